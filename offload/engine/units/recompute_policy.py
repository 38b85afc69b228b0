"""Decide per unit use: keep the autograd graph or recompute."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from typing import Any

import torch

from offload.engine.units.activation_offload import ActivationOffload, stretch_of
from offload.engine.units.traits import Trained
from offload.engine.units.unit import Unit
from offload.engine.units.way import Way
from offload.tiers.device import Device

_COPIED_SHARE = 10
"""A unit recomputes if the graph has weight copies above 1/10 of the weight bytes.

Keeping the copies would undo weight streaming.
"""

DEVICE, BELOW = "device", "below"
"""Where a saved graph waits for the backward: device memory, or host/NVMe memory."""
_NOTHING = nullcontext()
Shapes = Sequence[tuple[torch.Size, torch.dtype]]


def spread(sizes: Sequence[int], room: int) -> list[int]:
    """Return the indices of graphs to offload within `room` bytes, spread evenly over all uses.

    A link too slow for every graph then has time while the units in between compute.
    """
    total, seen, taken, found = sum(sizes), 0, 0, []
    for number, size in enumerate(sizes):
        seen += size
        if taken + size <= room and (taken + size) * total <= room * seen:
            found.append(number)
            taken += size
    return found


class RecomputePolicy:
    """Chooses saved graph or recomputation.

    Modes: `always` recompute, `never`, or `auto`: save as many graphs as the device budget allows. With graph offload,
    further graphs go to host or NVMe memory as far as space permits.

    A unit saves a graph with only inputs and weights (embedding, linear head) in every mode. In `auto`, the first step
    with a new shape recomputes and measures the graph sizes. Later steps save graphs from the last unit backwards,
    because the last graphs are held shortest. Graphs may use the budget minus the peak of everything else, so unit
    inputs always fit.
    """

    def __init__(
        self,
        mode: str,
        device: Device,
        is_weight: Callable[[torch.Tensor], bool],
        way: Way,
        below: ActivationOffload | None = None,
    ) -> None:
        self.below = below
        """Storage for graphs above the device budget. None: no graph offload."""
        self._mode, self._way, self._device, self._ledger, self._is_weight = mode, way, device, device.ledger, is_weight
        self._sizes: dict[tuple[Any, ...], int] = {}
        self._whole_sizes: dict[tuple[Any, ...], int] = {}
        self._kept: set[tuple[Any, ...]] = set()
        self._below: set[tuple[Any, ...]] = set()
        self._used: set[tuple[Any, ...]] = set()
        self._new: list[tuple[Any, ...]] = []
        self._others_peak_bytes = 0
        self._step_peak_bytes = 0
        self._device_peak_bytes = 0
        self._recomputed_bytes = 0

    @property
    def mode(self) -> str:
        """Effective mode: "always", "never" or "auto". "never" if the equivalence check has disabled recomputation."""
        return self._mode if self._way.recomputes else "never"

    def keeps(self, unit: Unit, shapes: Shapes, trained: Trained) -> str:
        """Return the graph storage for a use with these input shapes and gradient signature.

        DEVICE, BELOW, or "" for recomputation.
        """
        traits = unit.traits
        if traits.graph(trained).keeps_nothing:
            return DEVICE
        mode, key = self.mode, (unit.name, *shapes)
        if traits.rewrites and self.below is not None:
            return ""
        if traits.mutated or traits.buffers or traits.copied_bytes * _COPIED_SHARE > unit.weight_bytes:
            return ""
        if mode == "never":
            return BELOW if self.below is not None else DEVICE
        if mode == "auto" and (self._ledger.budget_bytes is None or key in self._kept):
            return DEVICE
        self._used.add(key)
        return BELOW if key in self._below else ""

    def may_give_up(self, where: str) -> bool:
        """True if an oversized graph may be dropped and the unit recomputed."""
        return self.mode == "auto" or (self.mode == "always" and where == BELOW)

    def has_room(self, num_bytes: int) -> bool:
        """True if the budget allows `num_bytes` more for graphs."""
        budget = self._ledger.budget_bytes
        return budget is None or self._held_bytes + num_bytes <= budget - self._others_peak_bytes

    def saw(self) -> None:
        """Update peaks after an allocation: graphs, and everything else."""
        # Read directly: a method call per saved tensor would be slow.
        held_bytes = self._ledger.allocations.get("kept tensors", 0)
        self._step_peak_bytes = max(self._step_peak_bytes, held_bytes)
        self._others_peak_bytes = max(self._others_peak_bytes, self._ledger.current_bytes - held_bytes)

    def measure(
        self, unit: Unit, shapes: Shapes, inputs: Sequence[torch.Tensor], num_parts: int
    ) -> AbstractContextManager[None]:
        """Return a context to measure the graph size in the recomputation of one of `num_parts` micro-batches."""
        key = (unit.name, *shapes)
        may_keep = self.below is not None or (self.mode == "auto" and self._ledger.budget_bytes is not None)
        is_asked = may_keep and self.mode != "never" and key not in self._sizes
        return self._measured(key, inputs, num_parts) if is_asked else _NOTHING

    @contextmanager
    def _measured(self, key: tuple[Any, ...], inputs: Sequence[torch.Tensor], num_parts: int) -> Iterator[None]:
        self._look(self._held_bytes)
        known = {tensor.untyped_storage().data_ptr() for tensor in inputs}
        storages: dict[int, int] = {}
        whole: dict[tuple[int, int], int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            if tensor.layout is not torch.strided:
                return tensor.detach()
            storage = tensor.untyped_storage()
            if not self._is_weight(tensor):
                stretch = stretch_of(tensor)
                whole[stretch.data_ptr(), stretch.nbytes] = stretch.nbytes
                if storage.data_ptr() not in known:
                    storages[storage.data_ptr()] = storage.nbytes()
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield
        self._recomputed_bytes = sum(storages.values())
        self._sizes[key] = self._recomputed_bytes * num_parts
        self._whole_sizes[key] = sum(whole.values()) * num_parts
        self._new.append(key)

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        """Discard all measurements made during the context (trial runs)."""
        before = {name: copy(value) for name, value in vars(self).items() if type(value) in (dict, set, list, int)}
        try:
            yield
        finally:
            self._device.take_recent_peak()
            vars(self).update(before)

    def begin_step(self) -> None:
        """Start a step."""
        self._step_peak_bytes = self._held_bytes
        self._device_peak_bytes = 0
        self._used.clear()

    def end_step(self) -> int:
        """Select graphs to save from the measurements of this step. Returns the peak device memory in bytes."""
        self._look(self._step_peak_bytes)
        budget, others = self._ledger.budget_bytes, []
        room = 0 if budget is None or self.mode != "auto" else budget - self._others_peak_bytes - self._step_peak_bytes
        for key in self._new:  # Backward order: last unit first.
            if self._sizes[key] <= room:
                self._kept.add(key)
                room -= self._sizes[key]
            else:
                others.append(key)
        if self.below is not None and others:
            # All buffers are free by now. Graphs for different shapes never wait at the same time.
            room = self.below.room_bytes - sum(self._whole_sizes[key] for key in self._below & self._used)
            chosen = spread([self._whole_sizes[key] for key in others], room)
            self._below.update(others[number] for number in chosen)
        self._new.clear()
        return self._device_peak_bytes

    def _look(self, kept_bytes: int) -> None:
        """Update the peak of memory other than graphs.

        Excludes saved graphs and the graph recomputed since the last update, because the latter may be saved later.
        Only accelerator peaks include temporaries and graphs.
        """
        recent = self._device.take_recent_peak()
        self._device_peak_bytes = max(self._device_peak_bytes, recent)
        self._others_peak_bytes = max(self._others_peak_bytes, recent - kept_bytes - self._recomputed_bytes)
        self._recomputed_bytes = 0

    def retreat(self) -> bool:
        """Halve the room for saved graphs, effective after the next step.

        Without graphs on the device, recompute half of the offloaded ones. Returns False if no graph was selected.
        """
        if self._ledger.budget_bytes is None:
            return False
        if not self._kept:  # Each offloaded graph passes through device memory on both copies.
            below = [key for key in self._sizes if key in self._below]
            self._below = set(below[1::2])
            return bool(below)
        self._new = [key for key in self._sizes if key in self._kept]
        self._others_peak_bytes = self._ledger.budget_bytes - sum(self._sizes[key] for key in self._new) // 2
        self._kept.clear()
        return True

    @property
    def _held_bytes(self) -> int:
        return self._ledger.allocations.get("kept tensors", 0)
