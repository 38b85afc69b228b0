"""Calls to torch's attention, as the card at hand has kernels for them (`fused_attention.py`).

With a mask, cuDNN is left out where its gradients can be wrong: torch's flags choose the kernel in the forward, and the
backward is from the same library. Attention without a mask keeps cuDNN, the fastest there. Compiled blocks are traced
with the same calls.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

from offload.accelerators import capability_of, masked_attention_fault
from offload.fused_attention import bound_call, fitted


@contextmanager
def without_cudnn() -> Iterator[None]:
    """Attention within the context is computed without cuDNN."""
    cuda = torch.backends.cuda
    was_enabled = cuda.cudnn_sdp_enabled()
    cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        cuda.enable_cudnn_sdp(was_enabled)


def _left_out(has_mask: bool, device: torch.device) -> AbstractContextManager[None]:
    if has_mask and masked_attention_fault(device):
        return without_cudnn()
    return nullcontext()


def _attend(*args: Any, **kwargs: Any) -> torch.Tensor:
    call = bound_call(args, kwargs)
    device = call["query"].device
    call = fitted(capability_of(device), call)
    with _left_out(call.get("attn_mask") is not None, device):
        return functional.scaled_dot_product_attention(**call)


def _attend_by_module(query: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    has_mask = any(kwargs.get(word) is not None for word in ("attn_mask", "key_padding_mask"))
    with _left_out(has_mask, query.device):
        return functional.multi_head_attention_forward(query, *args, **kwargs)


_FITTED: dict[Any, Callable[..., Any]] = {
    functional.scaled_dot_product_attention: _attend,
    functional.multi_head_attention_forward: _attend_by_module,
}


class FittedAttention(TorchFunctionMode):
    """Within the context, attention calls are fitted to the card."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _FITTED.get(func, func)(*args, **(kwargs or {}))


def attention_fitted(device: torch.device) -> AbstractContextManager[Any]:
    """Return a context in which attention fits the device."""
    if capability_of(device) is None:
        return nullcontext()
    return FittedAttention()


def with_fitted_attention(forward: Callable[..., Any], device: torch.device) -> Callable[..., Any]:
    """Return a module forward with attention that fits the device; `forward` itself if all does."""
    if capability_of(device) is None:
        return forward

    @functools.wraps(forward)
    def fitting(*args: Any, **kwargs: Any) -> Any:
        with FittedAttention():
            return forward(*args, **kwargs)

    return fitting


def fit_graph(graph: torch.fx.GraphModule) -> None:
    """Fit attention calls in a traced graph, before the compiler chooses their kernels.

    Calls that fit stay, because torch keeps compiled graphs only with its own functions.
    """
    for node in graph.graph.nodes:
        if node.target is functional.scaled_dot_product_attention:
            given = tree_map_only(torch.fx.Node, lambda each: each.meta["example_value"], (node.args, node.kwargs))
            call = bound_call(*given)
            device = call["query"].device
            has_fault = call.get("attn_mask") is not None and masked_attention_fault(device)
            if has_fault or fitted(capability_of(device), call) is not call:
                node.target = _attend
    graph.recompile()
