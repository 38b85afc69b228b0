"""Trials of a loss on the same rows with other labels, without repeating the base model."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

from torch import nn

from offload.engine.loss.batch import Batch
from offload.engine.units.rerouting import forward_replaced


def base_of(model: nn.Module) -> nn.Module | None:
    """Return the transformers base model below the head, also through an adapter wrapper. None: no base model."""
    found = model
    while isinstance(below := getattr(found, "base_model", None), nn.Module) and below is not found:
        found = below
    return None if found is model else found


class LabelTrials:
    """Runs a model repeatedly on the same rows with other labels.

    If the labels do not change the base model output, this output is computed once and only the head runs again.
    """

    def __init__(self, model: nn.Module, run: Callable[..., Any]) -> None:
        """`run`: the model on a batch and further arguments."""
        self._base, self._run, self._learned = base_of(model), run, list[Any]()
        self.output: Any = None
        """Output of the base model. None: labels may change the output."""

    def __call__(self, batch: Batch, **extra: Any) -> Any:
        return self._run(batch, **extra) if self.output is None else self._again(self.output, batch, **extra)

    def learn(self, batch: Batch) -> None:
        """Run the unmodified model and store the base model output."""
        base, self._learned = self._base, []
        if base is None:
            self._run(batch)
            return
        forward = base.forward

        def noted(*args: Any, **kwargs: Any) -> Any:
            self._learned.append(forward(*args, **kwargs))
            return self._learned[-1]

        with forward_replaced(base, noted):
            self._run(batch)

    def confirm(self, batch: Batch, loss_of: Callable[[Any, Batch], float]) -> None:
        """Accept the stored output for all labels if the loss with these labels is equal to the bit.

        The labels must differ everywhere from the labels in `learn`.
        """
        if len(self._learned) == 1:
            whole, again = (loss_of(its, batch) for its in (self._run(batch), self._again(self._learned[0], batch)))
            if whole == again and math.isfinite(whole):
                self.output = self._learned[0]

    def _again(self, output: Any, batch: Batch, **extra: Any) -> Any:
        assert self._base is not None
        with forward_replaced(self._base, lambda *_args, **_kwargs: copy.copy(output)):
            return self._run(batch, **extra)
