"""Deferred updates: ready, but not yet in a lane."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from offload.layout.regions import Region
from offload.tiers.tile import Tile

UpdateFunction = Callable[[Tile, Mapping[str, torch.Tensor]], int | torch.Tensor]
"""Update function: (tile, planes, with gradients if the update has any) -> number of non-finite weights."""


class DeferredUpdates:
    """Updates to start before the next use of the weights.

    pending: by region, in the order of use in the next step, functions that submit an update to its lane. in_slot:
    update functions for regions updated in their slots, at the next fetch.
    """

    def __init__(self) -> None:
        self.pending: dict[Region, Callable[[], None]] = {}
        self.in_slot: dict[Region, UpdateFunction] = {}

    def start(self, last: Region | None = None) -> None:
        """Start pending updates up to region `last` (None: all).

        `last` is the next region to fetch: updates behind it would fill the ring needed for the fetch. No effect if
        `last` has no pending update.
        """
        if last is None or last in self.pending:
            for region in list(self.pending):
                self.pending.pop(region)()
                if region is last:
                    break
