"""What a step computes, unit by unit, told by shapes alone."""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace


@dataclass(frozen=True)
class Cost:
    """Work of the device.

    flops: floating point operations of matrix products and attention.
    num_bytes: memory that these read and write, while they compute.
    num_operations: operations that are launched.
    moved_bytes: memory that all other operations read and write, one after the other.
    exchanged_bytes: what is sent to the ranks that share sequences, for which compute waits.
    """

    flops: float
    num_bytes: float
    num_operations: int
    moved_bytes: float = 0.0
    exchanged_bytes: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(mine + its for mine, its in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: Cost) -> Cost:
        return self + Cost(*(-its for its in astuple(other)))

    def with_rows(self, num_rows: int, of_one_more: Cost) -> Cost:
        """Return the cost with so many rows more, by that with one more: what reads weights reads them once."""
        return replace(
            self,
            flops=self.flops + num_rows * (of_one_more.flops - self.flops),
            num_bytes=self.num_bytes + num_rows * (of_one_more.num_bytes - self.num_bytes),
            moved_bytes=self.moved_bytes + num_rows * (of_one_more.moved_bytes - self.moved_bytes),
            exchanged_bytes=self.exchanged_bytes + num_rows * (of_one_more.exchanged_bytes - self.exchanged_bytes),
        )


NO_COST = Cost(0.0, 0.0, 0)


@dataclass(frozen=True)
class UnitWork:
    """One use of a unit over one micro-batch, or a stretch of compute between units: losses, norms, what the model does
    by itself. Sizes are of one micro-batch too.
    """

    name: str | None
    """The name of the unit; None for a stretch."""
    forward: Cost
    """The work of the forward. Of what is not cut, that of all micro-batches together."""
    backward: Cost
    """The work of the backward, without the forward that a recompute makes again."""
    input_bytes: int
    """What waits for the backward on the device, or where activations go; what an earlier use has saved already is not
    counted.
    """
    saved_bytes: int
    """What the graph holds beyond the input where it is kept. That of a stretch is always kept."""
    forward_temporary_bytes: int
    """The most that the forward holds at once beside what waits for a backward, results included; for a stretch,
    results of the unit before it too.
    """
    backward_temporary_bytes: int
    """The most that the backward holds at once beside what waits for a backward, gradients of inputs included: with the
    graph that a recompute makes, without the gradients of parameters, but for the one that was made last.
    """
    result_bytes: int = 0
    """What the use hands on."""
    gradient_bytes: int = 0
    """The gradients that the backward hands on."""
    staying_bytes: int = 0
    """What of the input stays on the device wherever activations go: what takes no gradient, or goes to other units
    too.
    """
    shared_bytes: int = 0
    """Of `staying_bytes`, what does not grow with the rows, and is there once for all micro-batches."""
    leaving_bytes: int = 0
    """Of `saved_bytes`, what leaves the device where graphs wait below it."""
    unsaved_bytes: int = 0
    """Of the inputs that take a gradient, what the graph does not save."""
    keeps_graph: bool = False
    """True if the graph saves nothing but inputs and weights, so that it is kept always, and nothing is recomputed."""
    reads_weights: bool = True
    """False if that graph saves no weights either, so that none are brought up for the backward."""
    is_cut: bool = True
    """False if the use runs once, over all micro-batches (stretches, a head in chunks)."""
    is_block: bool = False
    """True if the unit is an element of a list of units, and no embedding or head."""

    def num_runs(self, num_micro_batches: int) -> int:
        """Return how often it runs in a step."""
        return num_micro_batches if self.is_cut else 1


NO_WORK = UnitWork(None, NO_COST, NO_COST, 0, 0, 0, 0)


@dataclass(frozen=True)
class Workload:
    """A step's compute.

    calls: the uses of units in the order of the forward, for one micro-batch.
    num_micro_batches: over how many of these each use loops.
    num_tokens: rows times positions of the step, of one rank.
    num_chunks: in how many pieces the head and its loss run, forward and backward, 1 where the logits are whole; so
        many uses at the end of `calls` are pieces.
    logits_bytes: what of a step's logits exists at once, in their own dtype.
    """

    calls: tuple[UnitWork, ...]
    num_micro_batches: int
    num_tokens: int
    num_chunks: int = 1
    logits_bytes: int = 0
