"""Unit calls: the router of all calls, and the border of a unit in the outer autograd graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import torch

from offload.engine.gradients.flow import GradientObserver
from offload.engine.units.arguments import Arguments, deliver_result, receive_call
from offload.engine.units.keep import keep_for
from offload.engine.units.runner import UnitRunner
from offload.engine.units.traits import GradientTensors, GraphTraits, Rows, Span
from offload.engine.units.unit import CallTarget, Unit
from offload.engine.units.use import Use
from offload.errors import ConfigError, OffloadError
from offload.interrupts import interrupts


class GraphCall(Protocol):
    """The call of a unit behind one node of the outer autograd graph."""

    graph: GraphTraits
    """Properties of the autograd graph inside the node."""
    result: Arguments | None
    """Result tree after the forward."""
    dirty: list[torch.Tensor]
    """Inputs changed in place."""

    def forward(self, tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        """Run the forward; return all tensors that come out."""
        ...

    def backward(self, gradients: GradientTensors, trains: bool) -> GradientTensors:
        """Run the backward; return the input gradients. Parameters take gradients if `trains`."""
        ...


class UnitCall:
    """One `UnitFunction`, from forward to backward."""

    def __init__(self, unit: Unit, runner: UnitRunner, rows: Rows, arguments: Arguments) -> None:
        self.unit = unit
        self.traits = unit.traits  # of this structure of arguments: a later call may select others
        signature = unit.gradient_signature(arguments.tensors)
        self.graph = self.traits.graph(signature)
        needs, self._frozen = signature
        self._runner = runner
        self._rows = rows

        # What the use keeps until its backward: chosen by graph and shapes, as the policy measured them before.
        key = unit.name, *[(t.shape, t.dtype) for t in arguments.tensors]
        keep_class = keep_for(runner.saved.policy, unit, key, self.graph)
        self._keep = keep_class(unit, runner, rows, arguments, needs, self.graph, key)
        self._is_open = False
        """True from the forward to the backward, which runs once."""

        # Outputs for autograd, until `join_graph` has taken them.
        self.result: Arguments | None = None
        self.dirty: list[torch.Tensor] = []

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the forward and save the data for the backward.

        Returns the result tensors, then the inputs changed in place, then the tensors kept elsewhere: autograd gives
        them this call as their graph, wherever they are.
        """
        unit, runner = self.unit, self._runner
        traits = self.traits
        self._is_open = True
        self._keep.begin(tensors)
        runner.enter(unit)
        try:
            results = self._keep.forward(tensors)
        finally:
            runner.leave()
        self.result = results[0]
        self.result.tensors[:] = runner.join(unit, self._rows, results)
        self._keep.check()
        # The caller changes this result in place, and autograd forbids in-place changes to a view.
        for i in traits.changed:
            if all(self.result.tensors[i] is not t for t in tensors):
                self.result.tensors[i] = self.result.tensors[i].clone()
        outputs = [*self.result.tensors]
        if traits.mutated:
            self.dirty = [tensors[i] for i in sorted(traits.mutated) if tensors[i].is_floating_point()]
            outputs += [t for t in self.dirty if all(t is not other for other in outputs)]
        return [*outputs, *self._keep.collect(outputs)]

    def backward(self, gradients: GradientTensors, trains: bool) -> list[torch.Tensor | None]:
        """Run the backward of every micro-batch and return the input gradients.

        Parameter gradients go to the runner if `trains`.

        Raises OffloadError with create_graph, after a second backward, an aborted step or a weight change.
        """
        unit, runner = self.unit, self._runner
        keep = self._keep
        if torch.is_grad_enabled():
            raise OffloadError(
                f"unit {unit.name}: backward with create_graph=True needs a graph of the gradients, which an offloaded "
                "unit cannot build. Leave out create_graph, or approximate the penalty with finite differences."
            )
        if not self._is_open:
            raise OffloadError(
                f"unit {unit.name}: backward ran twice over one forward (with retain_graph=True, or over tensors of an "
                "earlier forward or a trial run that a global list or a hook still holds); run the forward again, and "
                "collect tensors in an attribute of the model."
            )
        keep.check()
        if not runner.claims.has(keep.claim):
            raise OffloadError(
                f"unit {unit.name}: the step of this forward was given up, by an exception or by zero_grad(), which "
                "drops all forwards of a step; run the forward again."
            )
        if not keep.claim.is_current:
            raise OffloadError(
                f"unit {unit.name}: the weights have changed since this forward (by an update, a step or a loaded "
                "checkpoint), so its gradients would be wrong; run the forward again."
            )
        keep.check_gradients(gradients)
        caller_rng_state = runner.device.random_state()
        reads = keep.reads_weights
        try:
            runner.enter(unit, backward=trains, reads=reads)
            if reads:  # A backward may run module code again (torch.utils.checkpoint inside a block).
                unit.install(unit.live())
            with unit.frozen_with(self._frozen):
                input_gradients = keep.backward(gradients, trains)
            if trains:
                runner.gradients.close(unit.regions)
        except BaseException:
            runner.has_failed = True
            raise
        finally:
            unit.install(unit.placeholders)
            runner.device.set_random_state(caller_rng_state)
            runner.leave()
            self._is_open = False
            keep.close()
        return self.traits.join_gradients(input_gradients)


class UnitFunction(torch.autograd.Function):
    """The border between the outer autograd graph and a unit."""

    @staticmethod
    def forward(
        ctx: Any, call: GraphCall, _anchor: torch.Tensor | None, num_weights: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """`tensors`: the inputs, then `num_weights` stand-ins of the unit, for a backward that asks for one of them."""
        ctx.call, ctx.num_weights = call, num_weights
        ctx.set_materialize_grads(False)
        outputs = call.forward(tensors[: len(tensors) - num_weights])
        if call.dirty:
            ctx.mark_dirty(*call.dirty)
        detached = call.graph.detached
        ctx.mark_non_differentiable(*(t for i, t in enumerate(outputs) if i in detached or not t.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        # `torch.autograd.grad`, or a backward with chosen inputs, must not change weight gradients.
        trains = not ctx.needs_input_grad[1] or torch._C._will_engine_execute_node(ctx.next_functions[0][0])
        if not trains:
            _refuse_weight_inputs(ctx.next_functions[len(ctx.next_functions) - ctx.num_weights :])
        with interrupts:
            return None, None, None, *ctx.call.backward(gradients, trains), *[None] * ctx.num_weights


def is_unit(node: Any) -> bool:
    """Tell whether a graph node is the border to a unit."""
    return getattr(type(node), "_forward_cls", None) is UnitFunction


def _refuse_weight_inputs(edges: Sequence[tuple[Any, int]]) -> None:
    """Raise ConfigError if the running backward was asked for the gradient of a weight with one of these edges."""
    for node, _ in edges:
        if node is not None and torch._C._will_engine_execute_node(node):
            name = node.variable.info.name
            raise ConfigError(
                f"backward(inputs=...) asked for the gradient of {name}, which no graph has: the engine computes it "
                "with all others, unit by unit. Call requires_grad_(False) on other weights before the forward, and "
                "loss.backward(); or loss.backward(), read parameter.grad, and drop all with optimizer.zero_grad()."
            )


def join_graph(
    call: GraphCall, unit: Unit, runner: UnitRunner, arguments: Arguments
) -> tuple[Arguments, Sequence[torch.Tensor]]:
    """Run a call as a node of the outer graph; return the result tree and the result tensors.

    The anchor makes the outputs require gradients even if no input does.
    """
    weights: Sequence[torch.Tensor] = ()
    if not runner.is_engine_call:  # a script's backward has any inputs
        weights = unit.stand_ins
    anchor = None
    if unit.trainable:
        anchor = runner.anchor
    outputs = UnitFunction.apply(call, anchor, len(weights), *arguments.tensors, *weights)
    # Two ways back: autograd returns tensors alone, so the tree around them comes as `call.result`.
    # The outputs hold the call through their graph. If the call also held the outputs (or an input changed in place,
    # now an output), the reference cycle would never be freed. Inputs needed by the backward are saved elsewhere.
    result = call.result
    call.result = None
    call.dirty = []
    arguments.tensors.clear()
    assert result is not None
    return result, outputs


def call_unit_without_graph(
    unit: Unit, runner: UnitRunner, rows: Rows, arguments: Arguments
) -> tuple[Arguments, Sequence[torch.Tensor]]:
    """Run a unit without gradients."""
    runner.enter(unit)
    try:
        with torch.no_grad():
            results = run_without_backward(unit, runner, rows, arguments, draws=False)
    finally:
        runner.leave()
    tensors = runner.join(unit, rows, results)
    if torch.is_grad_enabled():
        tensors = _renew_views(tensors, arguments.tensors)
    return results[0], tensors


def _renew_views(results: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return results computed under no_grad with new views in place of views.

    The caller may add a trained tensor to a frozen result in place, but torch forbids this for a view made under
    no_grad. Views of one tensor stay views of one tensor, also of an input or of another result.
    """
    bases: dict[int, torch.Tensor] = {}
    renewed = []
    for tensor in results:
        base = tensor._base
        if base is not None:
            is_known = any(base is t or base is t._base for t in inputs) or any(base is t for t in results)
            root = bases.setdefault(id(base), base if is_known else base.detach())
            is_strided = tensor.dtype == base.dtype and tensor.is_conj() == base.is_conj()
            places = tensor.shape, tensor.stride(), tensor.storage_offset()
            tensor = root.as_strided(*places) if is_strided else tensor.detach()
        renewed.append(tensor)
    return renewed


def run_without_backward(
    unit: Unit, runner: UnitRunner, rows: Rows, arguments: Arguments, draws: bool = True
) -> list[Arguments]:
    """Run a unit on all its rows. Return a result per micro-batch. The weights are in the slot."""

    def run(_span: Span | None, tensors: Sequence[torch.Tensor], others: Sequence[Any]) -> Arguments:
        use = Use(runner, arguments, tensors, others)
        return runner.run(unit, use, runner.stages.forward_of(unit, use))

    return runner.run_rows(unit, rows, arguments, arguments.tensors, run, draws)


class Router:
    """Receives all unit calls: runs them with or without a backward, or passes them to a `diverted` target."""

    def __init__(self, runner: UnitRunner, recover: Callable[[], None]) -> None:
        """`recover`: resets the engine after a pass failed halfway."""
        self._runner, self._recover = runner, recover
        self.target: CallTarget = self.stream

    def stream(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run a unit forward by the runner, as in training steps."""
        runner = self._runner
        if runner.has_failed:
            self._recover()
        with interrupts:
            runner.collect()
            is_step = torch.is_grad_enabled() or runner.rows.is_cut
            arguments, containers = receive_call(args, kwargs, opens_caches=is_step)
            rows = runner.receive(unit, arguments)
            if torch.is_grad_enabled() and (unit.trainable or any(t.requires_grad for t in arguments.tensors)):
                runner.expect_backward(unit)
                call = UnitCall(unit, runner, rows, arguments)
                return deliver_result(*join_graph(call, unit, runner, arguments), containers)
            return deliver_result(*call_unit_without_graph(unit, runner, rows, arguments), containers)

    @contextmanager
    def trial_mode(self, calls: CallTarget, observer: GradientObserver = lambda *_: None) -> Iterator[None]:
        """Send unit calls to `calls`, and gradients only to `observer`, during the context. For trial runs."""
        gradients = self._runner.gradients
        with self.diverted(calls):
            gradients.observe(observer)
            try:
                yield
            finally:
                gradients.observe(None)

    @contextmanager
    def diverted(self, calls: CallTarget) -> Iterator[None]:
        """Send unit calls to `calls` during the context."""
        before, self.target = self.target, calls
        try:
            yield
        finally:
            self.target = before
