"""Losses over groups of rows (e.g. the two answers in a preference) and over token log-probabilities."""

from __future__ import annotations

from typing import Any, ClassVar

import torch

from offload.engine.loss.batch import IGNORED, Batch
from offload.engine.loss.loss import Loss, Needs

GroupMetrics = dict[str, torch.Tensor]
"""Metrics by name, fp32 [groups] each."""


class GroupLoss(Loss):
    """Mean loss over groups of neighbouring rows. Micro-batches and ranks never split a group.

    The batch has `labels` int64 [rows, tokens]. A group counts if every row has a target, so a rank without real rows
    can participate. The model does not receive the batch values in `own`.
    """

    own: ClassVar[frozenset[str]] = frozenset({"labels"})
    counts_groups: ClassVar[bool] = True

    def __init__(self) -> None:
        # A rank without own rows repeats a part with weight 0: only kept parts count.
        self._newest: GroupMetrics = {}
        self._parts: list[GroupMetrics] = []

    def begin(self) -> None:
        self._parts = []

    def keep(self) -> None:
        self._parts.append(self._newest)

    @property
    def metrics(self) -> GroupMetrics:
        """Group metrics from the last pass, in order, on the CPU."""
        names = self._parts[0] if self._parts else ()
        return {name: torch.cat([part[name] for part in self._parts]).cpu() for name in names}

    def _counted(self, batch: Batch, device: torch.device) -> torch.Tensor:
        """Return the groups that count, bool [groups]."""
        return has_target(batch["labels"], shifts=self.shifts).view(-1, self.group).all(1).to(device)

    def _mean(self, losses: torch.Tensor, batch: Batch, **metrics: torch.Tensor) -> torch.Tensor:
        """Return the mean of losses [groups] over the counted groups. Store `metrics` for these groups."""
        counts = self._counted(batch, losses.device)
        self._newest = {name: value.detach().float()[counts] for name, value in metrics.items()}
        return losses.masked_fill(~counts, 0.0).sum() / counts.sum()


class TokenLoss(GroupLoss):
    """A loss over target log-probabilities. Logits can be computed in chunks."""

    needs = Needs.LOG_PROBS

    def __call__(self, outputs: Any, batch: Batch) -> torch.Tensor:
        label_log_probs = log_probs(outputs.logits[:, :-1], batch["labels"][:, 1:])
        # Nothing predicts the first label of a row.
        return self.of(torch.nn.functional.pad(label_log_probs, (1, 0)), batch)


def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return label log-probabilities, fp32, from logits [..., vocabulary] and labels [...]; 0 for ignored labels."""
    is_target = labels != IGNORED
    targets = labels.masked_fill(~is_target, 0)  # `gather` refuses negative indices
    logits = logits.float()
    values = logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)
    return values.masked_fill(~is_target, 0.0)


def has_target(labels: torch.Tensor, *, shifts: bool = True) -> torch.Tensor:
    """Return bool [rows]: True for rows with a target in labels [rows, tokens]. `shifts`: the first label of a row is
    none.
    """
    if shifts:
        labels = labels[:, 1:]
    return (labels != IGNORED).any(1)
