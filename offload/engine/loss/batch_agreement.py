"""Agreement between ranks before a pass, so that all ranks run the same pass; and the properties of a pass."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace

import torch

from offload.distributed.comm import Comm
from offload.engine.loss.batch import IGNORED, Batch, BatchForm, check_batch, has_equal_rows
from offload.engine.loss.chunked_head import ChunkedHead
from offload.engine.loss.loss import LossFunction, LossRule, labels_of
from offload.engine.units.attention import SharedRows
from offload.errors import ConfigError

_RULES = [LossRule(shifts=shifts, counts_rows=counts_rows) for counts_rows in (False, True) for shifts in (True, False)]
"""The rules by which a loss may count targets."""


@dataclass(frozen=True)
class RankBatch:
    """Announcement of one rank before a pass."""

    operation: str
    """"step" or "evaluate"."""
    shapes: tuple[tuple[str, tuple[int, ...] | str], ...] = ()
    """Tensor shapes by name; the type name for other values."""
    ints: tuple[tuple[str, int], ...] = ()
    """Integer values by name. They may select a branch inside the model."""
    rows: int = 0
    """Rows in the batch."""
    micro_rows: int = 0
    """Rows per micro-batch."""
    targets: tuple[int, ...] = (0,) * len(_RULES)
    """Target counts under `_RULES`. Without labels, all are the row count."""
    elements: int = 0
    """Elements in the first tensor of a batch without labels, if all tensors have rows along axis 0; else 0."""
    is_labelled: bool = False
    """True if the batch has labels."""
    has_loss_function: bool = False
    """True if the caller passes a loss function."""
    is_new: bool = False
    """True if this rank needs a recording pass first."""
    is_known: bool = False
    """True if this rank has a recording for the same pattern with other values."""
    is_claim: bool = False
    """True if the recording of this rank is from another engine, and not yet checked."""
    modes: int = 0
    """Hash of the training modes of modules and the frozen parameters on this rank."""
    needs_mask: bool = False
    """True if the rank shares rows with other ranks, and the attention mask is not purely causal."""
    error_message: str = ""
    """Error message for a bad batch. Empty: no error."""
    lr: float | None = None
    """Learning rate for the update after this pass. None: no update follows."""

    @classmethod
    def of(
        cls,
        operation: str,
        batch: Batch,
        rows: int,
        micro_rows: int | None,
        has_loss_function: bool,
        shared: SharedRows | None = None,
    ) -> RankBatch:
        """Return the announcement of a batch with `rows` rows. `shared`: shared rows beyond this rank's tokens."""
        labels = labels_of(batch)
        targets = (rows,) * len(_RULES)
        elements = 0
        shapes = tuple(
            (key, tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__)
            for key, value in sorted(batch.items())
        )
        ints = tuple((key, value) for key, value in sorted(batch.items()) if type(value) is int)
        if shared is not None:
            # The targets of this rank's tokens: the label of the last one is on the next rank.
            count = int((shared.targets != IGNORED).sum())
            targets = (count,) * len(_RULES)
        elif labels is not None:
            targets = tuple(rule.count(labels) for rule in _RULES)
        if labels is None and has_equal_rows(batch, rows):
            # The divisor of a loss function is unknown: see `PassPlan.num_targets`.
            elements = next(iter(batch.values())).numel()
        return cls(
            operation,
            shapes,
            ints,
            rows,
            min(micro_rows or rows, rows),
            targets,
            elements,
            is_labelled=labels is not None,
            has_loss_function=has_loss_function,
            needs_mask=shared is not None and shared.needs_mask,
        )

    @property
    def num_parts(self) -> int:
        """Number of micro-batches."""
        return -(-self.rows // self.micro_rows)


@dataclass(frozen=True)
class PassPlan:
    """A pass as agreed by all ranks."""

    ranks: Sequence[RankBatch]
    """Announcements in rank order."""
    rank: int
    """This rank."""
    step: PassPlan | None = None
    """The plan for the rows of the whole step, for one of several passes."""

    @property
    def schedule_key(self) -> Hashable:
        """Key shared by passes with the same schedule."""
        own = self.ranks[self.rank]
        # Shapes of all ranks: the largest batch decides the number of parts here too.
        return own.operation, tuple(announcement.shapes for announcement in self.ranks), not own.has_loss_function

    @property
    def is_new(self) -> bool:
        """True if some rank needs a recording pass. All ranks then record together."""
        return any(announcement.is_new for announcement in self.ranks)

    @property
    def has_other_values(self) -> bool:
        """True if some rank has a recording for this batch pattern, but from values with less information."""
        return any(announcement.is_new and announcement.is_known for announcement in self.ranks)

    @property
    def has_claims(self) -> bool:
        """True if some rank has a recording from another engine, and not yet checked."""
        return any(announcement.is_claim for announcement in self.ranks)

    @property
    def needs_mask(self) -> bool:
        """True if some rank has shared rows with an attention mask that is not purely causal."""
        return any(announcement.needs_mask for announcement in self.ranks)

    @property
    def num_parts(self) -> int:
        """Number of micro-batches on the rank with the most."""
        return max(announcement.num_parts for announcement in self.ranks)

    @property
    def num_elements(self) -> int:
        """Elements in the largest batch tensor over all ranks."""
        return max(
            math.prod(shape)
            for announcement in self.ranks
            for _, shape in announcement.shapes
            if isinstance(shape, tuple)
        )

    @property
    def has_peers(self) -> bool:
        return len(self.ranks) > 1

    def num_targets(self, rule: LossRule, rank: int | None = None) -> int:
        """Return the target count over all ranks, or for one rank. Without labels: the row count.

        Without labels, a loss function over tensors [rows, ...] is assumed to average over the elements of the first
        tensor.
        """
        kind = _RULES.index(LossRule(shifts=rule.shifts, counts_rows=rule.counts_rows))
        counts = [announcement.targets[kind] for announcement in self.ranks]
        if all(announcement.has_loss_function and announcement.elements for announcement in self.ranks):
            counts = [announcement.elements for announcement in self.ranks]
        if rank is None:
            return sum(counts)
        return counts[rank]

    def weight(self, rule: LossRule, rank: int | None = None) -> int:
        """Return the weight of the losses of all ranks together, or of one rank."""
        if not rule.weighs_rows:
            return self.num_targets(rule, rank)
        if rank is None:
            return sum(each.rows for each in self.ranks)
        return self.ranks[rank].rows


@dataclass(frozen=True)
class PassInputs:
    """One batch, and everything that determines the pass over it.

    plan: announcements from all ranks.
    batch: the batch, on the device.
    loss_fn: the caller's loss function. None: the model loss.
    labels: the labels on the host, so that counting does not synchronize the device. None: no labels.
    rule: how the loss counts targets.
    head: the model head, if logits can be computed in chunks.
    form: row axes of the batch.
    shared: information about shared rows beyond this rank's tokens. None: the rank has whole rows.
    num_passes: passes over parts of the rows, at most.
    """

    plan: PassPlan
    batch: Batch
    loss_fn: LossFunction | None
    labels: torch.Tensor | None
    rule: LossRule
    head: ChunkedHead | None
    form: BatchForm
    shared: SharedRows | None
    num_passes: int = 1

    @property
    def cuts(self) -> bool:
        """True if the rows may be cut, into micro-batches or passes."""
        return self.plan.num_parts > 1 or self.num_passes > 1

    @property
    def is_training(self) -> bool:
        """True if an update follows the pass; False for an evaluation."""
        return self.plan.ranks[0].operation == "step"

    @property
    def num_targets(self) -> int:
        """Target count over all ranks and passes."""
        return (self.plan.step or self.plan).num_targets(self.rule)

    @property
    def weight(self) -> int:
        """Weight of the losses of all ranks and passes together."""
        return (self.plan.step or self.plan).weight(self.rule)

    def of_sample(self, sample: Batch, micro_rows: int | None = None) -> PassInputs:
        """Return the `PassInputs` for a few rows that this rank runs alone, in micro-batches with `micro_rows` rows."""
        has_loss_function = self.loss_fn is not None
        own = RankBatch.of(self.plan.ranks[0].operation, sample, check_batch(sample), micro_rows, has_loss_function)
        plan = PassPlan([own], rank=0)
        return replace(self, batch=sample, plan=plan, labels=host_labels(sample), shared=None)


def agree_on_pass(comm: Comm, announcement: RankBatch) -> PassPlan:
    """Exchange announcements with all ranks before a pass. Collective.

    Raises ConfigError on all ranks if the calls differ between ranks, or one rank has a bad batch.
    """
    ranks = comm.gather_objects(announcement, "agreement on the next operation")
    # Every rank sees all announcements and raises: a rank going on alone would wait for the others forever.
    for rank, other in enumerate(ranks):
        if other.error_message:
            text = other.error_message
            if len(ranks) > 1:
                text = f"rank {rank}: {text}"
            raise ConfigError(text) from None
    # Operations first: two ranks at different calls differ in the other subjects too.
    for subject, values in (
        ("operations", [other.operation for other in ranks]),
        ("batch tensors", [", ".join(_describe_shape(key, shape) for key, shape in other.shapes) for other in ranks]),
        ("learning rates", [f"engine.lr={other.lr}" for other in ranks]),
        ("losses", [f"{'a' if other.has_loss_function else 'no'} loss_fn" for other in ranks]),
    ):
        if len(set(values)) > 1:
            listed = "; ".join(f"rank {rank}: {value or 'none'}" for rank, value in enumerate(values))
            closes = any(value.startswith("close") for value in values)
            closed = " A rank without more data ends the run for all." if closes else ""
            raise ConfigError(
                f"the ranks have different {subject}: {listed}. All ranks must make the same calls in the same order, "
                f"on batches with the same keys.{closed}"
            )
    return PassPlan(ranks, comm.rank)


def host_labels(batch: Batch) -> torch.Tensor | None:
    """Return the labels on the host, or None without labels."""
    labels = labels_of(batch)
    if labels is None:
        return None
    return labels.cpu()


def _describe_shape(key: str, shape: tuple[int, ...] | str) -> str:
    if isinstance(shape, str):
        return f"{key}, {shape}"
    return f"{key} of {len(shape)} axes"
