"""Trial runs without a trace: results, gradients, saved bytes and side effects of one unit; state of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch

from offload.engine.comparison import Sketch
from offload.engine.units.arguments import Arguments
from offload.engine.units.recompute_policy import saved_tensors_watched
from offload.engine.units.snapshots import PassSnapshot, RngState, buffer_places
from offload.engine.units.stages import Forward, ForwardRunner, Use
from offload.engine.units.state_snapshot import StateSnapshot
from offload.engine.units.unit import Unit
from offload.errors import OffloadError
from offload.tiers.device import Device

ENGINE_ERRORS = (OffloadError, torch.OutOfMemoryError)
"""Errors of the engine or of memory. A trial run ends with these; any other error is a property of the model."""


class TrialSnapshot:
    """State of random generators and all objects reachable from `roots` (e.g. the model, a batch, a loss function)."""

    def __init__(self, device: Device, roots: Mapping[str, Any], ignores: Callable[[torch.Tensor], bool]) -> None:
        """`ignores`: True for a tensor over engine weights."""
        self._device, self._roots, self._ignores = device, roots, ignores
        self._random, self._rng_state = device.random_state(), RngState.capture()
        self.state = self.capture_state()

    def capture_state(self) -> StateSnapshot:
        """Return the current state behind the roots."""
        return StateSnapshot(self._roots, self._ignores, gradients=True)

    @property
    def has_sampled(self) -> bool:
        """True if random numbers were sampled since the snapshot."""
        is_same = all(map(torch.equal, self._random, self._device.random_state()))
        return not (is_same and self._rng_state.equals(RngState.capture()))

    def reset_generators(self) -> None:
        """Reset the random generators to the snapshot."""
        self._device.set_random_state(self._random)
        self._rng_state.put_back()

    def restore(self) -> None:
        """Restore the snapshot."""
        self.reset_generators()
        self.state.put_back()


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
        self, runner: ForwardRunner, unit: Unit, arguments: Arguments, others: Sequence[Any] | None = None
    ) -> None:
        """`others`: non-tensor inputs in place of those in `arguments`."""
        self._runner, self.unit, self._arguments = runner, unit, arguments
        self._others = arguments.others if others is None else others

    def snapshot(self, module: torch.nn.Module) -> TrialSnapshot:
        """Return the state of generators and a module, to compare with the state after a run."""
        return TrialSnapshot(self._runner.device, {"": module}, self._runner.is_weight)

    @contextmanager
    def restoring(self) -> Iterator[None]:
        """Put the weights into the modules; afterwards, restore generators, attributes and all buffers."""
        unit, runner, moving = self.unit, self._runner, buffer_places(self.unit.modules)
        before = PassSnapshot(runner.device, unit.modules, moving, unit.mutable_attributes, runner.is_weight)
        try:
            # The weights are needed too for a backward with module code (torch.utils.checkpoint).
            with unit.installed():
                yield
        finally:
            before.put_back()

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
        needs = [has_graph and t.requires_grad for t in tensors] if needs is None else needs
        buffers = [b for m in unit.modules for b in m._buffers.values() if b is not None and not b.is_inference()]
        buffer_versions = _versions(buffers)
        with self.restoring(), torch.set_grad_enabled(has_graph):
            weights = list(unit.live().values())
            saved = SavedBytes([*tensors, *weights])
            leaves = [t.detach().clone().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
            inputs = [leaf.clone() for leaf in leaves] if has_graph else leaves
            input_versions = _versions(inputs)
            with saved_tensors_watched(saved.add) if counts_saved else nullcontext():
                use = Use(self._runner, self._arguments, inputs, self._others)
                results = self._runner.run(unit, use, forward).tensors
                if has_graph:
                    gradients = gradients_of(results, [t for t in (*leaves, *weights) if t.requires_grad])
            has_other_buffers = _versions(buffers) != buffer_versions
        has_other_inputs = _versions(inputs) != input_versions
        text = "its inputs" if has_other_inputs else "its buffers" if has_other_buffers else ""
        return Evidence([t.detach() for t in results], gradients, saved.num_bytes, text)


def _versions(tensors: Iterable[torch.Tensor]) -> list[int]:
    return [t._version for t in tensors]


class SavedBytes:
    """Counts bytes saved by autograd, except known tensors."""

    def __init__(self, known: Sequence[torch.Tensor]) -> None:
        self._known = {t.untyped_storage().data_ptr() for t in known}
        self.num_bytes = 0

    def add(self, tensor: torch.Tensor) -> None:
        """Count the storage of a saved tensor, once."""
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self.num_bytes += storage.nbytes()


def gradients_of(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[Sketch | None]:
    """Return the gradients of a weighted sum over all elements of the results."""
    roots = [t for t in results if t.requires_grad]
    if not roots or not inputs:
        return [None] * len(inputs)
    weights = [torch.arange(t.numel(), device=t.device).cos().view(t.shape).to(t.dtype) for t in roots]
    gradients = torch.autograd.grad(roots, inputs, weights, allow_unused=True)
    return [None if g is None else Sketch.of(g if g.layout is torch.strided else g.to_dense()) for g in gradients]
