"""The life of a unit's weights: fetch, use, release, and the landing of the gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from offload.engine.gradients.flow import GradientFlow
from offload.engine.hooked.saved_tensors import Observe, with_names
from offload.engine.hooked.unit import Unit, WeightView
from offload.engine.units.runner import RunAhead
from offload.errors import OffloadError
from offload.interrupts import interrupts
from offload.lanes.lanes import Lanes
from offload.layout.regions import Piece, Region
from offload.schedule.execute import Executor
from offload.tiers.device import Device


class Uses:
    """Has the weights of one unit at a time in its parameters, while compute needs them.

    A forward uses a unit from the call to the return. In a backward a use begins with the first saved weight that a
    graph asks for, with a recomputation, or with a gradient, and ends when another unit is used.
    """

    def __init__(self, device: Device, lanes: Lanes, executor: Executor, gradients: GradientFlow) -> None:
        self._lanes = lanes
        self._executor = executor
        self._gradients = gradients
        self._ahead = RunAhead(device)

        # The present use.
        self._unit: Unit | None = None
        self._is_backward = False
        self._reads = False
        """False for a backward that has asked for no weight so far."""
        self._name = ""
        self._begin = 0.0

        self._callers: list[Unit] = []
        """Units whose forward runs: the last one is called by the one before."""

    def enter(self, unit: Unit, backward: bool = False, reads: bool = True) -> None:
        """Begin a use: fetch the weights (if `reads`), and for a backward make room for the gradients."""
        is_same = self._unit is unit and self._is_backward >= backward
        if is_same and self._reads >= reads:
            return
        interrupts.check()
        has_room = is_same and backward  # the first gradient came before the first weight
        self.leave(sends=not has_room)
        self._ahead.enter()
        self._executor.enter(unit.regions, backward, reads)
        self._unit = unit
        self._is_backward = backward
        self._reads = reads
        if backward and unit.trainable and not has_room:
            self._gradients.open(unit.regions)
        self._name = f"forward {unit.name}"
        if backward:
            self._name = f"backward {unit.name}"
        if reads:
            unit.show()
        self._begin = self._lanes.now()

    def leave(self, sends: bool = True) -> None:
        """End the use: release the weights, and with `sends` send the gradients of a backward on.

        Raises OffloadError if a tensor over the weights is left, since the slot will hold other weights.
        """
        unit, self._unit = self._unit, None
        if unit is None:
            return
        if self._is_backward and unit.trainable and sends:
            self._gradients.close(unit.regions)
        if self._reads:
            unit.hide()
            if unit.is_lent:
                raise OffloadError(
                    f"unit {unit.name}: a view of its weights lives on after the use (in an attribute, a list or a "
                    "graph), where it would show the weights of another unit. Keep a copy: weight.clone()."
                )
        marks = self._lanes.record_compute(self._name, self._begin)
        self._ahead.leave(marks)
        self._executor.leave(unit.regions, marks)

    @contextmanager
    def forward(self, unit: Unit) -> Iterator[None]:
        """Context of a forward, also inside the forward of another unit, or in a recomputation."""
        in_backward = torch._C._current_graph_task_id() >= 0
        self._callers.append(unit)
        self.enter(unit, backward=in_backward)
        try:
            yield
        finally:
            self._callers.pop()
            if self._callers:
                self.enter(self._callers[-1], backward=in_backward)
            elif not in_backward:  # the backward of a recomputation follows
                self.leave()

    def naming(self, observe: Observe | None) -> saved_tensors_hooks:
        """Context in which a graph saves names of weights. `observe` sees all other saved tensors."""
        return with_names(self._pack, self._unpack, observe)

    def _pack(self, tensor: torch.Tensor) -> Any:
        if tensor.layout is not torch.strided:
            return tensor.clone()  # its parts may lie over weights
        unit = self._unit
        if unit is None or not self._reads or not unit.holds(tensor):
            return tensor
        return WeightView(unit, int(tensor.storage_offset()), tensor.shape, tensor.stride(), tensor.dtype)

    def _unpack(self, name: WeightView) -> torch.Tensor:
        self.enter(name.unit, backward=True)
        return name.unit.view(name)

    def land(self, unit: Unit, region: Region, piece: Piece, parameter: nn.Parameter) -> None:
        """Take the gradient of a parameter out of autograd, to the host."""
        if not self._gradients.lasts(region):
            self.enter(unit, backward=True, reads=False)
        self._gradients.take(piece, parameter)
