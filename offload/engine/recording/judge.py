"""The judge: are the passes of an engine those of the model? It compares them with the plainest one.

A rehearsal learns what a step relies on, by looking for what could go wrong. The judge looks for nothing in particular:
a few rows go through the model twice, from the same state of modules, objects and generators, once plainly
(`plain.py`) and once in the way in which steps are made. Losses, gradients and what is left behind must be the same.
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
    """How far apart two sums in another order may be."""

    share: float
    """As a share of the sum."""
    rounding: float
    """As a share of all gradients of a unit, since some gradients are a rounding of terms that cancel each other."""


_BOUNDS = {"fp32": _Bounds(1e-4, 1e-6), "bf16": _Bounds(3e-2, 4e-3)}
_DROPOUTS = frozenset(
    function
    for name in ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")
    for function in (getattr(torch.nn.functional, name), getattr(torch, name, None))
)


@dataclass(frozen=True)
class Case:
    """Passes that are to be judged."""

    roots: Mapping[str, Any]
    """What the passes can reach, by name: the model, a batch, a loss function."""
    loss: Callable[[], torch.Tensor]
    """Runs the model on all rows at once, plainly, and returns the loss."""
    way: Callable[[], Sequence[torch.Tensor]]
    """Makes the passes as steps make them, and returns their losses."""
    hang: Callable[[Unit, int], None]
    """Hangs the weights of a unit in its module as the plain pass of a number sees them."""
    num_passes: int = 1
    """How many passes there are, each with the same random numbers."""
    has_backward: bool = True
    """True if a backward follows each pass."""
    leaves: Sequence[torch.Tensor] = ()
    """What gets gradients beside weights."""


class Verdict(NamedTuple):
    """What the judge says of passes."""

    difference: str
    """How passes differ, for people; empty where they are alike."""
    is_steady: bool
    """False if the model gave another result when it ran again, plainly."""
    tells: bool
    """False if the plain loss is no number, which shows nothing."""


@dataclass
class Evidence:
    """What passes show."""

    losses: list[float] = field(default_factory=list)
    """The loss of each pass."""
    uses: list[tuple[str, list[Sketch]]] = field(default_factory=list)
    """The name and the results of each use of a unit."""
    gradients: dict[Piece, Sketch] = field(default_factory=dict)
    """The gradients, by the pieces of parameters that they are of."""
    belongings: Belongings | None = None
    """All that modules, batch and loss function hold afterwards."""
    has_drawn: bool = False
    """True if random numbers were drawn."""
    is_half: bool = False
    """True if some unit computed in 16 bits, as under autocast."""
    error: Exception | None = None
    """What the model raised."""

    def seen(self, calls: Calls) -> Calls:
        """Return `calls` whose results are noted."""

        def call(unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = calls(unit, args, kwargs)
            tensors = [t for t in tree_iter(result) if isinstance(t, torch.Tensor)]
            self.uses.append((unit.name, [Sketch.of(t) for t in tensors]))
            self.is_half |= any(t.dtype in (torch.bfloat16, torch.float16) for t in tensors)
            return result

        return call

    def receive(self, piece: Piece, gradient: torch.Tensor) -> None:
        """Note a contribution to the gradient of a piece of a parameter."""
        sketch = Sketch.of(gradient)
        self.gradients[piece] = self.gradients[piece] + sketch if piece in self.gradients else sketch


class WithoutDropout(TorchFunctionMode):
    """Within, dropout keeps everything: the masks of a batch and of its rows by themselves are others."""

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
    """Compares passes."""

    def __init__(self, state: EngineState, precision: str) -> None:
        self._state, self._precision, self._bounds = state, precision, _BOUNDS[precision]

    def difference(self, case: Case, *, is_exact: bool = True) -> Verdict:
        """Return in what the engine's way differs from the plain one. Collective: ranks find the same.

        is_exact: the order of sums is the plain one, so that the bits of losses are. Else rows are cut, of which each
        has other random numbers than in the whole, as each rank has: then no dropout is made, and where others are
        drawn, forwards in eval mode have to do.
        """
        state, start = self._state, Start(self._state, case.roots)
        draws_alike = is_exact and state.comm.size == 1
        without: Callable[[], AbstractContextManager[Any]] = nullcontext if draws_alike else WithoutDropout
        with state.runner.saved.tried(), start.unseen(), torch.set_grad_enabled(case.has_backward):
            with without():
                plain = self._plainly(case, start)
            if not draws_alike and state.comm.any(plain.has_drawn, "whether a trial draws"):
                without = self._in_eval_mode
                with without():
                    plain = self._plainly(case, start)
            with without():
                way, is_steady = self._way(case, start), True
                if state.comm.any(way.error is not None, "whether a trial fails"):
                    error, way = way.error, self._way(case, start)
                    if error is not None and way.error is None:  # it came by chance, and is the caller's
                        raise error
                found = self._compare(plain, way, is_exact=is_exact)
                if state.comm.any(bool(found), "what a trial shows"):
                    # A model that differs from itself can be judged by what does not.
                    again = self._plainly(case, start)
                    is_steady = not self._compare(plain, again, is_exact=True)
                    found = self._compare(plain, way, is_exact=is_exact, again=again)
        if state.comm.any(bool(found), "the verdict on a trial"):
            found = found or "another rank's pass differs"
        is_steady = not state.comm.any(not is_steady, "whether a trial is steady")
        tells = not state.comm.any(not all(map(math.isfinite, plain.losses)), "whether a trial tells")
        return Verdict(found, is_steady, tells)

    @contextmanager
    def _in_eval_mode(self) -> Iterator[None]:
        """Within, nothing is drawn, and forwards have no backward: some models refuse one in eval mode."""
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
            except Exception as error:  # of rows that do not run by themselves, or nothing to do with the engine
                state.runner.fail(False)
                evidence.error = error
        return self._concluded(evidence, start)

    def _concluded(self, evidence: Evidence, start: Start) -> Evidence:
        evidence.belongings, evidence.has_drawn = start.belongings_now(), start.has_drawn
        start.put_back()
        return evidence

    # -- the verdict -----------------------------------------------------------------------------------------

    def _compare(self, plain: Evidence, way: Evidence, *, is_exact: bool, again: Evidence | None = None) -> str:
        """Return a difference, for people. `again`: plain evidence once more; where its belongings differ from the
        first, those of the way may differ too.
        """
        if not all(map(math.isfinite, plain.losses)):
            return ""
        if way.error is not None:
            what = "" if isinstance(way.error, PartsDifferError) else f"the model raises {type(way.error).__name__}: "
            return f"{what}{way.error}".splitlines()[0]
        self._bounds = _BOUNDS["bf16" if plain.is_half or way.is_half else self._precision]
        results = self._differing_result(plain, way, is_exact=is_exact)
        if results and not any(plain.losses):  # a call whose outputs nobody can look into
            return results
        for one, other in zip(plain.losses, way.losses, strict=True):
            if not (one == other if is_exact else abs(one - other) <= self._bounds.share * abs(one) + 1e-12):
                return results or f"the loss is {one:.9g}, and {other:.9g}"
        found = self._differing_gradient(plain, way)
        if found or not is_exact:
            return found
        unsteady = {path for path, *_ in _belongings(plain, again)} if again else ()
        for path, mine, theirs in _belongings(plain, way):
            noted = path.removeprefix("the length of ").startswith("loss_fn")  # a loss function may note what it likes
            if path not in unsteady and not noted:
                return f"{path} is {_shown(mine)} afterwards, and {_shown(theirs)}"
        return ""

    def _differing_result(self, plain: Evidence, way: Evidence, *, is_exact: bool) -> str:
        """Return the first unit whose result is another, where both went the same way through the model."""
        if [name for name, _ in plain.uses] != [name for name, _ in way.uses]:
            return ""
        for (name, mine), (_, theirs) in zip(plain.uses, way.uses, strict=True):
            for number, (one, other) in enumerate(zip(mine, theirs, strict=False)):
                if not (one.is_as(other) if is_exact else one.distance(other) <= self._bounds.share * one.norm):
                    return (
                        f"result {number} of unit {name}, of shape {tuple(one.shape)}, has a norm of {one.norm:.6g}, "
                        f"and {other.norm:.6g}, {one.distance(other):.3g} apart"
                    )
        return ""

    def _differing_gradient(self, plain: Evidence, way: Evidence) -> str:
        """Return the parameter whose gradient is farthest from the plain one, if one is too far."""
        infos, worst, text = self._state.infos, 1.0, ""
        for unit in self._state.units:
            mine = [piece for region in unit.regions for piece in region.pieces]
            whole = math.hypot(*(plain.gradients[piece].norm for piece in mine if piece in plain.gradients), 0.0)
            for piece in mine:
                name, one, other = infos[piece.parameter].name, plain.gradients.get(piece), way.gradients.get(piece)
                if one is None or other is None:
                    if one is not other:
                        mine_is, other_is = ("none" if g is None else f"a norm of {g.norm:.6g}" for g in (one, other))
                        return f"the gradient of {name} in unit {unit.name} has {mine_is}, and {other_is}"
                    continue
                apart = one.distance(other) / (self._bounds.share * one.norm + self._bounds.rounding * whole + 1e-30)
                if apart > worst:
                    worst = apart
                    text = (
                        f"the gradient of {name} in unit {unit.name} has a norm of {one.norm:.6g}, and "
                        f"{other.norm:.6g}, {one.distance(other):.3g} apart"
                    )
        return text


def _belongings(one: Evidence, other: Evidence) -> Iterator[tuple[str, Any, Any]]:
    """Yield what is otherwise after two passes."""
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
