"""Losses over pairs of a chosen and a rejected answer, in neighbouring rows of a batch: DPO, ORPO, reward."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch.nn.functional import logsigmoid

from offload.engine.loss.batch import IGNORED, Batch
from offload.engine.loss.group_loss import GroupLoss, TokenLoss


class LogProbs(TokenLoss):
    """Measures the summed log-probability of targets per row, as `log_probs`. The loss is the negative mean."""

    own: ClassVar[frozenset[str]] = frozenset({"labels", "answers"})

    def of(self, log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
        sums = log_probs.sum(1)
        return self._mean(-sums, batch, log_probs=sums)


class DPO(TokenLoss):
    """Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290, equation 7).

    The reward of an answer is `beta` times its log-probability ratio to the reference model. The reference
    log-probabilities are the first column of `reference` in the batch, fp32 [rows, tokens].
    """

    group = 2
    own: ClassVar[frozenset[str]] = frozenset({"labels", "reference"})

    def __init__(self, beta: float) -> None:
        super().__init__()
        self._beta = beta

    def of(self, log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
        sums, beta = log_probs.sum(1), self._beta
        ratios = sums - batch["reference"][:, 0]  # one value a row
        losses = -logsigmoid(beta * _margins(ratios))
        return self._mean(losses, batch, **_reward_metrics(beta * ratios), **_sum_metrics(sums))


class ORPO(TokenLoss):
    """Odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691, equation 6), without a reference.

    Loss on the chosen answer, minus `beta` (lambda in the paper) times the log-sigmoid of the log odds ratio between
    chosen and rejected answer. If the batch has `answers`, int64 [rows, tokens], prompt labels count in the first term,
    and `answers` marks the labels for the second.
    """

    group = 2
    own: ClassVar[frozenset[str]] = frozenset({"labels", "answers"})

    def __init__(self, beta: float) -> None:
        super().__init__()
        self._beta = beta

    def of(self, log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
        labels = batch["labels"]
        nll = -(log_probs.sum(1) / _num_targets(labels))[::2]
        if (answers := batch.get("answers")) is not None:
            log_probs, labels = log_probs * answers, labels.masked_fill(answers == 0, IGNORED)
        sums = log_probs.sum(1)
        means = sums / _num_targets(labels)  # over the length, or long answers would be improbable
        # log(p / (1 - p)) from log p alone: p itself underflows for long answers.
        log_odds = _margins(means - _log1mexp(means))
        ratios = logsigmoid(log_odds)
        metrics = _reward_metrics(self._beta * means) | _sum_metrics(sums) | {"nll_loss": nll, "log_odds": log_odds}
        return self._mean(nll - self._beta * ratios, batch, **metrics)


class Reward(GroupLoss):
    """Reward model loss: the chosen answer should score higher (Bradley and Terry 1952).

    Model outputs: `logits` [rows, 1]. Adds `centering` times the squared score sum of a pair (Eisenstein et al. 2023,
    arXiv:2312.09244).
    """

    group = 2

    def __init__(self, centering: float) -> None:
        super().__init__()
        self._centering = centering

    def of(self, outputs: Any, batch: Batch) -> torch.Tensor:
        scores = outputs.logits[:, 0].float()
        losses = -logsigmoid(_margins(scores))
        if self._centering:
            # A loss of differences leaves the sum of both scores free to drift.
            losses = losses + self._centering * scores.view(-1, 2).sum(1) ** 2
        return self._mean(losses, batch, **_reward_metrics(scores))


def _margins(values: torch.Tensor) -> torch.Tensor:
    """Return chosen minus rejected values. values: [rows]; result: [pairs]."""
    return values[::2] - values[1::2]


def _reward_metrics(rewards: torch.Tensor) -> dict[str, torch.Tensor]:
    """Return reward metrics by TRL's names, each [pairs]. rewards: [rows]."""
    margins = _margins(rewards)
    return {
        "rewards/chosen": rewards[::2],
        "rewards/rejected": rewards[1::2],
        "rewards/margins": margins,
        "rewards/accuracies": margins > 0,
    }


def _sum_metrics(sums: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"logps/chosen": sums[::2], "logps/rejected": sums[1::2]}


def _num_targets(labels: torch.Tensor) -> torch.Tensor:
    """Return the target count per row, at least 1. labels: [rows, tokens]; result: [rows]."""
    return (labels[:, 1:] != IGNORED).sum(1).clamp(min=1)


def _log1mexp(values: torch.Tensor) -> torch.Tensor:
    """Return log(1 - exp(values)) for negative values (Maechler 2012, "Accurately computing log(1 - exp(-|a|))")."""
    # At 0, a certain answer, the logarithm is minus infinity.
    values = values.clamp(max=-torch.finfo(values.dtype).eps)
    is_small = values > -math.log(2)
    # Masked before, not after: the gradient of the branch not taken would be NaN.
    near = torch.log(-torch.expm1(torch.where(is_small, values, -1.0)))
    return torch.where(is_small, near, torch.log1p(-torch.exp(torch.where(is_small, -1.0, values))))
