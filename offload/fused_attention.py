"""Attention as each card has it: the kernel that torch takes for a call, and the same call as a kernel takes it.

Without a fused kernel torch makes all scores [rows, heads, queries, keys] in fp32, and keeps them for the backward.
"""

from __future__ import annotations

from typing import Any

import torch

Capability = tuple[int, int]
"""NVIDIA compute capability, major and minor."""
PREFERS_CUDNN = 9, 10
"""Major capabilities on which torch takes cuDNN first: Hopper, B200 and B300."""
_CUDNN_FAULT = (2, 11), (2, 14)
"""First torch with wrong gradients from cuDNN with a mask (NaN: pytorch #196678; a mask in another dtype is read as the
query's: #191612), and first torch without a test.
"""
_GROUPED_EFFICIENT = 2, 14
"""First torch whose memory-efficient attention takes fewer key heads than query heads (pytorch #191085)."""
_HALVES = torch.float16, torch.bfloat16
_PARAMETERS = "query", "key", "value", "attn_mask", "dropout_p", "is_causal"
"""Positional parameters in `scaled_dot_product_attention`."""


def torch_version() -> tuple[int, ...]:
    """Return the major and minor version."""
    return tuple(map(int, torch.__version__.split(".")[:2]))


def has_cudnn_fault(capability: Capability | None) -> bool:
    """True if cuDNN's attention with a mask is torch's choice on this card, and may be wrong."""
    is_first = capability is not None and capability[0] in PREFERS_CUDNN
    return is_first and _CUDNN_FAULT[0] <= torch_version() < _CUDNN_FAULT[1]


def fused(
    capability: Capability | None, dtype: torch.dtype, has_mask: bool, grouped_heads: bool, *head_sizes: int
) -> str:
    """Return the fused kernel that torch takes: "cudnn", "flash" or "efficient". Empty: none.

    capability: None for a device with a kernel for every call: a CPU, and others without a rule here. grouped_heads:
    fewer key heads than query heads. head_sizes: elements in a query head and in a value head.
    """
    if capability is None:
        return "flash"
    is_half = dtype in _HALVES and capability >= (8, 0)
    most = max(head_sizes)
    is_aligned = not any(size % (8 if dtype in _HALVES else 4) for size in head_sizes)
    has_cudnn = capability[0] in PREFERS_CUDNN and not (has_mask and has_cudnn_fault(capability))
    if is_half and has_cudnn and is_aligned and most <= 128:
        return "cudnn"
    if is_half and not has_mask and most <= 256 and len(set(head_sizes)) == 1:
        return "flash"
    has_dtype = is_half or (dtype in (torch.float32, torch.float16) and capability >= (5, 0))
    if has_dtype and is_aligned and (not grouped_heads or torch_version() >= _GROUPED_EFFICIENT):
        return "efficient"
    return ""


def bound_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments for `scaled_dot_product_attention` by name."""
    return dict(zip(_PARAMETERS, args, strict=False)) | kwargs


def kernel_of(capability: Capability | None, call: dict[str, Any]) -> str:
    """Return the kernel for a call (`bound_call`), as `fused`."""
    query, value = call["query"], call["value"]
    kind = query.device.type
    dtype = torch.get_autocast_dtype(kind) if kind != "meta" and torch.is_autocast_enabled(kind) else query.dtype
    is_grouped = bool(call.get("enable_gqa")) and call["key"].shape[-3] != query.shape[-3]
    return fused(capability, dtype, call.get("attn_mask") is not None, is_grouped, query.shape[-1], value.shape[-1])


def fitted(capability: Capability | None, call: dict[str, Any]) -> dict[str, Any]:
    """Return the call as a fused kernel takes it, with the same result: `call` itself if it does.

    A mask gets the query's dtype. Grouped keys and values are repeated if a kernel then takes them.
    """
    if capability is None:
        return call
    query, mask = call["query"], call.get("attn_mask")
    if mask is not None and mask.is_floating_point() and mask.dtype != query.dtype:
        call = {**call, "attn_mask": _cast(mask, query.dtype)}
    if call.get("enable_gqa") and not kernel_of(capability, call):
        whole = {**call, "enable_gqa": False}
        whole |= {name: _repeated(call[name], query.shape[-3]) for name in ("key", "value")}
        if kernel_of(capability, whole):
            return whole
    return call


def _cast(mask: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the mask in another dtype. A number below the least one there stays finite: a row may have no other."""
    least = torch.finfo(dtype).min
    return mask.clamp(min=least).to(dtype).masked_fill(mask.isneginf(), -torch.inf)


def _repeated(tensor: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return [..., num_heads, tokens, size] for fewer heads, each repeated for its group."""
    return tensor.repeat_interleave(num_heads // tensor.shape[-3], -3)
