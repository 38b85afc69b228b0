"""States that are read from disk before the norm is known, which says how they are updated."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offload.layout.regions import Region
from offload.tiers.lease import Lease
from offload.tiers.store import Store
from offload.tiers.tile import Tile


class EarlyReads:
    """Leases of the tiles that are likely to be updated first: those of the last norm."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._order: list[Region] = []
        self._leases: dict[Tile, Lease] = {}
        self.are_possible = store.lends_early

    def begin(self) -> None:
        """The backward begins, in which the disk has little to do: read what was updated first last time, as far as the
        ring reaches.
        """
        for tile in (tile for region in self._order for tile in self._store[region].tiles if tile.record is not None):
            lease = tile.lend_early(*tile.states)
            if lease is None:
                break
            self._leases[tile] = lease

    def check(self) -> None:
        """Raise what has failed of it: nothing is updated yet, and nothing lost."""
        for ticket in (ticket for lease in self._leases.values() for ticket in lease.reads):
            if ticket.error is not None:
                raise ticket.error

    def follow(self, order: list[Region]) -> None:
        """Updates come in this order; what was read for another would be in the way."""
        if order != self._order:
            self.give_back()
        self._order = order

    def give_back(self, tiles: Iterable[Tile] | None = None) -> None:
        """What was read of these tiles, or of all, is not updated."""
        for tile in list(self._leases) if tiles is None else tiles:
            if (lease := self._leases.pop(tile, None)) is not None:
                lease.give_back()

    def forget(self) -> None:
        """All leases were given up."""
        self._leases.clear()

    def lend(self, tile: Tile, names: Sequence[str]) -> Lease:
        """Lend a tile's planes for its update: those that were read early, or anew."""
        early = self._leases.pop(tile, None)
        return tile.lend(*names) if early is None else tile.renewed(early)
