"""Saved autograd graphs in host or NVMe memory: copied there after the forward, and back before the backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.engine.units.activation_offload import ActivationOffload, DeviceCopy, stretch_of
from offload.engine.units.arguments import Arguments
from offload.engine.units.saved_graph import Graph, GraphMemory, TooMuchToKeepError
from offload.engine.units.saved_inputs import Claim, SavedInputs
from offload.engine.units.unit import Unit
from offload.engine.units.use import Forward, Use

SMALLEST_BYTES = 4096
"""Minimum bytes for offload: below one page, a transfer is not worth the time."""


class _Range:
    """A memory range saved by a graph and offloaded from forward to backward."""

    def __init__(self, stretch: torch.Tensor, pool: ActivationOffload, saved: SavedInputs, claim: Claim) -> None:
        self.memory: torch.Tensor | None = stretch
        """The device memory, held during the forward so the address stays unique."""
        self._saved = saved
        self._address = saved.device.address
        self._begin = self._address(stretch)
        self._pool = pool
        self._stand_in = pool.put(stretch)
        claim.entries.append((self._stand_in.data_ptr(), self._stand_in.nbytes))
        self._num_uses = 0  # tensors saved and not yet unpacked
        self._copies: list[DeviceCopy] = []  # to the device: none or one

    def pack(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return the packed form of a tensor in this range: the range, and the arguments of `unpack`."""
        self._num_uses += 1
        offset = (self._address(tensor) - self._begin) // tensor.itemsize
        return self, tensor.dtype, offset, tensor.shape, tensor.stride()

    def unpack(self, dtype: torch.dtype, offset: int, shape: torch.Size, stride: tuple[int, ...]) -> torch.Tensor:
        """Return a tensor on the device. `offset`: start in the range, in elements."""
        flat = self._take()
        whole = flat[: flat.numel() // dtype.itemsize * dtype.itemsize].view(dtype)
        return whole.as_strided(shape, stride, whole.storage_offset() + offset)

    def prepare(self) -> None:
        """Start the copy to the device, unless all tensors were taken."""
        if not self._copies and self._num_uses > 0:
            self._copies = [self._pool.get(self._stand_in)]

    def _take(self) -> torch.Tensor:
        """Return the bytes on the device.

        The last expected reader becomes the only owner. A backward may read more often than saved (`ctx.saved_tensors`
        unpacks all each time); then the range is copied again.
        """
        copies = self._copies or [self._pool.get(self._stand_in)]
        (memory,) = self._saved.wait(copies)
        self._num_uses -= 1
        self._copies = []
        if self._num_uses > 0:
            self._copies = copies
        return memory


class OffloadedGraphMemory(GraphMemory):
    """Memory of the tensors that autograd saves: offloaded from forward to backward, where possible.

    A storage is offloaded once, and strides are preserved, since kernels depend on them.
    """

    def _open(self, unit: Unit, use: Use) -> None:
        super()._open(unit, use)
        self._free.clear()
        assert self._saved.policy.graph_offload is not None
        self._pool = self._saved.policy.graph_offload
        self._ranges: dict[tuple[int, int, int], _Range] = {}
        if not self._saved.is_trial:
            self.leaving = _find_leaving(unit, use)
        leaving = self.leaving or ()
        self._staying = {self._address(t.untyped_storage()) for i, t in enumerate(use.tensors) if i not in leaving}

    def pack(self, tensor: torch.Tensor) -> Any:
        if self.leaving is None or not self._can_leave(tensor):
            return super().pack(tensor)
        if not tensor.numel():
            return torch.empty_like(tensor)  # A view would hold the whole storage.
        stretch = stretch_of(tensor)
        # The version is part of the key: after an in-place change between two operations the bytes differ.
        key = self._address(stretch), stretch.nbytes, tensor._version
        if key not in self._ranges:
            if self._may_drop and not self._pool.has_room(stretch.nbytes):
                raise TooMuchToKeepError
            self._ranges[key] = _Range(stretch, self._pool, self._saved, self._claim)
        return self._ranges[key].pack(tensor)

    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, tuple) and isinstance(packed[0], _Range):
            return packed[0].unpack(*packed[1:])
        return super().unpack(packed)

    def prepare(self) -> None:
        """Start the copies to the device, last offloaded first, in backward order."""
        for stretch in reversed(self._ranges.values()):
            stretch.prepare()

    def run(self, unit: Unit, use: Use, forward: Forward) -> tuple[Graph, Arguments]:
        graph, result = super().run(unit, use, forward)
        for stretch in self._ranges.values():
            stretch.memory = None  # the forward is over: nothing else is packed by this address
        return graph, result

    def _can_leave(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in (torch.Tensor, nn.Parameter) or tensor.layout is not torch.strided:
            return False
        if tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False  # The tensor has properties beyond raw bytes.
        storage = tensor.untyped_storage()
        is_movable = storage.nbytes() >= SMALLEST_BYTES and self._address(storage) not in self._staying
        return is_movable and tensor.device == self._saved.device.torch_device and not self._slots.holds(tensor)


def _find_leaving(unit: Unit, use: Use) -> list[int]:
    """Return the indices of inputs that an offloaded graph need not hold.

    Excluded are inputs shared with other units, and non-contiguous inputs, since their gradients would have another
    layout.
    """
    needs, shared = use.needs or (), unit.traits.shared
    return [i for i, t in enumerate(use.tensors) if needs[i] and i not in shared and t.is_contiguous()]
