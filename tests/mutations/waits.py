"""Mutations in waits and memory leases."""

from __future__ import annotations

from copy import copy
from dataclasses import replace
from typing import Any

import pytest

from offload.accelerators import Accelerator
from offload.engine.gradients.tile_updates import InPlaceUpdates, TileUpdate
from offload.lanes.ticket import Fence
from offload.tiers.lease import Ring, RingSlice
from offload.tiers.slots import Slots
from offload.tiers.tile import Tile
from tests.mutations import enter_as, mutation, replaced

# Readers do not wait for the fill of a buffer.
enter_as(
    "read-before-filled",
    replaced(Fence, "before_read", lambda self: ()),
    "tests/engine/test_races.py",
    fuzzed=True,
)
# A fill waits for earlier fills but not for readers.
enter_as(
    "filled-before-read",
    replaced(Fence, "before_fill", lambda self: self._filled),
    "tests/engine/test_races.py",
    fuzzed=True,
)
# Stale update-ring contents count as current.
enter_as(
    "weights-from-a-place-that-others-have",
    replaced(RingSlice, "is_whole", property(lambda self: True, lambda self, is_whole: None)),
    "tests/engine/test_device_updates.py",
    fuzzed=True,
)


@mutation("tests/engine/test_races.py", fuzzed=True)
def ring_given_back_early(patch: pytest.MonkeyPatch) -> None:
    """The ring lends a slice again while the last borrower uses it."""
    take = Ring.take

    def taken(self: Ring, num_bytes: int) -> Any:
        stretch = take(self, num_bytes)
        if stretch is not None:
            stretch.users.clear()
        return stretch

    patch.setattr(Ring, "take", taken)


# Compute starts before the unit weights are on the device.
enter_as(
    "compute-does-not-wait-for-weights",
    replaced(Slots, "use", lambda self, cargo, regions: None),
    "tests/engine/test_races.py",
)

# Compute over host pages does not wait for their updates.
enter_as(
    "pages-read-before-their-update",
    replaced(Slots, "_page_fences", lambda self, region: []),
    "tests/accelerator/test_pages.py",
    options=("-m", "accelerator and not slow"),
)
# The device computes over copied host memory, which no update reaches.
enter_as(
    "pages-copied-once",
    replaced(Accelerator, "over", lambda self, host: host.to(self.device, copy=True)),
    "tests/contracts/test_contracts.py",
    options=("--device", "sim", "-k", "host and pages"),
)


@mutation("tests/engine/test_races.py")
def update_before_its_gradients_are_down(patch: pytest.MonkeyPatch) -> None:
    submit = InPlaceUpdates.submit

    def submitted(self: InPlaceUpdates, tile: TileUpdate) -> Any:
        update = copy(tile.update)
        update.fence = Fence(update.fence.buffer_type)
        return submit(self, replace(tile, update=update))

    patch.setattr(InPlaceUpdates, "submit", submitted)


@mutation("tests/engine/test_races.py")
def weights_fetched_before_their_update(patch: pytest.MonkeyPatch) -> None:
    fetch = Tile.fetch
    patch.setattr(Tile, "fetch", lambda self, *names, **how: replace(fetch(self, *names, **how), reads=()))


@mutation("tests/engine/test_placements.py")
def weights_from_before_the_update_stay_in_a_slot(patch: pytest.MonkeyPatch) -> None:
    """A prefetched or remaining unit computes with these weights in the next step."""
    patch.setattr(Slots, "_retire", lambda self, slots: None)
