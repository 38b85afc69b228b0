"""DPO with a reference that streams beside the trained model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import torch
from torch import nn

from offload.engine.loss.batch import Batch, Chunk
from offload.engine.loss.chunked_head import ChunkedHead, HeadInputs
from offload.engine.loss.cross_entropy import Term, log_probs_with_gradient
from offload.engine.loss.group_loss import log_probs
from offload.engine.loss.label_trials import find_base_model
from offload.engine.loss.loss import Needs, select_inputs
from offload.extras.prefs.losses import DPO


class DPOBeside(DPO):
    """DPO, whose reference runs in each step in place of measured values in the batch.

    reference: a companion (`add_companion`), a causal model. within: see `Distillation`.
    """

    own: ClassVar[frozenset[str]] = frozenset({"labels"})

    def __init__(
        self,
        beta: float,
        reference: nn.Module,
        within: Callable[[Sequence[nn.Module]], AbstractContextManager[None]] = lambda _modules: nullcontext(),
    ) -> None:
        super().__init__(beta)
        self._reference = reference
        self._within = within
        self._modules = list(reference.modules())
        self._base = find_base_model(reference)
        if self._base is None:  # its forward has logits of all tokens
            self.needs = Needs.OUTPUTS
        self._values = torch.empty(0)
        """Log-probabilities of the labels, of the reference, fp32 [rows, tokens]."""

    @torch.no_grad()
    def term(self, inputs: Batch, batch: Batch, chunks: Sequence[Chunk]) -> Term:
        assert self._base is not None
        head = ChunkedHead(self._reference, self._base)
        own_inputs = select_inputs(self._reference, inputs, self)
        with self._within(self._modules):
            output = head.base_output(lambda: self._reference(**own_inputs))
            self._values = head.label_log_probs(HeadInputs(output, batch, chunks))
        return log_probs_with_gradient

    def __call__(self, outputs: Any, batch: Batch) -> torch.Tensor:
        with torch.no_grad(), self._within(self._modules):
            logits = self._reference(**select_inputs(self._reference, batch, self)).logits
            self._values = log_probs(logits[:, :-1], batch["labels"][:, 1:])
        return super().__call__(outputs, batch)

    def of(self, log_probs: torch.Tensor, batch: Batch) -> torch.Tensor:
        return super().of(log_probs, {**batch, "reference": self._values.sum(1, keepdim=True)})
