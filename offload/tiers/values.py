"""Parameter values, whole or in ranges, on any tier."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from offload.distributed.comm import Comm
from offload.errors import ConfigError
from offload.lanes.lanes import Lanes
from offload.layout.planes import CODES, MASTER, Plane
from offload.layout.regions import ParameterInfo, Piece, Region, align
from offload.layout.sharding import Sharding
from offload.native import kernels
from offload.tiers.device import Device
from offload.tiers.model_files import master_planes
from offload.tiers.tile import RegionState

Read = Callable[[int, int], torch.Tensor]
"""Returns parameter elements `begin` to `end`, flat."""
_PART = 1 << 24
"""Elements per step in `write`: some 100 MiB for a while, and few steps of Python."""


class Values:
    """Reads and writes parameters in a store, in pieces."""

    def __init__(
        self,
        states: Iterable[RegionState],
        infos: Sequence[ParameterInfo],
        sharding: Sharding,
        comm: Comm,
        within: Comm,
        between: Comm,
        lanes: Lanes,
        device: Device,
    ) -> None:
        """`comm`: all ranks. `within`: ranks in this replica. `between`: ranks at this position in all replicas."""
        self._infos = infos
        self.sharding = sharding
        self._lanes = lanes
        self._device = device
        self.comm = comm
        self._within = within
        self._between = between
        self._pieces: dict[int, list[tuple[Piece, RegionState, int]]] = {}
        """Pieces by parameter, in order, with region state and position there."""
        for state in states:
            for position, piece in enumerate(state.region.pieces):
                self._pieces.setdefault(piece.parameter, []).append((piece, state, position))
        for pieces in self._pieces.values():
            pieces.sort(key=lambda entry: entry[0].begin)
        self._nonfinite: dict[str, int] = {}  # number of non-finite input weights, by parameter name

    def write(self, parameter: int, read: Read, dtype: torch.dtype, source: int | None = None) -> None:
        """Set a parameter's master weights in pieces.

        `read(begin, end)` returns elements, flat, in `dtype` (any float dtype), or records for the codec. With
        `source`, only this rank calls `read`, and the call is collective.
        """
        region = self.region(parameter)
        plane = region.plane("weights")
        travels = region.travelling
        for begin, end, stored in region.codec.encoded(self._parts(parameter, read, dtype, source)):
            codes = None
            if CODES in region.by_name:  # records for copies, made from the master weights
                master = stored
                if not region.has_low:  # rounded, like the planes below
                    master = stored.to(region.dtype)
                codes = region.link.records(master)
            tiles = self.open_tiles(parameter, CODES, *MASTER, begin=begin, end=end, changes=True, of_all=True)
            for planes, in_tile, in_piece in tiles:
                if "weights" in planes:
                    self._put(planes, plane.cut(in_tile), stored[plane.cut(in_piece)], region)
                if codes is not None:  # also ranges of other ranks, whose master weights may be only there
                    planes[CODES][travels.cut(in_tile)].copy_(codes[travels.cut(in_piece)])

    def _put(self, planes: dict[str, torch.Tensor], in_tile: slice, piece: torch.Tensor, region: Region) -> None:
        """Copy a piece into the tile planes, split for a split master."""
        is_on_device = not planes["weights"].is_cpu
        if is_on_device:
            piece = self._device.copy_to_device(piece)
        for name, values in master_planes(region, piece).items():
            if name in planes:
                planes[name][in_tile].copy_(values)
        if is_on_device:
            self._device.wait()

    def region(self, parameter: int) -> Region:
        """Return the first piece's region. Other pieces have regions with the same training and storage properties."""
        return self._pieces[parameter][0][1].region

    def _parts(self, parameter: int, read: Read, dtype: torch.dtype, source: int | None) -> Iterator[torch.Tensor]:
        """Yield the input to `write` in parts, on every rank."""
        info = self._infos[parameter]
        dtype, block, width = info.codec.input_format(dtype)
        step = align(_PART, block)
        for begin in range(0, info.numel, step):
            end = min(begin + step, info.numel)
            if source is None:  # every rank has the model
                flat = read(begin, end)
            else:
                numel = align(end - begin, block) // block * width
                if source == self.comm.rank:
                    flat = read(begin, end).cpu()
                else:
                    flat = torch.empty(numel, dtype=dtype)
                self.comm.broadcast(flat, source, f"first weights of {info.name}")
            # The sum is one read; the count of elements only for the message.
            if not math.isfinite(flat.sum()) and (wrong := flat.numel() - int(flat.isfinite().sum())):
                self._nonfinite[info.name] = self._nonfinite.get(info.name, 0) + wrong
            yield flat

    def explain_nonfinite(self, otherwise: str) -> str:
        """Return a message about non-finite input weights, or `otherwise` if there were none."""
        if not self._nonfinite:
            return otherwise
        name = next(iter(self._nonfinite))
        others = len(self._nonfinite) - 1
        more = ""
        if others:
            more = f" (and of {others} other parameters)"
        return (
            f"The cause: {self._nonfinite[name]} weights of {name}{more} were not finite when loaded, before any "
            "update. Load the model from intact files."
        )

    def forget_nonfinite(self) -> None:
        """Forget non-finite inputs before all weights are written anew."""
        self._nonfinite.clear()

    def read(self, parameter: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return a parameter's master weights as a CPU copy in `dtype`, in shape; decoded if quantized. Collective."""
        info = self._infos[parameter]
        return self.read_range(parameter, 0, info.numel, dtype).view(info.shape)

    def read_range(self, parameter: int, begin: int, end: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return parameter elements `begin` to `end` as a flat CPU copy in `dtype`. Collective.

        In the compute dtype they are rounded as for a forward: halves away from zero.
        """
        region = self.region(parameter)
        names: Sequence[str] = MASTER
        if dtype == region.dtype:  # the high half of a split master
            names = MASTER[:1]
        values = torch.empty(end - begin, dtype=dtype)
        for planes, in_tile, in_range in self.open_tiles(parameter, *names, begin=begin, end=end):
            weights = region.codec.read(planes["weights"], in_tile, region.dtype)
            if "low" in planes:
                weights = kernels.join(weights, self._device.to_host(planes["low"][in_tile]))
            values[in_range] = weights
        return self._complete(parameter, begin, values)

    def read_local(self, parameter: int) -> torch.Tensor:
        """Return a parameter as used on the device, in the compute dtype, as a CPU copy, in shape. Not collective: this
        rank must hold all weights.
        """
        region = self.region(parameter)
        info = self._infos[parameter]
        name = region.travelling.name
        values = torch.empty(info.numel, dtype=region.dtype)
        for planes, in_tile, in_parameter in self.open_tiles(parameter, name, of_all=True):
            values[in_parameter] = region.travels.read(planes[name], in_tile, region.dtype)
        return values.view(info.shape)

    def is_cut(self, parameter: int) -> bool:
        """True if a parameter lies in several pieces."""
        return len(self._pieces[parameter]) > 1

    def gradient(self, parameter: int, touched: Mapping[int, Sequence[bool]]) -> torch.Tensor | None:
        """Return the sum over several passes of the gradient of a parameter that is not cut: fp32, in the parameter's
        shape, in place, on a single rank. None: no pass had a gradient. `touched`: see `Measures`.
        """
        ((_, state, position),) = self._pieces[parameter]
        if state.sums is None or not touched[state.region.index][position]:
            return None
        return state.sums[state.span(position)].view(self._infos[parameter].shape)

    def moment_planes(self, parameter: int) -> list[Plane]:
        """Return the planes of moments of a parameter."""
        planes = self.region(parameter).states
        return [plane for plane in planes if plane.state == "optimizer" and plane.name not in MASTER]

    def moment_shapes(self, parameter: int) -> dict[str, tuple[int, ...]]:
        """Return the shape of each moment of a parameter, as torch's optimizers have them."""
        shape = self._infos[parameter].shape
        along = {"rows": (*shape[:-1], 1), "columns": (*shape[:-2], 1, *shape[-1:]), "elements": shape}
        factors = [factor for factor in self.region(parameter).factors if factor.numel(shape)]
        moments = {plane.name: shape for plane in self.moment_planes(parameter)}
        return moments | {factor.name: along[factor.along] for factor in factors}

    def moments_bytes(self, parameter: int) -> int:
        """Return the bytes of the moments of a parameter in fp32."""
        return sum(4 * math.prod(shape) for shape in self.moment_shapes(parameter).values())

    def read_moments(self, parameter: int) -> tuple[int, dict[str, torch.Tensor]]:
        """Return the number of updates of a parameter, and fresh CPU copies of the moments, fp32, on a single rank."""
        shapes = self.moment_shapes(parameter)
        moments = {plane.name: self._own_values(parameter, plane).float() for plane in self.moment_planes(parameter)}
        _, state, position = self._pieces[parameter][0]
        moments |= {name: values.to("cpu", copy=True) for name, values in state.factors_of(position).items()}
        return state.steps[position], {name: flat.view(shapes[name]) for name, flat in moments.items()}

    def write_moments(self, parameter: int, num_steps: int, moments: Mapping[str, torch.Tensor]) -> None:
        """Set the number of updates and the moments of a parameter, on a single rank, or all to zero, on any number."""
        flat = {name: value.detach().reshape(-1) for name, value in moments.items()}
        for plane in self.moment_planes(parameter):
            for planes, in_tile, in_parameter in self.open_tiles(parameter, plane.name, changes=True):
                planes[plane.name][plane.cut(in_tile)] = flat[plane.name][in_parameter] if flat else 0
        for _, state, position in self._pieces[parameter]:
            state.steps[position] = num_steps
            for name, values in state.factors_of(position).items():
                if flat:
                    values.copy_(flat[name])
                else:
                    values.zero_()

    def prune_moments(self, parameter: int, share: float) -> None:
        """Set the smallest elements, a fraction `share` (1: all), in each of a parameter's moments and factors to zero.
        Collective. Raises ConfigError for quantized moments and a share below 1.
        """
        if not share:
            return
        for _, state, position in self._pieces[parameter]:
            for factor in state.factors_of(position).values():  # valid where this rank updates the parameter
                _prune(factor, _threshold(factor, share))
        for plane in self.moment_planes(parameter):
            if share < 1 and not plane.dtype.is_floating_point:
                raise ConfigError(
                    f"the moments of {self._infos[parameter].name} are stored in int8, where a part cannot be set to "
                    "zero: set all of them to zero (a share of 1), or set --optimizer.states fp32 or bf16."
                )
            threshold = math.inf
            if share < 1:  # of the whole parameter, so ranks exchange their parts
                threshold = _threshold(self._complete(parameter, 0, self._own_values(parameter, plane)), share)
            for planes, in_tile, _ in self.open_tiles(parameter, plane.name, changes=True):
                _prune(planes[plane.name][plane.cut(in_tile)], threshold)

    def _own_values(self, parameter: int, plane: Plane) -> torch.Tensor:
        """Return a plane of a parameter, flat, on the CPU. Undefined where another rank updates the parameter."""
        values = torch.empty(self._infos[parameter].numel, dtype=plane.dtype)
        for planes, in_tile, in_parameter in self.open_tiles(parameter, plane.name):
            values[in_parameter] = self._device.to_host(planes[plane.name][in_tile])
        return values

    def _complete(self, parameter: int, begin: int, values: torch.Tensor) -> torch.Tensor:
        """Complete `values`, parameter elements from `begin` on: each rank sends the elements it updates
        to all others.
        """
        operation = f"weights of {self._infos[parameter].name}"
        until = begin + len(values)
        if self.sharding.num_ranges == 1:  # this rank has all of them
            return values
        for piece, state, position in self._pieces[parameter]:
            zero = state.span(position).start - piece.begin  # position of the parameter's first element
            for owner, (first, last) in enumerate(self.sharding.ranges(state.region)):
                low = max(zero + max(begin, piece.begin), first)
                high = min(zero + min(until, piece.end), last)
                if low < high:
                    part = values[low - zero - begin : high - zero - begin]
                    rank, replica = divmod(owner, self.sharding.num_ranges // self.sharding.size)
                    # To the same position in each replica first, then within the replicas.
                    if self.sharding.spreads and rank == self.sharding.rank:
                        self._between.broadcast(part, replica, operation)
                    self._within.broadcast(part, rank, operation)
        return values

    def open_tiles(
        self,
        parameter: int,
        *names: str,
        begin: int = 0,
        end: int | None = None,
        changes: bool = False,
        of_all: bool = False,
    ) -> Iterator[tuple[dict[str, torch.Tensor], slice, slice]]:
        """Yield (planes, elements in the tile, elements from `begin`) for each tile with parameter elements `begin` to
        `end`.

        The caller reads the planes, or with `changes` writes them, in this thread. Covers tiles updated by this rank,
        or with `of_all` all tiles held here.
        """
        if end is None:
            end = self._infos[parameter].numel
        for piece, state, position in self._pieces[parameter]:
            zero = state.span(position).start - piece.begin  # position of the parameter's first element
            first = zero + max(begin, piece.begin)
            last = zero + min(end, piece.end)
            if first >= last:  # nothing of this piece
                continue
            ranges = [state.tiles]
            if of_all:
                ranges += state.others.values()
            for tiles in ranges:
                before = bisect_right(tiles, first, key=lambda tile: tile.end)
                until = bisect_left(tiles, last, key=lambda tile: tile.begin)
                for tile in tiles[before:until]:
                    low = max(first, tile.begin)
                    high = min(last, tile.end)
                    with tile.lend(*names).opened(self._lanes.wait, changes) as planes:
                        start = zero + begin
                        yield planes, slice(low - tile.begin, high - tile.begin), slice(low - start, high - start)


def _threshold(values: torch.Tensor, share: float) -> float:
    """Return the magnitude up to which the fraction `share` of all values lies; infinity for all."""
    number = 1 + int(share * (values.numel() - 1))
    if share == 1:
        return math.inf
    return float(values.abs().float().view(-1).kthvalue(number).values)


def _prune(values: torch.Tensor, threshold: float) -> None:
    """Set elements with magnitude up to `threshold` to zero."""
    if threshold == math.inf:
        values.zero_()
    else:
        values.masked_fill_(values.abs() <= threshold, 0)
