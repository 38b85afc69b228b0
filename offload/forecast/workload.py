"""What a step computes, unit by unit, told by shapes alone."""

from __future__ import annotations

from dataclasses import dataclass


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


@dataclass(frozen=True)
class UnitWork:
    """One use of a unit over one micro-batch, or a stretch of compute between units (`name` None: losses, norms, what
    the model does by itself).

    forward, backward: its work; the backward's is without the forward that a recompute makes again.
    input_bytes: what waits on the device, or where activations go, for its backward.
    saved_bytes: what its graph holds beyond that where it is kept.
    forward_temporary_bytes, backward_temporary_bytes: the most that its operations hold at once beside inputs, results
        and what is counted above (of the backward: with the graph that a recompute makes).
    """

    name: str | None
    forward: Cost
    backward: Cost
    input_bytes: int
    saved_bytes: int
    forward_temporary_bytes: int
    backward_temporary_bytes: int


@dataclass(frozen=True)
class Workload:
    """A step's compute.

    calls: the uses of units in the order of the forward, for one micro-batch.
    num_micro_batches: over how many of these each use loops.
    num_tokens: rows times positions of the step, of one rank.
    """

    calls: tuple[UnitWork, ...]
    num_micro_batches: int
    num_tokens: int
