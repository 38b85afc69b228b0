"""How a use of a unit is kept between forward and backward: by its inputs, by product outputs, or by its graph.

`keep_for` chooses a class for each use. The inputs are the base: the backward runs the forward again, and so it does
where a graph proves too large.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any
from weakref import ref

import torch

from offload.engine.units.activation_offload import DeviceCopy
from offload.engine.units.arguments import Arguments
from offload.engine.units.offloaded_graph import OffloadedGraphMemory
from offload.engine.units.outside_tensors import OutsideTensors
from offload.engine.units.recompute_policy import PRODUCTS, RecomputePolicy, UseKey, saved_tensors_dropped
from offload.engine.units.runner import UnitRunner, synchronized
from offload.engine.units.saved_graph import (
    Graph,
    GraphMemory,
    TooMuchToKeepError,
    refuse_changed,
    run_with_graph,
)
from offload.engine.units.snapshots import Snapshot, ThreadState
from offload.engine.units.state_snapshot import ContainerSnapshot
from offload.engine.units.traits import GradientTensors, GraphTraits, Rows, Span
from offload.engine.units.unit import Unit
from offload.engine.units.use import Forward, Product, Use
from offload.errors import ConfigError

_version = attrgetter("_version")
_COPIED_SHARE = 10
"""A unit recomputes if the graph has weight copies above 1/10 of the weight bytes.

Keeping the copies would undo weight streaming.
"""


@dataclass
class MicroBatch:
    """One micro-batch of a use, from forward to backward."""

    span: Span | None
    """Rows of the micro-batch. None: the whole input."""
    snapshot: Snapshot
    """RNG and module state before the forward."""
    forward: Forward
    """Function for the forward and the recomputation."""
    graph: Graph | None = None
    """Saved autograd graph. None: the backward recomputes."""
    outputs: list[torch.Tensor] = field(default_factory=list)
    """Outputs of streamed experts, or of products. The recomputation reuses them."""


class Inputs:
    """Keeps the inputs. The backward runs the forward again with a graph, from saved random and module state."""

    _keep_products: Callable[[Sequence[Product]], None] | None = None
    _may_recompute = True

    def __init__(
        self,
        unit: Unit,
        runner: UnitRunner,
        rows: Rows,
        arguments: Arguments,
        needs: Sequence[bool],
        graph: GraphTraits,
        key: UseKey,
    ) -> None:
        """`needs`: requires_grad per input. `graph`: of a use with these inputs."""
        self.unit = unit
        self._runner = runner
        self._saved = runner.saved
        self._policy = runner.saved.policy

        # The call.
        self._traits = unit.traits  # of this structure of arguments: a later call may select others
        self._rows = rows
        self._arguments = arguments
        self._needs = needs
        self._graph = graph
        self._key = key
        self._thread_state = ThreadState(runner.device.autocast_type)  # of the caller: a backward may have another

        # What is kept.
        self.claim = runner.claims.open(self, unit.name)
        self._micro_batches: list[MicroBatch] = []
        self._inputs: list[torch.Tensor] = []
        self._versions: list[int] = []  # of the inputs, to find changes in place
        self._copies: dict[int, list[DeviceCopy]] = {}  # to the device, by micro-batch

    # -- forward ---------------------------------------------------------------------------------------------

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Begin the use, before the unit has its weights: save the inputs."""
        traits = self._traits
        # An input of several units stays: it is on the device once for all of them.
        are_movable = [need and i not in traits.shared for i, need in enumerate(self._needs)]
        changing = traits.mutated | traits.stale  # in place, before the recomputation reads them
        self._inputs = self._saved.save([t.detach() for t in tensors], are_movable, self.claim, changing)
        self._versions = list(map(_version, self._inputs))
        if not self._saved.inputs_stay:
            self._saved.add_use(self)

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[Arguments]:
        """Run all micro-batches; return their results. Raises ConfigError if a buffer changed."""
        # The recomputation restores the buffers that the recording saw changing. A change of another would count twice.
        buffers = self.unit.still_buffers()
        results = self._run_all(tensors)
        _refuse_changed_buffers(self.unit, buffers)
        return results

    def _run_all(self, tensors: Sequence[torch.Tensor]) -> list[Arguments]:
        return self._runner.run_rows(self.unit, self._rows, self._arguments, tensors, self._begin_micro_batch)

    def collect(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:  # noqa: ARG002
        """Return the tensors of the forward, other than `results`, that later code may take gradients through."""
        return []

    def check(self) -> None:
        """Raise OffloadError if a saved input was changed in place."""
        for tensor, version in zip(self._inputs, self._versions, strict=True):
            if tensor._version != version:
                refuse_changed(self.unit, tensor)

    def _begin_micro_batch(self, span: Span | None, inputs: Sequence[torch.Tensor], others: Sequence[Any]) -> Arguments:
        runner = self._runner
        use = Use(runner, self._arguments, inputs, others, self._needs, self._keep_products)
        forward = runner.stages.forward_of(self.unit, use)
        micro_batch = MicroBatch(span, runner.snapshot(self.unit, self._may_recompute), forward)
        self._micro_batches.append(micro_batch)
        return self._run(micro_batch, use)

    def _run(self, micro_batch: MicroBatch, use: Use) -> Arguments:
        """Run the forward of a micro-batch and keep it for the backward."""
        with self._runner.outputs.recorded_in(micro_batch.outputs):
            result = self._compute(micro_batch, use)
        self._keep_outputs(micro_batch.outputs)
        return result

    def _compute(self, micro_batch: MicroBatch, use: Use) -> Arguments:
        """Run the forward without keeping its graph."""
        if self._traits.needs_graph:  # without one, torch would select a kernel with different last bits
            return run_with_graph(self.unit, use, micro_batch.forward)[1]
        return self._runner.run(self.unit, use, micro_batch.forward)

    def _keep_outputs(self, outputs: list[torch.Tensor]) -> None:
        if outputs:
            outputs[:] = self._saved.save(outputs, [True] * len(outputs), self.claim)

    # -- backward --------------------------------------------------------------------------------------------

    @property
    def reads_weights(self) -> bool:
        """True unless the backward needs no weights."""
        return True

    def check_gradients(self, gradients: GradientTensors) -> None:
        """Raise ConfigError for a gradient that cannot be passed on."""

    def backward(self, gradients: GradientTensors, trains: bool) -> list[GradientTensors]:
        """Run the backward of all micro-batches; return the input gradients of each.

        Parameters take gradients if `trains`.
        """
        input_gradients = []
        for number, _ in enumerate(synchronized(self._runner, self._traits, self._rows, self._micro_batches)):
            self._look_ahead(number)
            input_gradients.append(self._backward_of(number, gradients, trains))
        self._saved.prefetch_previous(self, 1)  # Start this copy before the weight copies submitted by `leave`.
        return input_gradients

    def _backward_of(self, number: int, gradients: GradientTensors, trains: bool) -> GradientTensors:
        with self._micro_batches[number].snapshot.values_restored(self._traits.buffers):
            return self._run_graph(self._recompute(number), number, gradients, trains)

    def _run_graph(self, graph: Graph, number: int, gradients: GradientTensors, trains: bool) -> GradientTensors:
        pieces = self._traits.cut_outputs(gradients, self._micro_batches[number].span)
        pairs: list[tuple[Any, torch.Tensor]] = [
            (root, g) for root, g in zip(graph.roots, pieces, strict=True) if g is not None and root is not None
        ]
        inputs = None
        if not trains:  # The hook of a parameter would pass its gradient on.
            inputs = [leaf for leaf, need in zip(graph.leaves, self._needs, strict=True) if need]
        torch.autograd.backward([root for root, _ in pairs], [g for _, g in pairs], inputs=inputs)
        return [leaf.grad for leaf in graph.leaves]

    def _look_ahead(self, number: int) -> None:
        """Start the H2D copies for this micro-batch and for the next one in backward order."""
        self.prepare(number)
        if number + 1 == len(self._micro_batches):
            self._saved.prefetch_previous(self)
        elif self._saved.prefetches:
            self.prepare(number + 1)

    def prepare(self, number: int = 0) -> None:
        """Start the H2D copies for the backward of a micro-batch."""
        if number < len(self._micro_batches) and number not in self._copies:
            micro_batch = self._micro_batches[number]
            inputs = self._traits.cut_inputs(self._inputs, micro_batch.span)
            self._copies[number] = self._saved.start_copies([*inputs, *micro_batch.outputs])

    def _recompute(self, number: int) -> Graph:
        """Run a micro-batch forward again with a graph."""
        runner, saved = self._runner, self._saved
        micro_batch = self._micro_batches[number]
        tensors = saved.wait(self._copies.pop(number))
        others = self._traits.cut_others(self._arguments.others, micro_batch.span)
        inputs, outputs = tensors[: len(self._needs)], tensors[len(self._needs) :]
        use = Use(runner, self._arguments, inputs, others, self._needs)
        known: Sequence[torch.Tensor] = ()
        if saved.inputs_stay:  # on the device with a graph and without
            known = inputs
        with (
            self._policy.measure(self._key, known, len(self._micro_batches)),
            micro_batch.snapshot.repeated(),
            runner.outputs.replayed(outputs),
        ):
            return self._repeat(use, runner.stages.for_recomputation(micro_batch.forward))

    def _repeat(self, use: Use, forward: Forward) -> Graph:
        # The thread of a backward has other contexts than the caller of the forward.
        graph, _ = self._thread_state.run(run_with_graph, self.unit, use, forward, self._traits.mutated)
        return graph

    def close(self) -> None:
        """Release everything kept."""
        self._inputs = []
        self._micro_batches = []
        self._copies = {}
        self._runner.finish(self.claim)


class InputsAndTensors(Inputs):
    """Keeps the inputs, and knows the tensors of the forward that stay alive outside: an attribute, a list, a hook."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._made: OutsideTensors | None = None  # during the forward
        self._kept: dict[int, ref[torch.Tensor]] = {}  # by number
        self._views: set[int] = set()  # numbers of kept views of weights

    def _compute(self, micro_batch: MicroBatch, use: Use) -> Arguments:
        if micro_batch.span is not None:  # a tensor of some rows is no tensor of the whole batch
            return super()._compute(micro_batch, use)
        self._made = made = OutsideTensors()
        with saved_tensors_dropped():
            graph, result = run_with_graph(self.unit, use, made.watching(micro_batch.forward))
        made.add_inputs(graph.leaves)
        return result

    def collect(self, results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        if self._made is None:
            return []
        kept = self._made.alive(results)
        self._made = None
        streams, address = self._runner.slots.streams, self._runner.device.address
        self._views = {number for number, t in kept.items() if streams(address(t))}
        self._kept = {number: ref(tensor) for number, tensor in kept.items()}
        return list(kept.values())

    def check_gradients(self, gradients: GradientTensors) -> None:
        # The gradients of kept tensors come last, as in `UnitCall.forward`.
        of_kept = zip(self._kept, gradients[len(gradients) - len(self._kept) :], strict=True)
        used = [number for number, gradient in of_kept if gradient is not None]
        if used and not self._runner.is_engine_call:
            self._runner.loss_scale.check_kept(self.unit.name)
        if not self._views.isdisjoint(used):
            raise ConfigError(
                f"unit {self.unit.name} keeps a view of its weights outside, and the view was used in a loss, but the "
                "weights leave the device. Keep a copy (.clone()), or compute inside the unit and return the result."
            )

    def _run_graph(self, graph: Graph, *others: Any) -> GradientTensors:
        input_gradients = super()._run_graph(graph, *others)
        for kept, root in zip(self._kept.values(), graph.roots[len(graph.roots) - len(self._kept) :], strict=True):
            # `retain_grad` was called in the forward, and so again in the recomputation. The script reads the first.
            if isinstance(root, torch.Tensor) and root.retains_grad and (tensor := kept()) is not None:
                tensor.grad = root.grad
        return input_gradients

    def _repeat(self, use: Use, forward: Forward) -> Graph:
        containers = ContainerSnapshot(self.unit.modules)
        made = OutsideTensors(self._kept)
        if self._kept:
            forward = made.watching(forward)
        graph = super()._repeat(use, forward)
        containers.put_back()  # hooks have collected the tensors of the recomputation too
        if self._kept:
            made.add_inputs(graph.leaves)
            graph.roots += [self._find_again(made, number) for number in self._kept]
        return graph

    def _find_again(self, made: OutsideTensors, number: int) -> torch.Tensor:
        """Return a kept tensor in the graph of the recomputation. Raises ConfigError."""
        tensor, kept = made.again.get(number), self._kept[number]()
        if tensor is None or not tensor.requires_grad or (kept is not None and tensor.shape != kept.shape):
            raise ConfigError(
                f"unit {self.unit.name} keeps a tensor outside that its recomputation does not make again: its forward "
                "takes another path there. Return the tensor from the unit, or keep tensor.detach()."
            )
        return tensor


class Products(Inputs):
    """Keeps the inputs, and chosen product outputs, on the device or below. The recomputation reuses these."""

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        super().begin(tensors)
        if self._saved.inputs_stay:  # outputs may leave
            self._saved.add_use(self)

    def _compute(self, micro_batch: MicroBatch, use: Use) -> Arguments:
        with saved_tensors_dropped():
            return run_with_graph(self.unit, use, micro_batch.forward)[1]

    def _keep_outputs(self, outputs: list[torch.Tensor]) -> None:
        """Do nothing: the outputs wait since the end of the forward."""

    def _keep_products(self, products: Sequence[Product]) -> None:
        policy = self._policy
        for number, product in enumerate(products):
            key = self._key, number
            if policy.stays(key) and policy.has_room(product.num_bytes):
                self._saved.reserve(product.outputs, "kept tensors", self.claim)
            elif policy.offloads(key):
                product.outputs = self._saved.put_below(product.outputs, self.claim)
            else:
                product.outputs = []
        policy.update_peaks()


class MeasuredProducts(Products):
    """Measures product outputs, and keeps the inputs alone. For the first step with some shapes."""

    def _keep_products(self, products: Sequence[Product]) -> None:
        self._policy.add_products(self._key, products)
        for product in products:
            product.outputs = []


class SavedGraph(Inputs):
    """Keeps the autograd graph on the device, and the inputs instead if an optional graph has no room."""

    memory_class: type[GraphMemory] = GraphMemory
    optional_in: Sequence[str] = ("auto",)
    """Modes of recomputation in which a graph may be dropped."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._may_recompute = self._policy.mode in self.optional_in

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:
        """Save nothing: the graph holds the inputs."""

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[Arguments]:
        return self._run_all(tensors)

    def _run(self, micro_batch: MicroBatch, use: Use) -> Arguments:
        memory = self.memory_class(self._runner.slots, self._saved, self.claim, is_optional=self._may_recompute)
        try:
            with self._runner.outputs.recorded_in(micro_batch.outputs):
                micro_batch.graph, result = memory.run(self.unit, use, micro_batch.forward)
            micro_batch.outputs.clear()
            return result
        except TooMuchToKeepError:
            # The graph exceeds the available memory, unforeseen in the plan for this shape. Drop the graph and
            # recompute this use.
            micro_batch.snapshot.put_back()
            if not self._inputs:
                super().begin(self._arguments.tensors)
        # Reuse the expert outputs from the aborted run. A second fetch is collective, and other ranks may have kept
        # their graph.
        with self._runner.outputs.replayed([tensor.clone() for tensor in micro_batch.outputs]):
            return super()._run(micro_batch, use)

    @property
    def reads_weights(self) -> bool:
        graphs = [each.graph for each in self._micro_batches]
        # Without a graph a micro-batch recomputes.
        if any(graph is None or graph.memory is None or graph.memory.has_weights for graph in graphs):
            return True
        return self._graph.reads_weights

    def _backward_of(self, number: int, gradients: GradientTensors, trains: bool) -> GradientTensors:
        micro_batch = self._micro_batches[number]
        graph, micro_batch.graph = micro_batch.graph, None  # freed as soon as its backward ends
        if graph is None:
            return super()._backward_of(number, gradients, trains)
        return self._run_graph(graph, number, gradients, trains)

    def prepare(self, number: int = 0) -> None:
        if number >= len(self._micro_batches):
            return
        graph = self._micro_batches[number].graph
        if graph is not None and graph.memory is not None:
            graph.memory.prepare()
        else:
            super().prepare(number)


class OffloadedGraph(SavedGraph):
    """Keeps the autograd graph in host or NVMe memory."""

    memory_class = OffloadedGraphMemory
    optional_in = ("auto", "always")

    def begin(self, tensors: Sequence[torch.Tensor]) -> None:  # noqa: ARG002
        self._saved.add_use(self)


def keep_for(policy: RecomputePolicy, unit: Unit, key: UseKey, graph: GraphTraits) -> type[Inputs]:
    """Return the class that keeps a use of `unit` with these input shapes and this graph."""
    traits = unit.traits
    choice = policy.choice
    if traits.keeps:  # a gradient may come through any tensor of a graph kept on the device
        return InputsAndTensors
    if graph.keeps_nothing:  # a recomputation would save no memory
        return SavedGraph
    if traits.rewrites and choice.can_offload:  # the copy has the values from before the change
        return Inputs
    # What a graph holds must not change before the backward, and copies of weights are as much as the weights.
    if traits.mutated or traits.buffers or traits.copied_bytes * _COPIED_SHARE > unit.weight_bytes:
        return Inputs
    if choice.mode == PRODUCTS:
        if policy.keeps_products(key):
            return Products
        return Inputs if policy.is_measured(key) else MeasuredProducts
    if choice.stays(key in policy.on_device):
        return SavedGraph
    if choice.can_offload and policy.offloads(key):
        return OffloadedGraph
    return Inputs


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
