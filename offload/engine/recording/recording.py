"""The recording pass: run the model once on a few rows, record the unit traits, and refuse unsupported behaviour.

Every unit runs with a separate autograd graph here, cut at the unit border. The pass detects:

- unit parameters read from outside the unit: the unit stays on the device;
- a unit called from inside another unit: the inner unit stays on the device;
- inputs changed in place, inside or after the unit: these inputs are cloned and returned as outputs;
- outputs that never require a gradient;
- bytes saved by the unit graph, and tensor axes that grow with the batch (from two passes with different row counts);
- tensors that leave a unit other than by return and reach the loss or another unit: refused, because the gradient
  would be lost.
"""

from __future__ import annotations

import gc
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any

import torch
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter
from torch.utils.checkpoint import CheckpointFunction
from torch.utils.hooks import RemovableHandle

from offload.engine.comparison import same_bits, signed_sums
from offload.engine.recording.watching import WatchingMode
from offload.engine.units.arguments import Arguments, deliver_result, receive_call
from offload.engine.units.offloaded_tensor import OffloadedTensor, ResidentParameter
from offload.engine.units.outside_tensors import OutsideTensors
from offload.engine.units.recompute_policy import saved_tensors_watched
from offload.engine.units.runner import UnitRunner
from offload.engine.units.saved_graph import has_only_torch_nodes, is_number
from offload.engine.units.snapshots import BufferPlace, buffers_of
from offload.engine.units.traits import GraphTraits, RecordedUse, UnitTraits
from offload.engine.units.trial import ENGINE_ERRORS, SavedBytes, Trial, Versions
from offload.engine.units.unit import Unit
from offload.engine.units.use import Forward, Use
from offload.engine.units.weight_writes import refuse_writes
from offload.errors import ConfigError
from offload.modules import nodes_of


class RestartRecording(Exception):
    """The pass needs more resident units; `Recording.outside_readers` has the names."""


class Observation:
    """One recorded use of a unit: the state before the forward, and what the forward did."""

    def __init__(self, unit: Unit, arguments: Arguments, runner: UnitRunner) -> None:
        self.unit = unit
        self.arguments = arguments
        self.traits = unit.learn(arguments.structure)
        # The graph of the use ends at `leaves`. The forward receives copies of these, which it may change in place.
        self.leaves = [t.detach().clone().requires_grad_(t.requires_grad) for t in arguments.tensors]
        self.inputs = [leaf.clone() for leaf in self.leaves]
        self._input_versions = Versions(self.inputs)
        self.saved = _SavedTensors(runner, self.inputs)
        self._buffers = {place: buffer.detach().clone() for place, buffer in buffers_of(unit.modules).items()}

        # Known once the weights are on the device:
        self.weights: list[torch.nn.Parameter] = []
        self.result: Arguments
        self.results_without_graph: list[torch.Tensor] = []
        self.is_plain = False
        """True if the graph has no hook and no own function. Either may hold weights."""

    def run(self, runner: UnitRunner, forward: Forward, made: OutsideTensors) -> None:
        """Run the forward with a graph."""
        next_hook = RemovableHandle.next_id  # torch numbers all hooks of a process
        use = Use(runner, self.arguments, self.inputs, self.arguments.others)
        made.add_inputs(self.inputs)
        with torch.enable_grad(), saved_tensors_watched(self.saved.add):
            self.result = runner.run(self.unit, use, made.watching(forward))
        _refuse_reentrant(f"unit {self.unit.name}", self.result.tensors)
        self.is_plain = RemovableHandle.next_id == next_hook and has_only_torch_nodes(self.result.tensors)

    @cached_property
    def mutated(self) -> set[int]:
        """Indices of the inputs changed in place."""
        return self._input_versions.changed()

    @cached_property
    def moved_buffers(self) -> set[BufferPlace]:
        """Buffers with other values than before. Native batch norm leaves `_version` unchanged."""
        before, now = self._buffers, buffers_of(self.unit.modules)
        return {each for each in now.keys() | before.keys() if not same_bits(now.get(each), before.get(each))}

    @property
    def own(self) -> list[torch.Tensor]:
        """The leaves of the graph: copies of the inputs, and weights."""
        return [*self.leaves, *self.weights]

    @property
    def shapes(self) -> RecordedUse:
        """Shapes and saved bytes, to compare with a use on another number of rows."""
        inputs, outputs = ([t.shape for t in tensors] for tensors in (self.inputs, self.result.tensors))
        return RecordedUse(inputs, list(self.arguments.others), outputs, self.saved.num_bytes)


class Recording(ABC):
    """Records the units during one model run on a number of rows (0: unknown).

    `interior`: leaves of a unit graph (weights and inputs). `border`: tensors returned by a unit. A unit result may
    depend only on the interior of the same unit, the loss only on borders.
    """

    _rows_to_learn: int | None = None
    """Rows from which stages learn in this run (`Stage.record`). None: they learn nothing."""

    def __init__(self, units: Sequence[Unit], runner: UnitRunner, rows: int = 0) -> None:
        self.runner = runner
        self.rows = rows
        self.outside_readers: set[str] = set()
        self.uses: dict[str, list[RecordedUse]] = {}
        self.streaming = {index: unit.layer for unit in units if not unit.resident for index in unit.placeholders}

        self._inside: Unit | None = None  # the unit that runs
        # By `id`: (tensor, unit name). The tensors live here, so that no other gets the same number.
        self._interior: dict[int, tuple[torch.Tensor, str]] = {}
        self._borders: dict[int, tuple[torch.Tensor, str]] = {}
        self._exchanges: list[tuple[UnitTraits, Versions, Versions, _Contents]] = []  # (inputs, outputs) of the uses
        self._variants: set[int] = set()  # traits with a use in this pass, by `id`

        # Writes to weights on the device.
        self.num_set_to_itself: Counter[int] = Counter()  # by `id` of the weight
        self.written_addresses: list[int] = []
        self.written: dict[Unit, _Contents] = {}
        """Resident units whose weights the model has changed, with the new contents."""
        self._resident_contents: list[tuple[Unit, _Contents]] = []

    @abstractmethod
    def _learn(self, seen: Observation) -> None:
        """Write what the use shows into the traits of the unit. The weights are still on the device."""

    def _watch(self, weights: Sequence[torch.Tensor]) -> _Contents:  # noqa: ARG002
        """Return the contents of the weights, to find writes that no version counter shows. Default: of no weight."""
        return _Contents()

    def call(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one unit use with a separate graph. Return the result detached from this graph."""
        made = OutsideTensors()
        result = self._record(unit, args, kwargs, made)
        # After `_record` has ended: its own variables would keep tensors alive.
        if not unit.traits.keeps and made.alive():
            gc.collect()  # a reference cycle keeps nothing
            unit.traits.keeps = bool(made.alive())
        return result

    def _record(self, unit: Unit, args: tuple[Any, ...], kwargs: dict[str, Any], made: OutsideTensors) -> Any:
        if self._inside is not None:
            self.outside_readers.add(unit.name)
            raise RestartRecording
        arguments, containers = receive_call(args, kwargs)
        seen = Observation(unit, arguments, self.runner)
        self._refuse_side_doors(unit, arguments.tensors, set(self._borders))
        self._inside = unit
        self.runner.enter(unit)
        try:
            seen.weights = list(unit.live().values())
            forward = self.runner.stages.record(unit, self.runner, arguments, self._rows_to_learn)
            outputs = self._run(seen, forward, made)
            self.uses.setdefault(unit.name, []).append(seen.shapes)
            self._learn(seen)
        finally:
            self.runner.leave()
            self._inside = None
        if seen.saved.contents.has_changed(unversioned=True):
            seen.traits.rewrites = True
        self._refuse_views(seen)
        changed_inputs = [seen.inputs[i] for i in seen.mutated]
        self._refuse_side_doors(unit, [*seen.result.tensors, *changed_inputs], {id(leaf) for leaf in seen.own})
        self._interior.update((id(leaf), (leaf, unit.name)) for leaf in seen.own)
        with torch.no_grad():  # the forward ran on copies, but the caller sees the changes
            for i in seen.mutated:
                arguments.tensors[i].copy_(seen.inputs[i])
        both = _Contents([*arguments.tensors, *outputs])
        self._exchanges.append((seen.traits, Versions(arguments.tensors), Versions(outputs), both))
        return deliver_result(seen.result, outputs, containers)

    def _run(self, seen: Observation, forward: Forward, made: OutsideTensors) -> list[torch.Tensor]:
        """Run the forward with a graph, and return the results without it. The weights are on the device.

        Raises ConfigError for changed weights, and for buffers with a graph.
        """
        streams = self.runner.slots.streams
        # An earlier unit may have had the same place in the slots.
        self.written_addresses[:] = [address for address in self.written_addresses if not streams(address)]
        num_writes = self._num_writes(seen.weights)
        contents = self._watch(seen.weights)
        seen.run(self.runner, forward, made)
        if self._num_writes(seen.weights) != num_writes or contents.has_changed(unversioned=True):
            refuse_writes(seen.unit)
        self._note_idle_writes(seen.unit)
        self._refuse_buffers_with_graphs(seen.unit)
        return self._detach_outputs(seen)

    def _detach_outputs(self, seen: Observation) -> list[torch.Tensor]:
        """Return the result tensors without the unit graph. An unchanged input stays the caller's tensor."""
        own = {id(t): original for t, original in zip(seen.inputs, seen.arguments.tensors, strict=True)}
        outputs = []
        for tensor in seen.result.tensors:
            if id(tensor) in own:
                outputs.append(own[id(tensor)])
                continue
            # The border is a leaf: a loss that depends on it, and not on the inside of the unit, is right.
            border = tensor.detach().clone().requires_grad_(tensor.requires_grad)
            self._borders[id(border)] = (border, seen.unit.name)
            outputs.append(border.clone())  # not a leaf: the caller may change it in place
        return outputs

    def note_read(self, index: int) -> None:
        """Note a read of a parameter from outside of a use of the unit."""
        if index in self.streaming:
            self.outside_readers.add(self.streaming[index])

    def finish(self, results: Any) -> None:
        """Finish after the forward. `results`: the loss.

        Records inputs and outputs changed later, refuses a loss that depends on the inside of a unit, and runs the
        backward between units to detect weight reads.
        """
        received = [t for _, inputs, _, _ in self._exchanges for t in inputs.tensors]
        receivers = Counter(map(id, received))
        for traits, inputs, outputs, contents in self._exchanges:
            traits.stale.update(inputs.changed())
            traits.changed.update(outputs.changed())
            traits.shared.update(i for i, t in enumerate(inputs.tensors) if receivers[id(t)] > 1)
            if contents.has_changed(unversioned=True):
                traits.rewrites = True
        self._refuse_side_doors(None, [t for t in tree_iter(results) if isinstance(t, torch.Tensor)], set())
        # The backward outside the units may read unit weights too (a reversible layer runs the units there). Tensors
        # trained beside the model are excluded.
        loss = results
        if not isinstance(results, torch.Tensor):
            loss = getattr(results, "loss", None)
        _refuse_reentrant("the model", [t for t in (loss, *received) if isinstance(t, torch.Tensor)])
        for tensor in [t for t in [loss, *received] if isinstance(t, torch.Tensor) and t.grad_fn is not None]:
            leaves = [
                t
                for t in _graph_leaves([tensor])
                if id(t) in self._borders or isinstance(t, OffloadedTensor) or self.runner.slots.holds(t)
            ]
            if leaves:
                torch.autograd.backward(tensor, torch.ones_like(tensor), retain_graph=True, inputs=leaves)

    def _is_first(self, traits: UnitTraits) -> bool:
        """True for the first use of a variant in this pass."""
        is_first = id(traits) not in self._variants
        self._variants.add(id(traits))
        return is_first

    def _num_writes(self, weights: Sequence[torch.Tensor]) -> list[int]:
        """Return the number of in-place changes per weight.

        A torch parametrization moves a parameter to another name and sets the parameter to itself: a new version
        without a change.
        """
        return [weight._version - self.num_set_to_itself[id(weight)] for weight in weights]

    def note_writes(self) -> None:
        """Record after a run the resident weights with changes by the model."""
        for unit, before in self._resident_contents:
            if before.has_changed():
                self.written[unit] = _Contents(unit.live().values())
            else:
                self._note_idle_writes(unit)

    def refuse_writes(self) -> None:
        """Check the restored weights after a run. Raises ConfigError for changed weights.

        Code may undo a change later: RWKV divides weights for eval mode and multiplies them again.
        """
        for unit, after in self.written.items():
            if after.has_changed():
                refuse_writes(unit)

    def _note_idle_writes(self, unit: Unit) -> None:
        """Let later passes check the weights of `unit` that an operation of this run wrote without a new value."""
        begins = {i: (torch.Tensor.data_ptr(weight), weight.nbytes) for i, weight in unit.live().items()}
        spans = {i: range(begin, begin + size) for i, (begin, size) in begins.items()}
        written = {i for i, span in spans.items() if any(address in span for address in self.written_addresses)}
        if written:
            self.runner.writes.add(unit, written)

    def _refuse_buffers_with_graphs(self, unit: Unit) -> None:
        for (_, key), buffer in buffers_of(unit.modules).items():
            if buffer.grad_fn is not None:
                raise ConfigError(
                    f"unit {unit.name} assigns its buffer {key} a tensor with an autograd graph: gradients of later "
                    "forwards would flow back into this graph, and even plain PyTorch would keep the graphs of all "
                    "earlier forwards. Assign a detached tensor (.detach(), or under torch.no_grad())."
                )

    def _refuse_views(self, seen: Observation) -> None:
        for tensor in (seen.arguments.tensors[i] for i in seen.mutated):
            if tensor._is_view() and tensor.requires_grad:
                raise ConfigError(
                    f"unit {seen.unit.name} changes an input of shape {tuple(tensor.shape)} in place, and the "
                    "input is a view of another tensor: its gradient cannot be computed while the unit is offloaded. "
                    "Pass a copy (.clone()), or use an out-of-place operation."
                )

    def _refuse_side_doors(self, unit: Unit | None, tensors: Sequence[torch.Tensor], own: set[int]) -> None:
        """Raise ConfigError if `tensors` depend on another unit's interior, or on a border other than the arguments."""
        for leaf in _graph_leaves(tensors):
            origin = self._interior.get(id(leaf))
            target = "the loss"
            if unit is not None:  # the loss may depend on borders, a unit only on those among its arguments
                origin = origin or self._borders.get(id(leaf))
                target = f"unit {unit.name}"
            if origin is not None and id(leaf) not in own:
                raise ConfigError(
                    f"a tensor computed inside unit {origin[1]} reaches {target} "
                    "without being an argument or a result (through an attribute, an object of an own class, or an "
                    "object or list that a hook holds), and its gradient would be lost while the unit is offloaded. "
                    "Return the tensor alone or in a tuple, dict or dataclass (without slots), put it into a list or "
                    "dict among the unit's arguments, or turn off the code that collects it."
                )


class FirstPass(Recording):
    """The first run: learns the graph of each use, and watches the contents of the weights."""

    def __init__(self, units: Sequence[Unit], runner: UnitRunner, rows: int = 0) -> None:
        super().__init__(units, runner, rows)
        self._rows_to_learn = rows
        self._resident_contents = [(unit, _Contents(unit.live().values())) for unit in units if unit.resident]

    def _watch(self, weights: Sequence[torch.Tensor]) -> _Contents:
        return _Contents(weights)

    def _learn(self, seen: Observation) -> None:
        detached = frozenset(i for i, t in enumerate(seen.result.tensors) if not t.requires_grad)
        saves_buffers = seen.saved.has_numbers and seen.moved_buffers
        keeps_nothing = seen.is_plain and not seen.mutated and not seen.saved.num_bytes and not saves_buffers
        reads_weights = not keeps_nothing or seen.saved.has_weights or self._reads_weights(seen)
        graph = GraphTraits(detached, keeps_nothing, reads_weights)
        signature = seen.unit.gradient_signature(seen.arguments.tensors)
        is_first = self._is_first(seen.traits)
        seen.traits.learn_use(signature, graph, seen.mutated, seen.moved_buffers, is_first=is_first)

    def _reads_weights(self, seen: Observation) -> bool:
        """True if a backward reads unit weights.

        Measured by a trial backward, because a checkpoint may read weights without saving any.
        """
        roots, inputs = ([t for t in tensors if t.requires_grad] for tensors in (seen.result.tensors, seen.own))
        if not roots or not inputs:
            return True
        torch.clear_autocast_cache()  # a checkpoint inside autocast would use the casts of the forward
        detector = _WeightReadDetector(self.runner)
        with seen.unit.installed(), detector:
            torch.autograd.grad(roots, inputs, [torch.ones_like(t) for t in roots], allow_unused=True)
        return detector.has_reads


class SecondPass(Recording):
    """A later run: compares each use with a forward without a graph, and with the use on another number of rows."""

    def __init__(self, units: Sequence[Unit], runner: UnitRunner, rows: int, before: Recording) -> None:
        super().__init__(units, runner, rows)
        self._before = before

    def _run(self, seen: Observation, forward: Forward, made: OutsideTensors) -> list[torch.Tensor]:
        # First, because the run with a graph moves generators and buffers. Attributes are those of the last run.
        seen.results_without_graph = self._run_without_graph(seen, forward)
        return super()._run(seen, forward, made)

    def _learn(self, seen: Observation) -> None:
        # A unit that changes its inputs is recomputed under a graph in any case.
        if not seen.mutated and not all(map(same_bits, seen.result.tensors, seen.results_without_graph)):
            seen.traits.needs_graph = True
        if self.rows == self._before.rows:
            return  # a call in the caller's own loop: no second row count
        uses = self.uses[seen.unit.name]
        before = self._before.uses.get(seen.unit.name, [])
        use_before: RecordedUse | None = None
        if len(before) >= len(uses):
            use_before = before[len(uses) - 1]
        rows = self._before.rows, self.rows
        seen.traits.learn_rows(use_before, uses[-1], rows, is_first=self._is_first(seen.traits))

    def _run_without_graph(self, seen: Observation, forward: Forward) -> list[torch.Tensor]:
        """Run a use as in a streamed forward. Return the results; empty if the forward needs a graph."""
        try:
            results = Trial(self.runner, seen.unit, seen.arguments).run(forward, seen.arguments.tensors).results
        except (RestartRecording, *ENGINE_ERRORS):
            raise
        except Exception:  # with a graph the model raises again, if this is an error of the model
            if self.outside_readers:
                raise
            seen.traits.needs_graph = True
            return []
        return [self.runner.copy_from_slot(t) for t in results]


class UseDetector(WatchingMode):
    """Tells a recording of operations on offloaded parameters, writes to weights on the device, and tensors set to
    themselves.
    """

    def __init__(self, recording: Recording) -> None:
        super().__init__()
        self._recording = recording

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.prim.device.default:  # `weight.device`, which libraries ask all weights of a model for
            return func(*args, **(kwargs or {}))
        recording = self._recording
        if types:  # classes of the operands with an own dispatch, as an OffloadedTensor has; empty in most operations
            for leaf in _operands(args, kwargs):
                if isinstance(leaf, OffloadedTensor):
                    recording.note_read(leaf.info.index)
        if func is torch.ops.aten.set_.source_Tensor and args[0] is args[1]:
            recording.num_set_to_itself[id(args[0])] += 1
        elif func._schema.is_mutable:
            for leaf in _operands((*args[:1], (kwargs or {}).get("out")), {}):
                if not isinstance(leaf, OffloadedTensor) and recording.runner.slots.holds(leaf):
                    recording.written_addresses.append(leaf.data_ptr())
        return func(*args, **(kwargs or {}))


class _WeightReadDetector(WatchingMode):
    """Detects operations on weights on the device."""

    def __init__(self, runner: UnitRunner) -> None:
        super().__init__()
        self._runner = runner
        self.has_reads = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(self._runner.is_weight(leaf) for leaf in _operands(args, kwargs)):
            self.has_reads = True
        return func(*args, **(kwargs or {}))


def _operands(args: Any, kwargs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors among the operands, one list level deep; for a DTensor the local tensor."""
    # Runs for each operation of a recorded forward, which has keyword arguments in few.
    values = args
    if kwargs:
        values = *args, *kwargs.values()
    for value in values:
        leaves: Sequence[Any] = (value,)
        if isinstance(value, list | tuple):
            leaves = value
        for leaf in leaves:
            while is_traceable_wrapper_subclass(leaf):
                leaf = getattr(leaf, leaf.__tensor_flatten__()[0][0])
            if isinstance(leaf, torch.Tensor):
                yield leaf


_COPIED = 4096
"""Elements of the largest tensor whose contents are a copy, which takes a tenth of the time of `signed_sums`."""


def _contents_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return the bytes of the elements, or, of a large tensor, of the `signed_sums`: uint8 in one dimension."""
    values = signed_sums(tensor) if tensor.numel() > _COPIED else tensor.detach().resolve_conj().resolve_neg()
    return values.reshape(-1).contiguous().view(torch.uint8)  # a view needs elements side by side


class _Contents:
    """Tensor contents at one moment. Version counters alone miss writes through `tensor.data` or numpy.

    Contents stay on the device of a tensor. A comparison waits once, for all tensors together. No dispatch mode sees
    the operations here: they would take several times as long.
    """

    def __init__(self, tensors: Iterable[torch.Tensor] = ()) -> None:
        # tensor, version, shape, contents
        self._entries: list[tuple[torch.Tensor, int, torch.Size, torch.Tensor]] = []
        for tensor in tensors:
            self.add(tensor)

    def add(self, tensor: torch.Tensor) -> None:
        """Record the contents of a tensor."""
        is_plain = (
            type(tensor) in (torch.Tensor, torch.nn.Parameter, ResidentParameter) and tensor.layout is torch.strided
        )
        if is_plain and not tensor.is_quantized:
            with no_dispatch():
                self._entries.append((tensor, tensor._version, tensor.shape, _contents_of(tensor).clone()))

    def has_changed(self, *, unversioned: bool = False) -> bool:
        """True if the contents of some tensor changed; `unversioned`: tensors with a new version are excluded."""
        contents = defaultdict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]](list)
        with no_dispatch():
            for tensor, version, shape, before in self._entries:
                if unversioned and tensor._version != version:
                    continue
                if tensor.shape != shape:
                    return True
                contents[before.device].append((before, _contents_of(tensor)))
            return any(not torch.equal(*map(torch.cat, zip(*pairs, strict=True))) for pairs in contents.values())


class _SavedTensors(SavedBytes):
    """Contents and bytes saved by autograd in a unit run, without weights; bytes also without inputs and numbers."""

    def __init__(self, runner: UnitRunner, inputs: Sequence[torch.Tensor]) -> None:
        super().__init__(inputs, runner.device)
        self._runner = runner
        self.contents = _Contents()
        self.has_weights = False
        self.has_numbers = False

    def add(self, tensor: torch.Tensor) -> None:
        if self._runner.slots.holds(tensor):
            self.has_weights = True
            return
        self.contents.add(tensor.detach())  # the tensor itself would keep the graph alive
        if is_number(tensor):
            self.has_numbers = True
        else:
            super().add(tensor)


def _refuse_reentrant(where: str, tensors: Sequence[torch.Tensor]) -> None:
    """Raise ConfigError for a reentrant checkpoint: no gradients for selected tensors in the backward."""
    for node in nodes_of(tensors):
        if getattr(type(node), "_forward_cls", None) is CheckpointFunction:
            run = node.run_function
            name = getattr(run, "__qualname__", type(run).__name__)
            raise ConfigError(
                f"{where} runs {name} in torch.utils.checkpoint with use_reentrant=True, where torch cannot compute "
                "gradients of selected tensors, as a trial run of the model needs. Set use_reentrant=False there, or "
                f"call {name} without a checkpoint: --train.recompute controls recomputation."
            )


def _graph_leaves(tensors: Sequence[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield the graph leaves that require a gradient."""
    yield from (tensor for tensor in tensors if tensor.requires_grad and tensor.grad_fn is None)
    for node in nodes_of(tensors):
        variable = getattr(node, "variable", None)
        if variable is not None:
            yield variable
