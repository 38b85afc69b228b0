"""Losses: interface, target counts, and the way from a batch to a loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from numbers import Real
from typing import Any, ClassVar

import torch
from torch import nn

from offload.distributed.comm import Comm
from offload.engine.loss.batch import IGNORED, Batch, Chunk
from offload.engine.loss.cross_entropy import Term, log_probs_with_gradient
from offload.errors import ConfigError, nearest
from offload.tiers.counters import Ledger

LossFunction = Callable[[Any, Batch], torch.Tensor]


class Needs(Enum):
    """Model results for a loss."""

    OUTPUTS = "outputs of the model"
    LOG_PROBS = "log-probabilities of the labels"
    MEAN = "the mean of a term of each target"

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

    group: int = 1
    """Rows per group."""
    obstacle: str = ""
    """Reason why the losses of parts of a batch do not add up: terms have rows of other groups. `of` then gets all rows
    of a rank at once, rows without targets as they are. Units still cut the batch into micro-batches.
    """
    needs: Needs = Needs.OUTPUTS
    """First argument of `of`."""
    own: ClassVar[frozenset[str]] = frozenset()
    """Batch values for the loss alone."""
    counts_groups: ClassVar[bool] = False
    """True if every group with targets has the same weight."""
    shifts: ClassVar[bool] = True
    """False if the first label of a row is a target of its own. Read if `counts_groups`; other losses are measured."""

    def __init__(self, needs: Needs) -> None:
        self.needs = needs

    def __call__(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """Return the loss, 0-dim, from the outputs of the model."""
        return self.of(outputs, batch)

    def of(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """Return the loss, 0-dim, from the results in `needs`: outputs of the model, or log-probabilities of the
        labels, fp32 [rows, tokens] (0 without a target, e.g. for the first label in a row).
        """
        raise NotImplementedError

    def term(self, _inputs: Batch, _batch: Batch, _chunks: Sequence[Chunk], /) -> Term:
        """Return the term of a target. A `MEAN` is the negative mean of the terms.

        Arguments: the batch values for the model, the batch, and the chunks. The head calls the term once for each.
        """
        return log_probs_with_gradient

    def trial(self) -> Loss:
        """Return a loss with the same way through the heads, for comparisons with plain PyTorch. Its gradient must tell
        something: near a minimum, gradients are rounding errors.
        """
        return self

    def fill_shapes(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return a batch on `meta` with the values for the loss alone, beside labels: a plan measures with them."""
        return batch

    def check(self, num_rows: int, micro_rows: int | None) -> None:
        """Raise ConfigError if the batch or a micro-batch splits a group."""
        for subject, number in ("the batch has", num_rows), ("a micro-batch has", micro_rows or num_rows):
            if number % self.group:
                raise ConfigError(
                    f"{subject} {number} rows, but the loss {type(self).__name__} needs groups of {self.group} rows: "
                    f"use a multiple of {self.group}."
                )

    def open(self, comm: Comm, ledger: Ledger) -> None:
        """Prepare for a step or an evaluation. `comm`: the ranks whose rows are one batch. `ledger`: of the device."""

    def num_bytes(self, _num_rows: int, _num_own_rows: int, _width: int, /) -> int:
        """Return the device bytes that `of` reserves beside the outputs of the model, as `LOSS`.

        Arguments: rows of all ranks and of this one, and numbers of a hidden state.
        """
        return 0

    def begin(self) -> None:
        """Begin a pass: drop earlier metrics."""

    def keep(self) -> None:
        """Count the latest loss as a part of the pass."""


_OF_FUNCTION, _OF_MODEL = Loss(Needs.OUTPUTS), Loss(Needs.MEAN)


def as_loss(loss_fn: Any) -> Loss:
    """Return a loss as `Loss`. None is the loss of the model; any other function takes outputs and batch."""
    if isinstance(loss_fn, Loss):
        return loss_fn
    if loss_fn is None:
        return _OF_MODEL
    return _OF_FUNCTION


@dataclass(frozen=True)
class LossRule:
    """Properties of a loss, measured by trials."""

    shifts: bool = True
    """True if position t is scored against label t + 1. The first label of a row is then not a target."""
    takes_count: bool = False
    """True if the loss divides by `num_items_in_batch` when given."""
    counts_rows: bool = False
    """True if every row with a target has the same weight."""
    obstacle: str = ""
    """Reason why parts, weighted by their targets, do not add up to the loss; "" if they do, or if this is unknown."""
    weighs_rows: bool = False
    """True if every row has the same weight, also without a target: a sum over targets, divided by all positions."""

    def count(self, labels: torch.Tensor) -> int:
        """Return the target count: labels not ignored, all regression values, or rows with a target (`counts_rows`)."""
        is_target = labels != IGNORED
        if self.shifts and labels.dim() > 1:
            is_target = is_target[:, 1:]
        if self.counts_rows and labels.dim() == 2:
            return int(is_target.any(1).sum())
        if labels.is_floating_point():
            return labels.numel()
        return int(is_target.sum())

    def weight(self, labels: torch.Tensor) -> int:
        """Return the weight of a part of the batch."""
        if self.weighs_rows:
            return len(labels)
        return self.count(labels)


def labels_of(batch: Batch) -> torch.Tensor | None:
    """Return the labels for target counting. None: no labels."""
    labels = batch.get("labels")
    if isinstance(labels, torch.Tensor) and labels.dim():
        return labels
    return None


def has_even_targets(batch: Batch) -> bool:
    """True if all rows have equal numbers of targets. Any weights of rows then give the same loss."""
    labels = labels_of(batch)
    if labels is None or labels.is_floating_point():
        return True
    counts = (labels != IGNORED).reshape(len(labels), -1).sum(1)
    return bool((counts == counts[0]).all())


def select_inputs(model: nn.Module, batch: Batch, loss_fn: LossFunction | None) -> dict[str, Any]:
    """Return the batch values that the model's forward takes. Other values are for `loss_fn`. Raises ConfigError."""
    signature = inspect.signature(model.forward).parameters
    labels, has_loss_function = labels_of(batch), loss_fn is not None
    # Given labels, a model would compute another loss, in vain or with an error.
    if own := as_loss(loss_fn).own:
        batch = {key: value for key, value in batch.items() if key not in own}
    elif has_loss_function and labels is not None and (labels.is_floating_point() or labels.dim() != 2):
        batch = {key: value for key, value in batch.items() if key != "labels"}  # not token labels: for loss_fn alone
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values()):
        for key in batch:
            # **kwargs would swallow a misspelt name.
            if key not in signature and (close := nearest(key, signature, cutoff=0.85)):
                raise ConfigError(
                    f"the batch has {key!r}, which is no named argument of {type(model).__name__}.forward{close}."
                )
        return dict(batch)
    unknown = [key for key in batch if key not in signature]
    if unknown and not has_loss_function:
        raise ConfigError(
            f"the batch has {unknown[0]!r}, which {type(model).__name__}.forward does not "
            f"take{nearest(unknown[0], signature)}; it takes {', '.join(signature)}."
        )
    return {key: value for key, value in batch.items() if key in signature}


def find_loss(outputs: Any) -> torch.Tensor:
    """Return the loss from model outputs: `.loss`, `["loss"]`, or a 0-dim tensor (first or alone).

    Raises ConfigError.
    """
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, Mapping):
        loss = outputs.get("loss")
    if loss is None and isinstance(outputs, tuple) and outputs:
        loss = outputs[0]
    if loss is None and isinstance(outputs, torch.Tensor):
        loss = outputs
    if not isinstance(loss, torch.Tensor) or loss.dim():
        raise ConfigError(
            f"the model returned no loss ({type(outputs).__name__}): put labels into the batch, or give engine.step a "
            "loss_fn(outputs, batch) that returns a 0-dim tensor."
        )
    return loss


def run_loss(
    model: nn.Module, batch: Batch, loss_fn: LossFunction | None, *, has_backward: bool = True, **extra: Any
) -> torch.Tensor:
    """Run the model on a batch. Return the loss from `loss_fn`, or the model loss without one.

    Without a backward, a loss function may also return Python and numpy numbers. Raises ConfigError.
    """
    outputs = model(**select_inputs(model, batch, loss_fn), **extra)
    if loss_fn is None:
        return find_loss(outputs)
    loss: Any = loss_fn(outputs, batch)
    # A bool is a number to Python, and no loss.
    if not has_backward and not isinstance(loss, bool) and isinstance(loss, Real):
        return torch.tensor(float(loss), dtype=torch.float32, device="cpu")
    if not isinstance(loss, torch.Tensor) or loss.dim():
        description = f"a {type(loss).__name__}"
        if isinstance(loss, torch.Tensor):
            description = f"a tensor of shape {tuple(loss.shape)}"
        raise ConfigError(
            f"loss_fn returned {description}; it must return a 0-dim tensor, such as the mean over the targets of the "
            "batch."
        )
    return loss
