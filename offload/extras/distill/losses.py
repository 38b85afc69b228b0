"""Divergences between the token probabilities of a teacher and those of a model."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from torch import nn
from torch.nn.functional import kl_div, log_softmax

from offload.engine.loss.batch import IGNORED, Batch, Chunk, next_labels
from offload.engine.loss.chunked_head import Part
from offload.engine.loss.cross_entropy import Term, log_probs_with_gradient
from offload.engine.loss.loss import Loss, Needs
from offload.extras.distill.classes import VALUES, Classes, pieces, top_classes
from offload.extras.frozen.frozen_model import FrozenModel, Within, as_itself

OfTeacher = Callable[[slice, int], Classes]
"""Maps some of the tokens, and the size of the model's vocabulary, to what the teacher finds at these tokens."""


def divergence(log_probs: torch.Tensor, teacher: torch.Tensor, beta: float) -> torch.Tensor:
    """Return the generalized Jensen-Shannon divergence of each token (Agarwal et al. 2024, arXiv:2306.13649, section 2
    and equation 1). `beta` 0: forward KL divergence, teacher || model. 1: reverse.

    log_probs, teacher: log-probabilities, fp32 [tokens, vocabulary]. Result: nats, fp32 [tokens].
    """
    if beta == 0:
        return _kl(teacher, log_probs)
    if beta == 1:
        return _kl(log_probs, teacher)
    mixture = torch.logaddexp(log_probs + math.log1p(-beta), teacher + math.log(beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(log_probs, mixture)


def _kl(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return KL(first || second), [tokens], from log-probabilities [tokens, vocabulary]. Tokens without probability in
    `first` add nothing: a teacher may rule some out.
    """
    terms = kl_div(second, first, reduction="none", log_target=True)
    return terms.masked_fill_(first.detach() == -math.inf, 0.0).sum(1)


class _Divergence(Loss):
    """Mean divergence from the probabilities of a teacher, in nats, over the tokens with a target.

    beta: see `divergence`. temperature: divides the logits of both. labels: share of the cross entropy of the labels in
    the loss, 0 to 1. The batch has `labels`, int64 [rows, tokens]. No model receives the values in `own`.
    """

    own: ClassVar[frozenset[str]] = frozenset({"labels"})

    def __init__(self, beta: float, temperature: float, labels: float, needs: Needs = Needs.MEAN) -> None:
        super().__init__(needs)
        self._beta = beta
        self._temperature = temperature
        self._labels = labels

    @abstractmethod
    def _of_all(self, batch: Batch) -> OfTeacher:
        """Return what the teacher finds at all tokens."""

    @abstractmethod
    def _of_chunks(self, inputs: Batch, batch: Batch, chunks: Sequence[Chunk]) -> Iterator[OfTeacher]:
        """Return what the teacher finds at the tokens of each chunk, to be computed when taken."""

    def of(self, outputs: Any, batch: Batch) -> torch.Tensor:
        """Return the loss, 0-dim, from model outputs with the logits of all tokens."""
        labels = next_labels(batch).flatten()
        is_target = labels != IGNORED
        term = partial(self._term, iter([self._of_all(batch)]))
        values: torch.Tensor = _Terms.apply(outputs.logits.flatten(0, 1), labels.clamp(min=0), term)
        return -(values * is_target).sum() / is_target.sum()

    def trial(self) -> _Divergence:
        # A model may begin as its teacher, where the divergence has no slope.
        loss = copy(self)
        loss._labels = max(0.5, self._labels)
        return loss

    def term(self, inputs: Batch, batch: Batch, chunks: Sequence[Chunk]) -> Term:
        return partial(self._term, self._of_chunks(inputs, batch, chunks))

    def _term(
        self,
        of_teacher: Iterator[OfTeacher],
        logits: torch.Tensor,
        labels: torch.Tensor,
        slopes: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the negative divergence of each token, and the gradient of the logits. In pieces: fp32 numbers and the
        graph exist for some tokens at a time.
        """
        with torch.no_grad():
            find_classes = next(of_teacher)
        values = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        gradient = None
        if slopes is not None:
            gradient = torch.empty_like(logits)
        for rows in pieces(logits):
            leaf = logits.detach()[rows].float().requires_grad_(slopes is not None)
            with torch.no_grad():
                classes = find_classes(rows, logits.shape[1])
            with torch.set_grad_enabled(slopes is not None):
                own = log_softmax(leaf / self._temperature, 1)
                piece = -divergence(classes.of(own), classes.log_probs, self._beta)
            values[rows] = piece.detach()
            if gradient is not None and slopes is not None:
                gradient[rows] = torch.autograd.grad(piece, leaf, slopes[rows])[0]
        if self._labels:
            shares = 1 - self._labels, self._labels
            label_values, label_gradient = log_probs_with_gradient(logits, labels, slopes)
            values = shares[0] * values + shares[1] * label_values
            if gradient is not None and label_gradient is not None:
                gradient.mul_(shares[0]).add_(label_gradient, alpha=shares[1])
        return values, gradient


class StoredDistillation(_Divergence):
    """Divergence from stored probabilities of a teacher: the values of a `record_type` at each token of the batch,
    [rows, tokens, ...]. For other arguments, see `_Divergence`.
    """

    own: ClassVar[frozenset[str]] = _Divergence.own | frozenset(VALUES)

    def __init__(self, record: np.dtype[Any], beta: float = 0.0, temperature: float = 1.0, labels: float = 0.0) -> None:
        super().__init__(beta, temperature, labels)
        self._record = record

    def fill_shapes(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        shape = batch["labels"].shape
        return batch | {
            key: torch.zeros(*shape, *self._record[key].shape, dtype=dtype, device="meta")
            for key, dtype in VALUES.items()
        }

    def _of_all(self, batch: Batch) -> OfTeacher:
        return self._at(batch, slice(None))

    def _of_chunks(self, _inputs: Batch, batch: Batch, chunks: Sequence[Chunk]) -> Iterator[OfTeacher]:
        return (self._at(batch, chunk.places) for chunk in chunks)

    def _at(self, batch: Batch, places: torch.Tensor | slice) -> OfTeacher:
        log_probs, ids = (batch[key].flatten(0, 1)[places] for key in VALUES)
        return lambda rows, _vocabulary: Classes(log_probs[rows], ids[rows])


class Distillation(_Divergence):
    """Divergence from a teacher beside the model.

    teacher, within: see `FrozenModel`. top_k: learn the probabilities of so many tokens, the most probable ones, and
    that of all others together; None: of each token. For other arguments, see `_Divergence`.

    Both heads run in chunks of tokens. The engine compares such a pass with `of` on a few tokens before the first step.
    """

    def __init__(
        self,
        teacher: nn.Module,
        beta: float = 0.0,
        temperature: float = 1.0,
        labels: float = 0.0,
        within: Within = as_itself,
        top_k: int | None = None,
    ) -> None:
        self._teacher = FrozenModel(teacher, within)
        needs = Needs.MEAN
        if not self._teacher.has_head:
            needs = Needs.OUTPUTS
        super().__init__(beta, temperature, labels, needs)
        self._top_k = top_k

    def _of_all(self, batch: Batch) -> OfTeacher:
        return self._classes_of(self._teacher.logits(batch, self).flatten(0, 1))

    @torch.no_grad()
    def _of_chunks(self, inputs: Batch, batch: Batch, chunks: Sequence[Chunk]) -> Iterator[OfTeacher]:
        """Run the teacher below the head."""
        head, head_inputs = self._teacher.run_below_head(inputs, batch, chunks, self, _no_values)
        parts = head.parts(head_inputs)
        # No variable holds the logits of a chunk while the next one runs.
        return (self._classes_of(self._run_head(parts)) for _ in chunks)

    def _run_head(self, parts: Iterator[Part]) -> torch.Tensor:
        with self._teacher.within_head():
            return next(parts).logits

    def _classes_of(self, logits: torch.Tensor) -> OfTeacher:
        """`logits`: of the teacher, [tokens, vocabulary]. Beyond the tokens both models have rows without a meaning."""
        return lambda rows, vocabulary: top_classes(logits[rows, :vocabulary], self._temperature, self._top_k)


def _no_values(_logits: torch.Tensor, labels: torch.Tensor, _slopes: torch.Tensor | None) -> tuple[torch.Tensor, None]:
    return labels, None


class _Terms(torch.autograd.Function):
    """The terms of tokens, with the gradient that the term itself computes."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, labels: torch.Tensor, term: Term) -> torch.Tensor:
        slopes = None
        if ctx.needs_input_grad[0]:
            slopes = torch.ones(labels.shape, dtype=torch.float32, device=logits.device)
        values, gradient = term(logits, labels, slopes)
        ctx.save_for_backward(gradient)
        return values

    @staticmethod
    def backward(ctx: Any, slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return (gradient.float() * slopes[:, None]).to(gradient.dtype), None, None
