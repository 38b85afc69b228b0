"""What a step computes, unit by unit, told by shapes alone."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Cost:
    """Work of the device.

    flops: floating point operations of matrix products and attention.
    num_bytes: memory that the operations read and write.
    num_operations: operations that are launched.
    """

    flops: float
    num_bytes: float
    num_operations: int

    def __sub__(self, other: Cost) -> Cost:
        return Cost(
            self.flops - other.flops, self.num_bytes - other.num_bytes, self.num_operations - other.num_operations
        )

    def with_rows(self, num_rows: int, of_one_more: Cost) -> Cost:
        """Return the cost with so many rows more, by that with one more: what reads weights reads them once."""
        return replace(
            self,
            flops=self.flops + num_rows * (of_one_more.flops - self.flops),
            num_bytes=self.num_bytes + num_rows * (of_one_more.num_bytes - self.num_bytes),
        )


NO_COST = Cost(0.0, 0.0, 0)


@dataclass(frozen=True)
class UnitWork:
    """One use of a unit over one micro-batch, or a stretch of compute between units (`name` None: losses, norms, what
    the model does by itself). Sizes are of one micro-batch too.

    forward, backward: its work; the backward's is without the forward that a recompute makes again. Of what is not cut
        that of all micro-batches together.
    input_bytes: what waits on the device, or where activations go, for its backward; what an earlier use has saved
        already is not counted.
    saved_bytes: what its graph holds beyond that where it is kept. That of a stretch is always kept.
    forward_temporary_bytes, backward_temporary_bytes: the most that is held at once beside what waits for a backward,
        results and gradients of inputs included; of the backward with the graph that a recompute makes, without the
        gradients of parameters, but for the one that was made last. For a stretch results of the unit before it, too.
    result_bytes: what it hands on.
    gradient_bytes: the gradients that its backward hands on.
    staying_bytes: of its input, what stays on the device wherever activations go: what takes no gradient, or goes to
        other units too.
    shared_bytes: of that, what does not grow with the rows, and is there once for all micro-batches.
    keeps_graph: its graph saves nothing but inputs and weights, so that it is kept always, and nothing recomputed.
    is_cut: False where it runs once, over all micro-batches (stretches, the head in chunks).
    is_block: it is of a unit that is an element of a list of them, and no embedding or head.
    """

    name: str | None
    forward: Cost
    backward: Cost
    input_bytes: int
    saved_bytes: int
    forward_temporary_bytes: int
    backward_temporary_bytes: int
    result_bytes: int = 0
    gradient_bytes: int = 0
    staying_bytes: int = 0
    shared_bytes: int = 0
    keeps_graph: bool = False
    is_cut: bool = True
    is_block: bool = False

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
