"""A unit: a module whose weights are fetched together, and where they are in the slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils._pytree import tree_map_only

from offload.engine.hooked.parameters import AbsentParameter, HiddenWeights
from offload.engine.units.find import UnitCandidate
from offload.layout.regions import Region
from offload.tiers.device import Device
from offload.tiers.slots import Slots


class WeightView(NamedTuple):
    """Name of a tensor over a slot. A graph saves the name: until the backward the slot holds other weights."""

    unit: Unit
    """The unit with the weights."""
    begin: int
    """First element in the unit's storage."""
    shape: torch.Size
    """Shape."""
    strides: tuple[int, ...]
    """Strides, in elements."""
    dtype: torch.dtype
    """Dtype."""


class Changes(NamedTuple):
    """Changes in place, by a use of a unit or after it, of what the recomputation reads."""

    inputs: frozenset[int]
    """Positions of input tensors."""
    buffers: bool
    """True if buffers change."""


class _Place(NamedTuple):
    """A range of slot memory as the weights of a unit."""

    storage: torch.UntypedStorage
    """Storage over this range alone."""
    views: list[torch.Tensor]
    """A view for each parameter."""
    num_uses: int
    """References to the storage by these views. Any more are tensors of the model or of a script."""


class Unit:
    """A module whose weights are fetched together."""

    def __init__(
        self,
        candidate: UnitCandidate,
        regions: Sequence[Region],
        parameters: Mapping[int, nn.Parameter],
        absent: type[AbsentParameter],
        slots: Slots,
        device: Device,
    ) -> None:
        """`parameters`: of the model, by index."""
        self.name = candidate.name
        self.module = candidate.module
        self.is_block = candidate.is_block
        self.resident = candidate.resident
        self.regions = tuple(regions)
        self.trainable = any(region.trainable for region in regions)

        # Weights in the slots.
        self._slots = slots
        self._device = device
        self._indices = list(candidate.parameters)
        self._weights = HiddenWeights([parameters[index] for index in self._indices], absent)
        self._places: dict[int, _Place] = {}  # by offset in the slot memory: mostly one or two
        self._place: _Place | None = None
        """Where the weights were last."""

        # What recomputations need, found in the first one.
        self.changes: Changes | None = None
        self.compared: frozenset[int] | None = None
        """Numbers of the saved tensors to compare."""

    # -- weights in the parameters ---------------------------------------------------------------------------

    def show(self) -> None:
        """Give the parameters the fetched weights."""
        offset = self._slots.offset(self._slots.cargo_of(self.regions))
        if offset not in self._places:
            self._places[offset] = self._find_place()
        self._place = self._places[offset]
        self._weights.show(self._place.views)

    def hide(self) -> None:
        """Take the weights from the parameters."""
        self._weights.hide()

    @property
    def is_lent(self) -> bool:
        """True if a tensor over the weights, other than the parameters, is alive."""
        place = self._place
        return place is not None and torch._C._storage_Use_Count(place.storage._cdata) > place.num_uses

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return True for a tensor over the present weights."""
        assert self._place is not None
        return tensor.layout is torch.strided and tensor.untyped_storage()._cdata == self._place.storage._cdata

    def copied(self, result: Any) -> Any:
        """Return a result of the module in which tensors over the weights are copies, since it outlives the use."""
        if not self.is_lent:
            return result
        return tree_map_only(torch.Tensor, lambda t: t.clone() if self.holds(t) else t, result)

    def view(self, name: WeightView) -> torch.Tensor:
        """Return the tensor with this name, over the present weights."""
        assert self._place is not None
        return self._over(self._place.storage, name.dtype, name.begin, name.shape, name.strides)

    def forget_places(self) -> None:
        """Forget all places before the slot memory is replaced."""
        self._places.clear()
        self._place = None

    def _find_place(self) -> _Place:
        # A storage of its own, in place of that of all slots: its references are the tensors over this unit's weights.
        addresses = self._slots.addresses(self._slots.cargo_of(self.regions))
        device = self._device.torch_device
        storage: Any = torch._C._construct_storage_from_data_pointer(addresses.start, device, len(addresses))
        views: dict[int, torch.Tensor] = {}
        for region, flat in self._slots.place(self.regions).items():
            first = (self._device.address(flat) - addresses.start) // flat.element_size()
            for piece, begin in zip(region.pieces, region.offsets, strict=True):
                view = flat[begin : begin + piece.numel].view(piece.shape).data
                if not self._slots.is_resident(region):
                    view = self._over(storage, view.dtype, first + begin, view.shape, view.stride())
                views[piece.parameter] = view
        own = [views[index] for index in self._indices]
        return _Place(storage, own, torch._C._storage_Use_Count(storage._cdata))

    def _over(
        self, storage: torch.UntypedStorage, dtype: torch.dtype, begin: int, shape: torch.Size, strides: tuple[int, ...]
    ) -> torch.Tensor:
        empty = torch.empty(0, dtype=dtype, device=self._device.torch_device)
        return empty.set_(storage, begin, shape, strides)
