"""Unit traits learned in the recording pass; unit tensors cut into micro-batches and joined again."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch

from offload.engine.comparison import same_bits
from offload.engine.units.arguments import Arguments
from offload.engine.units.snapshots import BufferPlace

Span = tuple[int, int, int]
"""A micro-batch as (begin, end, total): rows [begin, end) from `total` rows."""


GradientTensors = Sequence[torch.Tensor | None]
"""Gradients of some tensors. None: no gradient."""


class UnrecordedCallError(Exception):
    """A unit was called with an unrecorded argument structure, so the arguments cannot be cut into rows.

    `is_own`: on this rank, else on another rank.
    """

    def __init__(self, is_own: bool) -> None:
        super().__init__()
        self.is_own = is_own


class PartsDifferError(Exception):
    """A result without batch axis differs between micro-batches."""


@dataclass
class RecordedUse:
    """One recorded use of a unit."""

    inputs: list[torch.Size]
    """Shapes of the input tensors."""
    others: list[Any]
    """Non-tensor inputs."""
    outputs: list[torch.Size]
    """Shapes of the result tensors."""
    saved_bytes: int = 0
    """Graph memory in bytes, without unit inputs and weights."""


GradientSignature = tuple[tuple[bool, ...], frozenset[int]]
"""Gradient signature of a use: requires_grad per input, and the frozen unit parameters."""


@dataclass(frozen=True)
class GraphTraits:
    """Autograd graph properties. The defaults are safe for any graph: all results require gradients."""

    detached: frozenset[int] = frozenset()
    """Indices of results without gradient."""
    keeps_nothing: bool = False
    """True if the graph saves only inputs and weights, so recomputation would save no memory."""
    reads_weights: bool = True
    """False if the graph saves no weights and the backward reads none."""


_UNKNOWN = GraphTraits()


@dataclass
class UnitTraits:
    """Known properties of unit uses. Indices refer to distinct input tensors or distinct result tensors."""

    mutated: set[int] = field(default_factory=set)
    """Inputs changed in place by the forward."""
    stale: set[int] = field(default_factory=set)
    """Inputs changed after the forward."""
    shared: set[int] = field(default_factory=set)
    """Inputs also passed to other units."""
    changed: set[int] = field(default_factory=set)
    """Results changed in place by the caller."""
    buffers: set[BufferPlace] = field(default_factory=set)
    """Unit module buffers changed by a forward."""
    rewrites: bool = False
    """True if a saved tensor changes later without a new version, as with `tensor.data.mul_`.

    A copy made at save time would then differ from the values read by a plain PyTorch backward.
    """
    needs_graph: bool = False
    """True if torch selects other kernels without a graph, with different last bits."""
    keeps: bool = False
    """True if tensors of a forward stay alive outside: later code may take gradients through them."""
    inputs: list[int | None] = field(default_factory=list)
    """Batch axis per input. None: the input does not grow with the batch.

    The size along this axis is proportional to the rows, such as batch * heads (ALiBi) or batch * sequence; the factor
    (sequence length) may differ between batches.
    """
    others: list[bool] = field(default_factory=list)
    """Per non-tensor input, True if the value is proportional to the row count."""
    outputs: list[int | None] = field(default_factory=list)
    """Batch axis per result. None: the result does not grow with the batch."""
    is_compared: bool = False
    """True after passes with different row counts were compared, so the axes are known."""
    splits: bool = False
    """True if cutting the batch into rows leaves the results unchanged."""
    graphs: dict[GradientSignature, GraphTraits] = field(default_factory=dict)
    """Graph properties for each gradient signature."""
    copied_bytes: int = 0
    """Bytes saved by the graph regardless of batch size (weight copies)."""
    learned: dict[str, Any] = field(default_factory=dict)
    """Properties learned by stages, keyed by stage name."""

    def copy(self) -> UnitTraits:
        """Return an independent copy of these traits."""
        return replace(self, **{f.name: copy.copy(getattr(self, f.name)) for f in fields(self)})

    def graph(self, signature: GradientSignature) -> GraphTraits:
        """Return the graph properties for a gradient signature, or safe defaults."""
        return self.graphs.get(signature, _UNKNOWN)

    def learn_use(
        self,
        signature: GradientSignature,
        graph: GraphTraits,
        mutated: set[int],
        buffers: set[BufferPlace],
        *,
        is_first: bool,
    ) -> None:
        """Record one use. Properties from all uses in a pass are merged; `is_first` marks the first use."""
        self.mutated |= mutated
        self.buffers |= buffers
        known = self.graphs.get(signature)
        if known is not None and not is_first:
            # What holds for both uses.
            graph = GraphTraits(
                graph.detached & known.detached,
                graph.keeps_nothing and known.keeps_nothing,
                graph.reads_weights or known.reads_weights,
            )
        self.graphs[signature] = graph

    def learn_rows(self, one: RecordedUse | None, two: RecordedUse, rows: tuple[int, int], *, is_first: bool) -> None:
        """Compare one use in two passes with (rows[0], rows[1]) rows.

        Determines the growing axes, the saved bytes independent of the row count, and if the unit can be cut. The unit
        stays uncut if uses disagree, if one pass lacks the use (None), or if two axes of a tensor grow.
        """
        could = is_first or self.splits
        self.is_compared = True
        self.splits = False  # until all below agrees
        if one is None:
            return
        # What does not grow with the rows is no activation.
        per_row = (two.saved_bytes - one.saved_bytes) // (rows[1] - rows[0])
        self.copied_bytes = max(self.copied_bytes, two.saved_bytes - per_row * rows[1])
        try:
            inputs = [batch_axis(a, b, rows) for a, b in zip(one.inputs, two.inputs, strict=True)]
            outputs = [batch_axis(a, b, rows) for a, b in zip(one.outputs, two.outputs, strict=True)]
            others = [_is_proportional(a, b, rows) for a, b in zip(one.others, two.others, strict=True)]
        except ValueError:
            return
        if not is_first and (inputs, outputs, others) != (self.inputs, self.outputs, self.others):
            return  # two uses of one structure disagree, and a later use may be like either
        if all(axis is None for axis in outputs):  # A position table uses tokens only for their shape and runs uncut.
            inputs, others = [None] * len(inputs), [False] * len(others)
        self.inputs = inputs
        self.outputs = outputs
        self.others = others
        # Without batch inputs the unit runs once for the whole batch, so buffers would change once, not per
        # micro-batch.
        in_place: Collection[Any] = self.buffers
        if self.grows:
            in_place = self.mutated
        self.splits = could and not in_place

    @property
    def grows(self) -> bool:
        """True if any input grows with the batch."""
        return any(axis is not None for axis in self.inputs)

    def can_cut(self, arguments: Arguments, num_rows: int) -> bool:
        """True if the axes are known, and every batch-dependent argument divides evenly into `num_rows` rows."""
        if not self.is_compared:
            return False
        # The type too: what was a number in the recording may be another object in this call.
        sizes = [t.shape[axis] for t, axis in zip(arguments.tensors, self.inputs, strict=True) if axis is not None]
        sizes += [other for other, grows in zip(arguments.others, self.others, strict=True) if grows]
        return all(type(size) is int and size % num_rows == 0 for size in sizes)

    def cut_inputs(self, tensors: Sequence[torch.Tensor], rows: Span | None) -> list[torch.Tensor]:
        """Return the inputs for one micro-batch. Inputs without batch axis go to every micro-batch unchanged."""
        if rows is None:
            return list(tensors)
        return [t if axis is None else _cut(t, axis, rows) for t, axis in zip(tensors, self.inputs, strict=True)]

    def cut_others(self, others: Sequence[Any], rows: Span | None) -> Sequence[Any]:
        """Return the non-tensor arguments for one micro-batch. Numbers proportional to the batch size are scaled."""
        if rows is None:
            return others
        number = rows[1] - rows[0]
        return [_share(o, number, rows) if grows else o for o, grows in zip(others, self.others, strict=True)]

    def cut_outputs(self, gradients: GradientTensors, rows: Span | None) -> list[torch.Tensor | None]:
        """Return the result gradients for one micro-batch, followed by gradients of the inputs changed in place."""
        if rows is None:
            return list(gradients)
        axes = [*self.outputs, *(self.inputs[i] for i in sorted(self.mutated))]
        pieces: list[torch.Tensor | None] = []
        for gradient, axis in zip(gradients, axes, strict=False):
            if gradient is not None and axis is not None:
                pieces.append(_cut(gradient, axis, rows))
            elif rows[0] == 0:  # The caller received the first micro-batch's copy of a shared result.
                pieces.append(gradient)
            else:
                pieces.append(None)
        return pieces

    def differing_output(self, results: Sequence[Arguments]) -> int | None:
        """Return the index of a differing result without batch axis, or None.

        Comparing distinct tensors waits for the device.
        """
        for index, axis in enumerate(self.outputs):
            first, *others = (result.tensors[index] for result in results)
            if axis is None and not all(first is other or same_bits(first, other) for other in others):
                return index
        return None

    def join_outputs(self, results: Sequence[Arguments]) -> list[torch.Tensor]:
        """Return the whole-batch results."""
        if len(results) == 1:
            return results[0].tensors
        joined = []
        for index, axis in enumerate(self.outputs):
            pieces = [result.tensors[index] for result in results]
            if axis is None:  # equal in all micro-batches, see `differing_output`
                joined.append(pieces[0])
            else:
                joined.append(torch.cat(pieces, axis))
        return joined

    def join_gradients(self, parts: Sequence[GradientTensors]) -> list[torch.Tensor | None]:
        """Return the input gradients of the whole batch.

        Gradients are concatenated along the batch axis, or summed for an input shared by all micro-batches.
        """
        if len(parts) == 1:
            return list(parts[0])
        joined: list[torch.Tensor | None] = []
        for index in range(len(parts[0])):
            pieces = [part[index] for part in parts]
            present = [piece for piece in pieces if piece is not None]
            axis = self.inputs[index]
            if not present:
                joined.append(None)
            elif axis is None:
                joined.append(functools.reduce(operator.add, present))
            else:
                assert len(present) == len(pieces)
                joined.append(torch.cat(present, axis))
        return joined


class Rows(NamedTuple):
    """Batch rows of a pass on one rank, and the place of one use in the step. The defaults: a whole batch."""

    batch: int = 0
    """Rows in the batch."""
    size: int = 0
    """Rows in a micro-batch."""
    num_parts: int = 1
    """Maximum micro-batch count over all ranks."""
    rank: int = 0
    """Rank with these rows."""
    step: int = 0
    """Step number."""
    use: int = 0
    """Number of the unit's calls so far in this step, this one included."""

    @property
    def is_cut(self) -> bool:
        """True if the rank has more than one micro-batch."""
        return self.size < self.batch

    def of(self, traits: UnitTraits) -> list[Span | None]:
        """Return the micro-batches of a unit with these traits, or [None] for the whole input."""
        if not (self.is_cut and traits.grows):
            return [None]
        return [(start, min(start + self.size, self.batch), self.batch) for start in range(0, self.batch, self.size)]


def batch_axis(first: Sequence[int], second: Sequence[int], rows: tuple[int, int]) -> int | None:
    """Return the axis that grew from shape `first` to `second` in proportion to the rows, or None.

    Raises ValueError if ambiguous.
    """
    if len(first) != len(second):
        raise ValueError("different numbers of axes")
    grown = [axis for axis, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if not grown:
        return None
    axis = grown[0]
    if len(grown) > 1 or first[axis] % rows[0] or first[axis] // rows[0] * rows[1] != second[axis]:
        raise ValueError("no single axis grew with the rows")
    return axis


def _is_proportional(first: Any, second: Any, rows: tuple[int, int]) -> bool:
    """True if a non-tensor argument is proportional to the row count, False if equal or not an int.

    Raises ValueError for any other change.
    """
    if type(first) is int and type(second) is int and first != second:
        if first % rows[0] or first // rows[0] * rows[1] != second:
            raise ValueError("a number that is not proportional to the rows")
        return True
    return False


def _cut(tensor: torch.Tensor, axis: int, rows: Span) -> torch.Tensor:
    """Return the slice of `tensor` for one micro-batch."""
    begin, end = (_share(tensor.shape[axis], number, rows) for number in rows[:2])
    return tensor.narrow(axis, begin, end - begin)


def _share(size: int, number: int, rows: Span) -> int:
    """Return the part of `size` for `number` rows, with `size` divided evenly over all rows."""
    return size // rows[2] * number
