"""What a step has to know of its gradients as a whole: which parameters received one, and how large they are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from offload.lanes.lanes import Lanes
from offload.layout.regions import ParameterInfo, Region
from offload.native import kernels
from offload.tiers.device import Device
from offload.tiers.store import Store

_PIECE = 1 << 22
"""Elements, of which a copy in float64 takes 32 MiB, where torch has no kernel for many norms at once and makes one."""

BringDown = Callable[[], None]
"""Copies what was measured on a GPU to the host, on the lane that brings gradients down."""


class Measures:
    """`touched[region.index][position]` tells which parameters received a gradient; `squares[parameter]` is the fp64
    sum of squares of its fp32 gradient. Both are final once `measured` was called for a region whose gradients have
    landed (from a GPU the squares come down with them).

    Over several ranks they are those of all: each rank adds up its own range, and these sums are added in rank order,
    so that all have the same bits. Until then `touched` is this rank's alone.
    """

    def __init__(self, store: Store, infos: Sequence[ParameterInfo], device: Device, lanes: Lanes) -> None:
        self._store, self._infos, self._device, self._lanes = store, infos, device, lanes
        self._regions = [state.region for state in store.states]
        self.touched: dict[int, list[bool]] = {}
        self.squares: list[float] = []
        self._known: set[int] = set()  # parameters, measured as they came
        counts = [2 * len(region.parameters) for region in self._regions]
        rooms = device.host_memory(sum(counts), torch.float64).split(counts)
        # Of each region, for its squares and flags: those of a step are all noted when it ends.
        self._rooms = {region.index: room for region, room in zip(self._regions, rooms, strict=True)}
        self._pending: dict[int, torch.Tensor] = {}  # on their way from a GPU
        self._shares: dict[int, torch.Tensor] = {}  # of this rank, until the ranks agree
        self.begin_step()

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        self.touched = {region.index: [False] * len(region.parameters) for region in self._regions if region.trainable}
        self.squares = [0.0] * len(self._infos)
        self._known.clear()
        self._pending.clear()
        self._comes_down = False
        self._shares.clear()

    @property
    def has_any(self) -> bool:
        """True where this rank has gradients of some parameter."""
        return any(any(flags) for flags in self.touched.values())

    def know(self, index: int, square: float | None) -> None:
        """Note the square of a parameter's gradient as it came; None where more was added to it."""
        if square is None:
            self._known.discard(index)
        else:
            self.squares[index] = square
            self._known.add(index)

    def measured(self, region: Region) -> None:
        """A region's gradients have landed: from now on what is known of them is final."""
        found = self._pending.get(region.index)
        if found is not None:  # on the update lane and here at once, if need be: both note the same
            self._note(region, found.tolist())
            self._pending.pop(region.index, None)

    def measure(self, region: Region, flat: torch.Tensor) -> BringDown | None:
        """Measure the gradients of the only rank; of a GPU it is known once what is returned has brought it down."""
        touched = self.touched[region.index]
        if all(index in self._known for index, has in zip(region.parameters, touched, strict=True) if has):
            return None
        squares = _squares(region, flat, slice(0, region.numel))
        if squares.is_cpu:
            self._note(region, squares.tolist())
            return None
        host = self._pending[region.index] = self._rooms[region.index][: len(squares)]
        return partial(self._device.copy, host, squares)

    def measure_shard(self, region: Region, shard: torch.Tensor, agrees: bool) -> None:
        """Measure this rank's piece of the sum over all ranks, on the lane of the last exchange. With `agrees` the
        others are told at once, else in `finish`.
        """
        room, touched = self._rooms[region.index], self.touched[region.index]
        flags = room[len(touched) :].copy_(torch.tensor(touched, dtype=torch.float64, device="cpu"))
        squares = _squares(region, shard, self._store.sharding.piece(region))
        share = torch.cat([squares, flags.to(squares.device, non_blocking=True)])
        if not agrees:
            self._shares[region.index] = self._brought_down(share, room)
            return
        what = f"norm of the gradients of {region.name}"
        if self._store.tier == "device":  # compute's own, which has to know at once who is updated
            touched[:] = [count > 0 for count in self._store.comm.sum_in_order(list(map(float, touched)), what)]
        total = self._store.comm.sum_in_order(share, what)
        self._pending[region.index] = self._brought_down(total, room)
        if share.is_cpu:
            self.measured(region)

    def finish(self) -> None:
        """All gradients have landed: let the ranks agree on what they have not yet, and note what came from a GPU."""
        regions = [region for region in self._regions if region.index in self._shares]
        if self._comes_down:  # from compute's own work, which has no tickets
            self._lanes.wait(self._lanes.mark())
            self._comes_down = False
        if regions:
            shares = torch.cat([self._shares[region.index] for region in regions]).tolist()
            # As values: tensors may be on their way for the next step.
            totals = torch.tensor(self._store.comm.sum_in_order(shares, "norm of the gradients"), dtype=torch.float64)
            sizes = [2 * len(region.parameters) for region in regions]
            self._pending.update(
                (region.index, total) for region, total in zip(regions, totals.split(sizes), strict=True)
            )
            self._shares.clear()
        for index in list(self._pending):
            self.measured(self._store.region(index))

    def _brought_down(self, values: torch.Tensor, room: torch.Tensor) -> torch.Tensor:
        """Return values on the host, there once the lane has done its present work."""
        if values.is_cpu:
            return values
        self._comes_down = self._store.tier == "device"
        return room.copy_(values, non_blocking=True)

    def _note(self, region: Region, values: Sequence[float]) -> None:
        """Note squares, and of several ranks on how many of them each parameter received a gradient."""
        count = len(region.parameters)
        touched = self.touched[region.index]
        if len(values) > count:
            touched[:] = [number > 0 for number in values[count:]]
        for index, value, has in zip(region.parameters, values, touched, strict=False):
            if has:
                self.squares[index] = float(value)


def _squares(region: Region, flat: torch.Tensor, held: slice) -> Any:
    """Return the sum of squares, in float64, of what lies of each parameter in `flat`, the elements `held` of a region;
    on the device of `flat`.
    """
    offsets, sizes = _held_of(tuple(region.offsets), tuple(region.sizes), held.start, held.stop)
    if flat.is_cpu:
        return kernels.sum_squares_segments(flat, offsets, sizes)
    pieces, counts = _pieces(offsets, sizes, _PIECE)
    squares = torch.stack(torch._foreach_norm([flat[piece] for piece in pieces], 2, torch.float64)).square()
    return squares if len(pieces) == len(counts) else torch.stack([part.sum() for part in squares.split(counts)])


_Sizes = tuple[int, ...]


@lru_cache(4096)
def _held_of(offsets: _Sizes, sizes: _Sizes, start: int, stop: int) -> tuple[_Sizes, _Sizes]:
    """Return offsets, counted from `start`, and sizes of what lies of each parameter in this range."""
    begins = [min(max(offset, start), stop) for offset in offsets]
    ends = [min(max(offset + size, start), stop) for offset, size in zip(offsets, sizes, strict=True)]
    return tuple(begin - start for begin in begins), tuple(e - b for b, e in zip(begins, ends, strict=True))


@lru_cache(4096)
def _pieces(offsets: _Sizes, sizes: _Sizes, most: int) -> tuple[list[slice], list[int]]:
    """Return pieces of at most so many elements, and how many there are of each parameter, one at least."""
    pieces = [
        slice(offset + begin, offset + min(begin + most, size))
        for offset, size in zip(offsets, sizes, strict=True)
        for begin in range(0, max(1, size), most)
    ]
    return pieces, [max(1, -(-size // most)) for size in sizes]
