"""A model that runs itself over streamed weights."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.engine.hooked.parameters import absent_class
from offload.engine.hooked.recompute import recompute
from offload.engine.hooked.saved_tensors import Observe, has_hooks, with_names
from offload.engine.hooked.unit import Unit
from offload.engine.hooked.uses import Uses
from offload.engine.memory import Memory
from offload.engine.prepare import EnginePlan
from offload.engine.spare_memory import SpareMemory
from offload.engine.units.find import regions_of
from offload.engine.weights import Weights
from offload.files.safetensors_file import tensor_reader
from offload.layout.planes import DTYPES
from offload.modules import move_buffers
from offload.schedule.execute import Executor


class Flow:
    """The model of an engine as units, around which weights come and go. It is the host of training methods."""

    def __init__(self, model: nn.Module, prepared: EnginePlan, memory: Memory, weights: Weights) -> None:
        settings, structure = prepared.settings, prepared.structure
        self.model = model
        self.plan = prepared.plan
        self.infos = structure.infos
        self.regions = structure.regions
        self._recompute = settings.recompute

        # What a host shows of the owners before this one.
        self.counters = memory.counters
        self.comm = memory.comm
        self.device = memory.device
        self.lanes = memory.lanes
        self.store = memory.store
        self.slots = memory.slots
        self.gradients = weights.gradients
        self.updates = weights.updates
        self.make_room = weights.make_room

        # Fetches in the order of uses.
        lookahead = self.plan.lookahead(settings.prefetch, len(self.regions))
        self.executor = Executor(self.slots, *lookahead, updates_at_end=self.gradients.lasts)
        self.spare_memory = SpareMemory(
            self.comm, self.device, self.slots, self.gradients, self.plan, self._forget_addresses
        )
        self.uses = Uses(self.device, self.lanes, self.executor, self.gradients)
        self.runner = _Steps(self)

        # The parameters, from here on without memory.
        self._parameters = list(model.parameters())
        self._indices = {id(parameter): index for index, parameter in enumerate(self._parameters)}
        self._take_weights()
        absent = absent_class(weakref.ref(self))
        named = dict(enumerate(self._parameters))
        self.units = [
            Unit(candidate, regions_of(candidate, self.regions), named, absent, self.slots, self.device)
            for candidate in structure.candidates
        ]
        for unit in self.units:
            self._hook(unit)
            if unit.resident:
                self._keep(unit)
            else:
                unit.hide()
                self._route(unit)
        for region in self.regions:
            if len(region.units) > 1:
                self.gradients.make_lasting(region)

    # -- the model -------------------------------------------------------------------------------------------

    def _take_weights(self) -> None:
        device = self.device.torch_device
        for info, parameter in zip(self.infos, self._parameters, strict=True):
            read = info.codec.reader(info.name, None, tensor_reader(parameter))
            self.store.values.write(info.index, read, parameter.dtype, 0)
            parameter.data = torch.zeros((), dtype=DTYPES[info.compute], device=device).expand(info.shape)
        move_buffers(self.model, device)
        self.lanes.drain_updates()

    def _keep(self, unit: Unit) -> None:
        """Keep the weights of a unit on the device for good."""
        self.slots.keep(unit.regions)
        self.slots.compute_after_resident()
        self.executor.reset()
        for region in unit.regions:
            self.gradients.make_lasting(region)
        unit.show()

    def _hook(self, unit: Unit) -> None:
        uses = weakref.proxy(self.uses)  # torch hides hooks from the garbage collector
        for region in unit.regions:
            for piece in region.pieces:
                parameter = self._parameters[piece.parameter]
                if parameter.requires_grad and region.units[0] == unit.name:
                    parameter.register_post_accumulate_grad_hook(partial(Uses.land, uses, unit, region, piece))

    def _route(self, unit: Unit) -> None:
        original = unit.module.forward
        recomputes = unit.is_block and self._recompute == "always"

        def run(observe: Observe | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            with self.uses.forward(unit), self.uses.naming(observe):
                return unit.copied(original(*args, **kwargs))

        def forward(*args: Any, **kwargs: Any) -> Any:
            if recomputes and torch.is_grad_enabled():
                return recompute(unit, run, args, kwargs)
            return run(None, args, kwargs)

        unit.module.forward = forward

    def _forget_addresses(self) -> None:
        self.executor.reset(keep_orders=True)
        for unit in self.units:
            unit.forget_places()

    # -- values of absent parameters -------------------------------------------------------------------------

    @contextmanager
    def shown(self, parameters: Iterable[nn.Parameter]) -> Iterator[None]:
        """Context in which absent parameters have their values, in memory of their own: views of it may live on.

        A graph saves the name of the parameter, and reads the values again in the backward.
        """
        before = []
        names: dict[int, int] = {}  # parameter indices by storage
        is_inside = has_hooks()
        for parameter in parameters:
            index = self._indices[id(parameter)]
            absent, parameter.__class__ = type(parameter), nn.Parameter
            before.append((parameter, absent, parameter.data))
            parameter.data = self._read(index)
            names[parameter.untyped_storage()._cdata] = index

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.layout is not torch.strided or tensor.untyped_storage()._cdata not in names:
                return tensor
            if is_inside:  # a script's checkpoint counts what a graph saves
                return tensor.detach()
            return names[tensor.untyped_storage()._cdata], tensor.shape, tensor.stride(), tensor.storage_offset()

        def unpack(name: Any) -> torch.Tensor:
            index, *form = name
            return self._read(index).as_strided(*form)

        try:
            with with_names(pack, unpack):
                yield
        finally:
            for parameter, absent, nothing in before:
                parameter.data = nothing
                parameter.__class__ = absent

    def _read(self, index: int) -> torch.Tensor:
        """Return the weights of a parameter in their dtype of use, on the device."""
        return self.store.values.read(index, DTYPES[self.infos[index].compute]).to(self.device.torch_device)


class _Steps:
    """The passes of steps, as training methods ask for them."""

    def __init__(self, flow: Flow) -> None:
        self._flow = weakref.proxy(flow)
        self.step_number = 0

    def begin_step(self) -> None:
        """Start a step."""
        self._flow.device.take_recent_peak()
        self._flow.gradients.begin_step()
        self._flow.slots.compute_after_resident()

    def end_step(self) -> int:
        """End a step; return the peak device memory in bytes."""
        self.step_number += 1
        return self._flow.device.take_recent_peak()
