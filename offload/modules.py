"""Helpers for torch modules and graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move all buffers of a model."""
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device:
                module._buffers[name] = buffer.to(device)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, without gradients, and restore each mode at exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def forwards_replaced(forwards: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace module forwards during the context. A replacement is called without the module argument."""
    # Only forwards of instances are put back: below them, the forward of the class shows again.
    before = {module: module.__dict__.get("forward") for module in forwards}
    for module, forward in forwards.items():
        module.forward = forward
    try:
        yield
    finally:
        for module, own in before.items():
            if own is None:
                module.__dict__.pop("forward", None)  # a snapshot from before the context may have removed it
            else:
                module.forward = own


def nodes_of(tensors: Iterable[torch.Tensor]) -> Iterator[Any]:
    """Yield the graph nodes behind tensors, each once."""
    seen: set[Any] = set()
    nodes = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    while nodes:
        node = nodes.pop()
        if node not in seen:
            seen.add(node)
            yield node
            nodes.extend(following for following, _ in node.next_functions if following is not None)
