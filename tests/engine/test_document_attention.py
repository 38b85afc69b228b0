"""Attention within each document of a packed row, against the documents alone."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest
import torch
from torch import nn

from offload import Engine
from offload.errors import ConfigError
from offload.extras.large import document_attention, document_operation
from offload.extras.large.document_attention import IMPLEMENTATION, _as_mask, find_starts
from offload.extras.large.document_operation import Documents
from tests.cases.models import VOCABULARY, build, gemma2, gpt2, llama, mistral, mixtral, qwen3, tokens
from tests.engine.device import own_device
from tests.engine.documents import LENGTHS, by_document, counted, deviations, packed, positions_of

ROUNDING = 1e-6


@pytest.mark.parametrize("make", [llama, qwen3, mixtral, gpt2, mistral])
def test_documents_of_a_row_equal_documents_alone(make: Callable[[], nn.Module]) -> None:
    """Break: move one border in `find_starts`, or leave the window of Mistral out."""
    assert max(deviations(build(make).eval())) < ROUNDING  # eval: no dropout


def packed_ids() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, VOCABULARY, (len(LENGTHS), sum(LENGTHS[0])))
    return {"input_ids": ids, "position_ids": positions_of(LENGTHS), "use_cache": False}


def test_no_mask_is_made_and_products_are_the_squares_of_the_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    model = by_document(build(llama))
    shapes = counted(lambda: model(**packed_ids()), monkeypatch)
    assert shapes == [(1, 4, length, 8) for length in chain(*LENGTHS)] * 2  # two layers
    squares = sum(tokens * tokens for _, _, tokens, _ in shapes) // 2
    assert squares == 892 < len(LENGTHS) * sum(LENGTHS[0]) ** 2


def test_a_mask_of_the_starts_equals_the_mask_of_transformers() -> None:
    """Attention with a bias uses it."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    for make, create in ((llama, create_causal_mask), (mistral, create_sliding_window_causal_mask)):
        config = by_document(build(make)).config
        embeds = torch.zeros(len(LENGTHS), sum(LENGTHS[0]), 1)
        starts = create(config, embeds, None, None, positions_of(LENGTHS))
        config._attn_implementation = "sdpa"
        whole = create(config, embeds, None, None, positions_of(LENGTHS))
        assert torch.equal(_as_mask(starts, torch.device("cpu")), whole)


@pytest.mark.parametrize("window", [None, 5])
def test_starts_have_a_window_at_each_document(window: int | None) -> None:
    starts = find_starts(torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]]), window)
    assert starts.tolist() == [[n * (window or 6) for n in row] for row in ([1, 0, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0])]
    assert starts.dtype == torch.int32
    documents = Documents.of(starts)
    assert documents.borders == [0, 2, 5, 6, 12]
    assert documents.lengths == [2, 3, 1, 6]
    assert documents.window == (window or 6)


def test_rows_of_one_document_and_padded_rows_run_as_before() -> None:
    model = build(llama)
    whole, padded = tokens(device="cpu"), {"attention_mask": torch.ones(4, 10).tril(6).long()}
    for batch in (whole, whole | padded):
        expected = model(**batch).logits
        assert torch.equal(by_document(copy.deepcopy(model))(**batch).logits, expected)


def test_other_attention_and_another_condition_in_the_mask_keep_the_mask() -> None:
    from transformers.masking_utils import create_causal_mask

    assert by_document(build(gemma2)).config._attn_implementation == "eager"  # caps scores
    assert isinstance(by_document(nn.Linear(2, 2)), nn.Linear)  # no transformers model
    config = by_document(build(llama)).config
    embeds = torch.zeros(len(LENGTHS), sum(LENGTHS[0]), 1)
    with pytest.warns(UserWarning, match="packed documents are computed with a mask over whole rows"):
        mask = create_causal_mask(
            config, embeds, None, None, positions_of(LENGTHS), and_mask_function=lambda b, h, q, k: k != 3
        )
    assert mask.dtype == torch.bool
    assert mask.shape == (3, 1, 20, 20)
    assert not mask[0, :, :, 3].any()


def test_layers_of_an_engine_never_wait_for_documents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches and recomputation get the starts as a host tensor, cut by rows."""
    seen, read = [], document_operation._read
    monkeypatch.setattr(document_operation, "_read", lambda *each: seen.append(each) or read(*each))
    with Engine(by_document(build(llama)), micro_batch_size=1, recompute="always") as engine:
        engine.step(packed(0))
        seen.clear()
        engine.step(packed(0))
        assert engine.device.type == own_device().type
    documents = [read(*each).borders for each in seen]
    assert len(documents) == 2 * 2 * 3  # layers, forward and recomputation, micro-batches
    assert {each[-1] for each in documents} == {12}


def run_attention(starts: torch.Tensor, inputs: list[torch.Tensor], attend: Callable[..., Any]) -> list[torch.Tensor]:
    """Return the result of `attend`, and the gradients of query, key and value."""
    leaves, module = [tensor.clone().requires_grad_() for tensor in inputs], nn.Module()
    module.num_key_value_groups = inputs[0].shape[1] // inputs[1].shape[1]
    result, _ = attend(module, *leaves, starts, scaling=0.3)
    generator = torch.Generator(result.device).manual_seed(1)
    result.backward(torch.randn(result.shape, generator=generator, device=result.device).to(result.dtype))
    return [result.detach(), *(leaf.grad for leaf in leaves)]


def attention_inputs(num_keys: int, tokens: int, width: int, device: str = "cpu") -> list[torch.Tensor]:
    generator = torch.Generator(device).manual_seed(0)
    shapes = [(2, heads, tokens, width) for heads in (8, num_keys, num_keys)]
    return [torch.randn(shape, generator=generator, device=device) for shape in shapes]


def starts_of(window: int | None, *lengths: int) -> torch.Tensor:
    """Return the starts of two rows with documents of these lengths."""
    numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    return find_starts(numbers.view(2, -1), window)


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("num_keys", [2, 8])
def test_a_traced_operation_has_the_bits_of_the_loop(window: int | None, num_keys: int) -> None:
    """Break: leave `scaling` out in `_backward`."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    traced = torch.compile(document_attention._attend, backend="aot_eager", fullgraph=True, dynamic=False)
    inputs = attention_inputs(num_keys, 12, 16)
    for lengths in ((7, 1, 4, 12), (12, 12), (2,) * 12):
        starts = starts_of(window, *lengths)
        expected = run_attention(starts, inputs, document_attention._attend)
        assert all(map(torch.equal, run_attention(starts, inputs, traced), expected))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Stand-ins on the CPU for torch's GPU kernels, in plain products. Yields the documents and window of each call."""
    calls: list[tuple[Any, ...]] = []

    def attend(query: Any, key: Any, value: Any, borders: Any, longest: int, scale: float, window: Any) -> Any:
        results, sums = [], []
        left, right = window
        for begin, end in itertools.pairwise(borders.tolist()):
            assert end - begin <= longest
            q, k, v = (each[begin:end].transpose(0, 1) for each in (query, key, value))
            k, v = (each.repeat_interleave(len(q) // len(k), 0) for each in (k, v))
            scores = scale * q @ k.transpose(1, 2)
            places = torch.arange(end - begin)
            distance = places[:, None] - places
            is_seen = (distance >= -right) & (distance <= left if left >= 0 else distance == distance)
            scores = scores.masked_fill(~is_seen, float("-inf"))
            results.append((scores.softmax(-1) @ v).transpose(0, 1))
            sums.append(scores.logsumexp(-1))
        return torch.cat(results), torch.cat(sums, 1)

    def forward(
        query: Any, key: Any, value: Any, borders: Any, _k: Any, longest: int, _l: int, dropout: float, causal: bool,
        debug: bool, *, scale: float, window_size_left: int, window_size_right: int,
    ) -> Any:  # fmt: skip
        assert causal == (window_size_left < 0)
        calls.append((borders.tolist(), window_size_left))
        empty = query.new_empty(0)
        window = window_size_left, window_size_right
        return *attend(query, key, value, borders, longest, scale, window), empty, empty, empty

    def backward(
        gradient: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, borders: Any, _k: Any, longest: int,
        _l: int, dropout: float, causal: bool, _state: Any, _unused: Any, *, scale: float, window_size_left: int,
        window_size_right: int,
    ) -> Any:  # fmt: skip
        window = window_size_left, window_size_right
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in (query, key, value)]
            again = attend(*leaves, borders, longest, scale, window)
        assert torch.allclose(again[0], out, atol=1e-6)
        assert torch.equal(again[1], sums)
        return torch.autograd.grad(again[0], leaves, gradient)

    for module in (document_operation, document_attention):
        monkeypatch.setattr(module, "has_kernel", lambda query, value: True)
    with kernels(forward, backward):
        yield calls


@contextmanager
def kernels(forward: Any, backward: Any) -> Iterator[None]:
    """Let the CPU have these in place of torch's GPU kernels."""
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("_flash_attention_forward", forward, "CPU")
        library.impl("_flash_attention_backward", torch.library.fallthrough_kernel, "AutogradCPU")
        library.impl("_flash_attention_backward", backward, "CPU")
        yield


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("lacks", ["", "forward", "backward"])
def test_the_kernel_is_tried_with_its_backward(lacks: str, is_traced: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A T4 has no FlashAttention, and an RTX 4090 no backward for heads of 193 to 224: both compute by the loop."""
    tried: list[str] = []

    def forward(query: Any, *_: Any, **__: Any) -> Any:
        tried.append("forward")
        if lacks == "forward":
            raise RuntimeError("FlashAttention only supports Ampere GPUs or newer.")
        empty = query.new_empty(0)
        return torch.zeros_like(query), query.new_empty(query.shape[1], len(query)).float(), empty, empty, empty

    def backward(_: Any, query: Any, key: Any, value: Any, *__: Any, **___: Any) -> Any:
        tried.append("backward")
        if lacks == "backward":
            raise RuntimeError("FlashAttention backward for head dim > 192 requires A100/A800 or H100/H800")
        return query, key, value

    torch._dynamo.reset()
    document_operation._runs_kernel.cache_clear()
    monkeypatch.setattr(document_operation, "runs_gpu_kernels", lambda _device_type: True)
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: True)
    attend: Any = document_attention._attend
    if is_traced:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=False)
    inputs, starts = [each.bfloat16() for each in attention_inputs(2, 12, 16)], starts_of(None, 5, 7, 12)
    with kernels(forward, backward):
        result, *_ = run_attention(starts, inputs, attend)
        assert document_operation.has_kernel(inputs[0], inputs[2]) is not bool(lacks)
    assert bool(result.any()) is bool(lacks), "the kernel played here returns zeros"
    trial = ["forward", "backward"][: 1 + (lacks != "forward")]
    assert tried == trial * (1 if lacks else 2), "once for all calls"
    document_operation._runs_kernel.cache_clear()


@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("num_keys", [2, 8])
def test_one_launch_of_the_kernel_has_all_documents(
    window: int | None, num_keys: int, is_traced: bool, kernel: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break: leave the 1 out in the window of `_kernel_arguments`."""
    torch._dynamo.reset()
    inputs, attend = attention_inputs(num_keys, 12, 16), document_attention._attend
    if is_traced:
        attend = torch.compile(attend, backend="aot_eager", fullgraph=True, dynamic=False)
    for lengths in ((7, 1, 4, 12), (2,) * 12):
        kernel.clear()
        starts = starts_of(window, *lengths)
        mine = run_attention(starts, inputs, attend)
        borders = [0, *itertools.accumulate(lengths)]
        assert kernel == [(borders, -1 if window is None or max(lengths) <= window else window - 1)]
        with monkeypatch.context() as patch:
            patch.setattr(document_attention, "has_kernel", lambda query, value: False)
            expected = run_attention(starts, inputs, document_attention._attend)
        torch.testing.assert_close(mine, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("is_traced", [False, True])
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("num_keys", [2, 8])
def test_the_kernel_equals_the_loop_on_a_gpu(window: int | None, num_keys: int, is_traced: bool) -> None:
    torch._dynamo.reset()
    starts, attend = starts_of(window, 300, 1, 211, 512), document_attention._attend
    inputs = [tensor.bfloat16() for tensor in attention_inputs(num_keys, 512, 64, "cuda")]
    assert document_operation.has_kernel(inputs[0], inputs[2])
    exact = run_attention(starts, [tensor.float() for tensor in inputs], attend)  # fp32 runs by the loop
    traced = torch.compile(attend, fullgraph=True, dynamic=False) if is_traced else attend
    for mine, its in zip(run_attention(starts, inputs, traced), exact, strict=True):
        assert float((mine.float() - its).norm() / its.norm()) < 1e-2


def test_an_engine_gives_the_attention_back() -> None:
    model = build(llama)
    with Engine(model) as engine:
        engine.set_attention("documents")
        assert model.config._attn_implementation == IMPLEMENTATION
        with pytest.raises(ConfigError, match="there is no attention 'document'"):
            engine.set_attention("document")
        engine.step(packed(0))
    assert model.config._attn_implementation == "sdpa"
