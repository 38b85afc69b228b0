"""Losses over groups of rows (e.g. the two answers in a preference) and over token log-probabilities."""

from __future__ import annotations

from enum import Enum
from typing import Any, ClassVar

import torch

from offload.engine.loss.batch import IGNORED, Batch
from offload.errors import ConfigError

GroupMetrics = dict[str, torch.Tensor]
"""Metrics by name, fp32 [groups] each."""


class Needs(Enum):
    """Model results for a loss."""

    OUTPUTS = "outputs of the model"
    LOG_PROBS = "log-probabilities of the labels"
    MEAN = "the loss of the model"

    @property
    def allows_chunks(self) -> bool:
        """True if the head may compute logits in chunks, so they never exist all at once."""
        return self is not Needs.OUTPUTS


class Loss:
    """Properties of a loss for the engine. The defaults are those of a function of outputs and batch.

    For example a loss over pairs of rows, from the log-probabilities of their labels:

        class Pairs(TokenLoss):
            group = 2

            def of(self, log_probs, batch):
                sums = log_probs.sum(1)
                return self._mean(softplus(sums[1::2] - sums[::2]), batch)
    """

    group: ClassVar[int] = 1
    """Rows per group."""
    needs: Needs = Needs.OUTPUTS
    """First argument of `of`."""
    own: ClassVar[frozenset[str]] = frozenset()
    """Batch values for the loss alone."""
    counts_groups: ClassVar[bool] = False
    """True if every group with targets has the same weight."""

    def __init__(self, needs: Needs) -> None:
        self.needs = needs

    def of(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """Return the loss, 0-dim, from the results in `needs`: outputs of the model, or log-probabilities of the
        labels, fp32 [rows, tokens] (0 without a target, e.g. for the first label in a row).
        """
        raise NotImplementedError

    def check(self, num_rows: int, micro_rows: int | None) -> None:
        """Raise ConfigError if the batch or a micro-batch splits a group."""
        for subject, number in ("the batch has", num_rows), ("a micro-batch has", micro_rows or num_rows):
            if number % self.group:
                raise ConfigError(
                    f"{subject} {number} rows, but the loss {type(self).__name__} needs groups of {self.group} rows: "
                    f"use a multiple of {self.group}."
                )

    def begin(self) -> None:
        """Begin a pass: drop earlier metrics."""

    def keep(self) -> None:
        """Count the latest loss as a part of the pass."""


class GroupLoss(Loss):
    """Mean loss over groups of neighbouring rows. Micro-batches and ranks never split a group.

    The batch has `labels` int64 [rows, tokens]. A group counts if every row has a target, so a rank without real rows
    can participate. The model does not receive the batch values in `own`.
    """

    own: ClassVar[frozenset[str]] = frozenset({"labels"})
    counts_groups: ClassVar[bool] = True

    def __init__(self) -> None:
        self._newest: GroupMetrics = {}
        self._parts: list[GroupMetrics] = []

    def __call__(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """Return the loss, 0-dim, from the model outputs."""
        return self.of(outputs, batch)

    def begin(self) -> None:
        self._parts = []

    def keep(self) -> None:
        self._parts.append(self._newest)

    @property
    def metrics(self) -> GroupMetrics:
        """Group metrics from the last pass, in order, on the CPU."""
        names = self._parts[0] if self._parts else ()
        return {name: torch.cat([part[name] for part in self._parts]).cpu() for name in names}

    def _mean(self, losses: torch.Tensor, batch: Batch, **metrics: torch.Tensor) -> torch.Tensor:
        """Return the mean of losses [groups] over the counted groups. Store `metrics` for these groups."""
        counts = has_target(batch["labels"]).view(-1, self.group).all(1).to(losses.device)
        self._newest = {name: value.detach().float()[counts] for name, value in metrics.items()}
        return losses.masked_fill(~counts, 0.0).sum() / counts.sum()


class TokenLoss(GroupLoss):
    """A loss over target log-probabilities. Logits can be computed in chunks."""

    needs = Needs.LOG_PROBS

    def __call__(self, outputs: Any, batch: Batch) -> torch.Tensor:
        label_log_probs = log_probs(outputs.logits[:, :-1], batch["labels"][:, 1:])
        return self.of(torch.nn.functional.pad(label_log_probs, (1, 0)), batch)


_OF_FUNCTION, _OF_MODEL = Loss(Needs.OUTPUTS), Loss(Needs.MEAN)


def as_loss(loss_fn: Any) -> Loss:
    """Return a loss as `Loss`. None is the loss of the model; any other function takes outputs and batch."""
    if isinstance(loss_fn, Loss):
        return loss_fn
    return _OF_MODEL if loss_fn is None else _OF_FUNCTION


def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return label log-probabilities, fp32, from logits [..., vocabulary] and labels [...]; 0 for ignored labels."""
    is_target = labels != IGNORED
    targets = labels.masked_fill(~is_target, 0)
    logits = logits.float()
    values = logits.gather(-1, targets[..., None])[..., 0] - logits.logsumexp(-1)
    return values.masked_fill(~is_target, 0.0)


def has_target(labels: torch.Tensor) -> torch.Tensor:
    """Return bool [rows]: True for rows with a target in labels [rows, tokens]."""
    return (labels[:, 1:] != IGNORED).any(1)
