"""Fused attention with sinks, against all scores in float64 and against the families' own eager attention."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from offload.errors import ConfigError
from offload.extras.large import document_operation, sink_operation
from offload.extras.large.document_attention import _as_mask, find_starts
from offload.extras.large.sink_attention import IMPLEMENTATION, _attend
from offload.extras.large.sink_operation import SINK_ATTENTION, computed_share
from tests.cases.models import build, gemma2, gpt_oss, granite_swa, llama, tokens, with_sinks
from tests.engine.test_document_attention import kernels

TOKENS, WIDTH = 24, 16


@pytest.fixture(autouse=True)
def several_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sink_operation, "_MOST_QUERIES", 5)


def starts_of(window: int | None, *lengths: int) -> torch.Tensor:
    documents = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return find_starts(documents.view(-1, TOKENS), window)


MASKS: dict[str, Callable[[], torch.Tensor | None]] = {
    "causal": lambda: starts_of(None, TOKENS, TOKENS),
    "window": lambda: starts_of(7, TOKENS, TOKENS),
    "documents": lambda: starts_of(6, 9, 1, 14, 24),
    "padded": lambda: torch.ones(2, 1, TOKENS, TOKENS, dtype=torch.bool).tril().triu(-3),
    "nothing seen": lambda: torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool),
    "added by head": lambda: torch.randn(1, 4, TOKENS, TOKENS),
    "every key": lambda: None,
}


def inputs_of(num_queries: int = TOKENS, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Return query, key, value and sinks, with two query heads for a key head."""
    shapes = (2, 4, num_queries, WIDTH), (2, 2, TOKENS, WIDTH), (2, 2, TOKENS, WIDTH), (4,)
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def with_gradients(attend: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    result = attend(*inputs)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
    return [result.detach(), *torch.autograd.grad(result, inputs, weights)]


def by_scores(query: Any, key: Any, value: Any, sinks: Any, mask: torch.Tensor | None) -> torch.Tensor:
    """Return attention over all scores beside the sink, [rows, queries, heads, width]."""
    key, value = (each.repeat_interleave(2, 1) for each in (key, value))
    scores = query @ key.mT * WIDTH**-0.5
    if mask is not None and mask.dtype == torch.int32:
        mask = _as_mask_by_row(mask)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask
    columns = torch.cat([scores, sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    return (columns.softmax(-1)[..., :-1] @ value).transpose(1, 2)


def _as_mask_by_row(starts: torch.Tensor) -> torch.Tensor:
    return _as_mask(starts, torch.device("cpu"))


@pytest.mark.parametrize("mask", MASKS)
def test_result_and_every_gradient_equal_all_scores_in_float64(mask: str) -> None:
    """Break: leave the sink out of the sums; move the first key of a window by one."""
    torch.manual_seed(0)
    made, inputs = MASKS[mask](), inputs_of()
    mine = with_gradients(lambda *each: SINK_ATTENTION(*each, made, None)[0], inputs)
    exact = with_gradients(partial(by_scores, mask=made), [each.detach().double().requires_grad_() for each in inputs])
    torch.testing.assert_close(mine, [each.float() for each in exact], rtol=1e-5, atol=2e-6)


def test_one_query_over_a_cache_and_sixteen_bits() -> None:
    torch.manual_seed(0)
    one = inputs_of(1)
    mine = with_gradients(lambda *each: SINK_ATTENTION(*each, None, None)[0], one)
    torch.testing.assert_close(mine, with_gradients(partial(by_scores, mask=None), one), rtol=1e-5, atol=2e-6)
    short, starts = inputs_of(dtype=torch.bfloat16), starts_of(7, TOKENS, TOKENS)
    exact = with_gradients(partial(by_scores, mask=starts), [each.detach().double().requires_grad_() for each in short])
    for its, right in zip(
        with_gradients(lambda *each: SINK_ATTENTION(*each, starts, None)[0], short), exact, strict=True
    ):
        assert its.dtype == torch.bfloat16
        assert float((its - right).norm() / right.norm()) < 1e-2


class Products(TorchDispatchMode):
    """Notes the dtypes of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.dtypes = set[torch.dtype]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.bmm.default, torch.ops.aten.mm.default):
            self.dtypes |= {each.dtype for each in args}
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("mask", ["padded", "added by head", "nothing seen"])
def test_a_gpu_multiplies_in_the_dtype_of_the_operands(mask: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager attention does, and fp32 has no tensor cores. Break: cast the operands; sum gradients of keys in bf16."""
    torch.manual_seed(0)
    made = MASKS[mask]()
    inputs = inputs_of(dtype=torch.bfloat16)
    exact = [each.detach().double().requires_grad_() for each in inputs]
    wanted = with_gradients(partial(by_scores, mask=made), exact)
    monkeypatch.setattr(sink_operation, "_operand_dtype", lambda query: query.dtype)
    with torch.no_grad(), Products() as products:  # a mode is off inside an operation: so its functions alone
        result, sums = sink_operation._forward(*inputs, made, None)
        weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).to(result.dtype)
        found = [result, *sink_operation._backward(weights, *inputs, made, result, sums, None)]
    assert products.dtypes == {torch.bfloat16}
    for own, other in zip(found, wanted, strict=True):
        assert (own.double() - other).norm() <= 0.02 * other.norm()


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_a_fused_kernel_takes_the_sums_with_the_sink(
    mask: str, is_traced: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's FlashAttention for CPUs plays the one for GPUs: its backward reads the result and the sums too.

    Break: give the kernel's own sums, or its own result, to the backward.
    """
    torch.manual_seed(0)
    aten = torch.ops.aten

    def each_document(query: Any, key: Any, value: Any, borders: Any, window: int) -> Any:
        group = query.shape[1] // key.shape[1]
        for begin, end in itertools.pairwise(borders.tolist()):
            parts = [each[begin:end].transpose(0, 1)[None] for each in (query, key, value)]
            wide = [parts[0], *(each.repeat_interleave(group, 1) for each in parts[1:])]
            seen = torch.ones(end - begin, end - begin).tril()
            if window >= 0:
                seen = seen.triu(-window)
            yield slice(begin, end), wide, seen.log()

    def forward(query: Any, key: Any, value: Any, borders: Any, *_: Any, window_size_left: int, **__: Any) -> Any:
        results, sums = torch.empty_like(query), query.new_empty(query.shape[1], len(query))
        for place, parts, seen in each_document(query, key, value, borders, window_size_left):
            own, its = aten._scaled_dot_product_flash_attention_for_cpu(*parts, attn_mask=seen)
            results[place], sums[:, place] = own[0].transpose(0, 1), its.view(len(sums), -1)
        empty = query.new_empty(0)
        return results, sums, empty, empty, empty

    def backward(
        gradient: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, borders: Any, *_: Any,
        window_size_left: int, **__: Any,
    ) -> Any:  # fmt: skip
        found = [torch.empty_like(each) for each in (query, key, value)]
        for place, parts, seen in each_document(query, key, value, borders, window_size_left):
            its, result = (each[place].transpose(0, 1)[None] for each in (gradient, out))
            gradients = aten._scaled_dot_product_flash_attention_for_cpu_backward(
                its, *parts, result, sums[None, :, place].contiguous(), 0.0, False, attn_mask=seen
            )
            for whole, each in zip(found, gradients, strict=True):
                whole[place] = each[0].unflatten(0, (whole.shape[1], -1)).sum(1).transpose(0, 1)
        return tuple(found)

    starts, inputs = MASKS[mask](), inputs_of()
    expected = with_gradients(lambda *each: SINK_ATTENTION(*each, starts, None)[0], inputs)
    monkeypatch.setattr(document_operation, "has_kernel", lambda query, value: True)
    monkeypatch.setattr(sink_operation, "has_kernel", lambda query, value: True)
    attend: Any = lambda *each: _attend(nn.Identity(), *each[:3], starts, s_aux=each[3])[0]  # noqa: E731
    if is_traced:
        torch._dynamo.reset()
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=False)
    with kernels(forward, backward):
        mine = with_gradients(attend, inputs)
    torch.testing.assert_close(mine, expected, rtol=1e-5, atol=5e-6)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("mask", ["causal", "window", "documents"])
def test_the_kernel_equals_all_scores_on_a_gpu(mask: str) -> None:
    torch.manual_seed(0)
    starts, inputs = MASKS[mask](), inputs_of(dtype=torch.bfloat16)
    exact = with_gradients(
        partial(by_scores, mask=starts), [each.detach().double().requires_grad_() for each in inputs]
    )
    on_device = [each.detach().cuda().requires_grad_() for each in inputs]
    assert document_operation.has_kernel(on_device[0], on_device[2])
    result, _ = SINK_ATTENTION(*on_device, starts, None)
    weights = torch.randn(result.shape, generator=torch.Generator().manual_seed(1)).bfloat16().cuda()
    mine = [result, *torch.autograd.grad(result, on_device, weights)]
    for its, right in zip(mine, exact, strict=True):
        assert float((its.cpu() - right).norm() / right.norm()) < 1e-2


class _Largest(TorchDispatchMode):
    """Notes the largest number: elements in one result."""

    numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **kwargs or {})
        self.numel = max([self.numel, *(t.numel() for t in tree_iter(result) if isinstance(t, torch.Tensor))])
        return result


def test_memory_grows_as_the_row_and_work_as_the_window() -> None:
    """Break: make all scores at once; count a window as the whole row."""
    largest, shares = [], []
    for length in (64, 128):
        query, key, sinks = torch.ones(1, 4, length, 2), torch.ones(1, 2, length, 2), torch.ones(4)
        starts = find_starts(torch.zeros(1, length, dtype=torch.int32), 8)
        with _Largest() as mode:
            result, sums = sink_operation._forward(query, key, key, sinks, starts, None)
            sink_operation._backward(result, query, key, key, sinks, starts, result, sums, None)
            sink_operation._forward(query, key, key, sinks, find_starts(torch.zeros(1, length), None), None)
        largest.append(mode.numel)
        shares.append(computed_share(query, key, starts) * length**2)
    assert largest == [4 * 5 * 60, 4 * 5 * 125], "scores, in the last chunk with five queries"
    assert shares == [8 * 64 - 28, 8 * 128 - 28]


# -- models ------------------------------------------------------------------------------------------------------------


def outputs(model: nn.Module, batch: dict[str, Any]) -> dict[str, torch.Tensor]:
    result = model(**batch, use_cache=False)
    result.loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"logits": result.logits.detach(), **{name: each for name, each in gradients.items() if each is not None}}


@pytest.mark.parametrize(("make", "padded"), [(gpt_oss, False), (gpt_oss, True), (granite_swa, False)])
def test_a_family_equals_its_own_eager_attention(make: Callable[[], nn.Module], padded: bool) -> None:
    own = build(make)
    batch = tokens(device="cpu", length=TOKENS)
    if padded:
        batch["attention_mask"] = torch.ones(len(batch["labels"]), TOKENS).tril(9).long()
    fused = with_sinks(copy.deepcopy(own))
    assert fused.config._attn_implementation == IMPLEMENTATION
    mine, its = outputs(fused, batch), outputs(own, batch)
    assert mine.keys() == its.keys()
    assert any("sinks" in name for name in mine)
    for name, each in mine.items():
        assert float((each - its[name]).norm()) <= 1e-5 * float(its[name].norm()), name


def test_a_cache_gives_the_same_tokens() -> None:
    own = build(gpt_oss).eval()
    ids = tokens(device="cpu")["input_ids"][:1]
    options: Any = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    fused: Any = with_sinks(copy.deepcopy(own))
    assert torch.equal(fused.generate(ids, **options), own.generate(ids, **options))


def test_other_models_keep_their_attention_and_a_dropout_is_refused() -> None:
    for make, name in ((llama, "sdpa"), (gemma2, "eager"), (partial(gpt_oss, attention_dropout=0.1), "eager")):
        assert with_sinks(build(make)).config._attn_implementation == name
    assert isinstance(with_sinks(nn.Linear(2, 2)), nn.Linear)
    with pytest.raises(ConfigError, match=r"dropout of 0\.1.*--model\.attention eager"):
        _attend(nn.Identity(), *inputs_of()[:3], None, s_aux=torch.zeros(4), dropout=0.1)
