"""Special parameters: frozen, without a gradient, tied, kept in fp32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from offload import SGD, AdamW, Engine, Placement
from offload.errors import ConfigError
from tests.cases.models import SIZES, batches, build, freeze, gemma2, llama, tokens
from tests.engine.compare import backward_both, train_both, update_both
from tests.engine.device import twin
from tests.engine.handmade import WIDTH, WORDS, Block, Namespace, Stack, cross_entropy, words
from tests.engine.inside import parts_of
from tests.engine.reference import Reference
from tests.engine.sizes import elements, tier_bytes
from tests.integrations.plain import needs
from tests.matrix import quick

# -- frozen ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("dtype", "frozen_bytes"), [(torch.float32, 4), (torch.bfloat16, 2)])
def test_frozen_parameters_have_neither_moments_nor_gradients(dtype: torch.dtype, frozen_bytes: int) -> None:
    """In bf16, a frozen fp32 weight costs 4 bytes (hi and lo), and a frozen bf16 weight 2 bytes (hi)."""
    model = freeze(build(Stack).to(dtype), "blocks")
    trained = elements(model.embedding) + elements(model.head)
    frozen = sum(elements(block) for block in model.blocks)
    engine = Engine(model, precision="bf16")
    assert tier_bytes(engine, "cpu") == {
        "weights": 2 * (trained + frozen),
        "low": 2 * trained + (frozen_bytes - 2) * frozen,
        "exp avg": 4 * trained,
        "exp avg sq": 4 * trained,
        "gradients": 2 * trained,
    }


def test_a_frozen_unit_is_fetched_again_only_where_its_input_needs_a_gradient() -> None:
    def bytes_of_a_step(*parts: str) -> tuple[int, int]:
        engine = Engine(freeze(build(Stack), *parts), max_grad_norm=None)
        engine.step(words(), loss_fn=cross_entropy)
        return engine.counters.h2d_bytes, engine.counters.d2h_bytes

    block = 4 * elements(Block())
    h2d, d2h = bytes_of_a_step()
    early = bytes_of_a_step("embedding", "blocks.0")
    late = bytes_of_a_step("blocks.2")
    assert early == (h2d - block, d2h - block - 4 * elements(nn.Embedding(WORDS, WIDTH)))
    assert late == (h2d, d2h - block), "a later unit passes the gradient on, so it runs backward too"


def test_parameters_may_be_frozen_in_an_own_loop() -> None:
    reference, engine = Reference(build(llama)), Engine(build(llama))
    for number, chosen in enumerate([("embed", "layers.0"), (), ("lm_head",)]):
        freeze(reference.model, *chosen)
        freeze(engine.model, *chosen)
        for part in range(2):
            backward_both(engine, reference, lambda model, seed: model(**tokens(seed)).loss, 2 * number + part)
        update_both(engine, reference, f"step {number}")


def test_what_was_frozen_when_the_engine_was_made_cannot_be_thawed() -> None:
    engine = Engine(freeze(build(llama), "layers.0"))
    engine.model.model.layers[0].requires_grad_(True)
    with pytest.raises(ConfigError, match=r"layers\.0\..*requires_grad=True.*before Engine\(\)"):
        engine.step(tokens())
    engine.model.requires_grad_(False)
    with pytest.raises(ConfigError, match="every parameter"):
        engine.step(tokens())
    assert engine.evaluate(tokens()).isfinite()


# -- without a gradient ---------------------------------------------------------------------------------------------


class Routed(nn.Module):
    """Three experts. The first token of a row selects the expert. Experts without rows get no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.experts, self.norm = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.LayerNorm(WIDTH)

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        normed = self.norm(h)
        for number, expert in enumerate(self.experts):
            rows = (x[:, 0] % 3 == number)[:, None, None]
            if rows.any():
                h = h + torch.tanh(expert(normed)) * rows
        return h


class Mixture(Stack):
    def __init__(self) -> None:
        super().__init__(Routed, depth=2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h, x)
        return self.head(h)


# -- in-place changes of frozen results --------------------------------------------------------------------------------


class SeveralViews(nn.Module):
    """Frozen, with results that are views of one tensor, of the input, or of another dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, h: Tensor) -> tuple[Tensor, ...]:
        y = nn.functional.linear(h, self.weight)
        pairs = torch.view_as_complex(y.unflatten(-1, (-1, 2)))
        return y, y[1:], h.view(-1, WIDTH), pairs.conj(), torch.view_as_real(pairs)


def add_to_second(h: Tensor, views: Sequence[Tensor], t: Tensor) -> Tensor:
    views[1].add_(t[1:])
    return views[0] + h


def add_to_input(h: Tensor, views: Sequence[Tensor], t: Tensor) -> Tensor:
    views[2].mul_(t.view(-1, WIDTH))
    return views[0] + h


def multiply_complex(h: Tensor, views: Sequence[Tensor], t: Tensor) -> Tensor:
    views[3].mul_(torch.view_as_complex(t.unflatten(-1, (-1, 2))))
    return torch.view_as_real(views[3].resolve_conj()).flatten(-2) + h


def add_to_real(h: Tensor, views: Sequence[Tensor], t: Tensor) -> Tensor:
    views[4].add_(t.unflatten(-1, (-1, 2)))
    return views[4].flatten(-2) + h


def changing(change: Callable[[Tensor], Any]) -> Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]:
    def run(h: Tensor, views: Sequence[Tensor], t: Tensor) -> Tensor:
        change_in_place: Any = change
        change_in_place(views[0], t)
        return views[0] + h

    return run


IN_PLACE: dict[str, Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]] = {
    "add": changing(lambda y, t: y.add_(t)),
    "slice": changing(lambda y, t: y[:, :2].add_(t[:, :2])),
    "transposed": changing(lambda y, t: y.transpose(0, 1).add_(t.transpose(0, 1))),
    "second view": add_to_second,
    "view of the input": add_to_input,
    "complex view": multiply_complex,
    "real view": add_to_real,
}


class AddsInPlace(Stack):
    """A trained tensor changes the result of a frozen unit without a gradient in place, as GraLoRA does."""

    def __init__(self, change: Callable[[Tensor, Sequence[Tensor], Tensor], Tensor]) -> None:
        super().__init__()
        self.frozen, self.trained, self.change = SeveralViews(), nn.Linear(WIDTH, WIDTH), change

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x).clone()
        h = self.change(h, self.frozen(h), self.trained(h.clone()))
        for block in self.blocks:
            h = block(h)
        return self.head(h)


@pytest.mark.parametrize("change", quick(IN_PLACE, ["add", "view of the input"]))
def test_a_result_of_a_frozen_unit_may_be_changed_in_place(change: str) -> None:
    """Torch forbids in-place changes to a view made under no_grad."""
    model = freeze(build(lambda: AddsInPlace(IN_PLACE[change])), "embedding", "frozen")
    train_both(model, [words(0), words(1)], loss_fn=cross_entropy)


# -- tied -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_tied_weight_is_stored_once_and_named_once(precision: str) -> None:
    model = build(Namespace)
    num_elements = elements(model.transformer.wte) + sum(elements(block) for block in model.transformer.h)
    num_elements += elements(model.transformer.ln_f)
    engine = Engine(model, precision=precision)
    assert tier_bytes(engine, "cpu")["exp avg"] == 4 * num_elements
    names = [name for name, _ in engine.named_parameters()]
    assert names == [name for name, _ in build(Namespace).named_parameters()]
    assert "lm_head.weight" not in names


def test_a_tied_weight_may_be_frozen() -> None:
    train_both(freeze(build(gemma2), "embed_tokens"), batches(2))


def masked(family: str) -> nn.Module:
    """Return a masked language model whose head has one bias under two names."""
    sizes = SIZES | {"max_position_embeddings": 32, "embedding_size": 16, "pad_token_id": 0}
    return getattr(transformers, f"{family}ForMaskedLM")(getattr(transformers, f"{family}Config")(**sizes))


class ThreeUsers(Stack):
    """Embedding, head and a small scale share weights; a block reads the scale of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.head.weight = self.embedding.weight
        self.scale = self.blocks[0].norm.weight
        self.end = nn.LayerNorm(WIDTH)
        self.end.weight = self.blocks[1].norm.weight = self.scale

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h)
        return self.head(self.end(h * self.scale)) + self.blocks[2].down.bias.sum()


def adapted() -> nn.Module:
    """Return a tied model with trained low-rank products beside the embedding and the head."""
    needs("peft")
    from peft import LoraConfig, get_peft_model

    model: Any = llama(tie_word_embeddings=True)
    targets = ["q_proj", "embed_tokens", "lm_head"]
    return get_peft_model(model, LoraConfig(r=2, target_modules=targets, ensure_weight_tying=True))


SHARING: dict[str, Callable[[], nn.Module]] = {
    **{family: partial(masked, family) for family in ("Bert", "Roberta", "Albert", "DebertaV2", "MPNet")},
    "tied llama": partial(llama, tie_word_embeddings=True),
    "tied llama with an adapter": adapted,
    "three users": ThreeUsers,
}
RESIDENCES: dict[str, dict[str, Any]] = {
    "streamed": {"placement": Placement(parameters="cpu", optimizer="cpu")},
    "on the device": {"placement": Placement(parameters="device", optimizer="device")},
}


def shared_names(model: nn.Module) -> set[frozenset[str]]:
    """Return the names of each parameter object."""
    names: dict[int, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return set(map(frozenset, names.values()))


@pytest.mark.filterwarnings("ignore:unit .* is read from outside")
@pytest.mark.parametrize("residence", quick(RESIDENCES, ["streamed"]))
@pytest.mark.parametrize("make", quick(SHARING, ["Bert", "three users"]))
def test_a_parameter_with_several_names_is_one_parameter_under_an_engine(make: str, residence: str) -> None:
    """Otherwise code over all parameters, such as torch's `clip_grad_norm_`, takes one gradient twice."""
    model = build(SHARING[make])
    names = shared_names(model)
    assert any(len(each) > 1 for each in names)
    batch, loss_fn = (words(), cross_entropy) if make == "three users" else (tokens(), None)
    engine = Engine(model, **RESIDENCES[residence])
    assert shared_names(model) == names
    for _ in range(2):  # the first step makes units resident
        engine.step(batch, loss_fn=loss_fn)
        assert shared_names(model) == names
    with parts_of(engine).with_placeholders():
        assert shared_names(model) == names
    assert shared_names(model) == names
    engine.evaluate(batch, loss_fn=loss_fn)
    assert shared_names(model) == names
    engine.close(restore=True)
    assert shared_names(model) == names


# -- kept in fp32 ---------------------------------------------------------------------------------------------------


class MixedBlock(Block):
    """The norm computes in fp32 at any precision."""

    def forward(self, h: Tensor) -> Tensor:
        normed = self.norm(h.float()).to(self.up.weight.dtype)
        return h + self.down(torch.tanh(self.up(normed)))


def mixed() -> nn.Module:
    model = Stack(MixedBlock).bfloat16()
    for block in model.blocks:
        block.norm.float()
    return model


def test_the_bytes_of_a_model_of_two_dtypes() -> None:
    model = build(mixed)
    wide = sum(elements(block.norm) for block in model.blocks)
    narrow = (
        sum(elements(block.up, block.down) for block in model.blocks) + elements(model.embedding) + elements(model.head)
    )
    engine = Engine(model, precision="bf16")
    assert sum(tier_bytes(engine, "cpu").values()) == 14 * narrow + 16 * wide


def test_a_bf16_model_under_fp32_becomes_wide() -> None:
    model = build(llama).bfloat16()
    wide = twin(model).float()
    train_both(model, batches(2), plain=wide)


# -- refused --------------------------------------------------------------------------------------------------------


class Packed(nn.Module):
    """Quantized layer: an integer weight and a float scale."""

    def __init__(self) -> None:
        super().__init__()
        self.packed = nn.Parameter(torch.zeros(4, 4, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x @ (self.packed * self.scale)


def test_integer_weights_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"1\.packed.*int8.*unquantized"):
        Engine(nn.Sequential(nn.Linear(4, 4), Packed()))


class Anew(nn.Linear):
    """Replaces the weight at every module listing, like PEFT's LoRA over nn.MultiheadAttention."""

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        self.weight = nn.Parameter(self.weight.data)
        return super().named_modules(*args, **kwargs)


def test_a_parameter_that_is_not_listed_is_refused_by_name() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Sequential(Anew(3, 3)))
    with pytest.raises(ConfigError, match=r"parameter weight of 1\.0 \(Anew\) is not in model\.named_parameters"):
        Engine(model)


class Padded(nn.Module):
    """An encoder whose padded positions reach the loss."""

    def __init__(self, nested: bool) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.0, batch_first=True)
        self.words, self.encoder = nn.Embedding(16, 8), nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)

    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> dict[str, Tensor]:
        hidden = self.encoder(self.words(input_ids), mask, src_key_padding_mask=input_ids == 0)
        return {"loss": hidden[..., 0].square().sum()}


@pytest.mark.parametrize(
    ("nested", "row", "mask", "is_refused"),
    [
        (True, [3, 5, 0, 0], None, True),
        (False, [3, 5, 0, 0], None, False),
        (True, [3, 5, 7, 9], None, False),
        (True, [0, 0, 3, 5], None, False),
        (True, [3, 5, 0, 0], torch.zeros(4, 4, dtype=torch.bool), False),
    ],
)
@pytest.mark.filterwarnings("ignore:.*prototype stage")
def test_an_evaluation_over_nested_tensors_is_refused(
    nested: bool, row: list[int], mask: Tensor | None, is_refused: bool
) -> None:
    """The rows that torch packs into nested tensors, with zeros at padded positions, and no others."""
    plain, batch = build(lambda: Padded(nested)), {"input_ids": torch.tensor([row, [1, 2, 3, 4]]), "mask": mask}
    with Engine(twin(plain), SGD(lr=0.0), max_grad_norm=None) as engine:
        engine.step(batch)
        with torch.no_grad():
            wanted, trained = plain.eval()(**batch)["loss"], plain.train()(**batch)["loss"]
        assert torch.allclose(wanted, trained, atol=1e-5) != is_refused
        if is_refused:
            with pytest.raises(ConfigError, match="enable_nested_tensor=False"):
                engine.evaluate(batch)
        else:
            torch.testing.assert_close(engine.evaluate(batch), wanted, atol=1e-5, rtol=1e-5)


def test_a_group_of_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optimizer\.groups has 'nrom'.*such as blocks\."):
        Engine(build(Stack), AdamW(groups={"norm": {"lr_scale": 0.5}, "nrom": {"lr_scale": 0.5}}))


def test_nothing_to_train_is_refused() -> None:
    with pytest.raises(ConfigError, match="frozen"):
        Engine(build(Stack).requires_grad_(False))
    with pytest.raises(ConfigError, match="no parameters"):
        Engine(nn.Sequential(nn.ReLU()))


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (torch.eye(4).to_sparse(), r"model\.norm\.places is sparse \(torch\.sparse_coo\)"),
        (torch.empty(4, device="meta"), r"model\.norm\.places is on the device 'meta', where it has no values"),
    ],
)
def test_a_buffer_without_dense_values_is_refused_by_name(buffer: torch.Tensor, message: str) -> None:
    model = build(llama)
    model.model.norm.register_buffer("places", buffer)
    with pytest.raises(ConfigError, match=message):
        Engine(model)


UNMOVABLE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "scripted": (lambda model: set_part(model, "blocks.1", torch.jit.script(Block())), r"blocks\.1 is a scripted"),
    "traced": (
        lambda model: set_part(model, "blocks.1.up", torch.jit.trace(nn.ReLU(), torch.ones(2))),
        r"blocks\.1\.up is a scripted.*restore=True",
    ),
    "lazy": (lambda model: set_part(model, "head", nn.LazyLinear(WORDS)), r"head\.weight has no shape.*model\(batch\)"),
    "lazy statistics": (
        lambda model: set_part(model, "head", nn.LazyBatchNorm1d(affine=False)),
        r"head\.running_mean has no shape",
    ),
}


def set_part(model: nn.Module, name: str, part: nn.Module) -> None:
    owner, _, key = name.rpartition(".")
    setattr(model.get_submodule(owner), key, part)


@pytest.mark.filterwarnings("ignore:.*(Lazy|torch.jit)")
@pytest.mark.parametrize("kind", UNMOVABLE)
def test_a_module_whose_weights_cannot_move_is_refused_by_name(kind: str) -> None:
    change, message = UNMOVABLE[kind]
    model = build(Stack)
    change(model)
    with pytest.raises(ConfigError, match=message):
        Engine(model)
