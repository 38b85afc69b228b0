"""Values of parameters, whole or in ranges, wherever the planes of their regions rest."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence

import torch

from offload.distributed.comm import Comm
from offload.errors import ConfigError
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Ticket
from offload.layout.planes import MASTER
from offload.layout.regions import ParameterInfo, Sharding, align
from offload.native import kernels
from offload.tiers.tile import RegionState, Tile

Read = Callable[[int, int], torch.Tensor]
"""Returns elements `begin` to `end` of a parameter, flat."""
_PIECE = 1 << 20
"""Elements of a parameter that are taken over at once."""


class Values:
    """Reads and writes the parameters of a store, a piece at a time. `states`: its regions, by their index."""

    def __init__(
        self,
        states: Mapping[int, RegionState],
        infos: Sequence[ParameterInfo],
        sharding: Sharding,
        comm: Comm,
        within: Comm,
        lanes: Lanes,
    ) -> None:
        """`comm`: of all ranks; `within`: of those of this replica."""
        self._states, self._infos, self.sharding, self._lanes = states, infos, sharding, lanes
        self.comm, self._within = comm, within
        self._home = {
            parameter: (index, position)
            for index, state in states.items()
            for position, parameter in enumerate(state.region.parameters)
        }
        self._spoilt: dict[str, int] = {}  # by parameter: how many of its weights were not finite as they were given

    def write(self, parameter: int, read: Read, dtype: torch.dtype, source: int | None = None) -> None:
        """Set the master weights of one parameter, piece by piece: `read(begin, end)` gives elements of it, flat, in
        `dtype`, any float one, or the records that its codec takes. Collective with `source`: that rank's alone is
        asked.
        """
        state = self._states[self._home[parameter][0]]
        region, plane = state.region, state.region.plane("weights")
        for begin, end, rests in region.codec.encoded(self._pieces(parameter, read, dtype, source)):
            for tiles in (state.tiles, *state.others.values()):
                opened = self.opened(parameter, *MASTER, begin=begin, end=end, changes=True, tiles=tiles)
                for planes, mine, its in opened:
                    _put(planes, plane.cut(mine), rests[plane.cut(its)], region.has_low)

    def _pieces(self, parameter: int, read: Read, dtype: torch.dtype, source: int | None) -> Iterator[torch.Tensor]:
        """Yield the weights of a parameter as `write` is given them, on every rank."""
        info, is_shared = self._infos[parameter], source is not None and self.comm.size > 1
        dtype, block, width = info.codec.takes(dtype)
        step = align(_PIECE, block)
        for begin in range(0, info.numel, step):
            end = min(begin + step, info.numel)
            if not is_shared:
                flat = read(begin, end)
            else:
                numel = align(end - begin, block) // block * width
                flat = read(begin, end).cpu() if source == self.comm.rank else torch.empty(numel, dtype=dtype)
                self.comm.broadcast(flat, source or 0, f"first weights of {info.name}")
            if not math.isfinite(flat.sum()) and (wrong := flat.numel() - int(flat.isfinite().sum())):
                self._spoilt[info.name] = self._spoilt.get(info.name, 0) + wrong
            yield flat

    def why_not_finite(self, otherwise: str) -> str:
        """Say what makes numbers not finite: weights that were not when they were given, else what `otherwise` says."""
        if not self._spoilt:
            return otherwise
        name, others = next(iter(self._spoilt)), len(self._spoilt) - 1
        more = f" (and of {others} other parameters)" if others else ""
        return (
            f"The cause: {self._spoilt[name]} weights of {name}{more} were not finite when they were loaded, before "
            "any update. Load the model from files that are whole."
        )

    def forget_spoilt(self) -> None:
        """All weights are about to be written anew."""
        self._spoilt.clear()

    def read(self, parameter: int) -> torch.Tensor:
        """Return a fresh fp32 CPU copy of one parameter's master weights, in its shape: where it rests in codes, of
        what they stand for on the device. Collective.
        """
        info = self._infos[parameter]
        return self.read_range(parameter, 0, info.numel).view(info.shape)

    def read_range(self, parameter: int, begin: int, end: int, *, travelling: bool = False) -> torch.Tensor:
        """Return a fresh CPU copy of elements `begin` to `end` of one parameter, flat: of its fp32 master weights, or
        of what the device uses (bf16, or fp32). Collective.
        """
        region = self._states[self._home[parameter][0]].region
        found = torch.empty(end - begin, dtype=region.dtype if travelling else torch.float32)
        for planes, mine, its in self.opened(parameter, *MASTER[: 1 if travelling else 2], begin=begin, end=end):
            weights = region.codec.read(planes["weights"], mine, region.dtype)
            found[its] = kernels.join(weights, planes["low"][mine].cpu()) if "low" in planes else weights
        return self._completed(parameter, begin, found)

    def read_here(self, parameter: int) -> torch.Tensor:
        """Return a fresh CPU copy of a parameter as the device uses it (bf16, or fp32), in its shape. Not collective:
        this rank has to hold all of its weights.
        """
        state, info = self._states[self._home[parameter][0]], self._infos[parameter]
        found = torch.empty(info.numel, dtype=state.region.dtype)
        for tiles in (state.tiles, *state.others.values()):
            for planes, mine, its in self.opened(parameter, *MASTER[:1], tiles=tiles):
                found[its] = state.region.codec.read(planes["weights"], mine, state.region.dtype)
        return found.view(info.shape)

    def prune_moments(self, parameter: int, share: float) -> None:
        """Set to zero this share of each array that the update rule keeps of a parameter, the elements of least
        magnitude; all of them with 1. Collective. Raises ConfigError for a share below 1 of moments in codes.
        """
        if not share:
            return
        index, position = self._home[parameter]
        state = self._states[index]
        region = state.region
        for factor in state.factors_of(position).values():  # right where the parameter is updated, whoever has it
            _prune(factor, _threshold(factor, share))
        for plane in (plane for plane in region.states if plane.kind == "optimizer" and plane.name not in MASTER):
            if share < 1 and not plane.dtype.is_floating_point:
                raise ConfigError(
                    f"the moments of {self._infos[parameter].name} rest in int8, of which a share cannot be set to "
                    "zero: set all of them to zero (a share of 1), or --optimizer.states fp32 or bf16."
                )
            threshold = math.inf
            if share < 1:
                found = torch.empty(self._infos[parameter].numel, dtype=plane.dtype)
                for planes, mine, its in self.opened(parameter, plane.name):
                    found[its] = planes[plane.name][mine].cpu()
                threshold = _threshold(self._completed(parameter, 0, found), share)
            for planes, mine, _ in self.opened(parameter, plane.name, changes=True):
                _prune(planes[plane.name][plane.cut(mine)], threshold)

    def _completed(self, parameter: int, begin: int, found: torch.Tensor) -> torch.Tensor:
        """Return elements of a parameter, from `begin` on, of which each rank has filled what it updates, with what the
        others have.
        """
        region, position = self._home[parameter]
        state, what = self._states[region], f"weights of {self._infos[parameter].name}"
        if self.sharding.num_ranges > 1:
            start = state.span(position).start + begin
            for rank, (first, last) in enumerate(self.sharding.ranges(state.region)):
                low, high = max(start, first), min(start + len(found), last)
                if low < high:
                    self._within.broadcast(found[low - start : high - start], rank, what)
        return found

    def opened(
        self,
        parameter: int,
        *names: str,
        begin: int = 0,
        end: int | None = None,
        changes: bool = False,
        tiles: Sequence[Tile] | None = None,
    ) -> Iterator[tuple[dict[str, torch.Tensor], slice, slice]]:
        """Yield (planes of a tile, the parameter's elements in them, the same counted from `begin`) of every tile with
        a share of elements `begin` to `end` of a parameter, for this thread to read or, with `changes`, to write.
        `tiles`: neighbours; None for those that this rank updates.
        """
        region, position = self._home[parameter]
        state, start = self._states[region], self._states[region].span(position).start
        tiles = state.tiles if tiles is None else tiles
        first, last = start + begin, start + (self._infos[parameter].numel if end is None else end)
        before = bisect_right(tiles, first, key=lambda tile: tile.end)
        until = bisect_left(tiles, last, key=lambda tile: tile.begin)
        for tile in tiles[before:until] if first < last else ():
            low, high = max(first, tile.begin), min(last, tile.end)
            lease = tile.lend(*names)
            give_back = lease.done_reading
            try:
                self._lanes.wait(lease.reads, fills=lease.fills if changes else ())
                mine, its = (slice(low - origin, high - origin) for origin in (tile.begin, first))
                yield lease.planes, mine, its
                give_back = lease.done_writing if changes else lease.done_reading
            finally:
                give_back(Ticket("compute", is_done=True))


def _put(planes: dict[str, torch.Tensor], mine: slice, piece: torch.Tensor, is_split: bool) -> None:
    """Set elements of a tile to a piece, of a split master or as it is."""
    low: torch.Tensor | int = 0
    if is_split and piece.dtype != torch.bfloat16:
        piece, low = kernels.split(piece.float().to(planes["weights"].device))
    planes["weights"][mine].copy_(piece)
    if "low" in planes:
        planes["low"][mine] = low


def _threshold(values: torch.Tensor, share: float) -> float:
    """Return the magnitude up to which so large a share of some values lies; infinity for all of them."""
    number = 1 + int(share * (values.numel() - 1))
    return math.inf if share == 1 else float(values.abs().float().view(-1).kthvalue(number).values)


def _prune(values: torch.Tensor, threshold: float) -> None:
    """Set to zero what has no larger magnitude."""
    values.zero_() if threshold == math.inf else values.masked_fill_(values.abs() <= threshold, 0)
