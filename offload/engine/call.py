"""One use of a unit in a pass that will have a backward: micro-batch by micro-batch, with a recompute or a kept
graph.
"""

from __future__ import annotations

import contextvars
import copy
from collections.abc import Callable, Hashable, MutableMapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from offload.engine.condition import Condition
from offload.engine.drawn import Drawn
from offload.engine.kept import KeptGraph, TooMuchToKeepError
from offload.engine.learned import Rows
from offload.engine.undo import Undo, Where
from offload.errors import OffloadError

if TYPE_CHECKING:
    from offload.engine.stream import Returning, Stream
    from offload.engine.unit import Unit


_T = TypeVar("_T")


class Arguments:
    """Positional and keyword arguments (or a result) as a tree, with each tensor listed once, however often it occurs.

    Mappings that torch's pytree does not open (such as the one in which Gemma 3n passes keys and values on) are opened
    too.
    """

    def __init__(self, tree: Any) -> None:
        self.tensors: list[torch.Tensor] = []
        self.others: list[Any] = []
        self._seen: dict[int, int] = {}
        self._leaves, self._spec = self._flatten(tree)

    @property
    def structure(self) -> Hashable:
        """Return what two uses of a unit must have in common for what was learned of one to hold for the other."""
        return self._spec, tuple(kind is True for kind, *_ in self._leaves), tuple(t.dim() for t in self.tensors)

    def fill(self, tensors: Sequence[torch.Tensor], others: Sequence[Any] | None = None) -> Any:
        """Return the tree with other tensors (and other leaves) in the places of the listed ones."""
        return self._fill(self._leaves, self._spec, tensors, self.others if others is None else others)

    def _flatten(self, tree: Any) -> tuple[list[Any], TreeSpec]:
        leaves, spec = tree_flatten(tree)
        places: list[Any] = []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor):
                index = self._seen.setdefault(id(leaf), len(self.tensors))
                if index == len(self.tensors):
                    self.tensors.append(leaf)
                places.append((True, index))
            elif isinstance(leaf, MutableMapping):
                places.append((leaf, *self._flatten(dict(leaf))))
            else:
                places.append((False, len(self.others)))
                self.others.append(leaf)
        return places, spec

    def _fill(self, places: list[Any], spec: TreeSpec, tensors: Sequence[torch.Tensor], others: Sequence[Any]) -> Any:
        leaves = []
        for kind, *place in places:
            if kind is True:
                leaves.append(tensors[place[0]])
            elif kind is False:
                leaves.append(others[place[0]])
            else:
                mapping = copy.copy(kind)
                inner_places, inner_spec = place
                mapping.update(self._fill(inner_places, inner_spec, tensors, others))
                leaves.append(mapping)
        return tree_unflatten(leaves, spec)


def run_unit(unit: Unit, arguments: Arguments, tensors: Sequence[torch.Tensor], others: Sequence[Any]) -> Arguments:
    """Run a unit's module; return its result, and what it put into mappings among its arguments, as (result,
    additions).
    """
    args, kwargs = arguments.fill(tensors, others)
    mappings = _mappings(args, kwargs)
    before = [dict(mapping) for mapping in mappings]
    result = unit.run(args, kwargs)
    additions = [
        (number, key, value)
        for number, mapping in enumerate(mappings)
        for key, value in mapping.items()
        if key not in before[number] or before[number][key] is not value
    ]
    return Arguments((result, additions))


def deliver(filled: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Put a unit's additions into the caller's own mappings; return the result alone."""
    result, additions = filled
    if additions:
        mappings = _mappings(args, kwargs)
        for number, key, value in additions:
            mappings[number][key] = value
    return result


def _mappings(args: Sequence[Any], kwargs: dict[str, Any]) -> list[MutableMapping[Any, Any]]:
    return [value for value in (*args, *kwargs.values()) if isinstance(value, MutableMapping)]


class Surroundings:
    """The default device, the context variables and the autocast of a forward. Its recompute needs them: a backward may
    be called outside, and on a GPU runs in a thread of autograd's, which has others.
    """

    def __init__(self, device_type: str) -> None:
        self._device, self._context = torch.get_default_device(), contextvars.copy_context()
        self._types = dict.fromkeys(("cpu", device_type))
        self._autocast = self._autocast_now()

    def run(self, function: Callable[[], _T], undo: Undo) -> _T:
        """Call a function in them."""
        return self._context.run(self._run, function, undo)

    def _run(self, function: Callable[[], _T], undo: Undo) -> _T:
        with ExitStack() as within:
            if torch.get_default_device() != self._device:
                within.enter_context(undo.within(self._device))
            if self._autocast_now() != self._autocast:
                for name, enabled, dtype, caches in self._autocast:
                    within.enter_context(undo.within(torch.autocast(name, dtype, enabled, caches)))
            return function()

    def _autocast_now(self) -> list[tuple[str, bool, torch.dtype, bool]]:
        caches = torch.is_autocast_cache_enabled()
        return [(t, torch.is_autocast_enabled(t), torch.get_autocast_dtype(t), caches) for t in self._types]


@dataclass
class Part:
    """One micro-batch of a call: its rows, the generators and the unit's modules as they were, its graph where that is
    kept. drawn: None where nothing was drawn but from torch's generators.
    """

    rows: Rows | None
    random: tuple[torch.Tensor, ...]
    condition: Condition
    drawn: Drawn | None
    graph: KeptGraph | None = None


class Call:
    """Serves the forward and the backward of one `Border`."""

    def __init__(self, unit: Unit, stream: Stream, arguments: Arguments) -> None:
        self.unit, self._stream, self._arguments, self.learned = unit, stream, arguments, unit.learned
        self._needs = [t.requires_grad for t in arguments.tensors]
        self._surroundings = Surroundings(stream.device.torch_device.type)
        self._inputs: list[torch.Tensor] = []
        self._versions: list[int] = []
        self._parts: list[Part] = []
        self._shapes = [(t.shape, t.dtype) for t in arguments.tensors]
        self.result: Arguments | None = None
        self.dirty: list[torch.Tensor] = []
        self._is_open = False
        self._coming: dict[int, Returning] = {}
        self._claim = stream.claims.open(self, unit.name)

    # -- forward ---------------------------------------------------------------------------------------------

    def forward(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Run; keep what the backward needs. Returns the result's tensors, then the inputs changed in place."""
        unit, stream, learned = self.unit, self._stream, self.learned
        rows = stream.rows_of(unit)
        keeps = stream.keeps_graph(unit, self._shapes)
        self._is_open = True
        if not keeps:
            self._save_inputs(tensors)
        stream.enter(unit)
        results: list[Arguments] = []
        # Ranks start from the same seed, and must not draw the same.
        draws_own = len(rows) > 1 or stream.has_peers
        ambient = stream.device.random_state() if draws_own else None
        try:
            for number, span in enumerate(rows):
                if ambient is not None:
                    stream.seed(unit, number)
                part = Part(
                    span, stream.device.random_state(), Condition(unit.modules, learned.buffers), Drawn.so_far()
                )
                self._parts.append(part)
                inputs = learned.cut_inputs(tensors, span)
                others = learned.cut_others(self._arguments.others, span)
                results.append(self._forward_part(part, inputs, others, keeps))
                if part.drawn and not part.drawn.has_moved():
                    part.drawn = None
        finally:
            stream.leave()
            if ambient is not None:
                stream.device.set_random_state(ambient)
        self.result = results[0]
        self.result.tensors = learned.join_outputs(results)
        for tensor, version in zip(self._inputs, self._versions, strict=True):
            _refuse_change(unit, tensor, version)
        for i in learned.changed:  # the caller changes this result in place, which autograd forbids where it is a view
            if all(self.result.tensors[i] is not t for t in tensors):
                self.result.tensors[i] = self.result.tensors[i].clone()
        self.dirty = [tensors[i] for i in sorted(learned.mutated) if tensors[i].is_floating_point()]
        return [*self.result.tensors, *(t for t in self.dirty if all(t is not other for other in self.result.tensors))]

    def _forward_part(
        self, part: Part, inputs: Sequence[torch.Tensor], others: Sequence[Any], keeps: bool
    ) -> Arguments:
        stream, unit = self._stream, self.unit
        if keeps:
            try:
                part.graph = KeptGraph(unit, stream, self._arguments, inputs, self._needs, others, self._claim)
                return part.graph.hand_over()
            except TooMuchToKeepError:
                # Not in the plan of this shape: give the graph up and recompute this use, as if it had been decided
                # before.
                stream.device.set_random_state(part.random)
                part.condition.put_back()
                if part.drawn:
                    part.drawn.put_back()
                if not self._inputs:
                    self._save_inputs(self._arguments.tensors)
        result = run_without_graph(unit, self._arguments, inputs, others, self._needs)
        result.tensors = [stream.own(t) for t in result.tensors]
        return result

    def _save_inputs(self, tensors: Sequence[torch.Tensor]) -> None:
        learned = self.learned
        copied = learned.mutated | learned.stale
        inputs = []
        for i, (t, need) in enumerate(zip(tensors, self._needs, strict=True)):
            saved = self._stream.put_away(t.clone() if i in copied else t.detach(), need and i not in learned.shared)
            self._stream.hold(saved, "unit inputs", self._claim)
            inputs.append(saved)
        self._inputs, self._versions = inputs, [t._version for t in inputs]
        self._stream.opened(self)

    # -- backward --------------------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Fetch, run the backward of every micro-batch, and return the gradients of the inputs; the parameters'
        go to the stream.
        """
        unit, stream = self.unit, self._stream
        if not self._is_open:
            raise OffloadError(
                f"unit {unit.name}: backward ran twice over one forward (retain_graph=True); run the forward again."
            )
        for tensor, version in zip(self._inputs, self._versions, strict=True):
            _refuse_change(unit, tensor, version)
        if not stream.claims.is_current(self._claim):
            raise OffloadError(
                f"unit {unit.name}: the step that this forward belongs to ended with an exception; run it again."
            )
        if not stream.claims.is_of_these_weights(self._claim):
            raise OffloadError(
                f"unit {unit.name}: the weights have changed since this forward (by an update, a step or a loaded "
                "checkpoint), so that its gradients would be none of any model's; run the forward again."
            )
        before, stream.where = stream.where, Where.ENGINE
        found: list[list[torch.Tensor | None]] = []
        ambient = stream.device.random_state()
        stream.enter(unit, backward=True)
        unit.install(unit.live())  # a backward may run module code again (torch.utils.checkpoint inside a block)
        try:
            for number, part in enumerate(self._parts):
                with part.condition.buffers_again(self.learned.buffers, stream.undo):
                    leaves, results = part.graph.take() if part.graph else self._recompute(number)
                    pieces = self.learned.cut_outputs(gradients, part.rows)
                    pairs = [(r, g) for r, g in zip(results, pieces, strict=True) if g is not None and r.requires_grad]
                    torch.autograd.backward([r for r, _ in pairs], [g for _, g in pairs])
                found.append([leaf.grad if need else None for leaf, need in zip(leaves, self._needs, strict=True)])
                del leaves, results, pairs
            stream.gradients.close(unit.regions)
        finally:
            unit.install(unit.resting)
            stream.device.set_random_state(ambient)
            stream.leave()
            self.close()
        joined = self.learned.join_gradients(found, self._shapes)
        stream.where = before
        return joined

    def prepare(self, number: int = 0) -> None:
        """Start to bring back the saved inputs of a micro-batch, ahead of its recompute."""
        if number < len(self._parts) and self._parts[number].graph is None and number not in self._coming:
            self._coming[number] = self._stream.bring_back(
                self.learned.cut_inputs(self._inputs, self._parts[number].rows)
            )

    def _recompute(self, number: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Run the forward of a micro-batch again, with a graph; return its leaves and the tensors that gradients
        come in for.
        """
        unit, stream, learned, part = self.unit, self._stream, self.learned, self._parts[number]
        self.prepare(number)
        saved = stream.wait(self._coming.pop(number))
        if number + 1 == len(self._parts):
            stream.look_back(self)
        elif stream.looks_back:
            self.prepare(number + 1)
        others = learned.cut_others(self._arguments.others, part.rows)
        leaves = [t.detach().requires_grad_(need) for t, need in zip(saved, self._needs, strict=True)]
        stream.device.set_random_state(part.random)
        with (
            torch.enable_grad(),
            stream.measure_kept(unit, self._shapes, leaves, len(self._parts)),
            part.condition.attributes_again(stream.undo),
            part.drawn.again(stream.undo) if part.drawn else nullcontext(),
        ):
            inputs = [leaf.clone() if i in learned.mutated else leaf for i, leaf in enumerate(leaves)]
            results = self._surroundings.run(
                lambda: run_unit(unit, self._arguments, inputs, others), stream.undo
            ).tensors
        dirty = [inputs[i] for i in sorted(learned.mutated) if inputs[i].is_floating_point()]
        return leaves, [*results, *(t for t in dirty if all(t is not other for other in results))]

    def close(self) -> None:
        """Let go of what the backward needed."""
        if self._is_open:
            self._is_open = False
            self._inputs, self._parts, self._coming = [], [], {}
            self._stream.finish(self._claim)


def _refuse_change(unit: Unit, tensor: torch.Tensor, version: int) -> None:
    if tensor._version != version:
        raise OffloadError(
            f"unit {unit.name}: an input of shape {tuple(tensor.shape)} was changed in place, which did not happen in "
            "the recording pass; use an out-of-place operation there."
        )


class Border(torch.autograd.Function):
    """The border between the outer graph and a unit."""

    @staticmethod
    def forward(ctx: Any, call: Call, _anchor: torch.Tensor | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        outputs = call.forward(tensors)
        if call.dirty:
            ctx.mark_dirty(*call.dirty)
        detached = call.learned.detached
        ctx.mark_non_differentiable(*(t for i, t in enumerate(outputs) if i in detached or not t.is_floating_point()))
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[Any, ...]:
        return None, None, *ctx.call.backward(gradients)


def call_unit(unit: Unit, stream: Stream, arguments: Arguments) -> Any:
    """Run one differentiable use of a unit; the anchor makes its outputs require a gradient even where no input
    does.
    """
    call = Call(unit, stream, arguments)
    outputs = Border.apply(call, stream.anchor if unit.trainable else None, *arguments.tensors)
    # The outputs hold the call through their graph: a call that held them too (or an input that it changed in place,
    # which is an output now) would be a cycle that nothing frees. What the backward needs of the inputs is saved.
    result, call.result, call.dirty, arguments.tensors = call.result, None, [], []
    assert result is not None
    return result.fill(outputs)


def call_unit_without_graph(unit: Unit, stream: Stream, arguments: Arguments) -> Any:
    """Run a unit whose result needs no gradient."""
    rows, results = stream.rows_of(unit), []
    stream.enter(unit)
    try:
        with torch.no_grad():
            for span in rows:
                inputs = unit.learned.cut_inputs(arguments.tensors, span)
                result = run_unit(unit, arguments, inputs, unit.learned.cut_others(arguments.others, span))
                result.tensors = [stream.own(t) for t in result.tensors]
                results.append(result)
    finally:
        stream.leave()
    return results[0].fill(unit.learned.join_outputs(results))


def run_without_graph(
    unit: Unit, arguments: Arguments, tensors: Sequence[torch.Tensor], others: Sequence[Any], needs: Sequence[bool]
) -> Arguments:
    """Run a unit and drop its graph; under one where torch would otherwise take another kernel, with other last
    bits.
    """
    if not unit.learned.needs_graph:
        return run_unit(unit, arguments, tensors, others)
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(need) for t, need in zip(tensors, needs, strict=True)]
        result = run_unit(unit, arguments, leaves, others)
    original = {id(leaf): t for leaf, t in zip(leaves, tensors, strict=True)}
    result.tensors = [original[id(t)] if id(t) in original else t.detach() for t in result.tensors]
    return result
