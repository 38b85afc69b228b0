"""The chunked head computes the cross entropy and the gradient of the logits in one pass: values, products, memory."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers as t
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import FlopCounterMode

from offload import Engine
from offload.engine.loss import cross_entropy as fused
from offload.engine.loss.batch import next_labels
from offload.engine.loss.chunked_head import ChunkedHead, HeadInputs, build_chunks
from tests.cases.models import GROUPED, SPECIAL, VOCABULARY, build, gemma2, gpt2, llama, tokens
from tests.engine.device import cpu_only
from tests.engine.test_head import cohere, granite

Maker = Callable[[], nn.Module]
ROWS, LENGTH, SIZE = 4, 10, 16
CPU = cpu_only("these heads run without an engine")


def phi() -> nn.Module:
    """An untied head with a bias."""
    sizes = {key: value for key, value in GROUPED.items() if key != "num_key_value_heads"}
    return t.PhiForCausalLM(t.PhiConfig(**sizes | SPECIAL))


FAMILIES: list[Maker] = [llama, partial(llama, tie_word_embeddings=True), gpt2, gemma2, phi, cohere, granite]


def state_of(model: nn.Module, drops: bool = False) -> Any:
    """Return a stand-in for the engine. `drops`: the gradient of the head leaves after each chunk, as in an engine."""

    def backward(logits: Tensor, gradient: Tensor, _leaf: Tensor) -> None:
        torch.autograd.backward(logits, gradient)
        if drops:
            model.get_output_embeddings().weight.grad = None

    return SimpleNamespace(
        gradients=SimpleNamespace(repeated=lambda _: nullcontext()),
        regions=(),
        runner=SimpleNamespace(backward=backward),
    )


def of_plain_model(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Run a model with its head in chunks and return the loss. Weights receive gradients."""
    base: Any = model.base_model
    output = base(input_ids=batch["input_ids"], use_cache=False)
    hidden = output["last_hidden_state"]
    gradient = torch.zeros_like(hidden) if hidden.requires_grad else None
    inputs = HeadInputs(output, batch, build_chunks(next_labels(batch), SIZE, 1, torch.clone), gradient)
    count = int((batch["labels"][:, 1:] != -100).sum())
    loss = ChunkedHead(model, base, VOCABULARY).mean_loss(state_of(model), inputs, count)
    if gradient is not None:
        hidden.backward(gradient)
    return loss


def some_labels(share: float = 0.6) -> dict[str, Tensor]:
    batch = {key: value.cpu() for key, value in tokens().items()}
    drawn = torch.rand(batch["labels"].shape, generator=torch.Generator().manual_seed(1))
    batch["labels"] = batch["labels"].masked_fill(drawn > share, -100)
    batch["labels"][2] = -100
    return batch


@pytest.fixture
def _small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "_PIECE_BYTES", 3 * VOCABULARY * 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.usefixtures("_small_pieces")
def test_log_probs_and_the_gradient_are_those_of_autograd_in_float64(dtype: torch.dtype) -> None:
    """Among the logits: a whole row of large ones, masked entries, and a label nearly without probability."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(10, VOCABULARY, generator=generator) * 3
    logits[1] += 1e4
    logits[2, 5:] = -torch.inf
    logits[3, 7] = -200.0
    labels = torch.randint(0, VOCABULARY, (10,), generator=generator)
    labels[2], labels[3] = 4, 7
    slopes = torch.randn(10, generator=generator)
    logits = logits.to(dtype)
    exact = logits.double().requires_grad_()
    wanted = -cross_entropy(exact, labels, reduction="none")
    wanted.backward(slopes.double())
    values, gradient = fused.log_probs_with_gradient(logits, labels, slopes)
    torch.testing.assert_close(values.double(), wanted.detach(), rtol=1e-6, atol=1e-5)
    assert gradient is not None
    assert gradient.dtype == dtype
    rounding = 2**-8 if dtype == torch.bfloat16 else 1e-6
    torch.testing.assert_close(gradient.double(), exact.grad, rtol=rounding, atol=1e-6)
    assert fused.log_probs_with_gradient(logits, labels)[1] is None


@CPU
@pytest.mark.parametrize("make", FAMILIES)
@pytest.mark.usefixtures("_small_pieces")
def test_the_loss_and_every_gradient_are_those_of_the_whole_model_in_float64(make: Maker) -> None:
    model, batch = build(make).eval(), some_labels()
    exact = copy.deepcopy(model).double()
    logits = exact(input_ids=batch["input_ids"]).logits
    wanted = cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())
    wanted.backward()
    loss = of_plain_model(model, batch)
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-6)
    scale = max(float(parameter.grad.abs().max()) for parameter in exact.parameters())
    for (name, parameter), other in zip(model.named_parameters(), exact.parameters(), strict=True):
        assert other.grad is not None
        apart = (parameter.grad.double() - other.grad).abs().max()
        assert apart <= 1e-6 * scale + 1e-5 * other.grad.abs().max(), name


def flops_of(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


@CPU
@pytest.mark.parametrize(("frozen", "products"), [(False, 3), (True, 2)], ids=["trained", "frozen"])
def test_products_of_the_head(frozen: bool, products: int) -> None:
    """Forward, input gradient, weight gradient. A frozen head (LoRA) has no weight gradient, an evaluation none."""
    model, batch = build(llama), some_labels()
    model.lm_head.weight.requires_grad_(not frozen)
    num_chunks = -(-int((batch["labels"][:, 1:] != -100).sum()) // SIZE)
    product = 2 * num_chunks * SIZE * VOCABULARY * model.config.hidden_size

    def run_base() -> Tensor:
        return model.model(input_ids=batch["input_ids"], use_cache=False)["last_hidden_state"]

    trained = flops_of(lambda: of_plain_model(model, batch)) - flops_of(lambda: run_base().sum().backward())
    assert trained == products * product
    with torch.no_grad():
        assert flops_of(lambda: of_plain_model(model, batch)) - flops_of(run_base) == product


@CPU
@pytest.mark.parametrize("recompute", ["always", "never"])
def test_an_engine_computes_the_logits_once(recompute: str) -> None:
    """Break: recompute the head for the backward."""
    found, batch = [], some_labels()
    for chunk_bytes in (None, SIZE * VOCABULARY * 4):
        engine = Engine(build(llama), recompute=recompute, head_chunk_bytes=chunk_bytes)
        engine.step(batch)
        found.append(flops_of(lambda engine=engine: engine.step(batch)))
    product = 2 * VOCABULARY * engine.model.config.hidden_size
    assert engine.head_chunks > 1
    assert found[1] - found[0] == 3 * product * (SIZE * engine.head_chunks - ROWS * LENGTH)


class Live(TorchDispatchMode):
    """Count the bytes of tensors made by operations, and the peak."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for leaf in tree_iter((args, kwargs)):
            if isinstance(leaf, Tensor):
                self._known.add(leaf.untyped_storage()._cdata)
        results = func(*args, **(kwargs or {}))
        for leaf in tree_iter(results):
            if isinstance(leaf, Tensor) and (storage := leaf.untyped_storage())._cdata not in self._known:
                key, size = storage._cdata, storage.nbytes()
                self._known.add(key)
                self.live += size
                self.peak = max(self.peak, self.live)
                weakref.finalize(storage, self._forget, key, size)
        return results

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@CPU
@pytest.mark.parametrize(("dtype", "bytes_"), [(torch.bfloat16, 4), (torch.float32, 8)], ids=str)
def test_a_chunk_holds_its_logits_their_gradient_and_one_piece_in_fp32(
    dtype: torch.dtype, bytes_: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The loss of transformers holds 12 bytes a logit: an fp32 copy, the log-softmax, and the gradient."""
    vocabulary, length = 4096, 64
    model = build(lambda: llama(vocab_size=vocabulary, hidden_size=8)).to(dtype)
    ids = torch.arange(ROWS * length).view(ROWS, length) % vocabulary
    batch = {"input_ids": ids, "labels": ids}
    monkeypatch.setattr(fused, "_PIECE_BYTES", 4 * vocabulary * 4)
    hidden = torch.randn(1, ROWS * length, 8, dtype=dtype, requires_grad=True)
    output = t.modeling_outputs.BaseModelOutputWithPast(hidden.view(ROWS, length, 8))
    chunks = build_chunks(next_labels(batch), size := 64, 1, torch.clone)
    inputs = HeadInputs(output, batch, chunks, torch.zeros_like(output["last_hidden_state"]))
    with Live() as seen:
        ChunkedHead(model, model.model, vocabulary).mean_loss(state_of(model, drops=True), inputs, 1)
    assert len(chunks) == 4
    piece, others = 4 * vocabulary * 4, 16 * 1024
    assert seen.peak <= size * vocabulary * bytes_ + max(piece, vocabulary * 8 * dtype.itemsize) + others
    assert seen.peak >= size * vocabulary * bytes_
    whole = Live()
    with whole:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert whole.peak > ROWS * length * vocabulary * 11
