"""What ranks tell each other before a pass, so that all of them do the same; and what is known of its batch."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from offload.distributed.comm import Comm
from offload.engine.loss.batch import IGNORED, Batch, BatchForm, check_batch, has_equal_rows
from offload.engine.loss.chunked_head import ChunkedHead
from offload.engine.loss.loss import LossFunction, LossRule, labels_of
from offload.engine.loss.shared_rows import SharedRows
from offload.errors import ConfigError


@dataclass(frozen=True)
class RankBatch:
    """What a rank is about to do."""

    operation: str
    """"step" or "evaluate"."""
    shapes: tuple[tuple[str, tuple[int, ...] | str], ...] = ()
    """The shapes of the batch's tensors, and the types of what is no tensor, by name."""
    ints: tuple[tuple[str, int], ...] = ()
    """The whole numbers of the batch, by name: they may choose a way through the model."""
    rows: int = 0
    """The rows of the batch."""
    micro_rows: int = 0
    """The rows of a micro-batch; 0 where batches are whole."""
    targets: tuple[int, int, int] = (0, 0, 0)
    """How many targets a loss counts that shifts labels, one that does not, and one that counts rows with targets; the
    rows for a batch without labels.
    """
    elements: int = 0
    """The elements of the first tensor of a batch without labels, all of whose tensors have its rows."""
    is_labelled: bool = False
    """True if the batch has labels."""
    has_loss_function: bool = False
    """True if the caller gave a loss function."""
    is_new: bool = False
    """True if the rank has to record this kind of batch first."""
    is_known: bool = False
    """True if it was recorded before, with other values."""
    modes: int = 0
    """A mark of which modules train on the rank, and which parameters are frozen."""
    needs_mask: bool = False
    """True if the rows are shared with other ranks, and causal attention is not all that their tokens may see."""
    complaint: str = ""
    """What is wrong with the batch; empty where nothing is."""
    lr: float | None = None
    """The learning rate of the update that follows; None where none does."""

    @property
    def num_parts(self) -> int:
        """Into how many micro-batches the batch is cut."""
        return -(-self.rows // self.micro_rows)


@dataclass(frozen=True)
class PassPlan:
    """What every rank knows of a pass."""

    ranks: Sequence[RankBatch]
    """What each rank is about to do, in rank order."""
    rank: int
    """The number of this rank."""

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
    def has_other_values(self) -> bool:
        """True where some rank has recorded this kind of batch with values that tell less than those of this one."""
        return any(told.is_new and told.is_known for told in self.ranks)

    @property
    def needs_mask(self) -> bool:
        """True where on some rank the tokens of shared rows may not see all tokens before them."""
        return any(told.needs_mask for told in self.ranks)

    @property
    def num_parts(self) -> int:
        """Into how many micro-batches the largest batch is cut."""
        return max(told.num_parts for told in self.ranks)

    @property
    def num_elements(self) -> int:
        """Return the elements of the largest tensor."""
        return max(math.prod(shape) for told in self.ranks for _, shape in told.shapes if isinstance(shape, tuple))

    @property
    def has_peers(self) -> bool:
        return len(self.ranks) > 1

    def num_targets(self, rule: LossRule, rank: int | None = None) -> int:
        """Return the targets of all ranks together, or of one. Without labels: the rows; what a loss function makes of
        tensors [rows, ...] alone is taken for a mean over the elements of the first.
        """
        counts = [told.targets[2 if rule.by_rows else not rule.shifts] for told in self.ranks]
        if all(told.has_loss_function and told.elements for told in self.ranks):
            counts = [told.elements for told in self.ranks]
        return sum(counts) if rank is None else counts[rank]


@dataclass(frozen=True)
class BatchFacts:
    """One batch, and what its pass goes by.

    plan: what every rank is about to do.
    batch: the batch, on the device.
    loss_fn: the caller's loss function; None for the model's own loss.
    labels: the labels of the batch on the host, where counting them makes nobody wait; None without labels.
    rule: how the loss counts targets.
    head: the model's head, where its logits can be made in chunks.
    form: how the batch is cut in rows.
    shared: what is known of the rows beside this rank's tokens of them; None where it has all.
    """

    plan: PassPlan
    batch: Batch
    loss_fn: LossFunction | None = None
    labels: torch.Tensor | None = None
    rule: LossRule = field(default_factory=LossRule)
    head: ChunkedHead | None = None
    form: BatchForm = field(default_factory=partial(BatchForm, {}))
    shared: SharedRows | None = None

    @property
    def trains(self) -> bool:
        """True where an update follows the pass, False for an evaluation."""
        return self.plan.ranks[0].operation == "step"

    @property
    def num_targets(self) -> int:
        """Return the targets of all ranks together."""
        return self.plan.num_targets(self.rule)

    def of_sample(self, sample: Batch, micro_rows: int | None = None) -> BatchFacts:
        """Return the facts of a few rows, which this rank passes by itself, in micro-batches of `micro_rows`."""
        told = self.plan.ranks[0]
        plan = PassPlan([_told(told.operation, sample, micro_rows, told.has_loss_function)], 0)
        return replace(self, batch=sample, plan=plan, labels=host_labels(sample), shared=None)


def agree_on_pass(
    comm: Comm,
    operation: str,
    batch: Batch | None = None,
    micro_rows: int | None = None,
    has_loss_function: bool = False,
    news: Callable[[], tuple[bool, bool]] = lambda: (False, False),
    lr: float | None = None,
    modes: int = 0,
    shared: SharedRows | None = None,
) -> PassPlan:
    """Tell the other ranks what this one is about to do with its batch, and hear the same of them. Collective. `news`
    returns whether the batch is new to this rank, and whether its kind is known; it may refuse the batch. `shared`:
    what is known of its rows beside this rank's tokens.

    Raises:
        ConfigError: on all ranks, where they are about to do different things, or where one has no sound batch.
    """
    told = RankBatch(operation)
    try:
        if batch is not None:
            told = _told(operation, batch, micro_rows, has_loss_function)
        if shared is not None:
            count = int((shared.targets != IGNORED).sum())
            told = replace(told, targets=(count, count, count), needs_mask=shared.whole.needs_mask)
        is_new, is_known = news()
        told = replace(told, is_new=is_new, is_known=is_known, lr=lr, modes=modes)
    except ConfigError as error:
        told = RankBatch(operation, complaint=str(error))
    ranks = comm.gather_objects(told, "what to do next")
    for rank, other in enumerate(ranks):
        if other.complaint:
            raise ConfigError(f"rank {rank}: {other.complaint}" if len(ranks) > 1 else other.complaint)
    for what, found in (
        ("call", [other.operation for other in ranks]),
        ("have the tensors", [", ".join(_shown(key, shape) for key, shape in other.shapes) for other in ranks]),
        ("have", [f"engine.lr={other.lr}" for other in ranks]),
        ("have", [f"{'a' if other.has_loss_function else 'no'} loss_fn" for other in ranks]),
    ):
        _refuse_differences(what, found)
    return PassPlan(ranks, comm.rank)


def host_labels(batch: Batch) -> torch.Tensor | None:
    """Return the labels of a batch on the host; None where it has none."""
    labels = labels_of(batch)
    return None if labels is None else labels.cpu()


def _told(operation: str, batch: Batch, micro_rows: int | None, has_loss_function: bool) -> RankBatch:
    rows, labels = check_batch(batch), labels_of(batch)
    shapes = tuple(
        (key, tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__)
        for key, value in sorted(batch.items())
    )
    ints = tuple((key, value) for key, value in sorted(batch.items()) if type(value) is int)
    targets, elements = (rows, rows, rows), 0
    if labels is not None:
        shifted, unshifted = LossRule(shifts=True).count(labels), LossRule(shifts=False).count(labels)
        targets = shifted, unshifted, LossRule(by_rows=True).count(labels)
    elif has_equal_rows(batch, rows):
        elements = next(iter(batch.values())).numel()
    micro_rows = min(micro_rows or rows, rows)
    is_labelled = labels is not None
    return RankBatch(operation, shapes, ints, rows, micro_rows, targets, elements, is_labelled, has_loss_function)


def _shown(key: str, shape: tuple[int, ...] | str) -> str:
    return f"{key}, {shape}" if isinstance(shape, str) else f"{key} of {len(shape)} axes"


def _refuse_differences(what: str, found: Sequence[str]) -> None:
    if len(set(found)) > 1:
        listed = "; ".join(f"rank {rank}: {value or 'none'}" for rank, value in enumerate(found))
        closes = any(value.startswith("close") for value in found)
        closed = " A rank that has no more data ends the run for all." if closes else ""
        raise ConfigError(
            f"the ranks {what} different things: {listed}. All ranks make the same calls in the same order, on batches "
            f"with the same keys.{closed}"
        )
