"""Helpers for torch modules."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Put every module in eval mode, and restore each mode at exit."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
