"""Which uses of units keep their graph, and which recompute."""

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
"""A unit whose graph holds copies of its own weights above this part of them recomputes: keeping it would undo
the streaming.
"""

DEVICE, BELOW = "device", "below"
"""Where a graph waits for its backward."""
_NOTHING = nullcontext()
Shapes = Sequence[tuple[torch.Size, torch.dtype]]


def spread(sizes: Sequence[int], room: int) -> list[int]:
    """Return which of some graphs have room below the device, by number, evenly over all: a link that has not the time
    for every graph has it for each of these, while the units between them compute.
    """
    total, seen, taken, found = sum(sizes), 0, 0, []
    for number, size in enumerate(sizes):
        seen += size
        if taken + size <= room and (taken + size) * total <= room * seen:
            found.append(number)
            taken += size
    return found


class RecomputePolicy:
    """`always` recompute, `never`, or `auto`: as many kept graphs as the device's budget has room for. Where graphs may
    wait below the device, those for which the device has no room do, as far as memory reaches there.

    A unit whose graph would save only its inputs and weights (an embedding, a linear head) keeps it in every mode. For
    `auto`, the first step of every shape recomputes and measures what a graph would hold beside the unit's inputs; the
    steps after it keep what fits, from the last unit back, since those are held for the shortest time. Room for graphs
    is what the budget leaves above the most that everything else has ever held, so that no unit's input is crowded out.
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
        """Where graphs wait for which the device has no room; None for nowhere."""
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
        """always, never or auto: where a graph that turns out too large is dropped, and the unit recomputed."""
        return self._mode if self._way.recomputes else "never"

    def keeps(self, unit: Unit, shapes: Shapes, trained: Trained) -> str:
        """Return where a use of a unit with inputs of these shapes, of which this takes gradients, keeps its graph:
        DEVICE, BELOW, or, for a recompute, an empty string.
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
        """True where a graph that turns out too large is dropped, and the unit recomputed."""
        return self.mode == "auto" or (self.mode == "always" and where == BELOW)

    def has_room(self, num_bytes: int) -> bool:
        """True where a graph may hold `num_bytes` more."""
        budget = self._ledger.budget_bytes
        return budget is None or self._held_bytes + num_bytes <= budget - self._others_peak_bytes

    def saw(self) -> None:
        """Something more is held than before: note the most that graphs and everything else have held."""
        held_bytes = self._ledger.allocations.get("kept tensors", 0)  # no call for each tensor that a graph saves
        self._step_peak_bytes = max(self._step_peak_bytes, held_bytes)
        self._others_peak_bytes = max(self._others_peak_bytes, self._ledger.current_bytes - held_bytes)

    def measure(
        self, unit: Unit, shapes: Shapes, inputs: Sequence[torch.Tensor], num_parts: int
    ) -> AbstractContextManager[None]:
        """Around a recompute of one of `num_parts` micro-batches: note what its graph would hold if it were kept."""
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
        """Within, trials are made, whose memory is not that of steps."""
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
        """Choose among what this step has measured. Return the most that the device held at once, for whatever."""
        self._look(self._step_peak_bytes)
        budget, others = self._ledger.budget_bytes, []
        room = 0 if budget is None or self.mode != "auto" else budget - self._others_peak_bytes - self._step_peak_bytes
        for key in self._new:  # backward order: the last unit comes first
            if self._sizes[key] <= room:
                self._kept.add(key)
                room -= self._sizes[key]
            else:
                others.append(key)
        if self.below is not None and others:
            # All buffers are free by now; of another shape, no graph waits beside those of this one.
            room = self.below.room_bytes - sum(self._whole_sizes[key] for key in self._below & self._used)
            chosen = spread([self._whole_sizes[key] for key in others], room)
            self._below.update(others[number] for number in chosen)
        self._new.clear()
        return self._device_peak_bytes

    def _look(self, kept_bytes: int) -> None:
        """Note what the device has held beside graphs that are kept, and the one that was recomputed since the last
        look: kept, it would be one of them. (Only an accelerator's figures have temporaries in them, and graphs.)
        """
        recent = self._device.take_recent_peak()
        self._device_peak_bytes = max(self._device_peak_bytes, recent)
        self._others_peak_bytes = max(self._others_peak_bytes, recent - kept_bytes - self._recomputed_bytes)
        self._recomputed_bytes = 0

    def retreat(self) -> bool:
        """Choose anew at the end of the next step, for half as much; where none stays on the device, let half of those
        that go below it recompute. False where no graph was chosen.
        """
        if self._ledger.budget_bytes is None:
            return False
        if not self._kept:  # on its way down, and back, each passes through the device
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
