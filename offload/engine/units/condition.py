"""What a pass may move and has to leave as it was: generators, and what modules hold beside their parameters."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from offload.engine.units.drawn import Drawn
from offload.engine.units.undo import Undo
from offload.tiers.device import Device

BufferPlace = tuple[nn.Module, str]
"""A module, and the name of one of its buffers. A forward may hang another tensor there."""


def buffer_places(modules: Iterable[nn.Module]) -> set[BufferPlace]:
    """Return the places of all buffers of these modules."""
    return {(module, key) for module in modules for key, found in module._buffers.items() if found is not None}


class Condition:
    """What hangs in `modules`, and the values of the buffers in `moving`: a forward may assign to both, and change the
    values in place. Attributes belong to it, since what a module knows of its buffers (how long a table has grown) is
    in these; `training` is one.
    """

    def __init__(self, modules: Sequence[nn.Module], moving: Iterable[BufferPlace]) -> None:
        self._modules = modules
        self._attributes = [(module.__dict__, module.__dict__.copy()) for module in modules]
        self._buffers = [(module._buffers, module._buffers.copy()) for module in modules]
        found = [(module, key, module._buffers.get(key)) for module, key in moving]
        self._values = [(m, key, t, _version(t), t.detach().clone()) for m, key, t in found if t is not None]

    def moved(self) -> set[BufferPlace]:
        """Return the places of buffers that have another value by now. Native batch norm moves no `_version`."""
        noted = {(module, key): value for module, key, _, _, value in self._values}
        same = {(module, key) for (module, key), value in noted.items() if same_values(module._buffers.get(key), value)}
        return (buffer_places(self._modules) | set(noted)) - same

    def put_back(self) -> None:
        """All is as it was."""
        self._put_back_attributes()
        self._put_back_buffers()

    @contextmanager
    def attributes_again(self, undo: Undo) -> Iterator[None]:
        """Within, attributes are as they were; afterwards as they are now."""
        with undo.afterwards(Condition(self._modules, ())._put_back_attributes):
            self._put_back_attributes()
            yield

    @contextmanager
    def buffers_again(self, moving: Iterable[BufferPlace], undo: Undo) -> Iterator[None]:
        """Within, buffers are as they were; afterwards as they are now, those in `moving` by value too."""
        with undo.afterwards(Condition(self._modules, moving)._put_back_buffers):
            self._put_back_buffers()
            yield

    def _put_back_attributes(self) -> None:
        for live, before in self._attributes:
            _put_back(live, before)

    def _put_back_buffers(self) -> None:
        hung = [module._buffers.get(key) for module, key, *_ in self._values]
        for live, before in self._buffers:
            _put_back(live, before)
        with torch.no_grad():
            for (module, key, tensor, version, value), was_hung in zip(self._values, hung, strict=True):
                if was_hung is tensor and not tensor.is_inference():
                    tensor.copy_(value)
                elif version is None or _version(tensor) != version:
                    # Changed, and then replaced: by now it may be in somebody's graph.
                    module._buffers[key] = value.clone()


class Moment:
    """Generators and modules at one moment. drawn: None where nothing was drawn since but from torch's generators."""

    def __init__(self, device: Device, modules: Sequence[nn.Module], moving: Iterable[BufferPlace]) -> None:
        """`moving`: the buffers whose values may change in place."""
        self._device, self.random = device, device.random_state()
        self.drawn: Drawn | None = Drawn.so_far()
        self.condition = Condition(modules, moving)

    def put_back(self) -> None:
        """All is as it was."""
        self._device.set_random_state(self.random)
        if self.drawn is not None:
            self.drawn.put_back()
        self.condition.put_back()


def _put_back(live: dict[str, Any], before: dict[str, Any]) -> None:
    for key in live.keys() - before.keys() - {"forward"}:  # the engine's own: a unit may stay on the device from now on
        del live[key]
    for key, value in before.items():
        if key != "forward" and (key not in live or live[key] is not value):
            live[key] = value


def _version(tensor: torch.Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def same_values(first: torch.Tensor | None, second: torch.Tensor) -> bool:
    """True where all elements are equal; NaN equals NaN."""
    if first is None or (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    if not first.is_floating_point():
        return torch.equal(first, second)
    return bool(torch.allclose(first, second, rtol=0.0, atol=0.0, equal_nan=True))
