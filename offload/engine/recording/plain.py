"""A plain PyTorch pass over streamed weights: the reference for the equivalence check."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_iter, tree_map_only

from offload.engine.flow import Flow
from offload.engine.units.unit import Unit

_SavedTensor = torch.Tensor | tuple[Unit, torch.dtype, int, torch.Size, tuple[int, ...]]
"""A tensor, or a position in the unit weights: (unit, dtype, byte offset, shape, stride)."""


class PlainPass:
    """Runs the modules' own forwards with one autograd graph: no split, no recomputation, no engine function.

    Weights saved in the graph are copied to the device again for the backward. All other saved tensors stay.
    """

    def __init__(self, flow: Flow, install: Callable[[Unit], None]) -> None:
        """`install`: installs the unit weights, already on the device, in the module."""
        self._runner = flow.runner
        self._slots = flow.slots
        self._install = install
        self.weights: dict[int, torch.nn.Parameter] = {}
        """Installed weights by `id`."""
        self._handles: list[Any] = []  # of hooks on results
        self._loaded_unit: Unit | None = None  # the only one: its weights may fill all slots
        self._is_running = False  # a module forward

    @contextmanager
    def open(self) -> Iterator[None]:
        """Within the context, units may run. Afterwards no weights remain in the modules."""
        try:
            yield
        finally:
            self._unload()
            for handle in self._handles:
                handle.remove()

    def call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the unit forward, as the module would."""
        if unit.layer != unit.name and self._loaded_unit is not unit:
            # Each use of a row block has separate leaves. Otherwise autograd would keep the gradients of all blocks in
            # a tied head until the embedding gradients arrive.
            unit.forget_live()
        self._load(unit)
        self._is_running = True
        try:
            with torch.autograd.graph.saved_tensors_hooks(partial(self._pack, unit), self._unpack):
                result = unit.compute(*args, **kwargs)
        finally:
            self._is_running = False
        result = tree_map_only(torch.Tensor, self._runner.copy_from_slot, result)
        # Module code that runs again in the backward (torch.utils.checkpoint) needs the weights there.
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor) and tensor.requires_grad:
                self._handles.append(tensor.register_hook(lambda _: self._load(unit)))
        return result

    def _load(self, unit: Unit) -> None:
        if self._loaded_unit is not unit:
            if not self._is_running:  # else the runner refuses: only one unit computes at a time
                self._unload()
            self._runner.enter(unit)
            self._loaded_unit = unit
            self._install(unit)
            installed = [place.module._parameters[place.key] for place in unit.places]
            self.weights.update((id(weight), weight) for weight in installed if weight is not None)

    def _unload(self) -> None:
        if self._loaded_unit is not None:
            self._loaded_unit.install_placeholders()
            self._runner.leave()
            self._loaded_unit = None

    def _pack(self, unit: Unit, tensor: torch.Tensor) -> tuple[_SavedTensor, int]:
        if tensor.layout is not torch.strided:
            return tensor.detach().clone(), 0
        address = self._runner.device.address(tensor)
        weights = self._slots.addresses(self._slots.cargo_of(unit.regions))
        if address in weights:
            return (unit, tensor.dtype, address - weights.start, tensor.shape, tensor.stride()), 0
        return tensor.detach(), tensor._version

    def _unpack(self, packed: tuple[_SavedTensor, int]) -> torch.Tensor:
        saved, version = packed
        if isinstance(saved, torch.Tensor):
            if saved.layout is torch.strided and saved._version != version:  # same check as in torch without hooks
                raise RuntimeError("a tensor that the backward needs was changed in place after its forward")
            return saved
        unit, dtype, offset, shape, stride = saved
        self._load(unit)
        return self._slots.view(self._slots.cargo_of(unit.regions), dtype, offset, shape, stride)
