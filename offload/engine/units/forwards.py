"""What runs in a use of a unit: its module's own forward, or what torch.compile has made of it."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.engine.units.arguments import Arguments
from offload.engine.units.unit import Unit
from offload.errors import OffloadError

Forward = Callable[..., Any]
Run = Callable[[Unit, Arguments, Sequence[torch.Tensor], Sequence[Any]], Arguments]
"""Runs a unit's module over its arguments, with these tensors and other values in their places."""

BACKEND = "inductor"
_MOST_KINDS = 8
"""Of one class of modules: kinds of uses, which differ in the shapes of the inputs above all, that are compiled."""
_MOST_GRAPHS = 8
"""Of one kind of use: units may differ in numbers that their code reads, and each number is a graph."""
_APART = {False: (1e-4, 1e-3), True: (3e-2, 1e-1)}
"""How far a compiled use may be from the module's own, by whether it computes in 16 bits: as a share of the norm of
results, and of gradients.
"""


class OwnForwards:
    """Uses run the modules' own forwards."""

    num_graphs = 0
    """Graphs that were compiled so far."""

    def of(
        self, unit: Unit, _arguments: Arguments, _tensors: Sequence[torch.Tensor], _others: Sequence[Any]
    ) -> Forward:
        """Return what runs in a use of a unit with these arguments, called as the module's forward."""
        return unit.forward

    def try_out(
        self,
        unit: Unit,
        arguments: Arguments,
        tensors: Sequence[torch.Tensor],
        others: Sequence[Any],
        needs: Sequence[bool] | None,
        run: Run,
        undone: Callable[[Unit], AbstractContextManager[None]],
    ) -> None:
        """A use of a unit begins, whose weights are up; nothing of it has run yet. `needs`: which tensors take gradients,
        or None where the use has no backward. Within `undone(unit)`, what the unit draws and notes is put back.
        """

    def compiles(self, _kind: type) -> bool:
        """Return True if modules of this class ran compiled, and none was refused."""
        return False

    def paused(self) -> AbstractContextManager[None]:
        """Within, trials run the modules' own forwards."""
        return nullcontext()


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
        self._tried: Forward | None = None
        self._is_paused = False
        self.num_graphs = 0

    def of(self, unit: Unit, arguments: Arguments, tensors: Sequence[torch.Tensor], others: Sequence[Any]) -> Forward:
        if self._tried is not None:
            return self._tried
        found = None if self._is_paused else self._chosen.get((unit.number, _kind(unit, arguments, tensors, others)))
        return unit.forward if found is None else partial(self._counted, found, unit.module)

    def try_out(
        self,
        unit: Unit,
        arguments: Arguments,
        tensors: Sequence[torch.Tensor],
        others: Sequence[Any],
        needs: Sequence[bool] | None,
        run: Run,
        undone: Callable[[Unit], AbstractContextManager[None]],
    ) -> None:
        if self._is_paused or not unit.is_block:
            return
        kind, owner = _kind(unit, arguments, tensors, others), type(unit.module)
        key = unit.number, kind
        if key in self._chosen:
            return
        self._chosen[key], refusal = None, _refusal(unit)
        if owner in self._refused:
            return
        if not refusal:
            functions = self._functions.setdefault(owner, {})
            if kind not in functions and len(functions) == _MOST_KINDS:
                refusal = (
                    f"{_MOST_KINDS} kinds of inputs were compiled, and here is another (give all batches one length)"
                )
            else:
                function = functions.setdefault(kind, _compiled(owner))
                try:
                    made = partial(self._made, unit, arguments, tensors, others, needs, run, undone)
                    refusal = self._difference(unit, made, partial(self._counted, function, unit.module), needs)
                except (OffloadError, torch.OutOfMemoryError):
                    raise
                except Exception as error:
                    refusal = f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]
                if not refusal:
                    self._chosen[key] = function
        if refusal:
            self._refused.add(owner)
            warnings.warn(
                f"compile is auto, and {owner.__name__} (unit {unit.name}) runs as it is from here on: {refusal}.",
                stacklevel=2,
            )

    def compiles(self, kind: type) -> bool:
        return kind in self._functions and kind not in self._refused

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def _counted(self, function: Forward, *args: Any, **kwargs: Any) -> Any:
        before = _num_graphs()
        try:
            return function(*args, **kwargs)
        finally:
            self.num_graphs += _num_graphs() - before

    def _difference(self, unit: Unit, made: Callable[..., Any], function: Forward, needs: Sequence[bool] | None) -> str:
        """Return why a unit is not to be compiled; empty where it gives what its own forward gives."""
        has_graph = needs is not None
        results, gradients = made(unit.forward, has_graph)
        mine, _ = made(function, False)
        before = self.num_graphs
        again, _ = made(function, False)
        if self.num_graphs > before:
            return "it would be compiled anew in each use, since what its code reads changes"
        is_half = any(t.dtype in (torch.bfloat16, torch.float16) for t in results)
        of_results, of_gradients = _APART[is_half]
        if (far := _distance(results, mine)) > of_results:
            return f"compiled, its results are {far:.3g} of their norm from its own"
        if has_graph:
            with_graph, compiled_gradients = made(function, True)
            if not all(map(_same, mine, with_graph)):
                unit.traits.need_graph()  # or a recompute had other bits than the forward
            if (far := _distance(gradients, compiled_gradients)) > of_gradients:
                return f"compiled, its gradients are {far:.3g} of their norm from its own"
        return "" if all(map(_same, mine, again)) else "compiled, it gives another result each time"

    def _made(
        self,
        unit: Unit,
        arguments: Arguments,
        tensors: Sequence[torch.Tensor],
        others: Sequence[Any],
        needs: Sequence[bool] | None,
        run: Run,
        undone: Callable[[Unit], AbstractContextManager[None]],
        function: Forward,
        has_graph: bool,
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return the results of a use, and the gradients of half the sum of their squares."""
        self._tried = function
        try:
            with undone(unit), torch.set_grad_enabled(has_graph):
                leaves = tensors
                if has_graph and needs is not None:
                    leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
                found = [t for t in run(unit, arguments, leaves, others).tensors if t.is_floating_point()]
                gradients: list[torch.Tensor] = []
                if has_graph:
                    roots = [t for t in found if t.requires_grad]
                    trained = [p for p in unit.live().values() if p.requires_grad]
                    inputs = [*(leaf for leaf in leaves if leaf.requires_grad), *trained]
                    if roots and inputs:
                        mine = [t.detach() for t in roots]
                        made = torch.autograd.grad(roots, inputs, mine, allow_unused=True)
                        gradients = [torch.zeros_like(t) if g is None else g for t, g in zip(inputs, made, strict=True)]
                return [t.detach().clone() for t in found], gradients
        finally:
            self._tried = None


def open_forwards(mode: str) -> OwnForwards:
    """Return what runs in uses of units: compile `never`, or `auto`."""
    return CompiledForwards() if mode == "auto" else OwnForwards()


def compile_modules(modules: Iterable[nn.Module]) -> None:
    """Let modules of a resident model run as an engine compiles units: one function for each class."""
    made: dict[type, Forward] = {}
    for module in modules:
        function = made.setdefault(type(module), _compiled(type(module)))
        module.forward = partial(function, module)


def _kind(unit: Unit, arguments: Arguments, tensors: Sequence[torch.Tensor], others: Sequence[Any]) -> Hashable:
    """Return what uses have in common that one function serves."""
    plain = tuple(
        [other if isinstance(other, (bool, int, float, str, type(None))) else type(other) for other in others]
    )
    device = tensors[0].device.type if tensors else "cpu"
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return unit.module.training, arguments.structure, tuple([(t.shape, t.dtype) for t in tensors]), plain, cast


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
