"""Helpers for torch modules."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


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
