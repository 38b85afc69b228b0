"""Turn a recorded use order into a fetch schedule. Pure functions.

A *cargo* is a group of regions fetched together: the streamed regions of a unit. Each cargo occupies a contiguous range
within `capacity` device bytes. Prefetching and eviction follow rules 1 to 4 in Cao, Felten, Karlin and Li, "A
study of integrated prefetching and caching strategies" (SIGMETRICS 1995): fetch the missing cargo needed next, as soon
as there is room, replace the cargo needed last (Belady), and never one needed earlier than the fetched cargo.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class CargoUse(NamedTuple):
    """One cargo use by compute: a unit forward or backward."""

    cargo: int
    """Cargo index; 0 for a unit without streamed regions."""
    backward: bool
    """True for a backward."""
    reads: bool = True
    """False for a backward without weight reads. Only the update follows."""


@dataclass(frozen=True)
class Fetch:
    """A scheduled cargo fetch."""

    cargo: int
    """Cargo index."""
    offset: int
    """Device offset in bytes."""
    evicts: tuple[int, ...]
    """Cargoes evicted by this fetch."""
    serves: int
    """Index of the use that needs this fetch."""


@dataclass(frozen=True)
class Schedule:
    """Uses in a pass, with the fetches between them.

    A fetch waits for the last reader of the overwritten range and for the last update of the cargo. A use waits for the
    fetch of its cargo.
    """

    uses: tuple[CargoUse, ...]
    """Uses in order."""
    before: tuple[tuple[Fetch, ...], ...]
    """For each use, the fetches issued after the previous use ends (for the first use: immediately), in order."""


@dataclass(frozen=True)
class SlotMemory:
    """Device memory for cargoes."""

    sizes: tuple[int, ...]
    """Bytes per cargo, by index."""
    capacity: int
    """Total bytes."""
    max_cargoes: int | None
    """Maximum cargo count at the same time; None: as many as fit."""

    def holds(self, cargoes: Collection[int]) -> bool:
        """Return True if all these cargoes fit together."""
        fits = sum(self.sizes[cargo] for cargo in cargoes) <= self.capacity
        return fits and (self.max_cargoes is None or len(cargoes) <= self.max_cargoes)

    def place(
        self, cargo: int, offsets: Mapping[int, int], next_use: Mapping[int, float], serves: float, home: int | None
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return (offset, evicted cargoes) for the least harmful placement.

        None: every placement evicts a cargo needed at `serves` or earlier.

        offsets: offset by cargo for current contents.
        home: preferred offset among equal candidates.
        """
        leaving: tuple[int, ...] = ()
        if self.max_cargoes is not None and len(offsets) >= self.max_cargoes:
            # One has to go wherever the new cargo lies: the one needed last.
            last = max(offsets, key=lambda other: next_use[other])
            if next_use[last] <= serves:
                return None
            leaving = (last,)
        size = self.sizes[cargo]
        contents = [(offset, offset + self.sizes[c], c) for c, offset in offsets.items() if c not in leaving]
        candidates = {0, *(end for _, end, _ in contents)}  # an offset between two of these overlaps no less
        if home is not None:
            candidates.add(home)
        best: tuple[tuple[float, bool, int], tuple[int, ...]] | None = None
        for offset in candidates:
            if not 0 <= offset <= self.capacity - size:
                continue
            over = tuple(c for begin, end, c in contents if begin < offset + size and offset < end)
            # Latest next use first (Belady), then the old place, then the lowest.
            rank = (min((next_use[c] for c in over), default=math.inf), offset == home, -offset)
            if (not over or rank[0] > serves) and (best is None or rank > best[0]):
                best = rank, over
        if best is None:
            return None
        return (-best[0][2], (*leaving, *best[1]))


def build(
    uses: Sequence[CargoUse],
    room: SlotMemory,
    lookahead: int,
    *,
    valid_offsets: Mapping[int, int],
    homes: Mapping[int, int],
    trained: Iterable[int],
    fetches_next: bool = False,
    late: Iterable[int] = (),
) -> Schedule:
    """Schedule one pass over `uses`, assuming the next pass is the same.

    lookahead: cargoes fetched early, beyond the next one.
    valid_offsets: offsets for cargoes already on the device.
    homes: previous offsets. The same place is preferred, because unit parameters are created once per place.
    trained: cargoes made stale by a backward, since an update follows.
    fetches_next: the update follows immediately, so updated cargoes can be fetched for the next pass during this one.
    late: cargoes exempt from `fetches_next`, with an update after the pass.
    """
    calendar = _Calendar(uses, set(trained))
    offsets = dict(valid_offsets)
    homes = dict(homes)
    not_yet = set(late)
    end = 2 * len(uses) if fetches_next else len(uses)  # times after the pass are uses of the next one
    before: list[tuple[Fetch, ...]] = []
    for now, use in enumerate(uses):
        fetches = []
        ahead = {use.cargo if use.reads else 0}  # cargo 0 has no bytes
        for serves in range(now, end):
            cargo, _, reads = uses[serves % len(uses)]
            if not room.sizes[cargo] or not reads:
                continue
            if cargo not in ahead:
                if len(ahead) > lookahead:
                    break
                ahead.add(cargo)
            if cargo in offsets:
                continue
            if serves >= len(uses):
                if cargo in not_yet or calendar.is_used(cargo, now):
                    continue  # the update comes later
                if not room.holds(ahead):
                    break  # would be evicted before the use
            next_use = {other: calendar.next_use(other, now) for other in offsets}
            placement = room.place(cargo, offsets, next_use, serves, homes.get(cargo))
            if placement is None:
                break  # a later fetch may not take room from an earlier use
            offset, evicted = placement
            for other in evicted:
                del offsets[other]
            offsets[cargo] = homes[cargo] = offset
            if serves >= len(uses):
                calendar.renew(cargo)
            fetches.append(Fetch(cargo, offset, evicted, serves))
        before.append(tuple(fetches))
        if calendar.next_use(use.cargo, now + 1) == math.inf:
            offsets.pop(use.cargo, None)  # stale from here, so eviction is free
    return Schedule(tuple(uses), tuple(before))


class _Calendar:
    """Next use for each cargo."""

    def __init__(self, uses: Sequence[CargoUse], trained: set[int]) -> None:
        self._length = len(uses)
        self._times: dict[int, list[int]] = {}
        """Times of the uses with weight reads, by cargo."""
        self._last = {use.cargo: time for time, use in enumerate(uses)}
        self._dying = {use.cargo for use in uses if use.backward and use.cargo in trained}
        """Cargoes with an update after their last use: a copy from before is stale in the next pass."""
        for time, use in enumerate(uses):
            if use.reads:
                self._times.setdefault(use.cargo, []).append(time)

    def is_used(self, cargo: int, now: int) -> bool:
        """Return True if the cargo has a use at `now` or later in this pass, with or without weight reads."""
        return self._last[cargo] >= now

    def renew(self, cargo: int) -> None:
        """Record a fetch after the update: the cargo remains valid in the next pass."""
        self._dying.discard(cargo)

    def next_use(self, cargo: int, now: int) -> float:
        """Return the next read of the cargo at `now` or later, possibly in the next pass.

        Infinity if the cargo is never read again or becomes stale first.
        """
        times = self._times.get(cargo, [])
        for time in times:
            if time >= now:
                return time
        if not times or cargo in self._dying:
            return math.inf
        return self._length + times[0]


def window_bytes(sizes: Sequence[int], num_units: int) -> int:
    """Return the maximum total size over `num_units` consecutive units, at least the largest unit."""
    windows = set(zip(*(sizes[first:] for first in range(num_units)), strict=False))  # of equal units: few
    return max(map(sum, windows or [sizes]), default=0)
