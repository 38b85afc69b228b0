"""From the order in which weights are used to a schedule of fetches: what, where to, and when. Pure.

A *cargo* is what travels at once: the regions of a unit that stream. The device has `capacity` bytes for cargoes, in
which each takes a stretch. Prefetching and eviction are those of Cao, Felten, Karlin and Li, "A study of integrated
prefetching and caching strategies" (SIGMETRICS 1995), rules 1 to 4: fetch the missing cargo that is needed next, as
soon as there is room, in the place of what is needed last (Belady), and never of what is needed before it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Use(NamedTuple):
    """One use of a cargo by compute: a unit's forward or its backward."""

    cargo: int
    """The number of the cargo; 0 for a unit of which nothing streams."""
    backward: bool
    """True for a backward."""
    reads: bool = True
    """False for a backward that reads no weights: what follows from it is their update alone."""


@dataclass(frozen=True)
class Fetch:
    """One cargo comes up."""

    cargo: int
    """The number of the cargo."""
    offset: int
    """The byte of the device's memory at which the cargo will lie."""
    evicts: tuple[int, ...]
    """The cargoes that lose their place."""
    serves: int
    """The number of the use that the fetch is for."""


@dataclass(frozen=True)
class Schedule:
    """The uses of a pass, and the fetches between them.

    Each fetch waits for the last reader of what it overwrites and for the last update of what it brings; a use waits
    for the fetch that brought its cargo.
    """

    uses: tuple[Use, ...]
    """The uses, in their order."""
    before: tuple[tuple[Fetch, ...], ...]
    """Of each use, the fetches that are issued once the use before it is over (for the first: at once), in order."""


@dataclass(frozen=True)
class Room:
    """The device's memory for cargoes."""

    sizes: tuple[int, ...]
    """The bytes of each cargo, by its number."""
    capacity: int
    """The bytes of the memory."""
    most: int | None
    """How many cargoes the memory holds at once at most; None for as many as fit."""

    def holds(self, cargoes: Collection[int]) -> bool:
        """True where all of these could lie there at once."""
        fits = sum(self.sizes[cargo] for cargo in cargoes) <= self.capacity
        return fits and (self.most is None or len(cargoes) <= self.most)

    def place(
        self, cargo: int, lying: Mapping[int, int], next_use: Mapping[int, float], serves: float, home: int | None
    ) -> tuple[int, tuple[int, ...]] | None:
        """Return the offset at which a cargo harms least and whom it evicts there; None where something would have to
        go that is needed no later than `serves`.

        lying: offset by cargo of what is there. home: preferred among equals.
        """
        leaving: tuple[int, ...] = ()
        if self.most is not None and len(lying) >= self.most:
            last = max(lying, key=lambda other: next_use[other])
            if next_use[last] <= serves:
                return None
            leaving = (last,)
        size = self.sizes[cargo]
        there = [(offset, offset + self.sizes[c], c) for c, offset in lying.items() if c not in leaving]
        candidates = {0, *(end for _, end, _ in there)}  # a place between two of these harms no less
        if home is not None:
            candidates.add(home)
        best: tuple[tuple[float, bool, int], tuple[int, ...]] | None = None
        for offset in candidates:
            if not 0 <= offset <= self.capacity - size:
                continue
            over = tuple(c for begin, end, c in there if begin < offset + size and offset < end)
            rank = (min((next_use[c] for c in over), default=math.inf), offset == home, -offset)
            if (not over or rank[0] > serves) and (best is None or rank > best[0]):
                best = rank, over
        return None if best is None else (-best[0][2], (*leaving, *best[1]))


def build(
    uses: Sequence[Use],
    room: Room,
    lookahead: int,
    *,
    held: Mapping[int, int],
    homes: Mapping[int, int],
    trained: Iterable[int],
    wraps: bool = False,
    late: Iterable[int] = (),
) -> Schedule:
    """Schedule one pass over `uses`, taking the next to be the same.

    lookahead: how many cargoes beyond the next one may be fetched early. held: where cargoes lie already. homes: where
    they lay the last time (a unit's parameters are made once a place, so the same place is preferred). trained: what a
    backward makes stale, since its update follows. wraps: the update follows at once, so that what was updated may come
    up for the next pass while this one goes on; late: but for these cargoes.
    """
    calendar = _Calendar(uses, set(trained))
    lying, homes, not_yet = dict(held), dict(homes), set(late)
    end = 2 * len(uses) if wraps else len(uses)
    before: list[tuple[Fetch, ...]] = []
    for now, use in enumerate(uses):
        fetches = []
        ahead = {use.cargo if use.reads else 0}
        for serves in range(now, end):
            cargo, _, reads = uses[serves % len(uses)]
            if not room.sizes[cargo] or not reads:
                continue
            if cargo not in ahead:
                if len(ahead) > lookahead:
                    break
                ahead.add(cargo)
            if cargo in lying:
                continue
            if serves >= len(uses):
                if cargo in not_yet or calendar.is_used(cargo, now):
                    continue  # its update is still to come
                if not room.holds(ahead):
                    break  # it would have to go again for what is needed before it
            next_use = {other: calendar.next_use(other, now) for other in lying}
            found = room.place(cargo, lying, next_use, serves, homes.get(cargo))
            if found is None:
                break
            offset, evicted = found
            for other in evicted:
                del lying[other]
            lying[cargo] = homes[cargo] = offset
            if serves >= len(uses):
                calendar.renew(cargo)
            fetches.append(Fetch(cargo, offset, evicted, serves))
        before.append(tuple(fetches))
        if calendar.next_use(use.cargo, now + 1) == math.inf:
            lying.pop(use.cargo, None)  # stale from here on: nobody's harm
    return Schedule(tuple(uses), tuple(before))


class _Calendar:
    """When a cargo is needed next."""

    def __init__(self, uses: Sequence[Use], trained: set[int]) -> None:
        self._length = len(uses)
        self._times: dict[int, list[int]] = {}
        self._last = {use.cargo: time for time, use in enumerate(uses)}
        self._dying = {use.cargo for use in uses if use.backward and use.cargo in trained}
        for time, use in enumerate(uses):
            if use.reads:
                self._times.setdefault(use.cargo, []).append(time)

    def is_used(self, cargo: int, now: int) -> bool:
        """True where a cargo is used at `now` or later in this pass, be it for its update alone."""
        return self._last[cargo] >= now

    def renew(self, cargo: int) -> None:
        """A cargo was fetched after its update: it is good for the next pass."""
        self._dying.discard(cargo)

    def next_use(self, cargo: int, now: int) -> float:
        """Return the first use at `now` or later that reads it, in the next pass where there is none in this and what
        lies there is still good then; infinity where it is not.
        """
        times = self._times.get(cargo, [])
        for time in times:
            if time >= now:
                return time
        if not times or cargo in self._dying:
            return math.inf
        return self._length + times[0]


def window_bytes(sizes: Sequence[int], num_units: int) -> int:
    """Return the most bytes that `num_units` neighbours among the units take, at least the largest unit."""
    last = max(1, len(sizes) - num_units + 1)
    return max((sum(sizes[first : first + num_units]) for first in range(last)), default=0)
