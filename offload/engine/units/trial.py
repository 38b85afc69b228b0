"""Trial runs of one unit without a trace: results, gradients, saved bytes and side effects."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from offload.engine.comparison import Sketch
from offload.engine.units.arguments import Arguments
from offload.engine.units.recompute_policy import saved_tensors_watched
from offload.engine.units.snapshots import Snapshot, buffers_of
from offload.engine.units.unit import Unit
from offload.engine.units.use import Forward, ForwardRunner, Use
from offload.errors import OffloadError
from offload.tiers.device import Device

ENGINE_ERRORS = (OffloadError, torch.OutOfMemoryError)
"""Errors of the engine or of memory. A trial run ends with these; any other error is a property of the model."""


class Evidence(NamedTuple):
    """Observations in one trial run."""

    results: list[torch.Tensor]
    """Result tensors, without a graph."""
    gradients: list[Sketch | None]
    """Gradients of the inputs and weights that require one, for a weighted sum of all results. None: no gradient."""
    saved_bytes: int
    """Bytes saved by autograd, without weights; 0 if not counted."""
    changed: str
    """Description of inputs or buffers changed in place. Empty: none."""


class Trial:
    """Runs a unit on some tensors, with the weights on the device.

    Generators, attributes and buffers are the same after each run as before.
    """

    def __init__(
        self,
        runner: ForwardRunner,
        unit: Unit,
        arguments: Arguments,
        others: Sequence[Any] | None = None,
        *,
        of_weights: bool = True,
    ) -> None:
        """`others`: non-tensor inputs in place of those in `arguments`. `of_weights`: take gradients of weights too."""
        self.unit = unit
        self.of_weights = of_weights
        self.device = runner.device
        self._runner = runner
        self._arguments = arguments
        self._others = arguments.others if others is None else others

    def snapshot(self, module: torch.nn.Module) -> Snapshot:
        """Return the state of generators and a module, to compare with the state after a run."""
        return Snapshot(self._runner.device, self._runner.is_weight, roots={"": module})

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Put the weights into the modules; afterwards, restore generators, attributes and all buffers."""
        unit, runner = self.unit, self._runner
        moving = buffers_of(unit.modules)  # all: which ones a forward changes is not known yet
        before = Snapshot(runner.device, runner.is_weight, unit.modules, moving, unit.mutable_attributes)
        try:
            # The weights are needed too for a backward with module code (torch.utils.checkpoint).
            with unit.installed():
                yield
        finally:
            before.put_back()

    @contextmanager
    def without_weight_gradients(self) -> Iterator[None]:
        """Context in which no weight of the unit requires a gradient."""
        weights = [weight for weight in self.unit.live().values() if weight.requires_grad]
        for weight in weights:
            weight.requires_grad_(False)
        try:
            yield
        finally:
            for weight in weights:
                weight.requires_grad_()

    def run(
        self,
        forward: Forward,
        tensors: Sequence[torch.Tensor],
        needs: Sequence[bool] | None = None,
        *,
        has_graph: bool = False,
        counts_saved: bool = False,
    ) -> Evidence:
        """Run `forward` on copies of `tensors`.

        `needs`: requires_grad per tensor. Default: as in `tensors` if `has_graph`, else False. `counts_saved`: count
        the bytes saved by autograd.
        """
        unit, gradients = self.unit, list[Sketch | None]()
        if needs is None:
            needs = [has_graph and t.requires_grad for t in tensors]
        buffers = Versions([buffer for buffer in buffers_of(unit.modules).values() if not buffer.is_inference()])
        frozen = nullcontext() if self.of_weights or counts_saved else self.without_weight_gradients()
        with self.restoring(), torch.set_grad_enabled(has_graph), frozen:
            weights = list(unit.live().values())
            saved = SavedBytes([*tensors, *weights], self.device)
            leaves = [t.detach().clone().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
            inputs = leaves
            if has_graph:  # torch forbids a change of a leaf in place
                inputs = [leaf.clone() for leaf in leaves]
            input_versions = Versions(inputs)
            with saved_tensors_watched(saved.add) if counts_saved else nullcontext():
                use = Use(self._runner, self._arguments, inputs, self._others)
                results = self._runner.run(unit, use, forward).tensors
                if has_graph:
                    wanted = [*leaves, *(weights if self.of_weights else ())]
                    gradients = gradients_of(results, [t for t in wanted if t.requires_grad])
            has_other_buffers = bool(buffers.changed())  # before `restoring` writes to them
        changed = ""
        if input_versions.changed():
            changed = "its inputs"
        elif has_other_buffers:
            changed = "its buffers"
        return Evidence([t.detach() for t in results], gradients, saved.num_bytes, changed)


class Versions:
    """Version counters of tensors at one moment."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors, self._versions = tensors, [t._version for t in tensors]

    def changed(self) -> set[int]:
        """Return the indices of tensors changed in place since then."""
        return {i for i, t in enumerate(self.tensors) if t._version != self._versions[i]}


class SavedBytes:
    """Counts bytes saved by autograd, except known tensors."""

    def __init__(self, known: Sequence[torch.Tensor], device: Device) -> None:
        self._address = device.address
        self._known = {self._address(t.untyped_storage()) for t in known}
        self.num_bytes = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a saved tensor, once."""
        storage = tensor.untyped_storage()
        address = self._address(storage)
        if address not in self._known:
            self._known.add(address)
            self.num_bytes += storage.nbytes()


def gradients_of(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Sketch | None]:
    """Return the gradients of a weighted sum over all elements of the results."""
    roots = [t for t in results if t.requires_grad]
    if not roots or not inputs:
        return [None] * len(inputs)
    # Other weights for each element: with equal ones, many a wrong gradient has the right sum.
    weights = [torch.arange(t.numel(), device=t.device).cos().view(t.shape).to(t.dtype) for t in roots]
    gradients = torch.autograd.grad(roots, inputs, weights, allow_unused=True)
    return [None if g is None else _sketch_of(g) for g in gradients]


def _sketch_of(gradient: torch.Tensor) -> Sketch:
    if gradient.layout is not torch.strided:  # of an embedding with `sparse=True`
        gradient = gradient.to_dense()
    return Sketch.of(gradient)
