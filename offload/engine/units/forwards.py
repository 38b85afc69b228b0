"""What runs in a use of a unit: its module's own forward, or what torch.compile has made of it."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from offload.engine.units.arguments import Arguments
from offload.engine.units.unit import Unit
from offload.errors import OffloadError, warn
from offload.tiers.device import Device

Forward = Callable[..., Any]

BACKEND = "inductor"
_MOST_KINDS = 8
"""Of one class of modules: kinds of uses, which differ in the shapes of the inputs above all, that are compiled."""
_MOST_GRAPHS = 8
"""Of one kind of use: units may differ in numbers that their code reads, and each number is a graph."""
_MOST_LETTERS = 200
"""Letters of what torch says of a failure."""
_APART = {False: (1e-4, 1e-3), True: (3e-2, 1e-1)}
"""How far a compiled use may be from the module's own, by whether it computes in 16 bits: as a share of the norm of
results, and of gradients.
"""


class Runner(Protocol):
    """Runs modules over weights that are up."""

    @property
    def device(self) -> Device:
        """What computes."""
        ...

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """True for a tensor over weights on the device."""
        ...

    def run(
        self, unit: Unit, arguments: Arguments, tensors: Sequence[torch.Tensor], others: Sequence[Any], own: Forward
    ) -> Arguments:
        """Run a unit's module by a forward, on these tensors and values in the places of those of its arguments."""
        ...

    def undone(self, unit: Unit) -> AbstractContextManager[None]:
        """Within, what the unit draws and notes is put back in the end."""
        ...


class _Use(NamedTuple):
    """A micro-batch of a use of a unit."""

    runner: Runner
    """What runs the unit."""
    arguments: Arguments
    """What the use is called with."""
    tensors: Sequence[torch.Tensor]
    """The tensors of the micro-batch."""
    others: Sequence[Any]
    """What of the arguments is no tensor."""
    needs: Sequence[bool] | None
    """Of each tensor, whether it takes gradients; None where the use has no backward."""


class OwnForwards:
    """Uses run the modules' own forwards."""

    num_graphs = 0
    """Graphs that were compiled so far."""
    _is_paused = False
    looks_at_few = False
    """True if a recording of a few tokens tells what one of many does not."""

    def of(
        self,
        unit: Unit,
        _runner: Runner,
        _arguments: Arguments,
        _tensors: Sequence[torch.Tensor],
        _others: Sequence[Any],
        _needs: Sequence[bool] | None = None,
    ) -> Forward:
        """Return what runs in a micro-batch of a use, now and in its recompute; it is called as the module's forward.
        Nothing of the use has run yet, and the unit's weights are up. `needs`: of each tensor, whether it takes
        gradients; None where the use has no backward.
        """
        return unit.forward

    def again(self, forward: Forward) -> Forward:
        """Return what runs in the recompute of a use in which that has run."""
        return forward

    def record(self, unit: Unit, _runner: Runner, _arguments: Arguments, _rows: int | None) -> Forward:
        """A use of a unit is recorded, whose weights are up: learn about it, where a number of `rows` is given (0: one
        that nobody knows), as in the first pass of several; return what is to run there.
        """
        return unit.forward

    def check(self) -> None:
        """All units are recorded. Raises ConfigError where none can run as it was asked for."""

    @property
    def told(self) -> str:
        """What runs otherwise than modules' own forwards, beside what is compiled, for people; empty for nothing."""
        return ""

    @property
    def compiled(self) -> frozenset[type]:
        """The classes of modules that ran compiled, and none of which was refused."""
        return frozenset()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Within, trials run the modules' own forwards."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before


class CompiledForwards(OwnForwards):
    """Blocks run as torch.compile makes them, one function for each kind of use of a class of modules: all equal layers
    share its graphs, one without gradients and one with, whatever slot their weights are in. The weights are inputs of
    a graph, and nothing that it compiles in.

    The first use of a unit in a kind is tried out beside the module's own forward, results and gradients. What fails or
    differs runs as it is from then on, which is said once for each class. What changes its inputs, or buffers, is not
    compiled: nor is what is no block, since each would be a compilation for a single use.
    """

    def __init__(self) -> None:
        self._functions: dict[type, dict[Hashable, Forward]] = {}
        self._chosen: dict[tuple[int, Hashable], Forward | None] = {}
        self._refused: set[type] = set()
        self._failed: set[type] = set()
        self.num_graphs = 0

    def of(
        self,
        unit: Unit,
        runner: Runner,
        arguments: Arguments,
        tensors: Sequence[torch.Tensor],
        others: Sequence[Any],
        needs: Sequence[bool] | None = None,
    ) -> Forward:
        if self._is_paused or not unit.is_block or type(unit.module) in self._failed:
            return unit.forward
        use = _Use(runner, arguments, tensors, others, needs)
        key = unit.number, _kind(unit, use)
        if key not in self._chosen:
            self._chosen[key] = self._choose(unit, use, key[1])
        return self._chosen[key] or unit.forward

    @property
    def compiled(self) -> frozenset[type]:
        return frozenset(self._functions) - self._refused

    def _choose(self, unit: Unit, use: _Use, kind: Hashable) -> Forward | None:
        """Return the compiled forward of a unit; None where it is not to be compiled, which is said."""
        owner = type(unit.module)
        if owner in self._refused:
            return None
        functions, refusal, function = self._functions.setdefault(owner, {}), _refusal(unit), None
        if not refusal and kind not in functions and len(functions) == _MOST_KINDS:
            refusal = f"{_MOST_KINDS} kinds of inputs were compiled, and here is another (give all batches one length)"
        if not refusal:
            if kind not in functions:
                functions[kind] = _compiled(owner)
            function = partial(self._counted, functions[kind], unit.module)
            try:
                refusal = self._difference(unit, use, function)
            except (OffloadError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                refusal = _shown(error)
        if refusal or function is None:
            self._refuse(unit, refusal)
            return None
        return partial(self._used, unit, function)

    def _refuse(self, unit: Unit, why: str) -> None:
        owner = type(unit.module)
        self._refused.add(owner)
        warn(f"compile is auto, and {owner.__name__} (unit {unit.name}) runs as it is from here on: {why}.")

    def _used(self, unit: Unit, function: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a compiled forward, or the module's own from where torch cannot compile it anew for what is other now."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not type(error).__module__.startswith("torch._dynamo"):
                raise
            if type(unit.module) not in self._failed:
                self._failed.add(type(unit.module))
                self._refuse(unit, _shown(error))
        return unit.forward(*args, **kwargs)

    def _counted(self, function: Forward, *args: Any, **kwargs: Any) -> Any:
        before = _num_graphs()
        try:
            return function(*args, **kwargs)
        finally:
            self.num_graphs += _num_graphs() - before

    def _difference(self, unit: Unit, use: _Use, function: Forward) -> str:
        """Return why a unit is not to be compiled; empty where it gives what its own forward gives."""
        has_graph = use.needs is not None
        results, gradients = _made(unit, use, unit.forward, has_graph)
        mine, _ = _made(unit, use, function, False)
        before = self.num_graphs
        again, _ = _made(unit, use, function, False)
        if self.num_graphs > before:
            return "it would be compiled anew in each use, since what its code reads changes"
        of_results, of_gradients = _APART[any(t.dtype in (torch.bfloat16, torch.float16) for t in results)]
        if (far := _distance(results, mine)) > of_results:
            return f"compiled, its results are {far:.3g} of their norm from its own"
        if has_graph:
            with_graph, compiled_gradients = _made(unit, use, function, True)
            if not all(map(_same, mine, with_graph)):
                unit.traits.need_graph()  # or a recompute had other bits than the forward
            if (far := _distance(gradients, compiled_gradients)) > of_gradients:
                return f"compiled, its gradients are {far:.3g} of their norm from its own"
        return "" if all(map(_same, mine, again)) else "compiled, it gives another result each time"


def compile_modules(modules: Iterable[nn.Module]) -> None:
    """Let modules of a resident model run as an engine compiles units: one function for each class."""
    made: dict[type, Forward] = {}
    for module in modules:
        owner = type(module)
        if owner not in made:
            made[owner] = _compiled(owner)
        module.forward = partial(made[owner], module)


def _kind(unit: Unit, use: _Use) -> Hashable:
    """Return what uses have in common that one function serves."""
    tensors = tuple([(t.shape, t.dtype) for t in use.tensors])
    others = tuple([value if isinstance(value, bool | int | float | str) else type(value) for value in use.others])
    device = use.tensors[0].device.type if use.tensors else "cpu"
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return unit.module.training, use.arguments.structure, tensors, others, cast


def _made(unit: Unit, use: _Use, forward: Forward, has_graph: bool) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the results of a use, and the gradients of half the sum of their squares."""
    with use.runner.undone(unit), _still_buffers(unit), torch.set_grad_enabled(has_graph):
        needs = use.needs if has_graph and use.needs is not None else [t.requires_grad for t in use.tensors]
        leaves = [t.detach().clone().requires_grad_(need) for t, need in zip(use.tensors, needs, strict=True)]
        results = [
            t for t in use.runner.run(unit, use.arguments, leaves, use.others, forward).tensors if t.is_floating_point()
        ]
        roots = [t for t in results if t.requires_grad] if has_graph else []
        inputs = [t for t in (*leaves, *unit.live().values()) if t.requires_grad] if roots else []
        gradients: Sequence[torch.Tensor | None] = ()
        if inputs:
            gradients = torch.autograd.grad(roots, inputs, [t.detach() for t in roots], allow_unused=True)
        filled = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, gradients, strict=True)]
        if any(leaf._version for leaf in leaves):
            raise RuntimeError("it changes its inputs in place")
        return [t.detach().clone() for t in results], filled


@contextmanager
def _still_buffers(unit: Unit) -> Iterator[None]:
    """Within, a unit is run that may change buffers in place, although no recording has seen it yet: they are put back.
    Raises RuntimeError then.
    """
    buffers = [b for module in unit.modules for b in module._buffers.values() if b is not None]
    before = [(b, b._version, b.clone()) for b in buffers]
    try:
        yield
    finally:
        changed = [(b, value) for b, version, value in before if b._version != version]
        for buffer, value in changed:
            buffer.copy_(value)
    if changed:
        raise RuntimeError("it changes its buffers in place")


def _compiled(owner: Any) -> Forward:
    """Return a function that compiles the forward of a class at its first calls, to be called with the module first."""
    known = inspect.signature(torch.compile).parameters
    limits = {"isolate_recompiles": True, "recompile_limit": 2 * _MOST_GRAPHS}  # of torch 2.13; else process-wide
    chosen: dict[str, Any] = {key: value for key, value in limits.items() if key in known}
    if BACKEND == "inductor":
        chosen["options"] = {"fallback_random": True}  # the generators' numbers, in their order
    return torch.compile(owner.forward, fullgraph=True, dynamic=False, backend=BACKEND, **chosen)


def _refusal(unit: Unit) -> str:
    """Return why a unit cannot be compiled, as far as that is known before."""
    if getattr(unit.forward, "__func__", None) is not getattr(type(unit.module), "forward", None):
        return "its forward is no method of its class, but was put into the module"
    if unit.traits.mutated or unit.traits.buffers:
        return "it changes its inputs or its buffers in place"
    return ""


def _shown(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:_MOST_LETTERS]}"


def _num_graphs() -> int:
    from torch._dynamo.utils import counters  # costs a second to import, and is needed by whoever compiles

    return counters["stats"].get("unique_graphs", 0)


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one, other) or bool(
        (one.isnan() == other.isnan()).all() and one.nan_to_num().equal(other.nan_to_num())
    )


def _distance(some: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> float:
    """Return the norm of the differences as a share of that of the first ones; NaN counts as infinitely far."""
    if len(some) != len(others) or any(a.shape != b.shape for a, b in zip(some, others, strict=True)):
        return math.inf
    apart = math.hypot(*(float((a.double() - b.double()).norm()) for a, b in zip(some, others, strict=True)), 0.0)
    whole = math.hypot(*(float(a.double().norm()) for a in some), 0.0)
    found = apart / whole if whole else apart
    return math.inf if math.isnan(found) else found
