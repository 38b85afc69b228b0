"""Losses that a batch's rows make together: of groups of rows, such as the two answers of a preference, and of the
log-probabilities that a model gives to the tokens of rows.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import torch

from offload.engine.loss.batch import IGNORED, Batch
from offload.errors import ConfigError

Measured = dict[str, torch.Tensor]
"""Numbers by name, fp32 [groups] each."""


class GroupLoss(ABC):
    """A loss that is a mean over groups of neighbouring rows, which no micro-batch and no rank divides.

    The batch has `labels` int64 [rows, tokens]; a group counts where each of its rows has a target, so that a rank
    without rows of its own can take part. What `own` names is for the loss alone, and the model is not given it.
    """

    group: ClassVar[int] = 1
    """Rows of a group."""
    own: ClassVar[frozenset[str]] = frozenset({"labels"})
    """What of a batch is for the loss alone."""

    def __init__(self) -> None:
        self._newest: Measured = {}
        self._parts: list[Measured] = []

    @abstractmethod
    def __call__(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """Return the loss of a batch, 0-dim, from the outputs of the model."""

    def check(self, num_rows: int, micro_rows: int | None) -> None:
        """Raise ConfigError where a batch, or its micro-batches, have no whole number of groups."""
        for what, number in ("the batch has", num_rows), ("a micro-batch has", micro_rows or num_rows):
            if number % self.group:
                raise ConfigError(
                    f"{what} {number} rows, and the loss {type(self).__name__} is of groups of {self.group} rows: give "
                    f"a multiple of {self.group}."
                )

    def begin(self) -> None:
        """A pass begins: forget what was measured in those before."""
        self._parts = []

    def keep(self) -> None:
        """The loss that was made last is a part of the pass."""
        self._parts.append(self._newest)

    @property
    def measured(self) -> Measured:
        """What the last pass has measured of each group, in order, on the CPU."""
        names = self._parts[0] if self._parts else ()
        return {name: torch.cat([part[name] for part in self._parts]).cpu() for name in names}

    def _mean(self, losses: torch.Tensor, batch: Batch, **measured: torch.Tensor) -> torch.Tensor:
        """Return the mean of the losses [groups] over those that count, and note what was `measured` of these."""
        counts = has_target(batch["labels"]).view(-1, self.group).all(1).to(losses.device)
        self._newest = {name: value.detach().float()[counts] for name, value in measured.items()}
        return losses.masked_fill(~counts, 0.0).sum() / counts.sum()


class TokenLoss(GroupLoss):
    """A loss of the log-probabilities of targets, whose logits can be made in chunks: all of them are never there at
    once.
    """

    def __call__(self, outputs: Any, batch: Batch) -> torch.Tensor:
        labels, logits = batch["labels"], outputs.logits
        found = log_probs(logits[:, :-1], labels[:, 1:])
        return self.of(torch.nn.functional.pad(found, (1, 0)), batch)

    @abstractmethod
    def of(self, found: torch.Tensor, batch: Batch) -> torch.Tensor:
        """Return the loss of a batch, 0-dim, from the log-probabilities of its labels, fp32 [rows, tokens]: 0 where a
        label is no target, as the first of a row is none.
        """


def group_of(loss_fn: Any) -> int:
    """Return how many neighbouring rows a loss takes together."""
    return loss_fn.group if isinstance(loss_fn, GroupLoss) else 1


def log_probs(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Return the log-probabilities of labels [...] by logits [..., vocabulary], fp32; 0 where labels are ignored."""
    is_target = labels != IGNORED
    wanted = labels.masked_fill(~is_target, 0)
    logits = logits.float()
    found = logits.gather(-1, wanted[..., None])[..., 0] - logits.logsumexp(-1)
    return found.masked_fill(~is_target, 0.0)


def has_target(labels: torch.Tensor) -> torch.Tensor:
    """Return which rows of labels [rows, tokens] have a target, bool [rows]."""
    return (labels[:, 1:] != IGNORED).any(1)
