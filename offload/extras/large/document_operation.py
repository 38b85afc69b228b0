"""Attention within each document of packed rows, as one torch operation with a backward.

A traced block keeps the operation as one node. The documents are values in `starts`, a host tensor with the shape of
the rows: other documents change neither shapes nor graphs, and nothing is read from the device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from offload.accelerators import open_accelerator, runs_gpu_kernels
from offload.engine.units.fitted_attention import attention_fitted
from offload.tiers.blocks import CACHES

_MOST_BATCHES = 64
"""Micro-batches with remembered documents."""
_MOST_WIDTH = 256
"""Largest head of the GPU kernels, in elements."""
_TRIED_TOKENS = 16
_MOST_KINDS = 64
"""Kinds of heads (device, dtype, width) with a remembered trial."""
_library = torch.library.Library("offload", "FRAGMENT")
_library.define(
    "document_attention(Tensor query, Tensor key, Tensor value, Tensor starts, float? scaling) -> (Tensor, Tensor)"
)
_library.define(
    "document_attention_backward(Tensor gradient, Tensor query, Tensor key, Tensor value, Tensor result, Tensor sums, "
    "Tensor starts, float? scaling) -> (Tensor, Tensor, Tensor)"
)
# The loop's gradients come from autograd, which a kernel for this key would switch off inside the operation.
_library.impl("document_attention_backward", torch.library.fallthrough_kernel, "Autograd")
OPERATION = torch.ops.offload.document_attention
"""(query, key, value, starts, scaling) -> (result, sums).

Query, key and value are [rows, heads, tokens, width], starts int32 [rows, tokens] on the host. The result is [rows,
tokens, heads, width]; sums are the kernel's logarithms of softmax sums, fp32 [heads, all tokens], or empty.
"""


@dataclass(frozen=True)
class Documents:
    """Documents in the rows of a micro-batch, joined to one sequence.

    borders: start of each document, then the number of tokens.
    window: attention window in tokens.
    tokens: tokens in a row.
    """

    borders: list[int]
    window: int
    tokens: int
    _copies: dict[torch.device, torch.Tensor] = field(default_factory=dict)

    @classmethod
    def of(cls, starts: torch.Tensor) -> Documents:
        """Return the documents for `starts`, int32 [rows, tokens] on the host."""
        return _read(starts.numpy().tobytes(), starts.shape[1])

    @property
    def lengths(self) -> list[int]:
        """Tokens of each document."""
        return [end - begin for begin, end in zip(self.borders, self.borders[1:], strict=False)]

    def borders_on(self, device: torch.device) -> torch.Tensor:
        """Return the borders, int32 [documents + 1]. The copy runs in stream order."""
        if device not in self._copies:
            with torch.inference_mode(False):  # a backward may save this tensor
                borders = torch.tensor(self.borders, dtype=torch.int32, device="cpu")
                if device.type != "cpu":  # a copy from pageable memory would wait for the stream
                    borders = open_accelerator(device).host_memory(len(borders), torch.int32).copy_(borders)
                self._copies[device] = borders.to(device, non_blocking=True)
        return self._copies[device]


# By bytes, because all layers read the same documents, and a tensor is no key.
@lru_cache(_MOST_BATCHES)
def _read(starts: bytes, tokens: int) -> Documents:
    values = torch.frombuffer(bytearray(starts), dtype=torch.int32)
    return Documents([*values.nonzero().flatten().tolist(), len(values)], int(values[0]), tokens)


CACHES.append(_read.cache_clear)


def has_kernel(query: torch.Tensor, value: torch.Tensor) -> bool:
    """True if one launch computes many documents on this device: FlashAttention in torch (arXiv:2205.14135)."""
    width = query.shape[-1]
    is_fit = query.dtype in (torch.bfloat16, torch.float16) and width == value.shape[-1] and not width % 8
    is_built = runs_gpu_kernels(query.device.type) and torch.backends.cuda.is_flash_attention_available()
    return is_built and is_fit and width <= _MOST_WIDTH and _runs_kernel(query.device, query.dtype, width)


# Once, because each layer of each step asks.
@lru_cache(_MOST_KINDS)
def _runs_kernel(device: torch.device, dtype: torch.dtype, width: int) -> bool:
    """Run the kernel and its backward on one document. A GPU may have neither (before Ampere), or no backward for wide
    heads.
    """
    one = Documents([0, _TRIED_TOKENS], _TRIED_TOKENS, _TRIED_TOKENS)
    # Also while a graph is traced, whose tensors have no values.
    with _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        heads = torch.ones(1, 1, _TRIED_TOKENS, width, dtype=dtype, device=device)
        try:
            result, sums = by_kernel(heads, heads, heads, one, None)
            backward_by_kernel(result, heads, heads, heads, result, sums, one, None)
        except RuntimeError:
            return False
    return True


def by_loop(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, **options: Any
) -> torch.Tensor:
    """Compute one document after the other by sdpa, with `options` of transformers' function."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attend, results = ALL_ATTENTION_FUNCTIONS["sdpa"], list[torch.Tensor]()
    module: Any = SimpleNamespace(num_key_value_groups=query.shape[1] // key.shape[1])
    for begin, length in zip(documents.borders, documents.lengths, strict=False):
        row, first = divmod(begin, documents.tokens)
        parts = [tensor[row : row + 1, :, first : first + length] for tensor in (query, key, value)]
        band = None
        if length > documents.window:
            band = torch.ones(length, length, dtype=torch.bool, device=query.device).tril().triu(1 - documents.window)
        with attention_fitted(query.device):  # an operation in a traced block has no context around it
            found = attend(module, *parts, band, **{**options, "is_causal": True})[0]
        results.append(found)  # [1, length, heads, width]
    joined = torch.cat(results, 1)
    return joined.view(query.shape[0], documents.tokens, *joined.shape[2:])


# -- the operation -------------------------------------------------------------------------------------------


def _forward(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, starts: torch.Tensor, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    documents = Documents.of(starts)
    if not has_kernel(query, value):
        with torch.autocast(query.device.type, enabled=False):  # the result has the dtype of the query
            return by_loop(query, key, value, documents, scaling=scaling), query.new_empty(0, dtype=torch.float32)
    return by_kernel(query, key, value, documents, scaling)


def by_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, documents: Documents, scaling: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    borders, longest, is_causal, options = _kernel_arguments(query, documents, scaling)
    result, sums, *_ = torch.ops.aten._flash_attention_forward(
        *map(_join, (query, key, value)), *borders, *longest, 0.0, is_causal, False, **options
    )
    return _split(result, documents).contiguous(), sums


def _backward(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    sums: torch.Tensor,
    starts: torch.Tensor,
    scaling: float | None,
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value. The loop computes the forward again."""
    documents = Documents.of(starts)
    if not has_kernel(query, value):
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        query, key, value = leaves
        with torch.enable_grad(), torch.autocast(query.device.type, enabled=False):
            again = by_loop(query, key, value, documents, scaling=scaling)
        gradients = torch.autograd.grad(again, leaves, gradient)
        # With the strides of `backward_shapes`, on which a compiled graph relies.
        return tuple([each.transpose(1, 2).contiguous().transpose(1, 2) for each in gradients])
    return backward_by_kernel(gradient, query, key, value, result, sums, documents, scaling)


def backward_by_kernel(
    gradient: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    result: torch.Tensor,
    sums: torch.Tensor,
    documents: Documents,
    scaling: float | None,
) -> tuple[torch.Tensor, ...]:
    borders, longest, is_causal, options = _kernel_arguments(query, documents, scaling)
    no_dropout = torch.zeros(2, dtype=torch.uint64, device=query.device), query.new_empty(0, dtype=torch.float32)
    gradients = torch.ops.aten._flash_attention_backward(
        gradient.flatten(0, 1), *map(_join, (query, key, value)), result.flatten(0, 1), sums,
        *borders, *longest, 0.0, is_causal, *no_dropout, **options,
    )  # fmt: skip
    return tuple([_split(each, documents).contiguous().transpose(1, 2) for each in gradients])


def _kernel_arguments(query: torch.Tensor, documents: Documents, scaling: float | None) -> tuple[Any, ...]:
    """Return the borders and the longest documents of queries and of keys, the causal flag, and options."""
    borders, longest = documents.borders_on(query.device), max(documents.lengths)
    window = -1  # no limit
    if documents.window < longest:
        window = documents.window - 1  # without the query itself
    options = {"scale": scaling, "window_size_left": window, "window_size_right": 0}
    return (borders, borders), (longest, longest), window < 0, options


def _join(tensor: torch.Tensor) -> torch.Tensor:
    """Return [all tokens, heads, width] for [rows, heads, tokens, width]."""
    return tensor.transpose(1, 2).flatten(0, 1)


def _split(joined: torch.Tensor, documents: Documents) -> torch.Tensor:
    """Return [rows, tokens, heads, width] for [all tokens, heads, width]."""
    return joined.view(-1, documents.tokens, *joined.shape[1:])


def _forward_shapes(query: Any, key: Any, value: Any, starts: Any, scaling: Any) -> Any:  # noqa: ARG001
    rows, heads, tokens, _ = query.shape
    sums: tuple[int, ...] = (0,)
    if has_kernel(query, value):
        sums = heads, rows * tokens
    result = query.new_empty(rows, tokens, heads, value.shape[-1])
    return result, query.new_empty(sums, dtype=torch.float32)


def backward_shapes(gradient: Any, query: Any, key: Any, value: Any, *_: Any) -> Any:  # noqa: ARG001
    """Return the shapes and strides of the gradients of query, key and value."""
    return tuple([each.new_empty(each.transpose(1, 2).shape).transpose(1, 2) for each in (query, key, value)])


def save_operands(ctx: Any, inputs: Any, output: Any) -> None:
    """Save operands, result and sums. The last operand is the scaling."""
    *tensors, ctx.scaling = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.mark_non_differentiable(output[1])  # the kernel's own sums
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, gradient: torch.Tensor | None, _: None) -> Any:
    if gradient is None:
        return (None,) * 5
    query, key, value, starts, *results = ctx.saved_tensors
    backward = torch.ops.offload.document_attention_backward
    return *backward(gradient, query, key, value, *results, starts, ctx.scaling), None, None


for _name, _function, _shapes in (
    ("document_attention", _forward, _forward_shapes),
    ("document_attention_backward", _backward, backward_shapes),
):
    _library.impl(_name, _function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"offload::{_name}", _shapes, lib=_library)
torch.library.register_autograd("offload::document_attention", _gradients, setup_context=save_operands, lib=_library)
