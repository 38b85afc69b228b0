"""Partition of regions over ranks."""

from __future__ import annotations

from dataclasses import dataclass

from offload.layout.codecs import EXACT, Codec
from offload.layout.planes import CUT_FROM, ERROR, OF_A_REPLICA, Plane
from offload.layout.regions import Region


@dataclass(frozen=True)
class Sharding:
    """Region partition over `size` ranks, as seen from `rank` (ZeRO, arXiv:1910.02054, section 5).

    A region has one range per rank, all equally long, and each rank updates one range. Stage 1 partitions the optimizer
    states, stage 2 also the stored gradients, stage 3 also the weights. In stage 0 every rank holds and updates
    everything.

    With one rank the stage is 0. Each replica has `size` ranks and the complete region; ranks at the same position in
    all replicas hold and update the same elements (unless `spreads`).
    """

    rank: int = 0
    """Rank number in the replica."""
    size: int = 1
    """Ranks per replica."""
    stage: int = 0
    """ZeRO stage, 0 to 3."""
    replica: int = 0
    """Replica number."""
    num_replicas: int = 1
    """Number of replicas."""
    gradients: Codec = EXACT
    """Format for gradients between replicas."""
    spreads: bool = False
    """True if each optimizer state is on one rank among all replicas. This rank updates the weights and sends them to
    the other ranks that hold them (hpZ: arXiv:2306.10209, section 3.2). Stage 3 only.
    """
    dispatches: bool = False
    """True if one rank computes a block for the rows of all ranks, so the gradients come from this rank alone."""

    def __post_init__(self) -> None:
        if self.size == 1:  # nothing to partition
            object.__setattr__(self, "stage", 0)

    @property
    def num_ranks(self) -> int:
        """Number of ranks in all replicas."""
        return self.size * self.num_replicas

    @property
    def owner(self) -> int:
        """Index in `ranges`: the update range for this rank."""
        if self.gathers:
            if self.spreads:  # the ranks at one position divide their weights: a range for each replica
                return self.partners[self.replica]
            return self.partners[0]
        if self.stage:
            return self.rank
        return 0

    @property
    def num_ranges(self) -> int:
        """Number of update ranges per region."""
        if not self.stage:
            return 1
        if self.spreads:
            return self.num_ranks
        return self.size

    @property
    def partners(self) -> range:
        """Indices in `ranges`: the weights on this rank."""
        if not self.gathers:  # every rank has all weights, whoever updates them
            return range(self.num_ranges)
        num = self.num_ranges // self.size
        return range(self.rank * num, (self.rank + 1) * num)

    @property
    def gathers(self) -> bool:
        """True if every fetch gathers weights from all ranks."""
        return self.stage >= CUT_FROM["parameters"]

    @property
    def publishes(self) -> bool:
        """True if each rank sends updated weights to the other ranks with the same weights."""
        return len(self.partners) > 1

    def is_cut(self, plane: Plane) -> bool:
        """True if a replica partitions `plane` over ranks."""
        return self.stage >= CUT_FROM[plane.state]

    def is_own(self, plane: Plane) -> bool:
        """True if a rank holds only its update range in `plane`."""
        return self.is_cut(plane) and not (self.spreads and plane.state in OF_A_REPLICA)

    def shard(self, region: Region) -> slice:
        """Return the elements that this rank reduces over the replica's gradients."""
        step = region.numel // self.size
        return slice(self.rank * step, (self.rank + 1) * step)

    def piece(self, region: Region) -> slice:
        """Return the elements, within the shard, for which this rank reduces the gradients over all replicas."""
        # A shard is reduced in pieces, one by each replica: no sum is made twice.
        start, step = self.shard(region).start, region.numel // self.num_ranks
        return slice(start + self.replica * step, start + (self.replica + 1) * step)

    def ranges(self, region: Region) -> list[tuple[int, int]]:
        """Return (begin, end) elements for each update range. In stage 0 one range covers the region."""
        step = region.numel // self.num_ranges
        return [(number * step, (number + 1) * step) for number in range(self.num_ranges)]

    def own(self, region: Region) -> slice:
        """Return the elements updated by this rank."""
        return slice(*self.ranges(region)[self.owner])

    def held_range(self, region: Region, plane: Plane) -> slice:
        """Return the `plane` elements on this rank."""
        if not self.is_cut(plane):
            return slice(0, region.numel)
        if self.is_own(plane):
            return self.own(region)
        return self.shard(region)

    def error_bytes(self, region: Region) -> int:
        """Return the bytes for gradient quantization errors on this rank."""
        if not (region.trainable and self.gradients.decodes):
            return 0
        return ERROR.num_bytes(region.numel // self.size)

    def plane_bytes(self, region: Region, plane: Plane) -> int:
        """Return the bytes of a plane on this rank."""
        num_shares = 1
        if self.is_own(plane):
            num_shares = self.num_ranges
        elif self.is_cut(plane):
            num_shares = self.size
        return plane.num_bytes(region.numel) // num_shares
