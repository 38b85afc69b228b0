"""A frozen causal model beside the trained one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

from offload.engine.loss.batch import Batch, Chunk
from offload.engine.loss.chunked_head import ChunkedHead, HeadInputs
from offload.engine.loss.cross_entropy import Term, log_probs_with_gradient
from offload.engine.loss.label_trials import find_base_model
from offload.engine.loss.loss import Loss, select_inputs

Within = Callable[[Sequence[nn.Module]], AbstractContextManager[None]]


def as_itself(_modules: Sequence[nn.Module]) -> AbstractContextManager[None]:
    """Return a context without effect."""
    return nullcontext()


class FrozenModel:
    """A causal model without gradients: a companion (`add_companion`), or part of the trained model.

    within: context in which given modules compute as this model, such as `as_base` with an adapter's base
    (`model.get_base_model()`).
    """

    def __init__(self, model: nn.Module, within: Within = as_itself) -> None:
        self._model = model
        self._within = within
        self._base = find_base_model(model)
        self._modules = list(model.modules())
        below = set((self._base or model).modules())
        self._head = [module for module in self._modules if module not in below]

    @property
    def has_head(self) -> bool:
        """False if the forward gives all logits, without a base model to capture."""
        return self._base is not None

    @torch.no_grad()
    def logits(self, batch: Batch, loss: Loss) -> torch.Tensor:
        """Return all logits [rows, tokens, vocabulary]."""
        with self._within(self._modules):
            logits: torch.Tensor = self._model(**select_inputs(self._model, batch, loss)).logits
            return logits

    @torch.no_grad()
    def run_below_head(
        self, inputs: Batch, batch: Batch, chunks: Sequence[Chunk], loss: Loss, term: Term = log_probs_with_gradient
    ) -> tuple[ChunkedHead, HeadInputs]:
        """Run the model below the head. Return the head, to be run `within_head`, and its inputs."""
        assert self._base is not None
        head = ChunkedHead(self._model, self._base)
        own_inputs = select_inputs(self._model, inputs, loss)
        with self._within(self._modules):
            output = head.base_output(lambda: self._model(**own_inputs))
        return head, HeadInputs(output, batch, chunks, term=term)

    def within_head(self) -> AbstractContextManager[None]:
        """Context for the head."""
        return self._within(self._head)
