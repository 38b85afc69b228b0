"""Update for a step without gradients, from the measured slopes, on any tier."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from offload.engine.gradients.tile_updates import RegionUpdate, TileUpdates
from offload.engine.methods.method import StepHost
from offload.extras.zeroth.mezo import MeZO
from offload.extras.zeroth.record import ZerothOrderRecord
from offload.extras.zeroth.slot_updates import SlotUpdates
from offload.lanes.ticket import Fence
from offload.layout.planes import DTYPES
from offload.layout.regions import Region
from offload.optim.rule import UpdateStep, parameter_key
from offload.optim.update import alike_runs, element_of
from offload.tiers.tile import Tile

_BLOCKS = "(blocks)"
"""Key for the block choice, in place of a parameter name."""


class DirectionUpdate(RegionUpdate):
    """The update of a region along a step's directions. `touched`: True if the step perturbed the piece."""

    def __init__(
        self,
        tiles: TileUpdates,
        region: Region,
        touched: Sequence[bool],
        thresholds: Mapping[int, float],
        measured: ZerothOrderRecord,
    ) -> None:
        """`thresholds`: by parameter index, the largest magnitude updated; absent: all weights."""
        super().__init__(tiles, region, torch.empty(0, device="cpu"), Fence("no gradients"), touched)
        self._thresholds = thresholds
        self._measured = measured

    def update_tile(self, tile: Tile, planes: Mapping[str, torch.Tensor]) -> int | torch.Tensor:
        num_wrong: int | torch.Tensor = 0
        infos = self.settings.infos
        rule = self.settings.rules[self.region.rule]
        measured = self._measured
        slopes = torch.tensor(measured.slopes, dtype=torch.float64, device="cpu")
        for span, (_, lr_scale, weight_decay, position) in alike_runs(self.state, tile, self.touched, infos, True):
            assert position is not None
            assert measured.lr is not None
            info = infos[self.region.pieces[position].parameter]
            by = UpdateStep(
                measured.step,
                measured.lr * lr_scale,
                weight_decay,
                scale=1.0,
                key=parameter_key(info.name, measured.seed),
                element=element_of(self.region, tile, span, position),
                threshold=self._thresholds.get(info.index, math.inf),
            )
            states = {name: flat[span] for name, flat in planes.items() if name != "gradients"}
            num_wrong += rule.update(states, slopes, by)
        if tile is self.state.tiles[-1]:
            self.state.count(self.touched)
        return num_wrong


class ZerothOrderUpdate:
    """Chooses the participating parameters for a step, and moves them against the slopes."""

    def __init__(self, host: StepHost, rule: MeZO, pending: SlotUpdates) -> None:
        self._host = host
        self.rule = rule
        self._pending = pending
        blocks = [unit for unit in host.units if unit.is_block]
        numbers = {unit.name: number for number, unit in enumerate(blocks)}
        self._num_blocks = len(blocks)
        # Weights tied across blocks belong to the first block. Weights used outside the blocks always participate.
        self._block_of = {
            region.index: min(numbers[name] for name in region.units)
            for region in host.regions
            if all(name in numbers for name in region.units)
        }

    @property
    def frozen(self) -> tuple[str, ...]:
        """Parameters trainable at the start and frozen now, by name."""
        return tuple(self._host.infos[index].name for index in sorted(self._host.snapshot.frozen))

    def touched(self, step: int, seed: int, frozen: Collection[str] = ()) -> dict[int, Sequence[bool]]:
        """Return participation flags by region index, for regions with any participating parameter."""
        host = self._host
        active = self.rule.active_blocks(self._num_blocks, parameter_key(_BLOCKS, seed), step)
        flags: dict[int, Sequence[bool]] = {}
        for region in host.regions:
            block = self._block_of.get(region.index)
            if region.trainable and (block is None or block in active):
                region_flags = [host.infos[index].name not in frozen for index in region.parameters]
                if any(region_flags):
                    flags[region.index] = region_flags
        return flags

    def update(
        self,
        measured: ZerothOrderRecord,
        thresholds: dict[int, float],
        first_use: Callable[[Region], float],
    ) -> None:
        """Make a step's updates pending, to be started in the order of `first_use`, or put them off until the next
        fetch.

        `thresholds`: by parameter index, the largest magnitude for participating weights, as far as the passes computed
        it; missing ones are added.
        """
        touched = self.touched(measured.step, measured.seed, measured.frozen)
        regions = sorted((self._host.regions[index] for index in touched), key=first_use)
        tiles = self._host.updates.tiles
        updates = {r: DirectionUpdate(tiles, r, touched[r.index], thresholds, measured) for r in regions}
        self._host.updates.flush()  # for units no pass has used
        if self.rule.magnitude_quantile < 1.0:
            self._find_thresholds(touched, thresholds)
        tiles.mark_updating()  # a failure from here on leaves a partial update
        self._pending.defer({region: updates.pop(region) for region in regions if self._pending.can_defer(region)})
        self._host.updates.defer(updates)

    def _find_thresholds(self, touched: Mapping[int, Sequence[bool]], thresholds: dict[int, float]) -> None:
        """Compute missing thresholds for unfetched parameters, from the weights on their tier."""
        host = self._host
        for region, flags in touched.items():
            for index, is_included in zip(host.regions[region].parameters, flags, strict=True):
                if is_included and index not in thresholds:
                    host.lanes.drain_updates()
                    if host.store.sharding.gathers:  # partitioned weights: all ranks miss the same ones
                        info = host.infos[index]
                        weights = host.store.values.read(index, DTYPES[info.compute]).flatten()
                    else:
                        weights = host.store.values.read_local(index).flatten()
                    thresholds[index] = self.rule.threshold(weights)
