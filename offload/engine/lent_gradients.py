"""Gradients of an own loop's step, lent to the script as ordinary tensors."""

from __future__ import annotations

import math

import torch

from offload.engine.state import EngineState
from offload.errors import ConfigError
from offload.layout.regions import ParameterInfo


class LentGradients:
    """Answers `parameter.grad` between the last backward and the update of an own loop.

    A lent gradient is the memory from which the update reads, so plain torch code (`clip_grad_norm_`, a scale, a log)
    works on it in place, with the bits of plain PyTorch. Regions that the script has changed are measured again.
    """

    def __init__(self, state: EngineState) -> None:
        self._state, self._store, self._measures = state, state.store, state.gradients.measures
        self._versions: dict[int, int] = {}  # of each region's sums, as they were measured
        self._resident: dict[int, torch.nn.Parameter] | None = None
        """Trainable Parameters of units that stay on the device, by index. None: no look at a gradient in this step."""
        self._refusal = ""
        """The reason why no gradient can be lent in this step beside the resident ones; empty if all can."""

    def lend(self, info: ParameterInfo) -> torch.Tensor | None:
        """Return the summed gradient of a parameter: fp32, in the parameter's shape, in place. None: no gradient.

        The step's gradients are then complete: no backward may follow before the update. Raises ConfigError where the
        gradient does not lie in one piece on this rank.
        """
        if not info.trainable:
            return None
        why = ""
        if (size := self._store.comm.world.size) > 1:
            why = f"the gradients are divided over {size} ranks"
        elif self._store.values.is_cut(info.index):
            why = "the engine has cut the parameter into pieces, for a small offload.device_memory"
        else:
            self._collect_resident()
            why = self._refusal
        if why:
            raise ConfigError(
                f"the grad of {info.name} was read during a step, but {why}. For clipping, call "
                "optimizer.clip_grad_norm_(model.parameters(), max_norm) of the optimizer from offload.wrap, or "
                "engine.update(max_grad_norm=...); in a script over accelerate, accelerator.clip_grad_norm_; for the "
                "norm alone, engine.grad_norm()."
            )
        self._state.updates.measure()
        states = self._store.states.values()
        self._versions = self._versions or {s.region.index: s.sums._version for s in states if s.sums is not None}
        for index, parameter in self._collect_resident().items():  # an ordinary Parameter, which asks nobody
            parameter.grad = self._store.values.gradient(index, self._measures.touched)
        return self._store.values.gradient(info.index, self._measures.touched)

    def measure_changed(self) -> None:
        """Measure the regions again in which the script has changed gradients."""
        for state in self._store.states.values() if self._versions else ():
            index, sums = state.region.index, state.sums
            if sums is not None and self._versions.get(index, sums._version) != sums._version:
                for piece in state.region.pieces:
                    self._measures.record_square(piece, None)
                if (copy_to_host := self._measures.measure(state.region, sums)) is not None:
                    copy_to_host()
                    self._state.lanes.wait(self._state.lanes.mark())
                    self._measures.complete(state.region)
                self._versions[index] = sums._version

    def forget(self) -> None:
        """End the step."""
        if self._versions:
            for parameter in self._collect_resident().values():
                parameter.grad = None
        self._versions.clear()
        self._resident = None

    def _collect_resident(self) -> dict[int, torch.nn.Parameter]:
        """Return the resident Parameters. The first look in a step collects them, and a reason to refuse all loans."""
        if self._resident is None:
            units = [unit for unit in self._state.units if unit.resident and unit.trainable]
            self._resident = {i: p for unit in units for i, p in unit.live().items() if self._state.infos[i].trainable}
            # A resident Parameter is lent its gradient at the first look at another one: a loop has to begin with that.
            trainable = [each.index for each in self._state.infos if each.trainable]
            first = next((index for index in trainable if index not in self._resident), 0)
            is_late = first > min(self._resident, default=math.inf)
            self._refusal = ""
            for index, p in self._resident.items():
                if is_late or not p.is_cpu or p.dtype != torch.float32 or self._store.values.is_cut(index):
                    name = self._state.infos[index].name
                    self._refusal = f"{name}, whose weights stay on the device, has its gradient in the engine alone"
                    break
        return self._resident
