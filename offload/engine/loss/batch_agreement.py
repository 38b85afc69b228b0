"""What ranks tell each other before a pass, so that all of them do the same."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

from offload.distributed.comm import Comm
from offload.engine.loss.loss import Batch, LossRule, check_batch
from offload.errors import ConfigError


@dataclass(frozen=True)
class RankBatch:
    """What a rank is about to do. `targets`: of a loss that shifts labels, and of one that does not. `is_new`: it has
    to record first. `lr`: of the update that follows.
    """

    operation: str
    shapes: tuple[tuple[str, tuple[int, ...]], ...] = ()
    micro_rows: int = 0
    targets: tuple[int, int] = (0, 0)
    has_loss_function: bool = False
    is_new: bool = False
    complaint: str = ""
    lr: float | None = None

    @property
    def rows(self) -> int:
        return self.shapes[0][1][0]

    @property
    def num_parts(self) -> int:
        """Into how many micro-batches the batch is cut."""
        return -(-self.rows // self.micro_rows)


@dataclass(frozen=True)
class PassPlan:
    """What every rank knows of a pass: what each was told, in rank order."""

    ranks: Sequence[RankBatch]
    rank: int

    @property
    def kind(self) -> Hashable:
        """Return what passes with the same schedule have in common."""
        own = self.ranks[self.rank]
        return own.operation, tuple(told.shapes for told in self.ranks), not own.has_loss_function

    @property
    def is_new(self) -> bool:
        """True where some rank has to record first, which all do together."""
        return any(told.is_new for told in self.ranks)

    @property
    def num_parts(self) -> int:
        """Into how many micro-batches the largest batch is cut."""
        return max(told.num_parts for told in self.ranks)

    @property
    def num_elements(self) -> int:
        """Return the elements of the largest tensor."""
        return max(math.prod(shape) for told in self.ranks for _, shape in told.shapes)

    @property
    def has_peers(self) -> bool:
        return len(self.ranks) > 1

    def num_targets(self, rule: LossRule, rank: int | None = None) -> int:
        """Return the targets of all ranks together, or of one."""
        counts = [told.targets[not rule.shifts] for told in self.ranks]
        return sum(counts) if rank is None else counts[rank]


def meet(
    comm: Comm,
    operation: str,
    batch: Batch | None = None,
    micro_rows: int | None = None,
    has_loss_function: bool = False,
    is_new: Callable[[], bool] = lambda: False,
    lr: float | None = None,
) -> PassPlan:
    """Tell the other ranks what this one is about to do with its batch, and hear the same of them. Collective.

    Raises:
        ConfigError: on all ranks, where they are about to do different things, or where one has no sound batch.
    """
    told = RankBatch(operation)
    try:
        if batch is not None:
            check_batch(batch)
    except ConfigError as error:
        told = RankBatch(operation, complaint=str(error))
    if batch is not None and not told.complaint:
        shapes = tuple((key, tuple(value.shape)) for key, value in sorted(batch.items()))
        rows = shapes[0][1][0]
        micro = min(micro_rows or rows, rows)
        targets = LossRule(shifts=True).targets(batch), LossRule(shifts=False).targets(batch)
        told = RankBatch(operation, shapes, micro, targets, has_loss_function)
    if not told.complaint:
        told = replace(told, is_new=is_new(), lr=lr)
    ranks = comm.gather_objects(told, "what to do next")
    for rank, other in enumerate(ranks):
        if other.complaint:
            raise ConfigError(f"rank {rank}: {other.complaint}" if len(ranks) > 1 else other.complaint)
    for what, found in (
        ("call", [other.operation for other in ranks]),
        ("have the tensors", [", ".join(f"{key} of {len(s)} axes" for key, s in other.shapes) for other in ranks]),
        ("have", [f"engine.lr={other.lr}" for other in ranks]),
        ("have", [f"{'a' if other.has_loss_function else 'no'} loss_fn" for other in ranks]),
    ):
        _refuse_differences(what, found)
    return PassPlan(ranks, comm.rank)


def _refuse_differences(what: str, found: Sequence[str]) -> None:
    if len(set(found)) > 1:
        listed = "; ".join(f"rank {rank}: {value or 'none'}" for rank, value in enumerate(found))
        closes = any(value.startswith("close") for value in found)
        closed = " A rank that has no more data ends the run for all." if closes else ""
        raise ConfigError(
            f"the ranks {what} different things: {listed}. All ranks make the same calls in the same order, on batches "
            f"with the same keys.{closed}"
        )
