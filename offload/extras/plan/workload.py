"""Compute costs for a training step, unit by unit, derived from tensor shapes alone."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from operator import add, neg
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Cost:
    """Device work.

    flops: floating point operations in matrix products and attention.
    num_bytes: bytes these products read and write, concurrently with the arithmetic.
    num_operations: kernel launches.
    moved_bytes: bytes all other operations read and write, one operation after the other.
    copied_bytes: bytes that copies without a conversion read and write, in long stretches.
    once_bytes: bytes read and written once in a use, for all micro-batches: weights are cast.
    exchanged_bytes: bytes sent to other ranks in the sequence-parallel group. Compute waits for this exchange.
    attention_flops: those `flops` in fused attention.
    fp8_flops: those `flops` in FP8 products.
    efficient_flops: those `attention_flops` in torch's memory-efficient kernel, on cards with a faster one.
    fresh_bytes: bytes of results in memory that a CPU's allocator takes from the system each time, and gives back.
    """

    flops: float
    num_bytes: float
    num_operations: int
    moved_bytes: float = 0.0
    exchanged_bytes: float = 0.0
    attention_flops: float = 0.0
    fp8_flops: float = 0.0
    fresh_bytes: float = 0.0
    copied_bytes: float = 0.0
    once_bytes: float = 0.0
    efficient_flops: float = 0.0

    def __add__(self, other: Cost) -> Cost:
        return Cost(*map(add, self._numbers, other._numbers))

    def __sub__(self, other: Cost) -> Cost:
        return self + Cost(*map(neg, other._numbers))

    @property
    def _numbers(self) -> Collection[Any]:
        """Values of all fields, in order. Costs are added for every operation: `astuple` would copy each number."""
        return vars(self).values()

    def with_rows(self, num_rows: int, of_one_more: Cost) -> Cost:
        """Extrapolate the cost to `num_rows` additional rows, given the cost with one additional row.

        The difference per row excludes weights, since weights are read once for all rows.
        """
        pairs = zip(self._numbers, of_one_more._numbers, strict=True)
        cost = Cost(*(own + num_rows * (more - own) for own, more in pairs))
        return replace(cost, num_operations=self.num_operations)


NO_COST = Cost(0.0, 0.0, 0)
REPEATED_SHARE = 0.39
"""Share of a recomputation's memory traffic in a compiled backward. All but the operands of products stays in kernels.

By count in an 8B Llama block, fused: 70 KB a token for two norms, a sum and the SwiGLU product, of 180 KB in a forward.
"""


class PlannedProduct(NamedTuple):
    """One product in a block use, per micro-batch: output bytes, `Product.work`, and the cost."""

    num_bytes: int
    work: float
    cost: Cost


@dataclass(frozen=True)
class ProductWork:
    """A block use with kept product outputs (`train.recompute products`), per micro-batch.

    kept_bytes: bytes of the outputs, on the device from the forward to the backward.
    recomputation: cost of the recomputation, without the kept products.
    forward_temporary_bytes, backward_temporary_bytes: as in `UnitWork`, beyond the kept outputs.
    products: all products, in the order of the forward.
    """

    kept_bytes: int
    recomputation: Cost
    forward_temporary_bytes: int
    backward_temporary_bytes: int
    products: tuple[PlannedProduct, ...] = ()

    def keeping(self, numbers: Collection[int]) -> ProductWork:
        """Return the use that keeps only these products. A forward holds all outputs up to its end."""
        others = [product for number, product in enumerate(self.products) if number not in numbers]
        left_bytes = sum(product.num_bytes for product in others)
        return ProductWork(
            self.kept_bytes - left_bytes,
            sum([product.cost for product in others], self.recomputation),
            self.forward_temporary_bytes + left_bytes,
            self.backward_temporary_bytes + left_bytes,
        )


@dataclass(frozen=True)
class UnitWork:
    """One unit use in one micro-batch, or a stretch: compute between units (losses, norms, model code).

    All sizes are per micro-batch.
    """

    name: str | None
    """Unit name; None for a stretch."""
    forward: Cost
    """Forward cost. If `is_cut` is False, the cost covers all micro-batches together."""
    backward: Cost
    """Backward cost, without the repeated forward under activation recomputation."""
    input_bytes: int
    """Input bytes kept for the backward, on the device or on the activation tier.

    Tensors an earlier use already keeps are not counted.
    """
    saved_bytes: int
    """Bytes the saved autograd graph holds beyond the input. A stretch always keeps the graph."""
    forward_temporary_bytes: int
    """Peak bytes during the forward beyond tensors kept for a backward, results included.

    For a stretch, the results of the previous unit are included too.
    """
    backward_temporary_bytes: int
    """Peak bytes during the backward beyond tensors kept for a backward.

    Includes input gradients and the recomputed graph. Among parameter gradients, only the newest counts.
    """
    result_bytes: int = 0
    """Result bytes passed to the next unit."""
    gradient_bytes: int = 0
    """Input gradient bytes passed to the previous unit."""
    staying_bytes: int = 0
    """Input bytes kept on the device even with an activation tier: tensors without gradient, or shared between units.
    """
    stretch_bytes: int = 0
    """Input bytes the graph of a stretch holds on the device too. The ledger counts these for this use alone."""
    shared_bytes: int = 0
    """Part of `staying_bytes` independent of the row count and present once for all micro-batches."""
    leaving_bytes: int = 0
    """Part of `saved_bytes` copied off the device when graphs are offloaded."""
    unsaved_bytes: int = 0
    """Differentiable input bytes the graph does not save."""
    keeps_graph: bool = False
    """True if the graph saves nothing but inputs and weights. This graph is always saved, without recomputation."""
    reads_weights: bool = True
    """False if, in addition, the graph saves no weights. The backward then fetches no weights."""
    is_cut: bool = True
    """False if the use runs once for all micro-batches (stretches, a head in chunks)."""
    is_block: bool = False
    """True if the unit is a module list element, neither embedding nor head."""
    products: ProductWork | None = None
    """The use with kept product outputs. None: not measured, the use keeps none."""

    def without_backward(self) -> UnitWork:
        """Return the use in a forward without a graph: nothing is kept, and the backward has no part in it."""
        return replace(self, backward=NO_COST, input_bytes=0, saved_bytes=0, keeps_graph=True, reads_weights=False)

    def with_products(self, products: ProductWork) -> UnitWork:
        """Return the use with the memory of a recomputation over kept product outputs."""
        return replace(
            self,
            forward_temporary_bytes=products.forward_temporary_bytes,
            backward_temporary_bytes=min(self.backward_temporary_bytes, products.backward_temporary_bytes),
        )

    def compiled(self, products: ProductWork) -> UnitWork:
        """Return the use of a compiled block: its graph holds product outputs, the backward repeats the rest."""
        repeated = replace(products.recomputation, moved_bytes=REPEATED_SHARE * products.recomputation.moved_bytes)
        return replace(
            self,
            saved_bytes=products.kept_bytes,
            leaving_bytes=products.kept_bytes,
            unsaved_bytes=0,
            backward=self.backward + repeated,
            backward_temporary_bytes=products.kept_bytes + products.backward_temporary_bytes,
        )

    def num_runs(self, num_micro_batches: int) -> int:
        """Return the run count per step."""
        return num_micro_batches if self.is_cut else 1


NO_WORK = UnitWork(None, NO_COST, NO_COST, 0, 0, 0, 0)


@dataclass(frozen=True)
class Workload:
    """Compute in one pass of a step.

    calls: unit uses in forward order, for one micro-batch.
    num_micro_batches: micro-batches each use loops over.
    num_tokens: rows times positions in the pass, on one rank.
    num_chunks: chunks for head and loss, in forward and backward. 1: whole logits. The chunks are the last
        entries in `calls`.
    logits_bytes: logits bytes present at the same time, in the logits dtype.
    num_passes: equal passes of a step.
    chunk_uses: entries in `calls` for a chunk.
    chunk_heads: of them uses of units: the head of the model, and heads of companions.
    loss_bytes: as `Loss.num_bytes`.
    """

    calls: tuple[UnitWork, ...]
    num_micro_batches: int
    num_tokens: int
    num_chunks: int = 1
    logits_bytes: int = 0
    num_passes: int = 1
    chunk_uses: int = 1
    chunk_heads: int = 1
    loss_bytes: int = 0

    def without_backward(self) -> Workload:
        """Return the compute of an evaluation."""
        calls = (replace(call.without_backward(), backward_temporary_bytes=0) for call in self.calls)
        return replace(self, calls=tuple(calls))
