"""What is known of one batch and its pass, found once and handed on."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial

import torch

from offload.engine.loss.batch import Batch, BatchForm
from offload.engine.loss.batch_agreement import PassPlan, plan_alone
from offload.engine.loss.chunked_head import ChunkedHead
from offload.engine.loss.loss import LossFunction, LossRule, labels_of


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
    """

    plan: PassPlan
    batch: Batch
    loss_fn: LossFunction | None = None
    labels: torch.Tensor | None = None
    rule: LossRule = field(default_factory=LossRule)
    head: ChunkedHead | None = None
    form: BatchForm = field(default_factory=partial(BatchForm, {}))

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
        return replace(
            self,
            batch=sample,
            plan=plan_alone(self.plan.ranks[0], sample, micro_rows),
            labels=host_labels(sample),
        )


def host_labels(batch: Batch) -> torch.Tensor | None:
    """Return the labels of a batch on the host; None where it has none."""
    labels = labels_of(batch)
    return None if labels is None else labels.cpu()
