"""Table of residence: tier of each plane, tile size and place of the update of each region. Pure functions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from offload.layout.planes import ERROR, Plane
from offload.layout.regions import Region, align, alike
from offload.layout.sharding import Sharding

DEVICE = "device"
HOST = "cpu"
DISK = "nvme"
FILES = "files"
"""Tiers: device memory, host memory, records on disk, and model files, which are only read."""
SLOT = "slot"
"""Place of the update: in the unit slot."""


@dataclass(frozen=True)
class Row:
    """Residence of one region."""

    tiers: Mapping[str, str] = field(default_factory=dict)
    """Tier by plane name, in record order, for planes outside the common tier of the table."""
    tile_numel: int = 0
    """Tile size in elements, for a region copied tile by tile. 0: one tile covers the range of a rank."""
    update: str = ""
    """Place of the update: DEVICE (tiles are copied to the device and back), SLOT (in the slot, after the H2D copy), or
    empty (where the planes are stored).
    """


_ALL_TOGETHER = Row()


@dataclass(frozen=True)
class Residence:
    """Table of residence, with a row per region.

    A state array is a plane: weights, a moment, gradients. A region with planes on disk is read, updated and written
    in tiles, and each tile has one record on disk. A tile ends at the latest where the share of a rank ends. For an
    update rule over whole matrices (Muon) tiles end between parameters, however large the parameters are.

        residence = Residence({0: Row({"momentum": DISK}, tile_numel=4096)})
        residence.tier(region, region.plane("momentum"))  # DISK
        residence.tiles(region)                           # [(0, 4096), (4096, 6144)]
    """

    rows: Mapping[int, Row] = field(default_factory=dict)
    """Rows by region index. A region without a row is on the common tier, and is updated there."""
    sharding: Sharding = field(default_factory=Sharding)
    """Region partition over ranks."""
    common: str = HOST
    """Tier for planes without an entry in a row: DEVICE or HOST."""
    keeps_weights: bool = False
    """True if the device keeps a copy of all weights, although states are on another tier."""
    uses_pages: bool = False
    """True if the device computes over weights in host memory, because both tiers are one memory."""
    file_staging_bytes: int = 0
    """Staging memory for direct reads from model files, in bytes. 0: reads use the page cache."""

    def row(self, region: Region) -> Row:
        """Return the row of a region."""
        return self.rows.get(region.index, _ALL_TOGETHER)

    def row_key(self, region: Region) -> int:
        """Return the same number for all regions with one row. Equal rows are mostly one object."""
        return id(self.row(region))

    def alike(self, regions: Iterable[Region]) -> list[tuple[Region, int]]:
        """Return a region of each kind and row, with the number of such regions."""
        return alike(regions, by=self.row_key)

    def tier(self, region: Region, plane: Plane) -> str:
        """Return the tier of a plane."""
        return self.row(region).tiers.get(plane.name, self.common)

    def planes_on(self, tier: str, region: Region, is_own: bool = True) -> tuple[str, ...]:
        """Return the names of planes with an entry for `tier`, held for the own range (`is_own`) or for ranges from
        other ranks.
        """
        names = (name for name, place in self.row(region).tiers.items() if place == tier)
        # A plane cut to the own range has nothing of other ranges.
        return tuple(name for name in names if is_own or not self.sharding.is_own(region.plane(name)))

    def indices_on(self, tier: str) -> frozenset[int]:
        """Return the indices of regions with a plane on `tier`, other than the common tier."""
        return frozenset(index for index, row in self.rows.items() if tier in row.tiers.values())

    @cached_property
    def updated_on_device(self) -> frozenset[int]:
        """Indices of regions updated on the device: tiles are copied from host or disk and back."""
        return frozenset(index for index, row in self.rows.items() if row.update == DEVICE)

    @property
    def copies_weights(self) -> bool:
        """True if the device needs copies of exact weights: states are on another tier, or ranks gather weights."""
        return self.common != DEVICE or self.sharding.gathers

    def is_used_in_place(self, region: Region) -> bool:
        """True if compute reads this region where it is stored."""
        if not region.is_stored_as_used or self.sharding.gathers:
            return False
        if self.common == DEVICE:
            return True
        is_in_pages = self.uses_pages and self.tier(region, region.plane("weights")) == HOST
        return is_in_pages and self.row(region).update != SLOT

    def co_fetched(self, region: Region) -> tuple[Plane, ...]:
        """Return the planes next to the weights in the slot, for the update there."""
        if not (region.has_low and self.row(region).update == SLOT):  # an update needs both halves of a weight
            return ()
        return (region.plane("low"),)

    def slot_bytes(self, region: Region) -> int:
        """Return the bytes of a region in a slot."""
        return region.weight_bytes + sum(plane.num_bytes(region.numel) for plane in self.co_fetched(region))

    def travels(self, region: Region, plane: Plane) -> bool:
        """True if `plane` in memory is copied to or from the device. Other planes are updated in place."""
        # Optimizer states move only where the update is not at their place.
        is_updated_elsewhere = self.row(region).update == DEVICE or plane in self.co_fetched(region)
        return plane.state != "optimizer" or is_updated_elsewhere

    def resting_labels(self, regions: Iterable[Region]) -> frozenset[str]:
        """Return plane labels, as in plans and ledgers, for planes copied in no region."""
        labels: dict[bool, set[str]] = {True: set(), False: set()}
        for region, _ in self.alike(regions):
            for plane in region.states:
                labels[self.travels(region, plane)].add(plane.label)  # one label may travel in some regions alone
            labels[False].update(factor.label for factor in region.factors)  # rules with factors do not stream
            if self.sharding.error_bytes(region):
                labels[False].add(ERROR.label)
        return frozenset(labels[False] - labels[True])

    def tiles(self, region: Region, owner: int | None = None) -> list[tuple[int, int]]:
        """Return (begin, end) elements for all tiles in the range of rank `owner` (None: this rank)."""
        if owner is None:
            owner = self.sharding.owner
        begin, end = self.sharding.ranges(region)[owner]
        # Without a tile size, one tile. An empty range has one too: every region has a first and a last tile.
        step = align(self.row(region).tile_numel, region.codec.block) or max(1, end - begin)
        if region.by_matrix:
            # Weights are published tile by tile, and all ranks need equally many tiles.
            if self.sharding.publishes:
                step = end - begin
            return _between(sorted(offset for offset in region.offsets if begin < offset < end), begin, end, step)
        return [(start, min(start + step, end)) for start in range(begin, max(begin + 1, end), step)]

    def largest_tile(self, region: Region) -> int:
        """Return the elements in the largest tile over all ranks."""
        if not region.by_matrix:  # all ranges are equally long, and cut alike
            length = region.numel // self.sharding.num_ranges
            return min(align(self.row(region).tile_numel, region.codec.block) or length, length)
        owners = range(self.sharding.num_ranges)
        return max(end - begin for owner in owners for begin, end in self.tiles(region, owner))

    def enlarge_tiles(self, factor: int) -> Residence:
        """Return a table with tiles `factor` times as large, except for model files."""
        larger = {id(row): row for row in self.rows.values()}
        for key, row in larger.items():
            if FILES not in row.tiers.values():  # these have a ring of their own, sized by their tile
                larger[key] = replace(row, tile_numel=row.tile_numel * factor)
        return replace(self, rows={index: larger[id(row)] for index, row in self.rows.items()})

    def record_bytes(self, region: Region, numel: int, is_own: bool = True) -> int:
        """Return the record bytes for a tile with `numel` elements in the own range, or in another rank's range."""
        return sum(region.plane(plane).disk_bytes(numel) for plane in self.planes_on(DISK, region, is_own))

    def disk_bytes(self, region: Region) -> dict[str, int]:
        """Return the bytes on disk by plane name: whole pages for each tile.

        Equal on all ranks. Whole matrices are cut into other tiles on each rank: the rank with the most bytes decides.
        """
        sizes: dict[str, int] = {}
        if DISK not in self.row(region).tiers.values():
            return sizes
        cuts = self._cuts(region)
        for name in self.planes_on(DISK, region):
            plane = region.plane(name)
            sizes[name] = max(sum(count * plane.disk_bytes(numel) for numel, count in cut.items()) for cut in cuts)
            if not self.sharding.is_own(plane):  # weights: of all ranges on this rank
                sizes[name] *= len(self.sharding.partners)
        return sizes

    def _cuts(self, region: Region) -> list[Mapping[int, int]]:
        """Return the number of tiles by elements in a tile, once for each kind of range."""
        if region.by_matrix:
            ranges = range(self.sharding.num_ranges)
            return [Counter(end - begin for begin, end in self.tiles(region, owner)) for owner in ranges]
        # All ranges are cut alike. A list of tiles would be long: a region may have millions.
        length = region.numel // self.sharding.num_ranges
        whole = self.largest_tile(region) or 1
        return [{whole: length // whole, length % whole: 1}]

    def num_bytes(self, regions: Iterable[Region]) -> int:
        """Return the bytes for all records."""
        return sum(sum(self.disk_bytes(region).values()) for region in regions)


def _between(borders: Sequence[int], begin: int, end: int, max_length: int) -> list[tuple[int, int]]:
    """Split a range at some of the `borders`, into parts with at most `max_length` elements where the borders allow."""
    parts = []
    start = begin
    last = begin  # the last border so far
    for border in (*borders, end):
        if border - start > max_length and last > start:
            parts.append((start, last))
            start = last
        last = border
    return [*parts, (start, end)]
