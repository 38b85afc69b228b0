"""Hooks on the tensors that an autograd graph saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

Observe = Callable[[torch.Tensor], None]
"""Sees each tensor that a graph saves, apart from weights."""


def has_hooks() -> bool:
    """Return True inside a checkpoint, or other hooks of a script."""
    return torch._C._autograd._top_saved_tensors_default_hooks(False) is not None


def with_names(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor], observe: Observe | None = None
) -> saved_tensors_hooks:
    """Context in which a graph saves the result of `pack` in place of a tensor, if the result is no tensor.

    Tensors go on to the hooks outside, which torch would not call: those of a checkpoint, or of a script.
    """
    outside: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    pack_outside, unpack_outside = outside or (None, None)

    def pack_any(tensor: torch.Tensor) -> tuple[bool, Any]:
        packed = pack(tensor)
        if not isinstance(packed, torch.Tensor):
            return False, packed
        if observe is not None:
            observe(packed)
        if pack_outside is not None:
            packed = pack_outside(packed)
        return True, packed

    def unpack_any(saved: tuple[bool, Any]) -> torch.Tensor:
        is_tensor, packed = saved
        if not is_tensor:
            return unpack(packed)
        if unpack_outside is not None:
            packed = unpack_outside(packed)
        found: torch.Tensor = packed
        return found

    return saved_tensors_hooks(pack_any, unpack_any)
