"""What the recording pass has learned about a unit, and how its tensors are cut into micro-batches and joined again."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from offload.engine.units.arguments import Arguments
from offload.engine.units.condition import BufferPlace
from offload.engine.units.tiles import Tiles

Rows = tuple[int, int, int]
"""A micro-batch: rows [begin, end) of so many."""


class UnrecordedCallError(Exception):
    """A unit was called with arguments of a structure that was not recorded, so that they cannot be cut in rows: on
    this rank (`is_own`) or on another.
    """

    def __init__(self, is_own: bool) -> None:
        super().__init__()
        self.is_own = is_own


class PartsDifferError(Exception):
    """Micro-batches were to have a result in common, and each has its own."""


@dataclass(frozen=True)
class BatchAxis:
    """A tensor's axis that grows with the batch. The size of the axis is a multiple of the rows: as many as there are
    heads, for ALiBi in [batch * heads, ...], or tokens in a row, which may be others in every batch, in [batch *
    sequence, ...].
    """

    axis: int
    """The number of the axis."""

    def cut(self, tensor: torch.Tensor, rows: Rows) -> torch.Tensor:
        """Return the part of `tensor` that belongs to a micro-batch."""
        begin, end = (_share(tensor.shape[self.axis], number, rows) for number in rows[:2])
        return tensor.narrow(self.axis, begin, end - begin)


@dataclass
class Use:
    """One use of a unit, as it was recorded."""

    inputs: list[torch.Size]
    """The shapes of the input tensors."""
    others: list[Any]
    """The inputs that are no tensors."""
    outputs: list[torch.Size]
    """The shapes of the result's tensors."""
    saved_bytes: int = 0
    """What the graph saved beside the unit's inputs and weights."""


Trained = tuple[tuple[bool, ...], frozenset[int]]
"""What of a use takes gradients: whether each input does, and which parameters of the unit do not."""


@dataclass(frozen=True)
class GraphTraits:
    """What is known of the graph of a use. By default what is safe: results take gradients."""

    detached: frozenset[int] = frozenset()
    """Results that require no gradient."""
    keeps_nothing: bool = False
    """True if the graph saves only inputs and weights, so that a recompute would save no memory."""
    reads_weights: bool = True
    """False if the graph saves no weights either, and its backward reads none."""


_UNKNOWN = GraphTraits()


@dataclass
class UnitTraits:
    """What is known of uses of a unit. Indices are into the unit's input tensors, or those of its result, each listed
    once.
    """

    mutated: set[int] = field(default_factory=set)
    """Inputs that the forward changes in place."""
    stale: set[int] = field(default_factory=set)
    """Inputs that change after the forward."""
    shared: set[int] = field(default_factory=set)
    """Inputs that other units receive too."""
    changed: set[int] = field(default_factory=set)
    """Results that the caller changes in place."""
    buffers: set[BufferPlace] = field(default_factory=set)
    """The buffers of the unit's modules that a forward moves."""
    rewrites: bool = False
    """True if a tensor that the graph saves is changed later without a new version, as by `tensor.data.mul_`: a copy of
    the moment of saving has other numbers than the backward of plain PyTorch reads.
    """
    needs_graph: bool = False
    """True if torch takes other kernels without a graph, so that the last bits differ."""
    inputs: list[BatchAxis | None] = field(default_factory=list)
    """Of each input the axis that grows with the batch; None for an input that does not grow."""
    others: list[bool] = field(default_factory=list)
    """Of each input that is no tensor, whether it is a multiple of the number of rows."""
    outputs: list[BatchAxis | None] = field(default_factory=list)
    """Of each result the axis that grows with the batch; None for a result that does not grow."""
    is_compared: bool = False
    """True once passes with different numbers of rows were compared, so that the axes are known."""
    splits: bool = False
    """True if the unit gives the same when the batch is cut in rows."""
    graphs: dict[Trained, GraphTraits] = field(default_factory=dict)
    """What is known of the graphs of uses, by what of them takes gradients."""
    copied_bytes: int = 0
    """What the graph saves that does not grow with the batch: copies of weights."""
    tiles: Tiles | None = None
    """Which modules inside the unit may run over tiles of the sequence; None where nobody has looked."""

    def copy(self) -> UnitTraits:
        """Return another variant with the same notes."""
        return replace(self, **{f.name: copy.copy(getattr(self, f.name)) for f in fields(self)})

    def learn_tiles(self, tiles: Tiles | None) -> None:
        """Note which modules inside the unit may run over tiles; None: that is to be found anew."""
        self.tiles = tiles

    def rewrite_saved(self) -> None:
        """Note that tensors which the graph saves change later, and their versions do not."""
        self.rewrites = True

    def need_graph(self) -> None:
        """Without a graph, torch gave other bits."""
        self.needs_graph = True

    def graph(self, trained: Trained) -> GraphTraits:
        """Return what is known of the graph of a use of which this takes gradients."""
        return self.graphs.get(trained, _UNKNOWN)

    def learn_use(
        self, trained: Trained, graph: GraphTraits, mutated: set[int], buffers: set[BufferPlace], *, is_first: bool
    ) -> None:
        """Note what one use does; over the uses of a pass, of which this `is_first` or not, what any of them does."""
        self.mutated |= mutated
        self.buffers |= buffers
        known = None if is_first else self.graphs.get(trained)
        if known is not None:
            graph = GraphTraits(
                graph.detached & known.detached,
                graph.keeps_nothing and known.keeps_nothing,
                graph.reads_weights or known.reads_weights,
            )
        self.graphs[trained] = graph

    def learn_rows(self, one: Use | None, two: Use, rows: tuple[int, int], *, is_first: bool) -> None:
        """Compare a use in two passes of so many rows: what grew with the rows, and by which axis; what the graph holds
        regardless of them; whether the unit can be cut. Uses that differ in this, a use that only one pass had (None),
        and tensors with two axes that grew leave the unit uncut.
        """
        could, self.is_compared, self.splits = is_first or self.splits, True, False
        if one is None:
            return
        per_row = (two.saved_bytes - one.saved_bytes) // (rows[1] - rows[0])
        self.copied_bytes = max(self.copied_bytes, two.saved_bytes - per_row * rows[1])
        try:
            inputs = [batch_axis(a, b, rows) for a, b in zip(one.inputs, two.inputs, strict=True)]
            outputs = [batch_axis(a, b, rows) for a, b in zip(one.outputs, two.outputs, strict=True)]
            others = [_scales(a, b, rows) for a, b in zip(one.others, two.others, strict=True)]
        except ValueError:
            return
        if not is_first and (inputs, outputs, others) != (self.inputs, self.outputs, self.others):
            return
        if all(axis is None for axis in outputs):  # a position table that takes tokens for their shape runs whole
            inputs, others = [None] * len(inputs), [False] * len(others)
        self.inputs, self.outputs, self.others = inputs, outputs, others
        # Buffers of a unit that sees no rows would move once for the whole batch.
        self.splits = could and not (self.mutated if self.grows else self.buffers)

    @property
    def grows(self) -> bool:
        """True where some input grows with the batch."""
        return any(axis is not None for axis in self.inputs)

    def can_cut(self, arguments: Arguments, num_rows: int) -> bool:
        """True where so many rows have equal shares of all arguments that grow with the batch."""
        sizes = [t.shape[axis.axis] for t, axis in zip(arguments.tensors, self.inputs, strict=True) if axis is not None]
        sizes += [other for other, grows in zip(arguments.others, self.others, strict=True) if grows]
        return all(type(size) is int and size % num_rows == 0 for size in sizes)

    def cut_inputs(self, tensors: Sequence[torch.Tensor], rows: Rows | None) -> list[torch.Tensor]:
        """Return the inputs of one micro-batch; what does not grow with the batch is every micro-batch's."""
        if rows is None:
            return list(tensors)
        return [t if axis is None else axis.cut(t, rows) for t, axis in zip(tensors, self.inputs, strict=True)]

    def cut_others(self, others: Sequence[Any], rows: Rows | None) -> Sequence[Any]:
        """Return the arguments that are no tensors; a number that is the batch size, or a multiple, becomes the
        micro-batch's.
        """
        if rows is None:
            return others
        number = rows[1] - rows[0]
        return [_share(o, number, rows) if grows else o for o, grows in zip(others, self.others, strict=True)]

    def cut_outputs(self, gradients: Sequence[torch.Tensor | None], rows: Rows | None) -> list[torch.Tensor | None]:
        """Return the gradients of one micro-batch's results (and of the inputs that it changed in place)."""
        if rows is None:
            return list(gradients)
        axes = [*self.outputs, *(self.inputs[i] for i in sorted(self.mutated))]
        # A result that every micro-batch gives alike was handed on once, by the first.
        shared = [g if rows[0] == 0 else None for g in gradients]
        return [
            g if g is None else once if a is None else a.cut(g, rows)
            for g, once, a in zip(gradients, shared, axes, strict=False)
        ]

    def differing_output(self, results: Sequence[Arguments]) -> int | None:
        """Return a result that does not grow with the batch, and that some micro-batch gives otherwise. Waits for the
        values of those that a forward has made.
        """
        for index, axis in enumerate(self.outputs):
            first, *others = (result.tensors[index] for result in results)
            if axis is None and not all(first is other or _is_same(first, other) for other in others):
                return index
        return None

    def join_outputs(self, results: Sequence[Arguments]) -> list[torch.Tensor]:
        """Return the results of the whole batch."""
        if len(results) == 1:
            return results[0].tensors
        joined = []
        for index, axis in enumerate(self.outputs):
            pieces = [result.tensors[index] for result in results]
            joined.append(pieces[0] if axis is None else torch.cat(pieces, axis.axis))
        return joined

    def join_gradients(
        self, found: Sequence[Sequence[torch.Tensor | None]], shapes: Sequence[tuple[torch.Size, torch.dtype]]
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs for the whole batch: joined along the batch, summed where all
        micro-batches share one.
        """
        if len(found) == 1:
            return list(found[0])
        joined: list[torch.Tensor | None] = []
        for index in range(len(shapes)):
            pieces = [part[index] for part in found]
            present = [piece for piece in pieces if piece is not None]
            axis = self.inputs[index]
            if not present:
                joined.append(None)
            elif axis is None:
                joined.append(functools.reduce(operator.add, present))
            else:
                assert len(present) == len(pieces)
                joined.append(torch.cat(present, axis.axis))
        return joined


def batch_axis(first: Sequence[int], second: Sequence[int], rows: tuple[int, int]) -> BatchAxis | None:
    """Return the axis of a tensor that grew from `first` to `second` as the rows did; ValueError where that is
    not clear.
    """
    if len(first) != len(second):
        raise ValueError("another number of axes")
    grown = [axis for axis, (a, b) in enumerate(zip(first, second, strict=True)) if a != b]
    if not grown:
        return None
    axis = grown[0]
    if len(grown) > 1 or first[axis] % rows[0] or first[axis] // rows[0] * rows[1] != second[axis]:
        raise ValueError("no single axis grew with the rows")
    return BatchAxis(axis)


def _scales(first: Any, second: Any, rows: tuple[int, int]) -> bool:
    """True where an argument that is no tensor is the number of rows or a multiple of it, False where it stays;
    ValueError for anything else.
    """
    if type(first) is int and type(second) is int and first != second:
        if first % rows[0] or first // rows[0] * rows[1] != second:
            raise ValueError("a number that follows the rows in another way")
        return True
    return False


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and bool(((one == other) | ((one != one) & (other != other))).all())


def _share(size: int, number: int, rows: Rows) -> int:
    """Return how much of a size that all rows share evenly so many rows have."""
    return size // rows[2] * number
