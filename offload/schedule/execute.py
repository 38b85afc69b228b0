"""Execute the schedule: fetch cargoes ahead of compute, in the order recorded in the last pass with the same kind."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence

from offload.lanes.ticket import Ticket
from offload.layout.regions import Region
from offload.schedule.build import CargoUse, Schedule, SlotMemory, build
from offload.tiers.slots import Slots

# Limits for batches with ever new shapes.
_MOST_SCHEDULES = 256
_MOST_PASS_KEYS = 64


def _family(pass_key: Hashable) -> Hashable:
    """Return the key for the latest pass with the same name and other batch shapes, a stand-in for an unseen key."""
    return ("family", pass_key[0] if isinstance(pass_key, tuple) else pass_key)


class Executor:
    """Follows compute from use to use and issues the scheduled fetches.

    A *kind* of pass (a step on batches of one shape, an evaluation) has a fixed use order. The first pass
    fetches on demand and is recorded; later passes follow a schedule. A pass departing from the recorded order
    continues on demand and is recorded again.

    updates_at_end: returns True for a region updated after the backward instead of during it.
    """

    def __init__(
        self, slots: Slots, lookahead: int, max_cargoes: int | None, *, updates_at_end: Callable[[Region], bool]
    ) -> None:
        self._slots = slots
        self._lookahead = lookahead
        self._max_cargoes = max_cargoes
        self._updates_at_end = updates_at_end

        # Learned from passes.
        self._orders: dict[Hashable, list[CargoUse]] = {}
        """Uses of the last pass, by kind and by family of kinds."""
        self._schedules: dict[tuple[object, ...], Schedule] = {}
        """Schedules by kind and start state: passes mostly begin with the same device contents."""
        self._homes: dict[int, int] = {}
        """Last offset by cargo. Unit parameters are views of one place and exist once a place."""

        # The present pass.
        self._pass_key: Hashable = None
        self._is_open = False
        self._fetches_next = False
        self._schedule: Schedule | None = None  # None: fetches on demand
        self._next = 0  # uses so far
        self._entered = 0  # cargo of the present use
        self._recorded_uses: list[CargoUse] = []
        self.num_departures = 0

    # -- a pass ----------------------------------------------------------------------------------------------

    def begin(self, pass_key: Hashable, fetches_next: bool = False) -> None:
        """Start a pass. fetches_next: each unit is updated right after its backward.

        With `fetches_next`, weights for the next pass can be fetched during this one.
        """
        # Otherwise the first fetches for this very pass already run, since the end of the last one.
        if self._schedule is None or self._next or (pass_key, fetches_next) != (self._pass_key, self._fetches_next):
            self.begin_fetches(pass_key, fetches_next)
        self._pass_key = pass_key
        self._is_open = True
        self._recorded_uses = []

    def enter(self, regions: Sequence[Region], backward: bool, reads: bool = True) -> None:
        """Make compute wait for unit weights. No fetch if `reads` is False."""
        cargo = self._slots.cargo_of(regions)
        use = CargoUse(cargo, backward, reads)
        if self._is_open:
            self._recorded_uses.append(use)
            if self._schedule is not None and self._schedule.uses[self._next : self._next + 1] != (use,):
                self.num_departures += 1
                self._orders.pop(self._pass_key, None)
                self._schedule = None
        else:  # outside a pass: prefetched cargoes are used as they are
            self._schedule = None
        self._entered = cargo if reads else 0
        if not reads:
            return
        if self._slots.offset(cargo) < 0 and self._slots.cargo_bytes(cargo):
            # An unscheduled use: evict the least recently used cargoes.
            valid_offsets = self._slots.valid_offsets()
            recent = enumerate(self._recorded_uses)
            next_use = dict.fromkeys(valid_offsets, 1.0) | {used.cargo: -time for time, used in recent}
            placement = self._room().place(cargo, valid_offsets, next_use, -math.inf, self._homes.get(cargo))
            assert placement is not None, "there is room for the largest unit"
            self._homes[cargo] = placement[0]
            self._slots.fetch(cargo, *placement, is_ahead=False)
        self._slots.use(cargo, regions)

    def leave(self, regions: Sequence[Region], marks: Sequence[Ticket]) -> None:
        """End the current use. Later fetches may overwrite the weights after the compute marks."""
        self._slots.release(self._entered, regions, marks)
        if self._schedule is not None:
            self._next += 1
            self._issue()

    def end(self) -> None:
        """End the pass and record the order."""
        if self._is_open and self._orders.get(self._pass_key) != self._recorded_uses:
            if len(self._orders) > _MOST_PASS_KEYS:  # batch shapes keep changing
                self._orders.clear()
            self._orders[self._pass_key] = self._orders[_family(self._pass_key)] = self._recorded_uses
            self._schedules.clear()  # made for the old order
        self._is_open = False
        self._schedule = None

    def suppose(self, pass_key: Hashable, order: Iterable[Sequence[Region]]) -> None:
        """Assume a use order for a pass key until the first pass is recorded.

        Cargoes alternate between both memory ends, so the free room stays contiguous.
        """
        uses = [CargoUse(self._slots.cargo_of(regions), False) for regions in order]
        self._orders.setdefault(pass_key, uses)
        for number, use in enumerate(uses):
            top = self._slots.capacity_bytes - self._slots.cargo_bytes(use.cargo)
            self._homes.setdefault(use.cargo, top if number % 2 else 0)

    def forget(self) -> None:
        """Reset to an empty device without an open pass."""
        self._slots.forget()
        self._schedule = None
        self._pass_key = None
        self._is_open = False
        self._recorded_uses = []

    def reset(self, keep_orders: bool = False) -> None:
        """Adapt to new cargoes, or with `keep_orders` only to a new memory size."""
        self.forget()
        if not keep_orders:
            self._orders.clear()
        self._schedules.clear()
        self._homes.clear()

    def first_use(self, users: Callable[[Region], Iterable[Sequence[Region]]]) -> Callable[[Region], float]:
        """Return a sort key for regions: the first use in the next pass, assuming the same order as in the ending pass.

        users: returns the region tuples for all units with a given region.
        """
        first = {use.cargo: time for time, use in reversed(list(enumerate(self._recorded_uses)))}
        slots = self._slots

        def first_use(region: Region) -> float:
            if slots.is_resident(region):
                return -1  # needed at the step start
            return min((first.get(slots.cargo_of(regions), math.inf) for regions in users(region)), default=math.inf)

        return first_use

    # -- fetches ---------------------------------------------------------------------------------------------

    def begin_fetches(self, pass_key: Hashable, fetches_next: bool) -> None:
        """Prepare the schedule for the next pass from the current device contents and issue the first fetches.

        A fetch waits for the pending update of the cargo.
        """
        self._pass_key = pass_key
        self._fetches_next = fetches_next
        self._next = 0
        self._schedule = None
        if len(self._schedules) > _MOST_SCHEDULES:
            self._schedules.clear()
        order = self._orders.get(pass_key) or self._orders.get(_family(pass_key))
        if order is None:
            return
        valid_offsets = self._slots.valid_offsets()
        late = self._with_any(self._updates_at_end)
        # All that decides a schedule, so passes with an equal start share one.
        key = (
            pass_key,
            fetches_next,
            *(tuple(sorted(part.items())) for part in (valid_offsets, self._homes)),
            tuple(sorted(late)),
        )
        if key not in self._schedules:
            self._schedules[key] = build(
                order,
                self._room(),
                self._lookahead,
                valid_offsets=valid_offsets,
                homes=self._homes,
                trained=self._with_any(lambda region: region.trainable),
                fetches_next=fetches_next,
                late=late,
            )
        self._schedule = self._schedules[key]
        self._issue()

    def _issue(self) -> None:
        assert self._schedule is not None
        if self._next < len(self._schedule.uses):
            for fetch in self._schedule.before[self._next]:
                self._homes[fetch.cargo] = fetch.offset
                is_ahead = not self._is_open or fetch.serves >= len(self._schedule.uses)  # counts for the next step
                self._slots.fetch(fetch.cargo, fetch.offset, fetch.evicts, is_ahead)

    def _room(self) -> SlotMemory:
        sizes = tuple(self._slots.cargo_bytes(cargo) for cargo in range(len(self._slots.cargoes)))
        return SlotMemory(sizes, self._slots.capacity_bytes, self._max_cargoes)

    def _with_any(self, is_one: Callable[[Region], bool]) -> Collection[int]:
        """Return the cargoes with at least one region satisfying the predicate."""
        return {number for number, regions in enumerate(self._slots.cargoes) if any(map(is_one, regions))}
