"""Equivalence check: compares streamed passes with plain PyTorch passes.

A recording pass looks for known hazards. The equivalence check needs no list of hazards: a few rows run twice from the
same state (modules, objects, random generators), once in a plain pass (`plain.py`) and once in the engine's
configuration for steps. Losses, gradients and the remaining state must be equal.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from offload.engine.comparison import OTHER_ORDER, Sketch, Tolerance, gradient_deviations, tolerance
from offload.engine.flow import Flow
from offload.engine.recording.plain import PlainPass
from offload.engine.units.snapshots import Snapshot
from offload.engine.units.stages import Host
from offload.engine.units.state_snapshot import StateSnapshot
from offload.engine.units.traits import PartsDifferError, UnrecordedCallError
from offload.engine.units.trial import ENGINE_ERRORS
from offload.engine.units.unit import CallTarget, Unit
from offload.layout.regions import Piece
from offload.modules import in_eval_mode

_DROPOUTS = frozenset(
    function
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    for function in (getattr(torch.nn.functional, name), getattr(torch, name, None))
)


@dataclass(frozen=True)
class PassPair:
    """Passes to check."""

    roots: Mapping[str, Any]
    """Objects within reach of the passes besides the model, by name: a batch, a loss function."""
    run_plain: Callable[[], torch.Tensor]
    """Runs the model on all rows at once as a plain pass. Returns the loss."""
    run_streamed: Callable[[], Sequence[torch.Tensor]]
    """Runs the passes as steps do. Returns the losses."""
    install: Callable[[Unit, int], None]
    """Installs the weights of a unit in the module, as plain pass number n sees them."""
    num_passes: int = 1
    """Number of passes. Each starts with the same random state."""
    has_backward: bool = True
    """True if a backward follows each pass."""
    leaves: Sequence[torch.Tensor] = ()
    """Tensors that receive gradients, besides the weights."""


class EquivalenceResult(NamedTuple):
    """Result of an equivalence check."""

    difference: str
    """First difference between the passes, for messages. Empty: no difference."""
    is_repeatable: bool
    """False if a second plain pass differs from the first."""
    is_conclusive: bool
    """False if a plain loss is not finite, so the check is not conclusive."""
    has_failed: bool
    """True if the model raised an error in a streamed pass."""


@dataclass
class PassObservations:
    """Observations from passes."""

    losses: list[float] = field(default_factory=list)
    """Loss per pass."""
    uses: list[tuple[str, list[Sketch]]] = field(default_factory=list)
    """Unit name and results per unit use."""
    gradients: dict[Piece, Sketch] = field(default_factory=dict)
    """Gradients by parameter piece."""
    final_state: StateSnapshot = field(init=False)
    """State of modules, batch and loss function afterwards."""
    has_sampled: bool = False
    """True if random numbers were sampled."""
    is_half: bool = False
    """True if some unit result has 16 bits, e.g. under autocast."""
    error: Exception | None = None
    """Exception from the model."""

    def wrap_calls(self, calls: CallTarget) -> CallTarget:
        """Wrap `calls` to record the results."""

        def call(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = calls(unit, args, kwargs)
            tensors = [t for t in tree_iter(result) if isinstance(t, torch.Tensor)]
            self.uses.append((unit.name, [Sketch.of(t) for t in tensors]))
            self.is_half |= any(t.dtype in (torch.bfloat16, torch.float16) for t in tensors)
            return result

        return call

    def add_gradient(self, piece: Piece, gradient: torch.Tensor) -> None:
        """Add a contribution to the gradient of a parameter piece."""
        sketch = Sketch.of(gradient)
        if piece in self.gradients:  # a sketch is linear: the sum of sketches is that of the gradients
            sketch = self.gradients[piece] + sketch
        self.gradients[piece] = sketch


class NoDropoutMode(TorchFunctionMode):
    """Disables dropout within the context, because a batch and its rows alone sample different masks."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _DROPOUTS:
            return args[0] if args else kwargs["input"]
        if func is torch.nn.functional.scaled_dot_product_attention:
            if len(args) > 4:
                args = (*args[:4], 0.0, *args[5:])
            else:
                kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


@contextmanager
def isolated(
    host: Host, roots: Mapping[str, Any] = MappingProxyType({}), snapshot: Snapshot | None = None
) -> Iterator[Snapshot]:
    """Within the context, the engine calls the model for internal runs. Yield the snapshot of the model and `roots`.

    Restores all state afterwards, also grad mode and resident weights changed by model code. `snapshot`: the snapshot
    of a surrounding context, for the next of several runs from the same state; a new one takes longer than the rest.
    """
    if snapshot is None:
        roots = {"": host.model, **roots}
        snapshot = Snapshot(host.device, host.runner.is_weight, roots=roots, settle=host.settle)
    versions = host.slots.versions()
    try:
        with (
            host.runner.as_engine_calls(),
            host.stages.paused(),
            torch.set_grad_enabled(torch.is_grad_enabled()),  # puts the mode back, whatever a run leaves
        ):
            yield snapshot
    finally:
        snapshot.put_back()
    host.slots.restore(versions)


class PassComparator:
    """Runs equivalence checks."""

    def __init__(self, flow: Flow, precision: str) -> None:
        self._flow = flow
        self._is_half = precision != "fp32"

    def compare(self, passes: PassPair, *, is_exact: bool = True) -> EquivalenceResult:
        """Compare the streamed passes with plain passes. Collective: all ranks get the same result.

        is_exact: sums have the plain order, so losses must be bit-equal. Otherwise the passes split the rows, and parts
        sample other random numbers than the whole; the same holds between ranks. Dropout is then disabled, and if the
        model samples in other ways, the check uses forwards in eval mode.
        """
        flow = self._flow
        has_equal_samples = is_exact and not flow.runner.has_peers
        sampling_context: Callable[[], AbstractContextManager[Any]] = nullcontext
        if not has_equal_samples:
            sampling_context = NoDropoutMode
        with flow.runner.saved.trial_mode(), isolated(flow, passes.roots) as snapshot:

            def run(passes_of: Callable[[PassPair, Snapshot], PassObservations]) -> PassObservations:
                """Each run ends with `put_back`, also of modes: a context for several runs would be lost."""
                with torch.set_grad_enabled(passes.has_backward), sampling_context():
                    return passes_of(passes, snapshot)

            plain = run(self._run_plain)
            if not has_equal_samples and flow.comm.any(plain.has_sampled, "random numbers of a trial run"):
                sampling_context = partial(in_eval_mode, flow.model)  # some models refuse a backward in eval mode
                plain = run(self._run_plain)
            streamed = run(self._run_streamed)
            result = self._settle(plain, streamed, is_exact)
            if result.has_failed:
                error = streamed.error
                streamed = run(self._run_streamed)
                if error is not None and streamed.error is None:  # a random failure: the caller's own error
                    raise error
                result = self._settle(plain, streamed, is_exact)
            if result.difference:
                # Compare an unstable model only in the properties where two plain passes agree.
                again = run(self._run_plain)
                result = self._settle(plain, streamed, is_exact, again)
        return result

    def _settle(
        self, plain: PassObservations, streamed: PassObservations, is_exact: bool, again: PassObservations | None = None
    ) -> EquivalenceResult:
        """Compare this rank's passes, and return the result of all ranks. `again`: as in `_first_difference`."""
        own = EquivalenceResult(
            self._first_difference(plain, streamed, is_exact=is_exact, again=again),
            again is None or not self._first_difference(plain, again, is_exact=True),
            all(map(math.isfinite, plain.losses)),
            streamed.error is not None,
        )
        ranks = self._flow.comm.gather_objects(own, "result of the equivalence check")
        differences, are_repeatable, are_conclusive, have_failed = zip(*ranks, strict=True)
        difference = own.difference
        if not difference and any(differences):
            difference = "another rank's pass differs"
        return EquivalenceResult(difference, all(are_repeatable), all(are_conclusive), any(have_failed))

    def _run_plain(self, passes: PassPair, snapshot: Snapshot) -> PassObservations:
        flow, observations = self._flow, PassObservations()
        resident = [unit for unit in flow.units if unit.resident]
        for number in range(passes.num_passes):
            snapshot.put_back_generators()

            def install(unit: Unit, number: int = number) -> None:
                passes.install(unit, number)

            plain = PlainPass(flow, install)
            # Resident units are not called through the router: their weights of this pass stay during the whole pass.
            with (
                ExitStack() as undo,
                flow.router.trial_mode(observations.wrap_calls(plain.call), observations.add_gradient),
                plain.open(),
            ):
                for unit in resident:
                    undo.callback(unit.install, unit.live())
                    passes.install(unit, number)
                loss = passes.run_plain()
                if passes.has_backward and loss.requires_grad:
                    flow.runner.backward(loss, None, *plain.weights.values(), *passes.leaves)
                observations.losses.append(float(loss.detach()))
                del loss
        return self._conclude(observations, snapshot)

    def _run_streamed(self, passes: PassPair, snapshot: Snapshot) -> PassObservations:
        flow, observations = self._flow, PassObservations()
        with flow.router.trial_mode(observations.wrap_calls(flow.router.stream), observations.add_gradient):
            try:
                observations.losses += [float(loss.detach()) for loss in passes.run_streamed()]
            except (*ENGINE_ERRORS, UnrecordedCallError):
                raise
            except Exception as error:  # rows that cannot run alone, or an error unrelated to the engine
                flow.runner.has_failed = False
                observations.error = error
        return self._conclude(observations, snapshot)

    def _conclude(self, observations: PassObservations, snapshot: Snapshot) -> PassObservations:
        observations.final_state, observations.has_sampled = snapshot.capture_state(), snapshot.has_sampled
        snapshot.put_back()
        return observations

    # -- comparison ------------------------------------------------------------------------------------------

    def _first_difference(
        self,
        plain: PassObservations,
        streamed: PassObservations,
        *,
        is_exact: bool,
        again: PassObservations | None = None,
    ) -> str:
        """Return the first difference, for messages.

        `again`: a second plain pass. State that differs between the two plain passes is not compared.
        """
        if not all(map(math.isfinite, plain.losses)):
            return ""
        if (error := streamed.error) is not None:
            text = f"the model raises {type(error).__name__}: {error}"
            if isinstance(error, PartsDifferError):  # an error of the engine, and a whole sentence
                text = str(error)
            return text.splitlines()[0]
        allowed = tolerance(OTHER_ORDER, is_half=self._is_half or plain.is_half or streamed.is_half)
        allowed_distance = allowed.result
        if is_exact:
            allowed_distance = 0.0
        results = _first_result_difference(plain, streamed, allowed_distance)
        if results and not any(plain.losses):  # e.g. a call with opaque outputs
            return results
        for one, other in zip(plain.losses, streamed.losses, strict=True):
            agrees = one == other
            if not is_exact:  # the absolute term is for losses near 0
                agrees = abs(one - other) <= allowed.result * abs(one) + 1e-12
            if not agrees:
                return results or f"the loss is {one:.9g} in plain PyTorch and {other:.9g} in the engine"
        difference = self._largest_gradient_difference(plain, streamed, allowed)
        if difference or not is_exact:
            return difference
        state = plain.final_state
        unstable_paths = set[str]()
        if again is not None:
            unstable_paths = {path for path, *_ in state.differences(again.final_state)}
        for path, mine, theirs in state.differences(streamed.final_state):
            # A loss function may store anything.
            is_in_loss_function = path.removeprefix("the length of ").startswith("loss_fn")
            if path not in unstable_paths and not is_in_loss_function:
                return (
                    f"{path} is {_describe_value(mine)} after the pass in plain PyTorch and {_describe_value(theirs)} "
                    "after the pass in the engine"
                )
        return ""

    def _largest_gradient_difference(
        self, plain: PassObservations, streamed: PassObservations, allowed: Tolerance
    ) -> str:
        """Return the parameter with the largest gradient error, if above the tolerance."""
        worst, text = 1.0, ""
        for unit in self._flow.units:
            pieces = [piece for region in unit.regions for piece in region.pieces]
            ones, others = ([each.gradients.get(piece) for piece in pieces] for each in (plain, streamed))
            deviations = gradient_deviations(ones, others, allowed)
            for piece, one, other, deviation in zip(pieces, ones, others, deviations, strict=True):
                is_lost = (one is None) != (other is None)
                if not (is_lost or deviation > worst):
                    continue
                mine, theirs = ("none" if g is None else f"norm {g.norm:.6g}" for g in (one, other))
                worst = deviation
                text = (
                    f"the gradient of {self._flow.infos[piece.parameter].name} in unit {unit.name} has {mine} in "
                    f"plain PyTorch and {theirs} in the engine"
                )
                if one is None or other is None:
                    return text
                text += f", a distance of {one.distance(other):.3g}"
        return text


def _first_result_difference(plain: PassObservations, streamed: PassObservations, share: float) -> str:
    """Return the first unit with a different result, if both passes use the same sequence of units.

    `share`: allowed distance, relative to the norm; 0: same bits.
    """
    if [name for name, _ in plain.uses] != [name for name, _ in streamed.uses]:
        return ""
    for (name, mine), (_, theirs) in zip(plain.uses, streamed.uses, strict=True):
        for number, (one, other) in enumerate(zip(mine, theirs, strict=False)):
            agrees = one.equals(other)
            if share:
                agrees = one.distance(other) <= share * one.norm
            if not agrees:
                return (
                    f"result {number} of unit {name}, of shape {tuple(one.shape)}, has norm {one.norm:.6g} in "
                    f"plain PyTorch and {other.norm:.6g} in the engine, a distance of {one.distance(other):.3g}"
                )
    return ""


def _describe_value(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and norm {float(value.double().norm()):.6g}"
    text = repr(value)
    if len(text) < 60:
        return text
    return f"{text[:60]}..."
