"""Gradients of an own loop's step, lent to the script as ordinary tensors."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

import torch

from offload.engine.flow import Flow
from offload.engine.units.offloaded_tensor import UsedGradient
from offload.errors import ConfigError
from offload.layout.planes import DTYPES
from offload.layout.regions import ParameterInfo, Region
from offload.tiers.tile import RegionState


class LentGradients:
    """Answers `parameter.grad` of an own loop, for all parameters alike.

    Between the last backward and the update, a lent gradient is the memory from which the update reads, so plain torch
    code (`clip_grad_norm_`, a scale, a log) works on it in place, with the bits of plain PyTorch. Before each use the
    contents of lent regions are compared: a changed region is measured again.

    From the step of a torch optimizer until `zero_grad`, plain PyTorch keeps gradients, and adds the next ones. Here
    they are used up, so each has to be cleared, in any of torch's ways, before the next gradients are used.
    """

    def __init__(self, flow: Flow) -> None:
        self._flow = flow
        self._store = flow.store
        self._measures = flow.gradients.measures
        self._squares: dict[Region, list[float]] = {}
        """Sums of squares of each lent region, at the last look: other sums tell of a write by the script."""
        self._lent: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """By parameter: the memory of the gradient, and the tensor of the script, which may take other memory."""
        self._used: dict[int, bool] = {}
        """Parameters with a gradient in the last step of a torch optimizer, by index. True: set to zero since."""

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
        elif torch._C._current_graph_task_id() >= 0:
            why = "a backward is still running (a hook): read it afterwards"
        if why:
            raise ConfigError(
                f"the grad of {info.name} was read during a step, but {why}. For clipping, call "
                "optimizer.clip_grad_norm_(model.parameters(), max_norm) of the optimizer from offload.wrap, or "
                "engine.update(max_grad_norm=...); in a script over accelerate, accelerator.clip_grad_norm_; for the "
                "norm alone, engine.grad_norm()."
            )
        if not self._flow.gradients.are_complete:
            self._flow.updates.measure()
        self.add_zeros()
        if info.index not in self._lent:
            gradient = self._store.values.gradient(info.index, self._measures.touched)
            if gradient is None:
                return None
            if (factor := self._flow.updates.take_scale()) != 1.0:
                self.scale(factor)
            self._lent[info.index] = gradient, gradient.data  # no view: a script may call detach_()
            if (region := self._store.values.region(info.index)) not in self._squares:
                self._squares[region] = self._look(region)
        return self._lent[info.index][1]

    def measure_changed(self) -> None:
        """Measure the regions again in which the script has changed gradients, also by `grad.data = tensor`."""
        for memory, lent in self._lent.values():
            if lent.data_ptr() != memory.data_ptr():
                memory.copy_(lent)
        for region, before in self._squares.items():
            if (now := self._look(region)) != before:
                self._measures.correct(region, now)
                self._squares[region] = now

    def scale(self, factor: float) -> None:
        """Multiply all gradients of the step in place, on a single rank, where the script reads them too."""
        self.measure_changed()
        for region, state in self._store.states.items():
            if state.sums is not None and any(self._measures.touched[region.index]):
                state.sums.mul_(factor)
                squares = self._look(region)
                self._measures.correct(region, squares)
                if region in self._squares:
                    self._squares[region] = squares
        for memory, lent in self._lent.values():
            if lent.data_ptr() != memory.data_ptr():
                lent.mul_(factor)

    @property
    def has_lent(self) -> bool:
        """True if the script has gradients of this step."""
        return bool(self._lent)

    def _look(self, region: Region) -> list[float]:
        sums = self._store.states[region].sums
        assert sums is not None
        return self._measures.squares_of(region, sums)

    def forget(self) -> None:
        """End the step. No gradient is left."""
        self._squares.clear()
        self._lent.clear()
        self._used.clear()

    # -- after the step of a torch optimizer -----------------------------------------------------------------

    def mark_used(self, indices: Iterable[int], is_zero: bool = False) -> None:
        """Remember the parameters whose gradients were used, or set to zero, and forget all others."""
        self._used = dict.fromkeys(indices, is_zero)

    def with_gradients(self, in_step: bool = True) -> list[int]:
        """Return the parameters with a used gradient or, `in_step`, with one of this step, by index."""
        flags: Mapping[int, Sequence[bool]] = {}
        if in_step:
            flags = self._measures.touched
        pairs = ((region, flags.get(region.index, ())) for region in self._store.states)
        touched = {index for region, has in pairs for index in itertools.compress(region.parameters, has)}
        return sorted(touched.union(self._used))

    def used(self, info: ParameterInfo) -> torch.Tensor | None:
        """Return the stand-in for a used gradient; None: cleared."""
        if info.index not in self._used:
            return None
        clear = partial(self._used.__setitem__, info.index, True)
        return UsedGradient.of(info, DTYPES[info.compute], self._flow.device.torch_device, clear)

    def drop(self, info: ParameterInfo) -> None:
        """Clear a used gradient: `parameter.grad = None`."""
        self._used.pop(info.index, None)

    def refuse_used(self) -> None:
        """Raise ConfigError if gradients of the last step are not cleared."""
        left = [self._flow.infos[index].name for index, is_zero in self._used.items() if not is_zero]
        if left:
            raise ConfigError(
                f"the gradients of {len(left)} parameters, first {left[0]}, were not cleared since the last "
                "optimizer.step(). Plain PyTorch would add the next ones to them, but the engine has used them up. "
                "Call optimizer.zero_grad() after each optimizer.step(); to add up the gradients of several backwards, "
                "call optimizer.step() after the last one alone."
            )

    @property
    def num_zeros(self) -> int:
        """Number of gradients that were set to zero since the last step."""
        return sum(self._used.values())

    def add_zeros(self) -> None:
        """Give a gradient of zero to parameters whose gradient was set to zero, if no other one has come."""
        if not self.num_zeros:
            return
        self._flow.updates.measure()  # `touched` is then final over the ranks
        self._flow.updates.flush()
        self._flow.lanes.drain_updates()  # the last update may still read this memory
        for region, state in self._store.states.items():
            touched = self._measures.touched.get(region.index, [])
            for number, has in enumerate(touched):
                if not has and self._used.get(region.parameters[number]):
                    touched[number] = True
                    self._clear(state, number)
        self._used.clear()  # they are gradients of this step now

    def _clear(self, state: RegionState, number: int) -> None:
        """Write zeros over this rank's gradients of piece `number` of a region."""
        span = state.span(number)
        region, sharding = state.region, self._store.sharding
        for flat, held in ((state.gradients, sharding.own(region)), (state.sums, sharding.shard(region))):
            if flat is not None:
                flat[max(0, span.start - held.start) : max(0, span.stop - held.start)].zero_()
