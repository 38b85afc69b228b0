"""Attention within each document of a packed row, against the documents alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from itertools import chain

import pytest
import torch
from torch import nn

from offload import Engine
from offload.errors import ConfigError
from offload.extras.large.document_attention import IMPLEMENTATION, _as_mask, _read, find_starts
from tests.engine.device import own_device
from tests.engine.documents import LENGTHS, by_document, counted, deviations, mistral, packed, positions_of
from tests.engine.families import VOCABULARY, build, gemma2, gpt2, llama, mixtral, qwen3, tokens

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
    """Compiled blocks use it."""
    from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask

    for make, create in ((llama, create_causal_mask), (mistral, create_sliding_window_causal_mask)):
        config = build(make).config
        masks = []
        for name in ("sdpa", IMPLEMENTATION):
            if name == IMPLEMENTATION:
                by_document(build(make))  # registers the name
            config._attn_implementation = name
            embeds = torch.zeros(len(LENGTHS), sum(LENGTHS[0]), 1)
            masks.append(create(config, embeds, None, None, positions_of(LENGTHS)))
        whole, starts = masks
        assert torch.equal(_as_mask(starts, torch.device("cpu")), whole)


@pytest.mark.parametrize("window", [None, 5])
def test_starts_have_a_window_at_each_document(window: int | None) -> None:
    starts = find_starts(torch.tensor([[0, 0, 1, 1, 1, 2], [0, 0, 0, 0, 0, 0]]), window)
    assert starts.tolist() == [[n * (window or 6) for n in row] for row in ([1, 0, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0])]
    assert starts.dtype == torch.int32
    documents = _read(starts.numpy().tobytes(), 6)
    assert documents.borders == [0, 2, 5, 6, 12]
    assert documents.lengths == [2, 3, 1, 6]
    assert documents.window == (window or 6)


def test_rows_of_one_document_and_padded_rows_run_as_before() -> None:
    model = build(llama)
    whole, padded = tokens(device="cpu"), {"attention_mask": torch.ones(4, 10).tril(6).long()}
    for batch in (whole, whole | padded):
        expected = model(**batch).logits
        assert torch.equal(by_document(copy.deepcopy(model))(**batch).logits, expected)


def test_other_attention_and_other_masks_stay() -> None:
    assert by_document(build(gemma2)).config._attn_implementation == "eager"  # caps scores
    model = by_document(nn.Linear(2, 2))  # no transformers model
    assert isinstance(model, nn.Linear)


def test_another_condition_in_the_mask_keeps_the_mask() -> None:
    from transformers.masking_utils import create_causal_mask

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
    from offload.extras.large import document_attention

    seen, read = [], document_attention._read
    monkeypatch.setattr(document_attention, "_read", lambda *each: seen.append(each) or read(*each))
    with Engine(by_document(build(llama)), micro_batch_size=1, recompute="always") as engine:
        engine.step(packed(0))
        seen.clear()
        engine.step(packed(0))
        assert engine.device.type == own_device().type
    documents = [read(*each).borders for each in seen]
    assert len(documents) == 2 * 2 * 3  # layers, forward and recomputation, micro-batches
    assert {each[-1] for each in documents} == {12}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("num_keys", [2, 8])
def test_the_kernel_equals_the_loop_on_a_gpu(window: int | None, num_keys: int) -> None:
    from offload.extras.large import document_attention

    lengths = ((300, 1, 211), (512,))
    numbers = torch.repeat_interleave(torch.arange(4), torch.tensor(list(chain(*lengths)))).view(2, 512)
    starts, module = find_starts(numbers.cuda(), window), nn.Module()
    module.num_key_value_groups = 8 // num_keys
    generator = torch.Generator("cuda").manual_seed(0)
    shapes = [(2, heads, 512, 64) for heads in (8, num_keys, num_keys)]
    inputs = [torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    gradient = torch.randn(2, 512, 8, 64, generator=generator, device="cuda", dtype=torch.bfloat16)
    assert document_attention._kernel_for(inputs[0], inputs[2]) is not None

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [tensor.to(dtype).requires_grad_() for tensor in inputs]
        result, _ = document_attention._attend(module, *leaves, starts)
        result.backward(gradient.to(dtype))
        return [result.detach().float(), *(leaf.grad.float() for leaf in leaves)]

    for mine, exact in zip(run(torch.bfloat16), run(torch.float32), strict=True):  # fp32 runs by the loop
        assert float((mine - exact).norm() / exact.norm()) < 1e-2


def test_an_engine_gives_the_attention_back() -> None:
    model = build(llama)
    with Engine(model) as engine:
        engine.set_attention("documents")
        assert model.config._attn_implementation == IMPLEMENTATION
        with pytest.raises(ConfigError, match="there is no attention 'document'"):
            engine.set_attention("document")
        engine.step(packed(0))
    assert model.config._attn_implementation == "sdpa"
