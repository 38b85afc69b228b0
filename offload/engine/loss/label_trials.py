"""Trials of a loss on the same rows with other labels, without repeating the base model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from torch import nn

from offload.engine.loss.batch import Batch
from offload.engine.units.rerouting import forward_replaced


def find_base_model(model: nn.Module) -> nn.Module | None:
    """Return the transformers base model below the head, also through an adapter wrapper. None: no base model."""
    base_model = model
    while isinstance(below := getattr(base_model, "base_model", None), nn.Module) and below is not base_model:
        base_model = below
    return None if base_model is model else base_model


class LabelTrials:
    """Runs a model repeatedly on the same rows with other labels.

    If the labels do not change the base model output, this output is computed once and only the head runs again.
    """

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        """`run`: the model on a batch and further arguments."""
        self._base, self._run, self._outputs = find_base_model(model), run, list[Any]()
        self.output: Any = None
        """Output of the base model. None: labels may change the output."""

    def __call__(self, batch: Batch, **extra: Any) -> Any:
        return self._run(batch, **extra) if self.output is None else self._run_head(self.output, batch, **extra)

    def learn(self, batch: Batch) -> None:
        """Run the unmodified model and store the base model output."""
        base, self._outputs = self._base, []
        if base is None:
            self._run(batch)
            return
        forward = base.forward

        def record_output(*args: Any, **kwargs: Any) -> Any:
            self._outputs.append(forward(*args, **kwargs))
            return self._outputs[-1]

        with forward_replaced(base, record_output):
            self._run(batch)

    def confirm(self, batch: Batch, loss_of: Callable[[Any, Batch], float]) -> None:
        """Accept the stored output for all labels if the loss with these labels is equal to the bit.

        The labels must differ everywhere from the labels in `learn`.
        """
        if len(self._outputs) == 1:
            full_loss, head_loss = (
                loss_of(outputs, batch) for outputs in (self._run(batch), self._run_head(self._outputs[0], batch))
            )
            if full_loss == head_loss and math.isfinite(full_loss):
                self.output = self._outputs[0]

    def _run_head(self, output: Any, batch: Batch, **extra: Any) -> Any:
        assert self._base is not None
        with forward_replaced(self._base, lambda *_args, **_kwargs: copy.copy(output)):
            return self._run(batch, **extra)
