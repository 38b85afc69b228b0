"""Data about a step's gradients as a whole: the parameters with a gradient, and the norm."""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from offload.layout.regions import Piece, Region
from offload.native import kernels
from offload.tiers.store import Store

_PART = 1 << 22
"""Chunk size in elements. Without a fused kernel torch makes a float64 copy: 32 MiB for this size."""

CopySquares = Callable[[], None]
"""Copies squares measured on a GPU to the host, on the lane for gradient D2H copies."""


class Measures:
    """Gradient flags and squares for all pieces.

    `touched[region.index][position]`: True if a piece has a gradient. `squares[piece]`: fp64 sum over the squared fp32
    gradient, in model parameter order. Both are final after `complete` for a region with all gradients on the host
    (from a GPU the squares are copied with them).

    Over several ranks both cover all ranks: each rank sums its own range, and the sums are added in rank order, so all
    ranks get equal bits. Before that, `touched` covers this rank only.

    A square comes from one of four places:

    - one rank, computing on a CPU, one contribution: `record_square`, while the gradient is copied into the buffer;
    - one rank, computing on a CPU, several contributions: `measure`, from the buffer;
    - one rank with a GPU: `measure` too, and `CopySquares` brings the numbers to the host;
    - several ranks: `measure_shard`, from the sum over all ranks, exchanged at once or in `finish`.

    `has_peers`: True over several ranks. Another rank may then have a gradient this rank lacks.
    """

    has_peers = False

    def __init__(self, store: Store) -> None:
        self._store = store
        self.has_peers = store.comm.size > 1
        self._regions = list(store.states)
        pieces = [piece for region in self._regions for piece in region.pieces]
        # The order of the model: the norm is a sum in the order of `squares`, and must not depend on regions.
        self._pieces = sorted(pieces, key=lambda piece: (piece.parameter, piece.begin))

        # The present step.
        self.touched: dict[int, list[bool]] = {}
        self.squares: dict[Piece, float] = {}
        self._known: set[Piece] = set()  # measured at arrival
        counts = [2 * len(region.parameters) for region in self._regions]
        buffers = store.device.host_memory(sum(counts), torch.float64).split(counts)
        # For each region, memory for squares and flags. Within a step no memory is used twice.
        self._buffers = {region.index: buffer for region, buffer in zip(self._regions, buffers, strict=True)}
        self._pending: dict[Region, torch.Tensor] = {}  # in D2H copies from a GPU
        self._shares: dict[int, torch.Tensor] = {}  # this rank's, until the ranks agree
        self.begin_step()

    def begin_step(self) -> None:
        self.touched = {region.index: [False] * len(region.parameters) for region in self._regions if region.trainable}
        self.squares = dict.fromkeys(self._pieces, 0.0)
        self._known.clear()
        self._pending.clear()
        self._has_device_values = False
        self._shares.clear()

    @property
    def has_any(self) -> bool:
        """True if this rank has a gradient for any parameter."""
        return any(any(flags) for flags in self.touched.values())

    def record_square(self, piece: Piece, square: float | None) -> None:
        """Record a piece's squared gradient; None: another contribution was added, so the square is unknown."""
        if square is None:
            self._known.discard(piece)
        else:
            self.squares[piece] = square
            self._known.add(piece)

    def touch(self, regions: Sequence[Region], frozen: Container[int]) -> None:
        """Mark all pieces in these regions as having gradients (0 if none came), except for parameters in `frozen`."""
        for region in [region for region in regions if region.trainable]:
            touched = self.touched[region.index]
            for position, piece in enumerate(region.pieces):
                if not touched[position] and piece.parameter not in frozen:
                    touched[position] = True
                    self.record_square(piece, 0.0)

    def complete(self, region: Region) -> None:
        """Make a region's measures final, after the gradients have arrived."""
        values = self._pending.get(region)
        if values is not None:  # the update lane may do the same at the same time, with equal values
            self._note(region, values.tolist())
            self._pending.pop(region, None)

    def measure(self, region: Region, flat: torch.Tensor) -> CopySquares | None:
        """Measure a region's gradients on a single rank.

        On a GPU the result is known after the returned copy has run; None: already known.
        """
        touched = self.touched[region.index]
        if all(piece in self._known for piece, has in zip(region.pieces, touched, strict=True) if has):
            return None
        _round_fp16(region, flat)
        squares = _squares(region, flat, slice(0, region.numel))
        if squares.is_cpu:
            self._note(region, squares.tolist())
            return None
        host = self._pending[region] = self._buffers[region.index][: len(squares)]
        return partial(self._store.device.copy, host, squares)

    def squares_of(self, region: Region, flat: torch.Tensor) -> list[float]:
        """Return the fp64 square sum of each piece of a region, from its gradients on a single rank."""
        squares: list[float] = _squares(region, flat, slice(0, region.numel)).tolist()
        return squares

    def correct(self, region: Region, squares: Sequence[float]) -> None:
        """Replace the squares of the pieces with gradients, after a script has changed these."""
        self._note(region, squares)

    def measure_shard(self, region: Region, shard: torch.Tensor, agrees: bool) -> None:
        """Measure this rank's piece of the sum over all ranks, on the lane of the last exchange.

        `agrees`: exchange the squares at once; otherwise in `finish`.
        """
        buffer, touched = self._buffers[region.index], self.touched[region.index]
        # Numbers, to exchange flags with the squares: a sum above 0 means a gradient on some rank.
        flags = buffer[len(touched) :].copy_(torch.tensor(touched, dtype=torch.float64, device="cpu"))
        _round_fp16(region, shard)
        squares = _squares(region, shard, self._store.sharding.piece(region))
        share = torch.cat([squares, flags.to(squares.device, non_blocking=True)])
        if not agrees:
            self._shares[region.index] = self._to_host(share, buffer)
            return
        label = f"norm of the gradients of {region.name}"
        if not self._store.is_below_device:  # inline updates need the flags at once
            touched[:] = [count > 0 for count in self._store.comm.sum_in_order(list(map(float, touched)), label)]
        total = self._store.comm.sum_in_order(share, label)
        self._pending[region] = self._to_host(total, buffer)
        if share.is_cpu:
            self.complete(region)

    def finish(self) -> None:
        """Exchange the remaining squares between ranks and record squares from a GPU. All gradients have arrived."""
        regions = [region for region in self._regions if region.index in self._shares]
        if self._has_device_values:  # copies on the compute stream have no tickets
            self._store.lanes.wait(self._store.lanes.mark())
            self._has_device_values = False
        if regions:
            shares = torch.cat([self._shares[region.index] for region in regions]).tolist()
            # Exchange numbers: tensors may already be on their way for the next step.
            totals = torch.tensor(self._store.comm.sum_in_order(shares, "norm of the gradients"), dtype=torch.float64)
            sizes = [2 * len(region.parameters) for region in regions]
            self._pending.update(zip(regions, totals.split(sizes), strict=True))
            self._shares.clear()
        for region in list(self._pending):
            self.complete(region)

    def _to_host(self, values: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
        """Return the values in host memory, valid after the lane's current work."""
        if values.is_cpu:
            return values
        self._has_device_values = not self._store.is_below_device
        return buffer.copy_(values, non_blocking=True)

    def _note(self, region: Region, values: Sequence[float]) -> None:
        """Record squares and, over several ranks, each piece's flag (True if any rank has a gradient)."""
        count = len(region.parameters)
        touched = self.touched[region.index]
        if len(values) > count:
            touched[:] = [number > 0 for number in values[count:]]
        for piece, value, has in zip(region.pieces, values, touched, strict=False):  # flags may follow the squares
            if has:
                self.squares[piece] = float(value)


def _round_fp16(region: Region, flat: torch.Tensor) -> None:
    """Round fp32 sums of gradients in fp16 in place: a sum too large for fp16 must show as infinite."""
    if region.compute == "fp16" and flat.dtype == torch.float32:
        for part in flat.split(_PART):
            part.copy_(part.to(region.dtype))


def _squares(region: Region, flat: torch.Tensor, span: slice) -> Any:
    """Return the fp64 square sum for each piece, on the device with `flat`, the `span` of a region."""
    offsets, sizes = _clip_pieces(tuple(region.offsets), tuple(region.sizes), span.start, span.stop)
    if flat.is_cpu:
        return kernels.sum_squares_segments(flat, offsets, sizes)
    parts, counts = _parts(offsets, sizes, _PART)
    squares = torch.stack(torch._foreach_norm([flat[part] for part in parts], 2, torch.float64)).square()
    if len(parts) == len(counts):  # no piece was cut
        return squares
    return torch.stack([part.sum() for part in squares.split(counts)])


_Sizes = tuple[int, ...]


@lru_cache(4096)
def _clip_pieces(offsets: _Sizes, sizes: _Sizes, start: int, stop: int) -> tuple[_Sizes, _Sizes]:
    """Return (offsets from `start`, sizes) for each piece's part within this range."""
    begins = [min(max(offset, start), stop) for offset in offsets]
    ends = [min(max(offset + size, start), stop) for offset, size in zip(offsets, sizes, strict=True)]
    return tuple(begin - start for begin in begins), tuple(e - b for b, e in zip(begins, ends, strict=True))


@lru_cache(4096)
def _parts(offsets: _Sizes, sizes: _Sizes, most: int) -> tuple[list[slice], list[int]]:
    """Return (slices with at most `most` elements, slice count per piece, at least one)."""
    parts = [
        slice(offset + begin, offset + min(begin + most, size))
        for offset, size in zip(offsets, sizes, strict=True)
        for begin in range(0, max(1, size), most)
    ]
    return parts, [max(1, -(-size // most)) for size in sizes]
