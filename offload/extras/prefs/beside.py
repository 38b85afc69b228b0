"""DPO with a reference that streams beside the trained model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import nn

from offload.engine.loss.batch import Batch, Chunk
from offload.engine.loss.cross_entropy import Term, log_probs_with_gradient
from offload.engine.loss.group_loss import log_probs
from offload.engine.loss.loss import Needs
from offload.extras.frozen.frozen_model import FrozenModel, Within, as_itself
from offload.extras.prefs.losses import DPO


class DPOBeside(DPO):
    """DPO, whose reference runs in each step in place of measured values in the batch.

    reference, within: see `FrozenModel`.
    """

    own: ClassVar[frozenset[str]] = frozenset({"labels"})

    def __init__(self, beta: float, reference: nn.Module, within: Within = as_itself) -> None:
        super().__init__(beta)
        self._reference = FrozenModel(reference, within)
        if not self._reference.has_head:
            self.needs = Needs.OUTPUTS
        self._values = torch.empty(0)
        """Log-probabilities of the labels, of the reference, fp32 [rows, tokens]."""

    @torch.no_grad()
    def term(self, inputs: Batch, batch: Batch, chunks: Sequence[Chunk]) -> Term:
        head, head_inputs = self._reference.run_below_head(inputs, batch, chunks, self)
        with self._reference.within_head():
            self._values = head.label_log_probs(head_inputs)
        return log_probs_with_gradient

    def __call__(self, outputs: Any, batch: Batch) -> torch.Tensor:
        logits = self._reference.logits(batch, self)
        self._values = log_probs(logits[:, :-1], batch["labels"][:, 1:])
        return super().__call__(outputs, batch)

    def of(self, log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().of(log_probs, {**batch, "reference": self._values.sum(1, keepdim=True)})
