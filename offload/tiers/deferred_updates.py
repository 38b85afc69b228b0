"""Deferred updates: ready, but not yet submitted."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from offload.layout.regions import Region
from offload.tiers.tile import Tile

UpdateFunction = Callable[[Tile, Mapping[str, torch.Tensor]], int | torch.Tensor]
"""Update function: (tile, planes, with gradients if the update has any) -> number of non-finite weights."""


class DeferredUpdates:
    """Updates to submit before the next weight use.

    submissions: submit functions by region, ordered by use in the next step. in_slot: update functions for regions
    updated in their slots, at the next fetch.
    """

    def __init__(self) -> None:
        self.submissions: dict[Region, Callable[[], None]] = {}
        self.in_slot: dict[Region, UpdateFunction] = {}

    def submit(self, last: Region | None = None) -> None:
        """Submit deferred updates up to region `last` (None: all).

        `last` is the next region to fetch: updates behind it would fill the ring needed for the fetch. No effect if
        `last` has no deferred update.
        """
        if last is None or last in self.submissions:
            for region in list(self.submissions):
                self.submissions.pop(region)()
                if region is last:
                    break
