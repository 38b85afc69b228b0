"""Perturbed weights on the device, for the passes in a step without gradients."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from functools import cache

import torch
from torch import nn

from offload.engine.methods.method import StepHost
from offload.engine.units.unit import Unit
from offload.extras.zeroth import directions
from offload.extras.zeroth.directions import NoiseRange
from offload.extras.zeroth.mezo import MeZO
from offload.optim.rule import parameter_key
from offload.planning.memory import PERTURBED

_SIDES = 2


class PerturbedWeights:
    """Makes perturbed copies from unit weights along a random direction.

    Streamed units share one memory for the unit in use. Resident units have copies for all directions, made once per
    step. Pass 2k uses w + eps z with direction k, pass 2k+1 uses w - eps z. Copies last for one step.

    `thresholds`: for each parameter index already fetched in this step, the largest magnitude for participating
    weights.
    """

    def __init__(self, host: StepHost, rule: MeZO, seed: int) -> None:
        self._host = host
        self._rule = rule
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._views: dict[tuple[int, int], Mapping[int, nn.Parameter]] = {}
        self._layout: Hashable = None
        self._included: frozenset[int] = frozenset()
        self._step = 0
        self._current: tuple[int, int] | None = None  # unit and direction now in the shared memory
        self.thresholds: dict[int, float] = {}
        self._key = cache(lambda index: parameter_key(host.infos[index].name, seed))

    def begin(self, step: int, touched: Mapping[int, Sequence[bool]]) -> None:
        """Begin a step's passes. `touched`: participation flags by region index.

        Compute must already run after the fetch of resident weights.
        """
        self._step = step
        self._current = None
        self.thresholds = {}
        self._included = frozenset(
            parameter
            for index, flags in touched.items()
            for parameter, is_included in zip(self._host.regions[index].parameters, flags, strict=True)
            if is_included
        )
        self._lay_out()
        for unit in self._host.units:
            if unit.resident:
                for direction in range(self._rule.num_directions):
                    self._fill(unit, direction, _SIDES * direction)

    def enter(self, unit: Unit, number: int) -> None:
        """Install a unit's weights for pass `number` in the module."""
        direction, side = divmod(number, _SIDES)
        # Both sides of a direction are made at once, and the second pass finds them.
        if self._current != (unit.number, direction) and not unit.resident:
            self._fill(unit, direction, 0)
            self._current = unit.number, direction
        if unit.resident:  # all passes have their weights at once
            side = number
        unit.install(self._live(unit, side))

    def _live(self, unit: Unit, place: int) -> dict[int, nn.Parameter]:
        moved = self._views.get((unit.number, place), {})
        return {
            index: moved[index] if index in self._included else parameter for index, parameter in unit.live().items()
        }

    def _fill(self, unit: Unit, direction: int, place: int) -> None:
        """Perturb a unit's weights to both sides, in `place` and the next place."""
        plus, minus = (self._views.get((unit.number, place + side), {}) for side in range(_SIDES))
        for region, flat in self._host.slots.place(unit.regions).items():
            for piece, offset in zip(region.pieces, region.offsets, strict=True):
                index = piece.parameter
                if index in self._included:
                    weights = flat[offset : offset + piece.numel]
                    if index not in self.thresholds:
                        self.thresholds[index] = self._rule.threshold(weights)
                    noise = NoiseRange(self._key(index), self._step, threshold=self.thresholds[index])
                    both = plus[index].detach().view(-1), minus[index].detach().view(-1)
                    directions.perturb(weights, *both, self._rule.eps, noise, direction=direction)

    # -- where they lie --------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        """Allocate memory for the current units: a unit may have become resident since the last step."""
        units = [unit for unit in self._host.units if any(region.trainable for region in unit.regions)]
        sizes = {unit: sum(region.weight_bytes for region in unit.regions if region.trainable) for unit in units}
        shared = max((size for unit, size in sizes.items() if not unit.resident), default=0)
        begins: dict[tuple[Unit, int], int] = {}
        end = _SIDES * shared
        for unit in units:
            if unit.resident:
                places = range(end, end + _SIDES * self._rule.num_directions * sizes[unit], sizes[unit])
                end = places.stop
            else:
                places = range(0, _SIDES * shared, shared)  # of the unit in use
            begins |= {(unit, place): begin for place, begin in enumerate(places)}
        layout = frozenset(begins.items())
        if layout == self._layout:
            return
        # Before the new memory: both together could exceed the budget.
        self.free()
        # By name: plans, and errors about memory, list this amount.
        self._memory = self._host.device.allocate(PERTURBED, end)
        self._host.slots.extend(self._memory)
        self._layout = layout
        for (unit, place), begin in begins.items():
            self._views[unit.number, place] = dict(self._parameters(unit, begin))

    def free(self) -> None:
        self._host.device.ledger.drop(PERTURBED)
        self._views = {}
        self._layout = None
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._host.slots.extend(self._memory)

    def _parameters(self, unit: Unit, begin: int) -> dict[int, nn.Parameter]:
        """Return Parameters, by index, over memory for a copy of a unit's trainable weights."""
        parameters = {}
        for region in unit.regions:
            if region.trainable:
                flat = self._memory[begin : begin + region.weight_bytes].view(region.dtype)
                begin += region.weight_bytes
                for piece, offset in zip(region.pieces, region.offsets, strict=True):
                    parameters[piece.parameter] = nn.Parameter(flat[offset : offset + piece.numel].view(piece.shape))
        return parameters
