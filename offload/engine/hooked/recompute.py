"""Recomputation of a unit by torch's own checkpoint, from what the unit saw in the forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as unsafe_preserve_version_counter
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from offload.engine.hooked.saved_tensors import Observe
from offload.engine.hooked.unit import Changes, Unit
from offload.engine.units.snapshots import buffers_of
from offload.errors import ConfigError

Run = Callable[[Observe | None, tuple[Any, ...], dict[str, Any]], Any]
"""Runs a unit."""


def recompute(unit: Unit, run: Run, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a unit, and again in the backward in place of saved tensors.

    The first use copies all inputs and buffers, and its recomputation finds those that were changed in place since.
    Later uses copy these alone, and refuse a change of others. Torch puts generators and autocast back.
    """
    leaves, spec = tree_flatten((args, kwargs))
    positions = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    versions = {i: leaves[i]._version for i in positions}
    known = unit.changes
    copies = {i: leaves[i].detach().clone() for i in positions if known is None or i in known.inputs}
    before = None
    if known is None or known.buffers:
        before = _buffers_of(unit.module)
    saved = _SavedTensors(unit)
    is_first = True

    def once() -> Any:
        nonlocal is_first
        if is_first:
            is_first = False
            return run(saved.note, args, kwargs)
        changed = {i for i in positions if leaves[i]._version != versions[i]}
        after = None
        if before is not None:
            after = _buffers_of(unit.module)
        if unit.changes is None:
            unit.changes = Changes(frozenset(changed), _differ(before or [], after or []))
        if not changed <= copies.keys():
            raise ConfigError(
                f"unit {unit.name}: an input was changed in place after the forward, not so in the first step, and a "
                "recomputation would read other values. Set --train.recompute never."
            )
        given, more = tree_unflatten(_with_copies(leaves, copies), spec)
        _put(before)
        try:
            return run(saved.check, given, more)
        finally:
            _put(after)

    return checkpoint(once, use_reentrant=False)


def _with_copies(leaves: list[Any], copies: dict[int, torch.Tensor]) -> list[Any]:
    """Return inputs with copies in their places. No copy is a leaf of a graph: the unit may change it in place."""
    fresh = list(leaves)
    for i, copy in copies.items():
        fresh[i] = copy
        if leaves[i].requires_grad:
            fresh[i] = copy.requires_grad_().clone()
    return fresh


class _SavedTensors:
    """Tensors that the graph of a forward saves, as one number of their bits each, beside those of the recomputation.

    What a recomputation needs and nobody put back (a value outside of the model that has changed since, python state)
    shows here, since other gradients would be silent. Results cannot show it: a recomputation ends with the last saved
    tensor. Four tensors are compared, the last one and others evenly before it; each is read once more.
    """

    def __init__(self, unit: Unit) -> None:
        self._unit = unit
        self._places = unit.compared
        self._numbers: dict[int, torch.Tensor] = {}
        self._num_noted = 0
        self._num_checked = 0

    def note(self, tensor: torch.Tensor) -> None:
        """Note a saved tensor of the forward."""
        if self._places is None or self._num_noted in self._places:
            self._numbers[self._num_noted] = _number_of(tensor)
        self._num_noted += 1

    def check(self, tensor: torch.Tensor) -> None:
        """Compare a saved tensor of the recomputation. Raises ConfigError."""
        if self._places is None:
            last = self._num_noted - 1
            self._places = frozenset((last // 4, last // 2, 3 * last // 4, last))
            self._unit.compared = self._places
        wanted = self._numbers.pop(self._num_checked, None)
        self._num_checked += 1
        if wanted is not None and not torch.equal(wanted, _number_of(tensor)):
            raise ConfigError(
                f"unit {self._unit.name}: the recomputation gave other values than the forward, so its gradients would "
                "be wrong. The forward reads or changes a value that is no input, buffer or torch generator (a global, "
                "a list of the caller, a config). Pass the value as an argument, or set --train.recompute never."
            )


_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _number_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of the bits of a tensor, int64 []."""
    if tensor.layout is not torch.strided:
        return torch.zeros((), dtype=torch.int64)
    flat = tensor.detach().reshape(-1)
    if flat.is_complex():
        flat = torch.view_as_real(flat).reshape(-1)
    if flat.dtype == torch.bool:
        return flat.sum()
    if flat.nbytes % 8 == 0 and flat.storage_offset() * flat.element_size() % 8 == 0:
        return flat.view(torch.int64).sum()  # as fast as memory; a sum that converts takes forty times as long
    return flat.view(_INTEGERS[flat.element_size()]).sum(dtype=torch.int64)


_Buffers = list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]]


def _buffers_of(module: nn.Module) -> _Buffers:
    """Return (place, key, buffer, copy) of all buffers."""
    found = buffers_of(module.modules())
    return [(owner._buffers, key, buffer, buffer.detach().clone()) for (owner, key), buffer in found.items()]


def _differ(before: _Buffers, after: _Buffers) -> bool:
    if len(before) != len(after):
        return True
    return any(a[2] is not b[2] or not torch.equal(a[3], b[3]) for a, b in zip(before, after, strict=True))


def _put(buffers: _Buffers | None) -> None:
    """Put buffers and their values back."""
    with torch.no_grad():
        for place, key, buffer, value in buffers or ():
            place[key] = buffer
            with unsafe_preserve_version_counter(buffer):
                buffer.detach().copy_(value)
