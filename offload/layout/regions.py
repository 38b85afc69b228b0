"""Flat regions: where each parameter lies in the buffers that travel. Pure: shapes in, offsets out (ZeRO,
arXiv:1910.02054, section 5).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch

from offload.errors import ConfigError
from offload.layout.codecs import EXACT, Codec
from offload.layout.planes import (
    CODES,
    CUT_FROM,
    DTYPES,
    ERROR,
    MASTER,
    OF_A_REPLICA,
    PARAMETER_ALIGNMENT,
    STALE,
    Factor,
    Plane,
    table,
)

SHARD_MULTIPLE = 2048
"""Elements. A shard of a 2-byte plane is then whole pages."""

_MOST_PADDING = 1 << 21
"""Elements. Above it a region may not grow to more than four times its parameters for these to be whole on a rank."""
SCRATCH_BYTES = 32 << 20
"""Of the device, per rank, at most, for pieces of gradients that are to be summed."""
CHUNK_BYTES = 1 << 19
"""Of a file, before the next one's turn: small beside a tile, so that each disk has a share of it."""


@dataclass(frozen=True)
class ParameterInfo:
    """One parameter of the model, tied names counted once."""

    index: int
    """The place of the parameter in torch's order."""
    name: str
    """The first name of the parameter in the model."""
    shape: tuple[int, ...]
    """The shape of the parameter."""
    trainable: bool
    """True if the parameter is trained."""
    compute: str
    """One of `DTYPES`: the dtype in which the device uses the parameter."""
    bf16_source: bool
    """True if the values came in bf16, so that a frozen parameter has no low half."""
    lr_scale: float = 1.0
    """The factor on the learning rate."""
    weight_decay: float = 0.0
    """The weight decay."""
    rule: int = 0
    """The number of the parameter's update rule, in the `parts` of the optimizer."""
    codec: Codec = EXACT
    """How the parameter rests; what is trained rests as it is."""
    link: Codec = EXACT
    """How the parameter travels if it is trained; what is frozen travels as it rests."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Piece(NamedTuple):
    """A run of elements of one parameter: what one region has of it. Most parameters are one piece."""

    parameter: int
    """The index of the parameter in the model."""
    begin: int
    """The first element, counted in the flat parameter."""
    shape: tuple[int, ...]
    """The shape in which the elements are used."""

    @classmethod
    def whole(cls, info: ParameterInfo) -> Piece:
        """Return the piece that is all of a parameter."""
        return cls(info.index, 0, info.shape)

    @property
    def numel(self) -> int:
        """The elements of the piece."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """The element of the flat parameter behind the piece."""
        return self.begin + self.numel


@dataclass(frozen=True, eq=False)
class Region:
    """One flat buffer of pieces of parameters that travel together and are updated alike. Pieces of equal learning-rate
    factor and weight decay are neighbours, so that one kernel call serves them.
    """

    index: int
    """The number of the region."""
    name: str
    """The name that plans, errors and timelines show: the names of the region's units."""
    compute: str
    """One of `DTYPES`: the dtype in which the device uses the weights."""
    trainable: bool
    """True if the parameters are trained."""
    has_low: bool
    """True if the weights have a low half beside them, with which they are fp32."""
    pieces: tuple[Piece, ...]
    """What the region has of parameters, in the order of the buffer."""
    offsets: tuple[int, ...]
    """The element at which each piece starts."""
    numel: int
    """The elements of the buffer, the padding between pieces included."""
    units: tuple[str, ...]
    """The names of all units that use the region: more than one where weights are tied."""
    table: tuple[Plane, ...]
    """All planes that there may be of the region; `planes` are those that there are."""
    rule: int = 0
    """The number of the update rule."""
    factors: tuple[Factor, ...] = ()
    """What the update rule keeps of each parameter as a whole."""
    by_matrix: bool = False
    """True if the rule needs parameters as a whole, so that neither ranks nor tiles cut one."""
    codec: Codec = EXACT
    """How the weights rest."""
    link: Codec = EXACT
    """How the weights travel to where they are used, if they rest as they are."""

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """The parameter of each piece, by its index in the model."""
        return tuple(piece.parameter for piece in self.pieces)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """The elements of each piece."""
        return tuple(piece.numel for piece in self.pieces)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in which the weights are used."""
        return DTYPES[self.compute]

    @property
    def is_bf16(self) -> bool:
        """True where weights are used, and gradients made, in bf16."""
        return self.compute == "bf16"

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """What of the table there is: all that is trained; of a frozen region its master weights."""
        absent = set() if self.has_low else {"low"}
        return tuple(p for p in self.table if p.name not in absent and (self.trainable or p.name in MASTER))

    @cached_property
    def states(self) -> tuple[Plane, ...]:
        """The planes that last: all but the gradients."""
        return tuple(plane for plane in self.planes if plane.kind != "gradients")

    @cached_property
    def by_name(self) -> Mapping[str, Plane]:
        """The planes of the table by their names."""
        return {plane.name: plane for plane in self.table}

    def plane(self, name: str) -> Plane:
        """Return the plane of this name in the table."""
        return self.by_name[name]

    @cached_property
    def weight_bytes(self) -> int:
        """Bytes of the weights on the device, as they are used."""
        return self.dtype.itemsize * self.numel

    @property
    def travels(self) -> Codec:
        """How the weights travel to where they are used."""
        return self.codec if self.link is EXACT else self.link

    @cached_property
    def travelling(self) -> Plane:
        """The plane that goes to the device, and that ranks give each other."""
        return self.plane("weights" if self.link is EXACT else CODES)

    @cached_property
    def travelling_bytes(self) -> int:
        """Bytes of the plane that goes to the device."""
        return self.travelling.num_bytes(self.numel)

    def factor_spans(self, factor: Factor) -> list[slice]:
        """Return the elements of each piece, by its position, in the region's array of a factor."""
        ends = list(accumulate((factor.numel(piece.shape) for piece in self.pieces), initial=0))
        return [slice(begin, end) for begin, end in pairwise(ends)]

    def factor_numel(self, factor: Factor) -> int:
        """Return the elements of the region's array of a factor."""
        return sum(factor.numel(piece.shape) for piece in self.pieces)

    def update_bytes(self, numel: int) -> int:
        """Return the bytes of states that an update of so many elements reads and writes; the gradient is not
        counted. (Where there are weights from before, those are read, and the others written. Codes are written once
        the master weights are read again.)
        """
        found = self._update_bytes.get(numel)
        if found is None:
            sizes = {plane.name: plane.num_bytes(numel) for plane in self.states if plane.name != STALE}
            found = 2 * sum(sizes.values())
            if CODES in sizes:
                found += sum(sizes.get(name, 0) for name in MASTER) - sizes[CODES]
            self._update_bytes[numel] = found
        return found

    @cached_property
    def _update_bytes(self) -> dict[int, int]:
        return {}  # by the elements of a tile; asked in every step


def align(size: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


def build_regions(
    parameters: Sequence[ParameterInfo],
    units: Mapping[str, Sequence[int | Piece]],
    moments: Sequence[Sequence[Plane]],
    world_size: int = 1,
    *,
    delays: bool = False,
    factors: Mapping[int, Sequence[Factor]] | None = None,
    num_ranges: int = 1,
    without_low: Collection[int] = (),
) -> tuple[Region, ...]:
    """Lay the parameters of `units` out in regions, with the `moments` that the update rule of each has, by its number.
    `units`: what each unit has, by its name, in module order: pieces, or the indices of parameters that it has as a
    whole. `delays`: as of `table`.

    Pieces share a region when the same units use them, in the same dtype, and when they are trained, or stored, alike;
    no element is in two pieces. `factors`: of the rules by matrix, by their numbers; of their parameters, which are one
    piece each, none lies across a border of the `num_ranges` ranges in which ranks update. Raises ConfigError where a
    region would become too large by that.
    `without_low`: the numbers of rules that keep no low half of what they train.
    """
    users: dict[Piece, list[str]] = {}
    for unit, its in units.items():
        for piece in dict.fromkeys(Piece.whole(parameters[p]) if isinstance(p, int) else p for p in its):
            users.setdefault(piece, []).append(unit)
    groups: dict[tuple, list[Piece]] = {}
    for piece, names in users.items():
        info = parameters[piece.parameter]
        is_alone = info.rule in without_low if info.trainable else info.bf16_source
        has_low = info.compute == "bf16" and not is_alone
        rule, codec, link = info.rule if info.trainable else 0, info.codec, info.link if info.trainable else EXACT
        has_low = has_low and codec is EXACT
        groups.setdefault((tuple(names), info.compute, info.trainable, has_low, rule, codec, link), []).append(piece)
    regions: list[Region] = []
    for (names, compute, trainable, has_low, rule, codec, link), members in groups.items():
        border = math.lcm(PARAMETER_ALIGNMENT, codec.block, link.block)
        members = sorted(
            members, key=lambda piece: (parameters[piece.parameter].lr_scale, parameters[piece.parameter].weight_decay)
        )
        by_matrix = trainable and factors is not None and rule in factors
        bins = _balanced(members, num_ranges) if by_matrix else [members]
        lengths = [_length(members, border) for members in bins]
        step = align(max(lengths), math.lcm(SHARD_MULTIPLE, border) * world_size // len(bins))
        _check_padding(names, parameters, members, step, len(bins))
        offsets = [
            number * step + _length(members[:position], border)
            for number, members in enumerate(bins)
            for position in range(len(members))
        ]
        suffix = "" if compute == "bf16" or not any(p.compute == "bf16" for p in parameters) else " (fp32)"
        suffix += f" (rule {rule + 1})" if rule else ""
        if not trainable:
            suffix += " (frozen)" if codec is EXACT else f" (frozen, {codec.name})"
        suffix += "" if link is EXACT else f" ({link.name})"
        regions.append(
            Region(
                index=len(regions),
                name=" = ".join(names) + suffix,
                compute=compute,
                trainable=trainable,
                has_low=has_low,
                pieces=tuple(piece for members in bins for piece in members),
                offsets=tuple(offsets),
                numel=step * len(bins),
                units=names,
                table=table(compute, moments[rule], delays, codec, link),
                rule=rule,
                factors=tuple(factors[rule]) if by_matrix and factors else (),
                by_matrix=by_matrix,
                codec=codec,
                link=link,
            )
        )
    return tuple(regions)


def _length(members: Sequence[Piece], border: int = PARAMETER_ALIGNMENT) -> int:
    """Return the elements that pieces take one behind the other, where each starts on a border."""
    return sum(align(piece.numel, border) for piece in members)


def _balanced(members: Sequence[Piece], num_ranges: int) -> list[list[Piece]]:
    """Share pieces out, each to one range, so that the largest is about as small as can be: the largest piece first,
    always to the range that has least.
    """
    bins: list[list[Piece]] = [[] for _ in range(num_ranges)]
    for piece in sorted(members, key=lambda piece: -piece.numel):
        min(bins, key=_length).append(piece)
    return [[piece for piece in members if piece in its] for its in bins]


def _check_padding(
    names: Sequence[str], parameters: Sequence[ParameterInfo], members: Sequence[Piece], step: int, num_ranges: int
) -> None:
    """Raise ConfigError where ranges that cut no parameter are mostly padding."""
    numel = _length(members)
    if num_ranges > 1 and step * num_ranges > max(4 * numel, numel + _MOST_PADDING):
        largest = parameters[max(members, key=lambda piece: piece.numel).parameter]
        raise ConfigError(
            f"the update rule of {largest.name} {list(largest.shape)} needs a matrix as a whole, and with unit "
            f"{' = '.join(names)} shared out so over {num_ranges} ranks each would hold {step} elements where an equal "
            f"share is {numel // num_ranges}: set --offload.zero_stage 0, or give this parameter a rule by element "
            "with --optimizer.groups."
        )


@dataclass(frozen=True)
class Sharding:
    """How `size` ranks share a region, as `rank` sees it (ZeRO, arXiv:1910.02054, section 5). It is cut in a range of
    equal length per rank, and each rank updates its own; stage 1 also cuts the optimizer states, stage 2 also the
    gradients that wait, stage 3 also the weights. In stage 0 everyone holds and updates everything.

    One rank is stage 0, whatever it was given. Of several replicas each has `size` ranks, and all of what the region
    has: the ranks in one place of all replicas hold and update the same.
    """

    rank: int = 0
    """The number of this rank in its replica."""
    size: int = 1
    """How many ranks a replica has."""
    stage: int = 0
    """The ZeRO stage, 0 to 3."""
    replica: int = 0
    """The number of this rank's replica."""
    num_replicas: int = 1
    """How many replicas there are."""
    gradients: Codec = EXACT
    """How gradients travel between replicas."""
    spreads: bool = False
    """True where a state of the optimizer is on one rank of all replicas, which updates the weights of that and gives
    them to the others that hold them (hpZ: arXiv:2306.10209, section 3.2). In stage 3 alone.
    """

    def __post_init__(self) -> None:
        if self.size == 1:
            object.__setattr__(self, "stage", 0)

    @property
    def num_ranks(self) -> int:
        """Return how many ranks there are in all replicas."""
        return self.size * self.num_replicas

    @property
    def owner(self) -> int:
        """Return which of `ranges` this rank updates."""
        if self.gathers:
            return self.partners[self.replica if self.spreads else 0]
        return self.rank if self.stage else 0

    @property
    def num_ranges(self) -> int:
        """Return into how many ranges updates are cut."""
        return (self.num_ranks if self.spreads else self.size) if self.stage else 1

    @property
    def partners(self) -> range:
        """Return which of `ranges` those are whose weights this rank holds."""
        if not self.gathers:
            return range(self.num_ranges)
        num = self.num_ranges // self.size
        return range(self.rank * num, (self.rank + 1) * num)

    @property
    def gathers(self) -> bool:
        """True where weights are put together from all ranks at every fetch."""
        return self.stage >= CUT_FROM["parameters"]

    @property
    def publishes(self) -> bool:
        """True where each rank gives the weights that it has updated to others that hold them."""
        return len(self.partners) > 1

    def is_cut(self, plane: Plane) -> bool:
        """True where no rank of a replica holds all of a plane."""
        return self.stage >= CUT_FROM[plane.kind]

    def is_own(self, plane: Plane) -> bool:
        """True where each rank holds of a plane what it updates, and nothing else."""
        return self.is_cut(plane) and not (self.spreads and plane.kind in OF_A_REPLICA)

    def shard(self, region: Region) -> slice:
        """Return the elements over which this rank sums the gradients of its replica."""
        step = region.numel // self.size
        return slice(self.rank * step, (self.rank + 1) * step)

    def piece(self, region: Region) -> slice:
        """Return the elements of its shard over which this rank sums the gradients of all replicas."""
        start, step = self.shard(region).start, region.numel // self.num_ranks
        return slice(start + self.replica * step, start + (self.replica + 1) * step)

    def ranges(self, region: Region) -> list[tuple[int, int]]:
        """Return the elements from which to which each rank updates a region; in stage 0 all of it, once."""
        step = region.numel // self.num_ranges
        return [(number * step, (number + 1) * step) for number in range(self.num_ranges)]

    def own(self, region: Region) -> slice:
        """Return the elements that this rank updates."""
        return slice(*self.ranges(region)[self.owner])

    def held(self, region: Region, plane: Plane) -> slice:
        """Return the elements of a plane that this rank holds."""
        if not self.is_cut(plane):
            return slice(0, region.numel)
        return self.own(region) if self.is_own(plane) else self.shard(region)

    def error_bytes(self, region: Region) -> int:
        """Return the bytes of the errors that this rank keeps of a region's gradients."""
        return ERROR.num_bytes(region.numel // self.size) if region.trainable and self.gradients is not EXACT else 0

    def share(self, plane: Plane, num_bytes: int) -> int:
        """Return what this rank holds of so many bytes of a plane, over one region or several."""
        return num_bytes // (self.num_ranges if self.is_own(plane) else self.size if self.is_cut(plane) else 1)


@dataclass(frozen=True)
class DiskLayout:
    """Which planes of each region are on disk, and how regions are cut in tiles.

    A region with planes on disk is read, updated and written back in tiles, each of which has one record on disk. Tiles
    end where a rank's range ends; those of a rule by matrix end where parameters do, however large these are.
    """

    planes: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    """The names of the planes on disk, in the order of the table, by the region's index."""
    tile_numel: int = SHARD_MULTIPLE
    """The elements of a tile."""
    sharding: Sharding = Sharding()
    """How ranks share the regions."""
    streamed: frozenset[int] = frozenset()
    """The regions that are updated on the device, to which they stream from where they rest, in tiles; by index."""
    staying: frozenset[int] = frozenset()
    """The regions whose optimizer states rest on the device, so that only weights and gradients stream; by index."""
    files: frozenset[int] = frozenset()
    """The regions that rest in the model's own files, which are read and never written; by index."""
    file_tile_numel: int = SHARD_MULTIPLE
    """The elements of a tile that is read from these."""
    file_staging_bytes: int = 0
    """The memory by way of which these files are read past the page cache; 0 where they are read through it."""
    in_slots: bool = False
    """True if weights in memory are updated in the slot in which they come up, where they come up for one unit."""

    def co_fetched(self, region: Region) -> tuple[Plane, ...]:
        """Return what a region has in its slot beside the weights, for their update there."""
        is_updated = self.updates_in_slot(region) and region.has_low
        return (region.plane("low"),) if is_updated else ()

    def updates_in_slot(self, region: Region) -> bool:
        """True where a region is updated when it comes up."""
        return self.in_slots and region.trainable and len(region.units) == 1 and not self.of(region)

    def stays(self, region: Region, plane: Plane) -> bool:
        """True where a plane rests on the device, to which the rest of its region streams."""
        return region.index in self.staying and plane.kind == "optimizer"

    def travels(self, region: Region, plane: Plane) -> bool:
        """True where a plane in memory is copied to the device or from it; others are updated where they rest."""
        is_updated_elsewhere = region.index in self.streamed or plane in self.co_fetched(region)
        return plane.kind != "optimizer" or is_updated_elsewhere

    def resting(self, regions: Iterable[Region]) -> frozenset[str]:
        """Return what those planes are called in plans and ledgers that travel for no region."""
        found: dict[bool, set[str]] = {True: set(), False: set()}
        for region in regions:
            for plane in region.states:
                found[self.travels(region, plane)].add(plane.label)
            found[False].update(factor.label for factor in region.factors)  # of rules that do not stream
            found[False].update([ERROR.label] if self.sharding.error_bytes(region) else ())
        return frozenset(found[False] - found[True])

    def of(self, region: Region) -> tuple[str, ...]:
        """Return the planes of a region that are on disk."""
        return self.planes.get(region.index, ())

    def on_disk(self, region: Region, is_own: bool) -> tuple[str, ...]:
        """Return the planes on disk that this rank holds of its own range of a region, or of the others'."""
        return tuple(plane for plane in self.of(region) if is_own or not self.sharding.is_own(region.plane(plane)))

    def tiles(self, region: Region, owner: int | None = None) -> list[tuple[int, int]]:
        """Return the elements from which to which the range of a rank, or this rank's own, is cut in tiles: all of it
        where nothing of it moves.
        """
        begin, end = self.sharding.ranges(region)[self.sharding.owner if owner is None else owner]
        step = self._step(region) or max(1, end - begin)
        if region.by_matrix:
            # Who publishes does it tile by tile, of which all ranks have as many.
            step = end - begin if self.sharding.publishes else step
            return _between(sorted(offset for offset in region.offsets if begin < offset < end), begin, end, step)
        return [(start, min(start + step, end)) for start in range(begin, max(begin + 1, end), step)]

    def _step(self, region: Region) -> int:
        """Return the elements of a tile of a region that moves in tiles; 0 for one that does not."""
        if region.index in self.files:
            return align(self.file_tile_numel, region.codec.block)
        moves = self.of(region) or region.index in self.streamed
        return align(self.tile_numel, region.codec.block) if moves else 0

    def largest_tile(self, region: Region) -> int:
        """Return the elements of the largest tile that any rank has of a region that moves in tiles."""
        if not region.by_matrix:
            step = self._step(region) or align(self.tile_numel, region.codec.block)
            return min(step, region.numel // self.sharding.num_ranges)
        owners = range(self.sharding.num_ranges)
        return max(end - begin for owner in owners for begin, end in self.tiles(region, owner))

    def record_bytes(self, region: Region, numel: int, is_own: bool = True) -> int:
        """Return the bytes of the record of a tile of so many elements, of this rank's range or of another's."""
        return sum(region.plane(plane).disk_bytes(numel) for plane in self.on_disk(region, is_own))

    def num_bytes(self, regions: Iterable[Region]) -> int:
        """Return the bytes of all records."""
        sizes = (
            self.record_bytes(region, end - begin, owner == self.sharding.owner)
            for region in regions
            for owner in self.sharding.partners
            for begin, end in self.tiles(region, owner)
        )
        return sum(sizes)


def _between(borders: Sequence[int], begin: int, end: int, most: int) -> list[tuple[int, int]]:
    """Cut a range at some of these borders, in parts of at most so many elements where the borders allow it."""
    parts, start, last = [], begin, begin
    for border in (*borders, end):
        if border - start > most and last > start:
            parts.append((start, last))
            start = last
        last = border
    return [*parts, (start, end)]


def stripe(offset: int, num_bytes: int, num_files: int) -> list[tuple[int, int, int]]:
    """Return where `num_bytes` from `offset` on lie that are spread over files in chunks by turns: (file, offset there,
    bytes) of every stretch, in order.
    """
    if num_files == 1:
        return [(0, offset, num_bytes)]
    pieces, end = [], offset + num_bytes
    while offset < end:
        chunk, within = divmod(offset, CHUNK_BYTES)
        size = min(CHUNK_BYTES - within, end - offset)
        pieces.append((chunk % num_files, chunk // num_files * CHUNK_BYTES + within, size))
        offset += size
    return pieces


def stripe_bytes(num_bytes: int, num_files: int) -> list[int]:
    """Return the bytes of each file over which so many are spread."""
    chunks, rest = divmod(num_bytes, CHUNK_BYTES)
    rounds, extra = divmod(chunks, num_files)
    return [CHUNK_BYTES * (rounds + (number < extra)) + (rest if number == extra else 0) for number in range(num_files)]
