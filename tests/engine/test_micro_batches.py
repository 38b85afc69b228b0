"""Layer-major micro-batches: each unit runs all parts of the batch after a single weight copy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from offload import AdamW, Engine
from offload.engine.gradients import flow
from offload.native import kernels
from tests.cases.models import build, gemma2, gpt2, mixtral, tokens
from tests.engine.compare import train_both, weights
from tests.engine.device import twin
from tests.engine.handmade import WIDTH, WORDS, Block, Log, Stack, TreesOfTensors, cross_entropy, words
from tests.engine.inside import steps_of
from tests.engine.reference import count_labels

Maker = Callable[[], nn.Module]
ROUNDING = 2e-6
CUT: dict[str, Any] = {"loss_fn": cross_entropy, "count": count_labels, "within": ROUNDING}


# -- copied bytes ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "settings"), [(gemma2, {}), (mixtral, {"recompute": "never"}), (gpt2, {"precision": "bf16"})]
)
def test_bytes_do_not_depend_on_the_number_of_micro_batches(make: Maker, settings: dict[str, Any]) -> None:
    moved = set()
    for rows in (8, 4, 2, 1):  # 1, 2, 4 and 8 micro-batches
        engine = Engine(build(make), micro_batch_size=rows, **settings)
        for seed in range(2):
            engine.step(tokens(seed, rows=8))
        moved.add((engine.counters.h2d_bytes, engine.counters.d2h_bytes))
    assert len(moved) == 1, moved


def test_only_one_micro_batch_of_inner_activations_is_alive() -> None:
    """Twice the rows in twice the micro-batches add a unit input, not inner tensors of a block."""
    sizes: list[int] = []

    class Wide(Block):
        def forward(self, h: Tensor) -> Tensor:
            sizes.append(len(h))
            return super().forward(h)

    engine = Engine(build(lambda: Stack(Wide)), micro_batch_size=3)
    engine.step(words(rows=8), loss_fn=cross_entropy)
    sizes.clear()
    engine.step(words(rows=8), loss_fn=cross_entropy)
    assert sizes == [3, 3, 2] * 3 + [3, 3, 2] * 3, "forward and backward, the last one smaller"


# -- results ---------------------------------------------------------------------------------------------------------


class TakesTheBatchSize(Block):
    """One argument is the batch size, another twice the batch size, and a third only looks similar."""

    def forward(self, h: Tensor, rows: int, both: list[int], heads: int) -> Tensor:  # type: ignore[override]
        assert both == [2 * rows, 4]
        h = super().forward(h.view(rows, -1, WIDTH))
        return h.reshape(2 * rows, -1, heads, WIDTH // heads).reshape(both[0] // 2, -1, WIDTH)


class BatchSizeAsArgument(Stack):
    def __init__(self) -> None:
        super().__init__(TakesTheBatchSize)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in self.blocks:
            h = block(h, len(x), both=[2 * len(x), 4], heads=4)
        return self.head(h)


class Flattens(Stack):
    """Pass all rows' tokens as one axis to blocks and head."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x).flatten(0, 1)
        for block in self.blocks:
            h = block(h)
        return self.head(h).unflatten(0, x.shape)


@pytest.mark.slow
def test_batches_of_another_length_than_the_first() -> None:
    """An axis with rows times tokens has another factor in each batch."""
    batches = [words(number, rows=3, length=length) for number, length in enumerate((6, 9, 4))]
    train_both(build(Flattens), batches, **CUT, micro_batch_size=1)


@pytest.mark.parametrize("rows", [1, 3])
def test_numbers_that_are_the_batch_size_become_the_micro_batchs(rows: int) -> None:
    batch_list = [words(s) for s in range(2)]
    engine, _ = train_both(build(BatchSizeAsArgument), batch_list, **CUT, micro_batch_size=rows)
    assert steps_of(engine).splits


class CentresTheBatch(Block):
    """Mix rows: micro-batches compute another function than the whole batch."""

    def forward(self, h: Tensor) -> Tensor:
        return super().forward(h - h.mean(0, keepdim=True))


class Centring(Stack):
    def __init__(self) -> None:
        super().__init__(CentresTheBatch)


# -- sums in fp32 ----------------------------------------------------------------------------------------------------


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WORDS, WORDS, bias=False)])

    def forward(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


@pytest.mark.parametrize("recompute", ["always", "never"])
def test_gradients_in_bf16_are_summed_in_fp32_and_rounded_once(recompute: str) -> None:
    """Each weight gets 1 from the first row and 2^-9 from 64 others. A bf16 sum would stay at 1."""
    rows, small = 65, 2.0**-9
    x = torch.full((rows, WORDS), small)
    x[0] = 1.0
    torch.manual_seed(0)
    model = Linear()
    master = model.layers[0].weight.detach().clone()
    settings = {"precision": "bf16", "max_grad_norm": None, "micro_batch_size": 1, "recompute": recompute}
    engine = Engine(model, AdamW(lr=0.01, betas=(0.5, 0.5), eps=1.0, weight_decay=0.0), **settings)
    result = engine.step({"x": x.bfloat16()}, loss_fn=lambda outputs, batch: outputs.float().sum())
    exact = 1.0 + (rows - 1) * small
    assert result.grad_norm == exact * WORDS
    gradient = torch.full_like(master, exact).bfloat16()
    assert gradient[0, 0] > 1.1
    moments = torch.zeros_like(master), torch.zeros_like(master)
    kernels.adamw(master, *moments, gradient, step=1, lr=0.01, betas=(0.5, 0.5), eps=1.0, weight_decay=0.0)
    assert torch.equal(weights(engine)["layers.0.weight"], master)


# -- dropout ---------------------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Drop half the input and log all masks. The log survives recomputation, unlike module state."""

    masks = Log()

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, h: Tensor) -> Tensor:
        mask = nn.functional.dropout(torch.ones_like(h), 0.5, self.training)
        self.masks.append(mask.detach().clone())
        return h * self.scale * mask


class AllDropping(Stack):
    """Use one block twice."""

    def __init__(self) -> None:
        super().__init__(Dropping, depth=2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        for block in (*self.blocks, self.blocks[0]):
            h = block(h)
        return self.head(h)


def masks_of(engine: Engine, seed: int) -> list[list[Tensor]]:
    for block in engine.model.blocks:
        block.masks.clear()
    torch.manual_seed(seed)
    engine.step(words(0), loss_fn=cross_entropy)
    return [list(block.masks) for block in engine.model.blocks]


def test_masks_differ_by_step_unit_use_and_micro_batch_and_come_back_in_the_recompute() -> None:
    engine = Engine(build(AllDropping), micro_batch_size=2)
    engine.step(words(0), loss_fn=cross_entropy)
    steps = [masks_of(engine, 0), masks_of(engine, 0)]
    forward = []
    for first, second in steps:
        assert (len(first), len(second)) == (8, 4), "two micro-batches, forward and backward; the first block twice"
        assert all(map(torch.equal, second[:2], second[2:]))
        assert all(map(torch.equal, first[:4], [*first[6:], *first[4:6]])), "the last use comes back first"
        forward += [*first[:4], *second[:2]]
    for number, one in enumerate(forward):
        assert not any(torch.equal(one, other) for other in forward[:number])
    assert len(forward) == 12


def test_masks_depend_on_the_seed_and_not_on_the_global_generator_and_leave_it_alone() -> None:
    first, second, third = (Engine(build(AllDropping), micro_batch_size=2, seed=seed) for seed in (0, 0, 1))
    for engine in (first, second, third):
        engine.step(words(0), loss_fn=cross_entropy)
    for one, other, differs in zip(masks_of(first, 1), masks_of(second, 2), masks_of(third, 1), strict=True):
        assert all(map(torch.equal, one, other))
        assert not any(map(torch.equal, one, differs))
    torch.manual_seed(3)
    state = torch.get_rng_state()
    first.step(words(0), loss_fn=cross_entropy)
    assert torch.equal(state, torch.get_rng_state())


def test_one_micro_batch_draws_as_plain_pytorch_does() -> None:
    train_both(build(gpt2), [tokens(s) for s in range(2)], micro_batch_size=4)


def scales(batch: dict[str, Tensor]) -> list[float]:
    """Return the largest value per block of TreesOfTensors."""
    model, found = twin(build(TreesOfTensors)), list[float]()
    for block in model.blocks:
        block.register_forward_hook(lambda module, args, result: found.append(float(result["scale"])))
    model(batch["x"])
    return found


def near(batch: dict[str, Tensor]) -> Any:
    """Return a value equal to the scales within rounding, since kernels also depend on shapes."""
    return pytest.approx(scales(batch), rel=ROUNDING)


def row(batch: dict[str, Tensor], number: int) -> dict[str, Tensor]:
    return {key: value[number : number + 1] for key, value in batch.items()}


@pytest.mark.slow
@pytest.mark.parametrize("is_alike", [False, True])
def test_a_value_of_all_rows_that_is_the_first_rows_in_every_unit(is_alike: bool) -> None:
    """In the sampled rows, the first row has the maximum in all blocks. With `is_alike`, a shared token gives every row
    this maximum, and only a later batch shows the difference.
    """
    batches = [words(seed, rows=2) for seed in range(40)]
    first = next(
        batch
        for batch in batches
        if scales(batch) == near(row(batch, 0)) and (scales(batch) == near(row(batch, 1))) is is_alike
    )
    engine = Engine(build(TreesOfTensors), micro_batch_size=1)
    whole = Engine(build(TreesOfTensors))
    with pytest.warns(UserWarning, match="has no row axis but depends on the rows.*not split"):
        found = [engine.step(batch, cross_entropy) for batch in (first, *batches[:2])]
    wanted = [whole.step(batch, cross_entropy) for batch in (first, *batches[:2])]
    assert [one.loss.item() for one in found] == pytest.approx([one.loss.item() for one in wanted], rel=ROUNDING)
    assert [one.grad_norm for one in found] == pytest.approx([one.grad_norm for one in wanted], rel=ROUNDING)


@pytest.mark.parametrize(("numel", "num_kernels"), [(1 << 20, 1), (100, 0)])
def test_a_large_gradient_is_added_without_a_copy_in_fp32(
    numel: int, num_kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum has the bits of torch's own addition."""
    calls: list[int] = []
    accumulate = kernels.accumulate

    def counted(total: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        calls.append(gradient.numel())
        return accumulate(total, gradient)

    monkeypatch.setattr(kernels, "accumulate", counted)
    total, gradient = torch.randn(numel, device="cpu"), torch.randn(numel, device="cpu").bfloat16()
    wanted = total + gradient.float()
    flow._add(total, gradient)
    assert torch.equal(total, wanted)
    assert len(calls) == num_kernels
