"""From a batch to a loss, and how the loss counts targets."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import nn

from offload.engine.loss.batch import IGNORED, Batch
from offload.engine.loss.group_loss import as_loss
from offload.errors import ConfigError, nearest

LossFunction = Callable[[Any, Batch], torch.Tensor]


@dataclass(frozen=True)
class LossRule:
    """Properties of a loss, measured by trials."""

    shifts: bool = True
    """True if position t is scored against label t + 1. The first label of a row is then not a target."""
    takes_count: bool = False
    """True if the loss divides by `num_items_in_batch` when given."""
    counts_rows: bool = False
    """True if every row with a target has the same weight."""

    def count(self, labels: torch.Tensor) -> int:
        """Return the target count: labels not ignored, all regression values, or rows with a target (`counts_rows`)."""
        if self.counts_rows and labels.dim() == 2:
            return int((labels[:, 1:] != IGNORED).any(1).sum())
        if labels.is_floating_point():
            return labels.numel()
        if self.shifts and labels.dim() > 1:
            labels = labels[:, 1:]
        return int((labels != IGNORED).sum())


def labels_of(batch: Batch) -> torch.Tensor | None:
    """Return the labels for target counting. None: no labels."""
    labels = batch.get("labels")
    return labels if isinstance(labels, torch.Tensor) and labels.dim() else None


def select_inputs(model: nn.Module, batch: Batch, loss_fn: LossFunction | None) -> dict[str, Any]:
    """Return the batch values that the model's forward takes. Other values are for `loss_fn`. Raises ConfigError."""
    signature = inspect.signature(model.forward).parameters
    labels, has_loss_function = labels_of(batch), loss_fn is not None
    if (loss := as_loss(loss_fn)).counts_groups:
        batch = {key: value for key, value in batch.items() if key not in loss.own}
    elif has_loss_function and labels is not None and (labels.is_floating_point() or labels.dim() != 2):
        batch = {key: value for key, value in batch.items() if key != "labels"}  # not token labels: for loss_fn alone
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values()):
        for key in batch:
            close = "" if key in signature else nearest(key, signature, cutoff=0.85)
            if close:  # **kwargs would swallow a misspelt name
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


def check_loss(loss: Any, *, has_backward: bool = True) -> torch.Tensor:
    """Validate the result of a loss function.

    Without a gradient, Python and numpy numbers are valid too. Raises ConfigError.
    """
    if not has_backward and not isinstance(loss, bool) and isinstance(loss, Real):
        return torch.tensor(float(loss), dtype=torch.float32, device="cpu")
    if not isinstance(loss, torch.Tensor) or loss.dim():
        description = (
            f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else f"a {type(loss).__name__}"
        )
        raise ConfigError(
            f"loss_fn returned {description}; it must return a 0-dim tensor, such as the mean over the targets of the "
            "batch."
        )
    return loss


def run_loss(
    model: nn.Module, batch: Batch, loss_fn: LossFunction | None, *, has_backward: bool = True, **extra: Any
) -> torch.Tensor:
    """Run the model on a batch. Return the loss from `loss_fn`, or the model loss without one."""
    outputs = model(**select_inputs(model, batch, loss_fn), **extra)
    return check_loss(loss_fn(outputs, batch), has_backward=has_backward) if loss_fn else find_loss(outputs)
