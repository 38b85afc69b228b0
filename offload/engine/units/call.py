"""Unit calls: the router of all calls, and one use of a unit, per micro-batch, with recomputation or a saved graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from weakref import ref

import torch

from offload.engine.gradients.flow import GradientObserver
from offload.engine.units.activation_offload import DeviceCopy
from offload.engine.units.arguments import Arguments, deliver_result, receive_call
from offload.engine.units.kept import KeptTensors
from offload.engine.units.offloaded_graph import OffloadedGraphMemory
from offload.engine.units.recompute_policy import MEASURED, OFFLOADED, PRODUCTS, REMADE
from offload.engine.units.runner import UnitRunner, synchronized
from offload.engine.units.saved_graph import (
    Graph,
    GraphMemory,
    TooMuchToKeepError,
    refuse_changed,
    run_with_graph,
)
from offload.engine.units.snapshots import Snapshot, ThreadState
from offload.engine.units.stages import Forward, Use
from offload.engine.units.state_snapshot import Collected
from offload.engine.units.traits import Rows
from offload.engine.units.unit import CallTarget, Unit
from offload.errors import ConfigError, OffloadError
from offload.interrupts import interrupts


@dataclass
class MicroBatch:
    """One micro-batch of a call."""

    rows: Rows | None
    """Rows of the micro-batch. None: the whole input."""
    snapshot: Snapshot
    """RNG and module state before the forward."""
    forward: Forward
    """Function for the forward and the recomputation."""
    graph: Graph | None = None
    """Saved autograd graph. None: the backward recomputes."""
    expert_outputs: list[torch.Tensor] = field(default_factory=list)
    """Streamed expert outputs from the forward. The recomputation reuses them instead of fetching experts again."""


class UnitCall:
    """State for one `UnitFunction` from forward to backward."""

    def __init__(self, unit: Unit, runner: UnitRunner, arguments: Arguments) -> None:
        self.unit, self._runner, self._arguments, self.traits = unit, runner, arguments, unit.traits
        self.signature = unit.gradient_signature(arguments.tensors)
        self._needs, self._frozen = self.signature
        self._thread_state = ThreadState(runner.device.torch_device.type)
        self._inputs: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._micro_batches: list[MicroBatch] = []
        self._shapes = [(t.shape, t.dtype) for t in arguments.tensors]
        self.result: Arguments | None = None
        self.dirty: list[torch.Tensor] = []
        self._is_open = False
        self._kept: dict[int, ref[torch.Tensor]] = {}  # by number
        self._made: KeptTensors | None = None
        self._views: set[int] = set()  # numbers of kept views of weights
        self._input_copies: dict[int, list[DeviceCopy]] = {}
        self._claim = runner.claims.open(self, unit.name)

    # -- forward ---------------------------------------------------------------------------------------------

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run the forward and save the data for the backward.

        Returns the result tensors, then the inputs changed in place, then the tensors kept elsewhere: autograd gives
        them this call as their graph, wherever they are.
        """
        unit, runner, traits = self.unit, self._runner, self.traits
        graph_storage = runner.saved.policy.graph_storage(unit, self._shapes, self.signature)
        self._is_open = True
        if graph_storage in REMADE:
            self._save_inputs(tensors)
        elif graph_storage == OFFLOADED:
            runner.saved.add_use(self)
        if traits.keeps and runner.rows_of(unit) == [None]:
            self._made = KeptTensors()
        runner.enter(unit)
        unchanged_buffers = unit.still_buffers() if graph_storage in REMADE else []
        try:
            results = runner.run_rows(unit, self._arguments, tensors, partial(self._forward_of, graph_storage))
        finally:
            runner.leave()
        _refuse_changed_buffers(unit, unchanged_buffers)
        self.result = results[0]
        self.result.tensors[:] = runner.join(unit, results)
        self._check_inputs()
        # The caller changes this result in place, and autograd forbids in-place changes to a view.
        for i in traits.changed:
            if all(self.result.tensors[i] is not t for t in tensors):
                self.result.tensors[i] = self.result.tensors[i].clone()
        self.dirty = [tensors[i] for i in sorted(traits.mutated) if tensors[i].is_floating_point()]
        dirty = [t for t in self.dirty if all(t is not other for other in self.result.tensors)]
        return [*self.result.tensors, *dirty, *self._collect_kept([*self.result.tensors, *dirty])]

    def _collect_kept(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return the tensors of the forward that are held outside, other than results."""
        kept = self._made.alive(results) if self._made else {}
        self._views = {number for number, t in kept.items() if self._runner.slots.streams(t.data_ptr())}
        self._made, self._kept = None, {number: ref(tensor) for number, tensor in kept.items()}
        return list(kept.values())

    def _forward_of(
        self, graph_storage: str, rows: Rows | None, inputs: Sequence[torch.Tensor], others: Sequence[Any]
    ) -> Arguments:
        """Run one micro-batch. The graph is kept in `graph_storage`, or dropped for a recomputation."""
        unit, runner, saved = self.unit, self._runner, self._runner.saved
        keeps_products = graph_storage in (PRODUCTS, MEASURED)
        use = Use(runner, self._arguments, inputs, others, self._needs, keeps_products)
        forward = runner.stages.forward_of(unit, use)
        snapshot = runner.snapshot(unit, graph_storage in REMADE or saved.policy.may_drop(graph_storage))
        micro_batch = MicroBatch(rows, snapshot, forward)
        self._micro_batches.append(micro_batch)
        outputs = micro_batch.expert_outputs
        if graph_storage not in REMADE:
            memory_class = OffloadedGraphMemory if graph_storage == OFFLOADED else GraphMemory
            memory = memory_class(unit, runner, use, self._claim)
            try:
                with runner.outputs.recorded_in(outputs):
                    micro_batch.graph, result = memory.run(unit, use, forward)
                outputs.clear()
                return result
            except TooMuchToKeepError:
                # The graph exceeds the available memory, unforeseen in the plan for this shape. Drop the graph and
                # recompute this use.
                micro_batch.snapshot.put_back()
                if not self._inputs:
                    self._save_inputs(self._arguments.tensors)
        # Reuse the expert outputs from the aborted graph run. A second fetch is collective, and other ranks may have
        # kept their graph.
        replayed_outputs = [tensor.clone() for tensor in outputs]
        with runner.outputs.recorded_in(outputs), runner.outputs.replayed(replayed_outputs):
            if self._made or keeps_products:  # torch chooses products by the need of a graph; nothing is saved
                watched = self._made.watching(forward) if self._made else forward
                with torch.autograd.graph.saved_tensors_hooks(lambda _: None, lambda _: torch.empty(0)):
                    graph, result = run_with_graph(unit, use, watched)
                if self._made:
                    self._made.add_inputs(graph.leaves)
                del graph
            elif unit.traits.needs_graph:  # without one, torch would select a kernel with different last bits
                result = run_with_graph(unit, use, forward)[1]
            else:
                result = runner.run(unit, use, forward)
        if keeps_products and not saved.policy.keeps_outputs(graph_storage, unit, self._shapes, outputs):
            outputs.clear()
        outputs[:] = [saved.save_input(tensor, movable=not keeps_products) for tensor in outputs]
        for tensor in outputs:
            saved.reserve(tensor, "kept tensors" if keeps_products else "unit inputs", self._claim)
        if keeps_products:
            saved.policy.update_peaks()
        return result

    def _check_inputs(self) -> None:
        for tensor, version in zip(self._inputs, self._versions, strict=True):
            refuse_changed(self.unit, tensor, version)

    def _save_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        traits = self.traits
        copied = traits.mutated | traits.stale
        inputs, saved = [], self._runner.saved
        for i, (t, need) in enumerate(zip(tensors, self._needs, strict=True)):
            saved_input = saved.save_input(t.clone() if i in copied else t.detach(), need and i not in traits.shared)
            saved.reserve(saved_input, "unit inputs", self._claim)
            inputs.append(saved_input)
        self._inputs, self._versions = inputs, [t._version for t in inputs]
        if not saved.inputs_stay:
            saved.add_use(self)

    # -- backward --------------------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[torch.Tensor | None], trains: bool) -> list[torch.Tensor | None]:
        """Run the backward of every micro-batch and return the input gradients.

        Parameter gradients go to the runner if `trains`.

        Raises OffloadError with create_graph, after a second backward, an aborted step or a weight change.
        """
        unit, runner = self.unit, self._runner
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
        self._check_inputs()
        if not runner.claims.has(self._claim):
            raise OffloadError(
                f"unit {unit.name}: the step of this forward was given up, by an exception or by zero_grad(), which "
                "drops all forwards of a step; run the forward again."
            )
        if not self._claim.is_current:
            raise OffloadError(
                f"unit {unit.name}: the weights have changed since this forward (by an update, a step or a loaded "
                "checkpoint), so its gradients would be wrong; run the forward again."
            )
        of_kept = zip(self._kept, gradients[len(gradients) - len(self._kept) :], strict=True)
        if any(number in self._views and gradient is not None for number, gradient in of_kept):
            raise ConfigError(
                f"unit {unit.name} keeps a view of its weights outside, and the view was used in a loss, but the "
                "weights leave the device. Keep a copy (.clone()), or compute inside the unit and return the result."
            )
        input_gradients: list[list[torch.Tensor | None]] = []
        caller_rng_state = runner.device.random_state()
        reads = self._reads_weights
        try:
            runner.enter(unit, backward=trains, reads=reads)
            if reads:  # A backward may run module code again (torch.utils.checkpoint inside a block).
                unit.install(unit.live())
            with unit.frozen_with(self._frozen):
                for number, micro_batch in enumerate(synchronized(runner, unit, self._micro_batches)):
                    input_gradients.append(self._backward_of(number, micro_batch, gradients, trains))
            runner.saved.prefetch_previous(self, 1)  # Start this copy before the weight copies submitted by `leave`.
            if trains:
                runner.gradients.close(unit.regions)
        except BaseException:
            runner.has_failed = True
            raise
        finally:
            unit.install(unit.placeholders)
            runner.device.set_random_state(caller_rng_state)
            runner.leave()
            self.close()
        return self.traits.join_gradients(input_gradients, self._shapes)

    @property
    def _reads_weights(self) -> bool:
        """False only if all graphs are saved and need no weights."""
        memories = [each.graph.memory if each.graph else None for each in self._micro_batches]
        is_free = all(memory is not None and not memory.has_weights for memory in memories)
        return not is_free or self.traits.graph(self.signature).reads_weights

    def _backward_of(
        self, number: int, micro_batch: MicroBatch, gradients: Sequence[torch.Tensor | None], trains: bool
    ) -> list[torch.Tensor | None]:
        """Run the backward of one micro-batch; return the input gradients."""
        self._look_ahead(number)
        graph, micro_batch.graph = micro_batch.graph, None
        with nullcontext() if graph else micro_batch.snapshot.values_restored(self.traits.buffers):
            graph = graph or self._recompute(number)
            pieces = self.traits.cut_outputs(gradients, micro_batch.rows)
            pairs: list[tuple[Any, torch.Tensor]] = [
                (root, g) for root, g in zip(graph.roots, pieces, strict=True) if g is not None and root is not None
            ]
            inputs = None if trains else [leaf for leaf, need in zip(graph.leaves, self._needs, strict=True) if need]
            torch.autograd.backward([root for root, _ in pairs], [g for _, g in pairs], inputs=inputs)
            for kept, root in zip(self._kept.values(), graph.roots[len(graph.roots) - len(self._kept) :], strict=True):
                if isinstance(root, torch.Tensor) and root.retains_grad and (tensor := kept()) is not None:
                    tensor.grad = root.grad
        return [leaf.grad if need else None for leaf, need in zip(graph.leaves, self._needs, strict=True)]

    def _look_ahead(self, number: int) -> None:
        """Start the H2D copies for this micro-batch and for the next one in backward order."""
        saved = self._runner.saved
        self.prepare(number)
        if number + 1 == len(self._micro_batches):
            saved.prefetch_previous(self)
        elif saved.prefetches:
            self.prepare(number + 1)

    def prepare(self, number: int = 0) -> None:
        """Start the H2D copy of a micro-batch's saved inputs or saved graph."""
        graph = self._micro_batches[number].graph if number < len(self._micro_batches) else None
        if graph is not None and graph.memory is not None:
            graph.memory.prepare()
        elif number < len(self._micro_batches) and number not in self._input_copies:
            micro_batch = self._micro_batches[number]
            inputs = self.traits.cut_inputs(self._inputs, micro_batch.rows)
            self._input_copies[number] = self._runner.saved.start_copies([*inputs, *micro_batch.expert_outputs])

    def _recompute(self, number: int) -> Graph:
        """Run a micro-batch forward again with a graph."""
        unit, runner, traits, micro_batch = self.unit, self._runner, self.traits, self._micro_batches[number]
        saved = runner.saved.wait(self._input_copies.pop(number))
        others = traits.cut_others(self._arguments.others, micro_batch.rows)
        inputs, outputs = saved[: len(self._needs)], saved[len(self._needs) :]
        use = Use(runner, self._arguments, inputs, others, self._needs)
        with (
            runner.saved.policy.measure(
                unit, self._shapes, inputs if runner.saved.inputs_stay else (), len(self._micro_batches)
            ),
            micro_batch.snapshot.repeated(),
            runner.outputs.replayed(outputs),
        ):
            forward = runner.stages.for_recomputation(micro_batch.forward)
            made, collected = KeptTensors(self._kept), Collected(unit.modules if traits.keeps else ())
            forward = made.watching(forward) if self._kept else forward
            graph, _ = self._thread_state.run(run_with_graph, unit, use, forward, traits.mutated)
        collected.put_back()
        if self._kept:
            made.add_inputs(graph.leaves)
            graph.roots += [self._find_again(made, number) for number in self._kept]
        return graph

    def _find_again(self, made: KeptTensors, number: int) -> torch.Tensor:
        """Return a kept tensor in the graph of the recomputation. Raises ConfigError."""
        tensor, kept = made.again.get(number), self._kept[number]()
        if tensor is None or not tensor.requires_grad or (kept is not None and tensor.shape != kept.shape):
            raise ConfigError(
                f"unit {self.unit.name} keeps a tensor outside that its recomputation does not make again: its forward "
                "takes another path there. Return the tensor from the unit, or keep tensor.detach()."
            )
        return tensor

    def close(self) -> None:
        """Release everything saved for the backward."""
        if self._is_open:
            self._is_open = False
            self._inputs, self._micro_batches, self._input_copies = [], [], {}
            self._runner.finish(self._claim)


def _refuse_changed_buffers(unit: Unit, buffers: Sequence[tuple[torch.Tensor, int]]) -> None:
    for buffer, version in buffers:
        if buffer._version != version:
            names = (key for module in unit.modules for key, other in module._buffers.items() if other is buffer)
            key = next(names, "a buffer")
            raise ConfigError(
                f"unit {unit.name} changes its buffer {key} in place, but did not in the recording pass, and "
                "recomputation would change it twice. Change the buffer from the first step on (by 0 if nothing "
                f"changes yet), assign a new tensor (self.{key} = ...), or set --train.recompute never."
            )


class UnitFunction(torch.autograd.Function):
    """The border between the outer autograd graph and a unit."""

    @staticmethod
    def forward(
        ctx: Any, call: UnitCall, _anchor: torch.Tensor | None, num_weights: int, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """`tensors`: the inputs, then `num_weights` stand-ins of the unit, for a backward that asks for one of them."""
        ctx.call, ctx.num_weights = call, num_weights
        ctx.set_materialize_grads(False)
        outputs = call.forward(tensors[: len(tensors) - num_weights])
        if call.dirty:
            ctx.mark_dirty(*call.dirty)
        detached = call.traits.graph(call.signature).detached
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


def call_unit(unit: Unit, runner: UnitRunner, arguments: Arguments) -> tuple[Arguments, Sequence[torch.Tensor]]:
    """Run one differentiable use of a unit. The anchor makes the outputs require gradients even if no input does."""
    call = UnitCall(unit, runner, arguments)
    weights = () if runner.is_engine_call else unit.stand_ins  # a script's backward has any inputs
    anchor = runner.anchor if unit.trainable else None
    outputs = UnitFunction.apply(call, anchor, len(weights), *arguments.tensors, *weights)
    # Two ways back: autograd returns tensors alone, so the tree around them comes as `call.result`.
    # The outputs hold the call through their graph. If the call also held the outputs (or an input changed in place,
    # now an output), the reference cycle would never be freed. Inputs needed by the backward are saved elsewhere.
    result, call.result, call.dirty = call.result, None, []
    arguments.tensors.clear()
    assert result is not None
    return result, outputs


def call_unit_without_graph(
    unit: Unit, runner: UnitRunner, arguments: Arguments
) -> tuple[Arguments, Sequence[torch.Tensor]]:
    """Run a unit without gradients."""
    runner.enter(unit)
    try:
        with torch.no_grad():
            results = run_without_backward(unit, runner, arguments, draws=False)
    finally:
        runner.leave()
    tensors = runner.join(unit, results)
    return results[0], _renew_views(tensors, arguments.tensors) if torch.is_grad_enabled() else tensors


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


def run_without_backward(unit: Unit, runner: UnitRunner, arguments: Arguments, draws: bool = True) -> list[Arguments]:
    """Run a unit on all its rows. Return a result per micro-batch. The weights are in the slot."""

    def run(_rows: Rows | None, tensors: Sequence[torch.Tensor], others: Sequence[Any]) -> Arguments:
        use = Use(runner, arguments, tensors, others)
        return runner.run(unit, use, runner.stages.forward_of(unit, use))

    return runner.run_rows(unit, arguments, arguments.tensors, run, draws)


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
            is_step = torch.is_grad_enabled() or runner.has_micro_batches
            arguments, containers = receive_call(args, kwargs, opens_caches=is_step)
            runner.count(unit, arguments)
            if torch.is_grad_enabled() and (unit.trainable or any(t.requires_grad for t in arguments.tensors)):
                runner.expect_backward(unit)
                return deliver_result(*call_unit(unit, runner, arguments), containers)
            return deliver_result(*call_unit_without_graph(unit, runner, arguments), containers)

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
