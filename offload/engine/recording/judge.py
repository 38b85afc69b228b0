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
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_iter

from offload.engine.recording.plain import PlainPass
from offload.engine.recording.sketch import Sketch
from offload.engine.recording.start import Start
from offload.engine.state import EngineState
from offload.engine.units.belongings import Belongings
from offload.engine.units.router import Calls
from offload.engine.units.traits import PartsDifferError, UnrecordedCallError
from offload.engine.units.unit import Unit
from offload.errors import OffloadError
from offload.hf.models import in_eval_mode
from offload.layout.regions import Piece


class _Bounds(NamedTuple):
    """Tolerances for sums in a different order."""

    share: float
    """Relative to the sum."""
    rounding: float
    """Relative to all gradients in a unit, because some gradients are only the rounding error of cancelling terms."""


_BOUNDS = {"fp32": _Bounds(1e-4, 1e-6), "bf16": _Bounds(3e-2, 4e-3)}
_DROPOUTS = frozenset(
    function
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    for function in (getattr(torch.nn.functional, name), getattr(torch, name, None))
)


@dataclass(frozen=True)
class Case:
    """Passes to check."""

    roots: Mapping[str, Any]
    """Objects within reach of the passes, by name: the model, a batch, a loss function."""
    loss: Callable[[], torch.Tensor]
    """Runs the model on all rows at once as a plain pass. Returns the loss."""
    way: Callable[[], Sequence[torch.Tensor]]
    """Runs the passes as steps do. Returns the losses."""
    hang: Callable[[Unit, int], None]
    """Installs the weights of a unit in the module, as plain pass number n sees them."""
    num_passes: int = 1
    """Number of passes. Each starts with the same random state."""
    has_backward: bool = True
    """True if a backward follows each pass."""
    leaves: Sequence[torch.Tensor] = ()
    """Tensors that receive gradients, besides the weights."""


class Verdict(NamedTuple):
    """Result of an equivalence check."""

    difference: str
    """First difference between the passes, for messages. Empty: no difference."""
    is_steady: bool
    """False if a second plain pass differs from the first."""
    tells: bool
    """False if a plain loss is not finite, so the check is not conclusive."""


@dataclass
class Evidence:
    """Observations from passes."""

    losses: list[float] = field(default_factory=list)
    """Loss per pass."""
    uses: list[tuple[str, list[Sketch]]] = field(default_factory=list)
    """Unit name and results per unit use."""
    gradients: dict[Piece, Sketch] = field(default_factory=dict)
    """Gradients by parameter piece."""
    belongings: Belongings | None = None
    """State of modules, batch and loss function afterwards."""
    has_drawn: bool = False
    """True if random numbers were sampled."""
    is_half: bool = False
    """True if some unit result has 16 bits, e.g. under autocast."""
    error: Exception | None = None
    """Exception from the model."""

    def seen(self, calls: Calls) -> Calls:
        """Wrap `calls` to record the results."""

        def call(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = calls(unit, args, kwargs)
            tensors = [t for t in tree_iter(result) if isinstance(t, torch.Tensor)]
            self.uses.append((unit.name, [Sketch.of(t) for t in tensors]))
            self.is_half |= any(t.dtype in (torch.bfloat16, torch.float16) for t in tensors)
            return result

        return call

    def receive(self, piece: Piece, gradient: torch.Tensor) -> None:
        """Add a contribution to the gradient of a parameter piece."""
        sketch = Sketch.of(gradient)
        self.gradients[piece] = self.gradients[piece] + sketch if piece in self.gradients else sketch


class WithoutDropout(TorchFunctionMode):
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


class Judge:
    """Runs equivalence checks."""

    def __init__(self, state: EngineState, precision: str) -> None:
        self._state, self._precision, self._bounds = state, precision, _BOUNDS[precision]

    def difference(self, case: Case, *, is_exact: bool = True) -> Verdict:
        """Compare the streamed passes with plain passes. Collective: all ranks get the same result.

        is_exact: sums have the plain order, so losses must be bit-equal. Otherwise the passes split the rows, and parts
        sample other random numbers than the whole; the same holds between ranks. Dropout is then disabled, and if the
        model samples in other ways, the check uses forwards in eval mode.
        """
        state, start = self._state, Start(self._state, case.roots)
        draws_alike = is_exact and state.comm.size == 1
        without: Callable[[], AbstractContextManager[Any]] = nullcontext if draws_alike else WithoutDropout
        with state.runner.saved.tried(), start.unseen(), torch.set_grad_enabled(case.has_backward):
            with without():
                plain = self._plainly(case, start)
            if not draws_alike and state.comm.any(plain.has_drawn, "random numbers of a trial run"):
                without = self._in_eval_mode
                with without():
                    plain = self._plainly(case, start)
            with without():
                way, is_steady = self._way(case, start), True
                if state.comm.any(way.error is not None, "errors of a trial run"):
                    error, way = way.error, self._way(case, start)
                    if error is not None and way.error is None:  # a random failure: the caller's own error
                        raise error
                found = self._compare(plain, way, is_exact=is_exact)
                if state.comm.any(bool(found), "differences of a trial run"):
                    # Compare an unstable model only in the properties where two plain passes agree.
                    again = self._plainly(case, start)
                    is_steady = not self._compare(plain, again, is_exact=True)
                    found = self._compare(plain, way, is_exact=is_exact, again=again)
        if state.comm.any(bool(found), "result of the equivalence check"):
            found = found or "another rank's pass differs"
        is_steady = not state.comm.any(not is_steady, "repeatability of a trial run")
        tells = not state.comm.any(not all(map(math.isfinite, plain.losses)), "losses of a trial run")
        return Verdict(found, is_steady, tells)

    @contextmanager
    def _in_eval_mode(self) -> Iterator[None]:
        """Within the context, nothing is sampled and no backward runs: some models refuse a backward in eval mode."""
        with in_eval_mode(self._state.model), torch.no_grad():
            yield

    def _plainly(self, case: Case, start: Start) -> Evidence:
        state, evidence = self._state, Evidence()
        resident = [unit for unit in state.units if unit.resident]
        for number in range(case.num_passes):
            start.draw_again()
            hang = partial(_hang, case, number)
            plain = PlainPass(state, hang)
            with (
                ExitStack() as undo,
                state.router.tried(evidence.seen(plain.call), evidence.receive),
                plain.open(),
            ):
                for unit in resident:
                    undo.callback(unit.install, unit.live())
                    hang(unit)
                loss = case.loss()
                if case.has_backward and loss.requires_grad:
                    state.backward(loss, None, *plain.weights.values(), *case.leaves)
                evidence.losses.append(float(loss.detach()))
                del loss
        return self._concluded(evidence, start)

    def _way(self, case: Case, start: Start) -> Evidence:
        state, evidence = self._state, Evidence()
        with state.router.tried(evidence.seen(state.router.stream), evidence.receive):
            try:
                evidence.losses += [float(loss.detach()) for loss in case.way()]
            except (OffloadError, UnrecordedCallError, torch.OutOfMemoryError):
                raise
            except Exception as error:  # rows that cannot run alone, or an error unrelated to the engine
                state.runner.fail(False)
                evidence.error = error
        return self._concluded(evidence, start)

    def _concluded(self, evidence: Evidence, start: Start) -> Evidence:
        evidence.belongings, evidence.has_drawn = start.belongings_now(), start.has_drawn
        start.put_back()
        return evidence

    # -- comparison ------------------------------------------------------------------------------------------

    def _compare(self, plain: Evidence, way: Evidence, *, is_exact: bool, again: Evidence | None = None) -> str:
        """Return the first difference, for messages.

        `again`: a second plain pass. State that differs between the two plain passes is not compared.
        """
        if not all(map(math.isfinite, plain.losses)):
            return ""
        if way.error is not None:
            what = "" if isinstance(way.error, PartsDifferError) else f"the model raises {type(way.error).__name__}: "
            return f"{what}{way.error}".splitlines()[0]
        self._bounds = _BOUNDS["bf16" if plain.is_half or way.is_half else self._precision]
        results = self._differing_result(plain, way, is_exact=is_exact)
        if results and not any(plain.losses):  # e.g. a call with opaque outputs
            return results
        for one, other in zip(plain.losses, way.losses, strict=True):
            if not (one == other if is_exact else abs(one - other) <= self._bounds.share * abs(one) + 1e-12):
                return results or f"the loss is {one:.9g} in plain PyTorch and {other:.9g} in the engine"
        found = self._differing_gradient(plain, way)
        if found or not is_exact:
            return found
        unsteady = {path for path, *_ in _belongings(plain, again)} if again else ()
        for path, mine, theirs in _belongings(plain, way):
            noted = path.removeprefix("the length of ").startswith("loss_fn")  # a loss function may store anything
            if path not in unsteady and not noted:
                return (
                    f"{path} is {_shown(mine)} after the pass in plain PyTorch and {_shown(theirs)} after the pass in "
                    "the engine"
                )
        return ""

    def _differing_result(self, plain: Evidence, way: Evidence, *, is_exact: bool) -> str:
        """Return the first unit with a different result, if both passes use the same sequence of units."""
        if [name for name, _ in plain.uses] != [name for name, _ in way.uses]:
            return ""
        for (name, mine), (_, theirs) in zip(plain.uses, way.uses, strict=True):
            for number, (one, other) in enumerate(zip(mine, theirs, strict=False)):
                if not (one.is_as(other) if is_exact else one.distance(other) <= self._bounds.share * one.norm):
                    return (
                        f"result {number} of unit {name}, of shape {tuple(one.shape)}, has norm {one.norm:.6g} in "
                        f"plain PyTorch and {other.norm:.6g} in the engine, a distance of {one.distance(other):.3g}"
                    )
        return ""

    def _differing_gradient(self, plain: Evidence, way: Evidence) -> str:
        """Return the parameter with the largest gradient error, if above the tolerance."""
        infos, worst, text = self._state.infos, 1.0, ""
        for unit in self._state.units:
            mine = [piece for region in unit.regions for piece in region.pieces]
            whole = math.hypot(*(plain.gradients[piece].norm for piece in mine if piece in plain.gradients), 0.0)
            for piece in mine:
                name, one, other = infos[piece.parameter].name, plain.gradients.get(piece), way.gradients.get(piece)
                if one is None or other is None:
                    if one is not other:
                        mine_is, other_is = ("none" if g is None else f"norm {g.norm:.6g}" for g in (one, other))
                        return (
                            f"the gradient of {name} in unit {unit.name} has {mine_is} in plain PyTorch and {other_is} "
                            "in the engine"
                        )
                    continue
                apart = one.distance(other) / (self._bounds.share * one.norm + self._bounds.rounding * whole + 1e-30)
                if apart > worst:
                    worst = apart
                    text = (
                        f"the gradient of {name} in unit {unit.name} has norm {one.norm:.6g} in plain PyTorch and "
                        f"{other.norm:.6g} in the engine, a distance of {one.distance(other):.3g}"
                    )
        return text


def _belongings(one: Evidence, other: Evidence) -> Iterator[tuple[str, Any, Any]]:
    """Yield the differences in the state after two passes."""
    assert one.belongings is not None
    assert other.belongings is not None
    return one.belongings.differences(other.belongings)


def _hang(case: Case, number: int, unit: Unit) -> None:
    case.hang(unit, number)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)} and norm {float(value.double().norm()):.6g}"
    text = repr(value)
    return text if len(text) < 60 else f"{text[:60]}..."
