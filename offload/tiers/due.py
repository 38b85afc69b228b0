"""Updates that it is known how to make, and that have not begun."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from offload.layout.regions import Region
from offload.tiers.tile import Tile

Work = Callable[[Tile, Mapping[str, torch.Tensor], torch.Tensor], int | torch.Tensor]
"""Updates a tile, given its planes and gradients; returns how many of its weights are no longer finite."""


class Due:
    """What has to be made before somebody needs the weights.

    submissions: what submits the update of a region, in the order in which the next step needs them. in_slot: the work
    of those that are updated in the slot in which their weights come up next.
    """

    def __init__(self) -> None:
        self.submissions: dict[Region, Callable[[], None]] = {}
        self.in_slot: dict[Region, Work] = {}

    def submit(self, last: Region | None = None) -> None:
        """Submit updates: up to that of a region whose weights come up next, as those behind it would take the place in
        the ring from which they come up; or all.
        """
        if last is None or last in self.submissions:
            for region in list(self.submissions):
                self.submissions.pop(region)()
                if region is last:
                    break
