"""Updates that are made in the slot in which their weights come up next, and go down from there."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch

from offload.engine.gradients.updates import Work
from offload.engine.state import EngineState
from offload.engine.units.unit import Unit
from offload.layout.regions import Region


class Pending:
    """What a step puts off until the next one comes to its weights, so that these go up once and down once a step (ZO2,
    arXiv:2503.12668). Who reads the states before that has it made on the host: each update is made once,
    by whoever comes first, and has the same bits. What has gone down belongs to the step before: a step that is given
    up leaves it alone.
    """

    def __init__(self, state: EngineState, lr: float) -> None:
        self._state, self._lr = state, lr
        self._works: dict[Region, Work] = {}
        self._counts: list[tuple[Region, torch.Tensor]] = []  # of weights that are not finite, known to the device
        state.slots.brings_masters = self._works.__contains__
        state.updates.flush = self.flush

    def takes(self, region: Region) -> bool:
        """True where the update of a region can be put off."""
        return self._state.store.updates_in_slot(region) and not self._state.slots.is_resident(region)

    def put(self, works: Mapping[Region, Work]) -> None:
        """Put updates off."""
        self._works.update(works)
        self._state.slots.need_masters(works)

    def make(self, unit: Unit) -> None:
        """A unit's weights have come up: update them, and send them down."""
        state = self._state
        due = [region for region in unit.regions if region in self._works]
        for region, planes in state.slots.masters(unit.regions).items() if due else ():
            if region not in self._works:
                continue
            (tile,) = state.store[region].tiles  # nothing of it is on disk, or on other ranks
            # In a slot that was kept lies what went down after the last update, and may be on its way still.
            state.lanes.compute_after(tile.fence.before_fill())
            num_wrong = self._works[region](tile, planes, torch.empty(0, device="cpu"))
            if isinstance(num_wrong, torch.Tensor):
                self._counts.append((region, num_wrong))
            elif num_wrong:
                state.updates.is_updating = True  # the states are not to be used
                state.updates.refuse_weights(region, self._lr, num_wrong)
            state.updates.is_updating = True  # whoever is interrupted here does not know whether it is made
            lease = tile.land(*planes)
            num_bytes = sum(plane.nbytes for plane in planes.values())
            down = state.lanes.update_down.submit(
                partial(self._copy, lease.planes, planes),
                reads=state.lanes.mark(),
                fills=lease.fills,
                name=region.name,
                num_bytes=num_bytes,
            )
            lease.done_writing(down)
            state.slots.used(state.slots.cargo_of(unit.regions), (), (down,))
            state.lanes.settle()
            del self._works[region]
            state.updates.is_updating = False
            state.store.came_down(num_bytes)
        assert not any(region in self._works for region in due), "a cargo came up without its master weights"

    def _copy(self, targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
        for name, target in targets.items():
            self._state.device.copy(target, sources[name])

    def check(self) -> None:
        """The passes of a step are over: refuse weights that are no longer finite, as far as the device alone knew."""
        counts, self._counts = self._counts, []
        if counts:
            told = self._state.device.bring_down(torch.stack([count for _, count in counts]))().tolist()
            for (region, _), num_wrong in zip(counts, told, strict=True):
                if num_wrong:
                    self._state.updates.is_updating = True
                    self._state.updates.refuse_weights(region, self._lr, num_wrong)

    def flush(self) -> None:
        """Make on the host what is put off still."""
        if self._works:
            works = dict(self._works)
            self._state.updates.is_updating = True  # whoever is interrupted from here on does not know if it is made
            self._works.clear()
            self._state.updates.descend(works, lambda: None)

    def forget(self) -> None:
        """The weights are others by now."""
        self._works.clear()
        self._counts.clear()
