"""Forward functions for unit uses: the module's own forward or a torch.compile version."""

from __future__ import annotations

import inspect
from collections.abc import Hashable, Iterable, Sequence
from functools import cache, partial
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from offload.engine.comparison import OTHER_KERNELS, Sketch, largest_excess, same_bits, tolerance
from offload.engine.loss.cross_entropy import Term, log_probs_with_gradient
from offload.engine.units.fitted_attention import fit_graph
from offload.engine.units.stages import Host, Stage
from offload.engine.units.trial import ENGINE_ERRORS, Trial
from offload.engine.units.unit import Unit
from offload.engine.units.use import Forward, Use
from offload.errors import describe, shorten, warn
from offload.extras.large.compiled_loss import CompiledLoss
from offload.planning.settings import Settings

BACKEND = "inductor"
_MOST_VARIANTS = 8
"""Maximum compiled variants per module class. Variants differ mainly in input shapes."""
_MOST_GRAPHS = 8
"""Maximum graphs per variant, or torch's own limit before torch 2.13. Code may read unit-specific numbers, and each
number needs a graph.
"""
_GRAPH_SHARE = 0.99
"""Part of a graph that a compiled block may keep for the backward (torch: `activation_memory_budget`).

Below 1, the backward computes again all operations that torch can fuse. The outputs of matrix products and attention
stay (arXiv:2205.05198). A graph with random numbers has 1: below 1, torch may draw the numbers of a dropout again in
the backward, and these are others.
"""


class Verdict(NamedTuple):
    """Result of a trial."""

    refusal: str = ""
    """Reason against the compiled function; empty if it may run."""
    needs_graph: bool = False
    """True if the graph with gradients gives other bits than the one without, and so runs in both cases."""


class CompiledForwards(Stage):
    """Blocks run compiled by torch.compile, with one function per variant (class, input shapes and so on).

    All equal layers share the graphs (one without gradients, one with), independent of the slot offset: weights are
    graph inputs, not constants. In each variant the first unit of a build (`build_key`) is compared with the original
    forward (results and gradients). After a failure or difference the class runs uncompiled, with one warning per
    class. Never compiled: units with in-place changes to inputs or buffers, and non-blocks, since each would need a
    compilation for a single use. The loss of a head in chunks is compiled as `CompiledLoss`.
    """

    num_graphs = 0

    def __init__(self, inner: Stage) -> None:
        super().__init__(inner)
        self._functions: dict[type, dict[Hashable, Forward]] = {}  # by class and variant
        self._choices: dict[tuple[int, Hashable], Forward | None] = {}  # by unit and variant
        self._verdicts: dict[Hashable, Verdict] = {}  # of the first unit of each build
        # After a refusal, units already chosen stay compiled: they passed. After a failure none does.
        self._refused: set[type] = set()
        self._failed: set[type] = set()
        self._loss = CompiledLoss(_compile)

    @classmethod
    def over(cls, inner: Stage, host: Host, settings: Settings) -> Stage:  # noqa: ARG003
        return cls(inner)

    def forward_of(self, unit: Unit, use: Use) -> Forward:
        if self.is_paused or not unit.is_block or type(unit.module) in self._failed:
            return self.inner.forward_of(unit, use)
        key = unit.number, _variant_key(unit, use)
        if key not in self._choices:
            self._choices[key] = self._choose(unit, use, key[1])
        return self._choices[key] or self.inner.forward_of(unit, use)

    def term_of(self, term: Term) -> Term:
        if self.is_paused or term is not log_probs_with_gradient:
            return self.inner.term_of(term)
        return self._loss

    @property
    def compiled(self) -> frozenset[type]:
        return frozenset(self._functions) - self._refused

    def _choose(self, unit: Unit, use: Use, variant: Hashable) -> Forward | None:
        """Return the compiled forward of a unit, or None after a refusal with a warning."""
        owner = type(unit.module)
        if owner in self._refused:
            return None
        functions, refusal = self._functions.setdefault(owner, {}), _refusal(unit)
        if not refusal and variant not in functions and len(functions) == _MOST_VARIANTS:
            refusal = f"it has more than {_MOST_VARIANTS} kinds of inputs (give all batches one length)"
        if refusal:
            self._refuse(unit, refusal)
            return None
        if variant not in functions:
            functions[variant] = _compile_class(owner)
        function = partial(self._run_counted, functions[variant], unit.module)
        # Uses without and with a backward have a trial each.
        needs = None if use.needs is None else tuple(use.needs)
        key = owner, variant, build_key(unit), needs
        if key not in self._verdicts:
            self._verdicts[key] = self._try(unit, use, function)
        verdict = self._verdicts[key]
        if verdict.refusal:
            self._refuse(unit, verdict.refusal)
            return None
        if verdict.needs_graph:  # otherwise a recomputation would have other bits than the forward
            unit.traits.needs_graph = True
        return partial(self._run_compiled, unit, function)

    def _refuse(self, unit: Unit, reason: str) -> None:
        owner = type(unit.module)
        self._refused.add(owner)
        warn(f"blocks are compiled, but {owner.__name__} (unit {unit.name}) runs uncompiled from here on: {reason}.")

    def _run_compiled(self, unit: Unit, function: Forward, *args: Any, **kwargs: Any) -> Any:
        """Run a compiled forward. Falls back to the module forward if torch fails to recompile for changed values."""
        try:
            return function(*args, **kwargs)
        except Exception as error:
            if not type(error).__module__.startswith("torch._dynamo"):
                raise
            if type(unit.module) not in self._failed:
                self._failed.add(type(unit.module))
                self._refuse(unit, _format_error(error))
        return unit.compute(*args, **kwargs)

    def _run_counted(self, function: Forward, *args: Any, **kwargs: Any) -> Any:
        before = _num_graphs()
        try:
            return function(*args, **kwargs)
        finally:
            self.num_graphs += _num_graphs() - before

    def _try(self, unit: Unit, use: Use, function: Forward) -> Verdict:
        """Compare a compiled function with the original forward."""
        try:
            return self._compare(unit, use, function)
        except ENGINE_ERRORS:
            raise
        except Exception as error:
            return Verdict(_format_error(error))

    def _compare(self, unit: Unit, use: Use, function: Forward) -> Verdict:
        has_graph, trial = use.needs is not None, Trial(use.runner, unit, use.arguments, use.others)

        def run(forward: Forward, has_graph: bool) -> tuple[list[torch.Tensor], list[Sketch | None]]:
            needs = use.needs if has_graph else [t.requires_grad for t in use.tensors]
            evidence = trial.run(forward, use.tensors, needs, has_graph=has_graph)
            if evidence.changed:
                raise RuntimeError(f"it changes {evidence.changed} in place")
            return [t.clone() for t in evidence.results if t.is_floating_point()], evidence.gradients

        results, gradients = run(unit.compute, has_graph)
        compiled_results, _ = run(function, False)
        before = self.num_graphs
        repeated_results, _ = run(function, False)  # a recomputation must give the same bits
        if self.num_graphs > before:
            return Verdict("it would be recompiled in each use, because values that its code reads change")
        allowed, needs_graph = tolerance(OTHER_KERNELS, results), False
        pair = map(Sketch.of, results), map(Sketch.of, compiled_results)
        if excess := largest_excess(*pair, allowed.result, allowed.rounding):
            return Verdict(f"a compiled result differs by {excess:.3g} of its norm")
        if has_graph:
            with_graph, compiled_gradients = run(function, True)
            needs_graph = not all(map(same_bits, compiled_results, with_graph))
            if excess := largest_excess(gradients, compiled_gradients, allowed.gradient, allowed.rounding):
                return Verdict(f"a compiled gradient differs by {excess:.3g} of its norm")
        if all(map(same_bits, compiled_results, repeated_results)):
            return Verdict(needs_graph=needs_graph)
        return Verdict("its compiled results differ from run to run")


def compile_modules(modules: Iterable[nn.Module]) -> None:
    """Compile the modules of a resident model like engine units: one function per class."""
    compiled: dict[type, Forward] = {}
    for module in modules:
        owner = type(module)
        if owner not in compiled:
            compiled[owner] = _compile_class(owner)
        module.forward = partial(compiled[owner], module)


def _variant_key(unit: Unit, use: Use) -> Hashable:
    """Return the variant key: uses with an equal key share one compiled function."""
    tensors = tuple([(t.shape, t.dtype) for t in use.tensors])
    others = tuple([value if isinstance(value, bool | int | float | str) else type(value) for value in use.others])
    device = use.tensors[0].device.type if use.tensors else "cpu"
    cast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return unit.module.training, use.arguments.structure, tensors, others, cast


def build_key(unit: Unit) -> Hashable:
    """Return the build of a unit: units with an equal key run the same code, except for the numbers that it reads.

    The key has the modules by name, with the attributes that code branches on (flags, names, functions, absent values),
    and the parameters with shape and dtype.
    """

    def selects_code(owner: nn.Module, key: str, value: Any) -> bool:
        is_route = owner is unit.module and key == "forward"  # set by the engine, different in each unit
        return not is_route and (value is None or callable(value) or isinstance(value, bool | str))

    modules = [
        (name, type(owner), [(key, value) for key, value in vars(owner).items() if selects_code(owner, key, value)])
        for name, owner in unit.module.named_modules()
    ]
    forward = getattr(unit.forward, "__func__", unit.forward)
    parameters = [(name, p.shape, p.dtype, p.requires_grad) for name, p in unit.module.named_parameters()]
    return repr((forward, modules, parameters))


def _compile_class(owner: Any) -> Forward:
    """Return the compiled forward of class `owner`, with the module as first argument."""
    return _compile(owner.forward)


def _compile(function: Any) -> Forward:
    """Return a compiled function. Compilation starts with the first call."""
    limits = _own_limits()
    if not limits and isinstance(function, FunctionType):
        function = _copy(function)
    return torch.compile(function, fullgraph=True, dynamic=False, backend=_compile_graph, **limits)


def _compile_graph(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
    """Return the compiled graph. The forward keeps outputs of products and attention alone."""
    from torch._functorch import config  # Imported late, as in `_num_graphs`.

    options = dict[str, Any]()
    if BACKEND == "inductor":
        options["config_patches"] = {
            "fallback_random": True,  # Draws the same random numbers in the same order.
            "joint_custom_pre_pass": _merge_pass(),
        }
    share = 1.0 if _is_random(graph, inputs) else _GRAPH_SHARE
    fit_graph(graph)
    with config.patch(activation_memory_budget=share):
        return torch._dynamo.lookup_backend(BACKEND)(graph, inputs, **options)


@cache
def _merge_pass() -> Any:
    """Return a pass in which equal operations become one, such as the casts of one input to FP8.

    torch does so where a graph has a backward, in its partitioner. Random operations stay apart.
    """
    from torch._functorch.compile_utils import fx_graph_cse  # Imported late, as in `_num_graphs`.
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class MergePass(CustomGraphPass):
        def __call__(self, graph: torch.fx.Graph) -> None:
            assert graph.owning_module is not None
            graph.owning_module.graph = fx_graph_cse(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    return MergePass()


class _SeedWatch(TorchDispatchMode):
    """Finds operations that draw random numbers."""

    has_drawn = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags:  # fused attention too, with and without dropout
            names = [argument.name for argument in func._schema.arguments]
            given = dict(zip(names, args, strict=False)) | kwargs
            self.has_drawn |= given.get("dropout_p", "dropout_p" not in names) > 0
        return func(*args, **kwargs)


def _is_random(graph: torch.fx.GraphModule, inputs: Sequence[Any]) -> bool:
    """Return whether a graph draws random numbers. The graph runs without data."""
    with FakeTensorMode(allow_non_fake_inputs=True), _SeedWatch() as watch:
        graph(*[torch.empty_like(t) if isinstance(t, torch.Tensor) else t for t in inputs])
    return watch.has_drawn


def _own_limits() -> dict[str, Any]:
    """Return the options for separate limits of a compiled function; empty before torch 2.13."""
    limits = {"isolate_recompiles": True, "recompile_limit": 2 * _MOST_GRAPHS}
    known = inspect.signature(torch.compile).parameters
    return limits if limits.keys() <= known.keys() else {}


def _copy(function: FunctionType) -> FunctionType:
    """Return the same function with a code object of its own.

    Before torch 2.13 the graphs of all variants, and of all engines in a process, count against one limit (8) for each
    code object.
    """
    copy = FunctionType(
        function.__code__.replace(),
        function.__globals__,
        function.__name__,
        function.__defaults__,
        function.__closure__,
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    copy.__dict__ = dict(function.__dict__)
    return copy


def _refusal(unit: Unit) -> str:
    """Return a reason against compilation known before a trial; empty for none."""
    if getattr(unit.forward, "__func__", None) is not getattr(type(unit.module), "forward", None):
        return "its forward is not the method of its class, but was replaced on the module"
    if unit.traits.mutated or unit.traits.buffers:
        return "it changes its inputs or its buffers in place"
    return ""


def _format_error(error: BaseException) -> str:
    if "Observed exception" in str(error) and error.__cause__ is not None:  # raised by the traced code
        error = error.__cause__
    return shorten(describe(error))


def _num_graphs() -> int:
    from torch._dynamo.utils import counters  # Imported late: takes a second, and is needed only with compilation.

    return counters["stats"].get("unique_graphs", 0)
