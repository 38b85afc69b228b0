"""The loss of a batch in parts, each with a separate backward."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from offload.engine.loss.batch import IGNORED, Batch, next_labels
from offload.engine.loss.batch_agreement import BatchFacts
from offload.engine.loss.chunked_head import chunks_of
from offload.engine.loss.group_loss import GroupLoss, TokenLoss
from offload.engine.loss.loss import labels_of, run_loss, select_inputs
from offload.engine.loss.shared_rows import over_whole_rows
from offload.engine.state import EngineState
from offload.errors import ConfigError


class Losses:
    """Runs the model on a batch, in micro-batches and with the head in chunks.

    Ranks may have different row counts; all ranks run as many parts as the largest batch needs. `num_chunks`: head
    chunks in the last loss. `chunk_bytes`: limit for logits in memory. `has_gradient`: a backward follows, so a loss
    must be a tensor.
    """

    def __init__(self, state: EngineState, chunk_bytes: int | None, has_gradient: bool = True) -> None:
        self._model, self._state = state.model, state
        self.chunk_bytes, self.has_gradient = chunk_bytes, has_gradient
        self.num_chunks = 1

    def cut_by(self, chunk_bytes: int | None) -> None:
        """Set the logits limit in bytes. None: no limit."""
        self.chunk_bytes = chunk_bytes

    @property
    def is_plain(self) -> bool:
        """True if some unit cannot cut the batch, so the model is called once per micro-batch."""
        return self._state.way.cut == "calls"

    def parts(self, facts: BatchFacts, chunk_tokens: int | None = None) -> Generator[torch.Tensor, None, None]:
        """Yield the loss in parts. The parts from all ranks add up to the mean over all targets.

        If possible, the units cut the batch: one model call, and the weights stream once. Otherwise the model is called
        once per micro-batch. `chunk_tokens`: tokens per head chunk; 0: all; None: per `chunk_tokens(facts)`.
        """
        known, batch = facts.plan, facts.batch
        own = known.ranks[known.rank]
        if isinstance(facts.loss_fn, GroupLoss):
            facts.loss_fn.begin()
        if facts.shared is not None and (self.chunk_tokens(facts) == 0 or (known.num_parts > 1 and self.is_plain)):
            raise ConfigError(
                f"train.sequence_parallel is {self._state.attention.comm.size}, but the model runs on one micro-batch "
                "after the other or with a loss over all logits (see the warnings above), and ranks cannot share rows "
                "then: set --train.sequence_parallel 1, or leave out --train.micro_batch_size."
            )
        if known.num_parts > 1 and self.is_plain:
            yield from self._micro_batches(facts)
            return
        num_parts = known.num_parts if self._state.way.cut == "units" else 1
        rows = own.micro_rows if num_parts > 1 else own.rows
        with self._state.runner.as_ours(), self._state.runner.micro_batches(own.rows, rows, num_parts):
            size = self.chunk_tokens(facts) if chunk_tokens is None else chunk_tokens
            if size:
                yield self._chunked(facts, size)
                return
            self.num_chunks = 1
            share = _share(facts)
            batch = batch if share else _with_targets(batch)
            loss = run_loss(self._model, batch, facts.loss_fn, has_gradient=self.has_gradient)
            yield _scaled(loss, share, facts)

    def _micro_batches(self, facts: BatchFacts) -> Generator[torch.Tensor, None, None]:
        known, rule, batch, loss_fn = facts.plan, facts.rule, facts.batch, facts.loss_fn
        tokens, own = facts.num_targets, known.ranks[known.rank]
        hanging = [t for t in batch.values() if isinstance(t, torch.Tensor) and t.grad_fn is not None]
        leaves = {id(t): t.detach().requires_grad_() for t in hanging}  # a backward would free the caller's graph
        batch = {key: leaves.get(id(value), value) for key, value in batch.items()}
        parts = list(facts.form.parts(batch, own.rows, own.micro_rows))
        if facts.labels is None:
            of_row = known.num_targets(rule, known.rank) // own.rows
            starts = range(0, own.rows, own.micro_rows)
            counts = [of_row * min(own.micro_rows, own.rows - start) for start in starts]
        else:
            counts = [rule.count(labels) for labels in facts.labels.split(own.micro_rows)]
        for number in range(known.num_parts):
            position = min(number, len(parts) - 1)
            part, share, extra = parts[position], counts[position] / max(1, tokens), {}
            if number >= len(parts):
                share = 0.0
            if not share:  # other ranks may have targets here
                if not known.has_peers:
                    continue
                part = _with_targets(part)
            elif loss_fn is None and rule.takes_count:
                share, extra = 1.0, {"num_items_in_batch": tokens}
            with self._state.runner.as_ours():
                loss = run_loss(self._model, part, loss_fn, has_gradient=self.has_gradient, **extra)
            yield _scaled(loss, share, facts)
        found = [(t, leaf.grad) for t in hanging if (leaf := leaves[id(t)]).grad is not None]
        torch.autograd.backward([t for t, _ in found], [gradient for _, gradient in found])

    def chunk_tokens(self, facts: BatchFacts) -> int:
        """Return the tokens per head chunk; 0 if the logits are computed at once."""
        is_whole = not isinstance(facts.loss_fn, TokenLoss | None) or not self._state.way.chunks
        if facts.head is None or is_whole or (self.chunk_bytes is None and facts.shared is None):
            return 0
        chunk_bytes = self.chunk_bytes or sys.maxsize
        size = max(1, chunk_bytes // (facts.head.num_logits * 4))
        if facts.shared is not None:  # only the head receives the shared targets
            return size
        most = max(1, chunk_bytes // (facts.head.vocabulary * 4))
        shapes = [dict(told.shapes)["labels"] for told in facts.plan.ranks]
        return size if any(math.prod(shape) > most for shape in shapes if isinstance(shape, tuple)) else 0

    def _chunked(self, facts: BatchFacts, size: int) -> torch.Tensor:
        """Run the model up to the head, then the head in chunks, forward and backward. Return the loss.

        The backward below the head runs here too, so the returned loss needs no backward.
        """
        head, batch, known = facts.head, facts.batch, facts.plan
        assert head is not None
        assert facts.labels is not None
        state, bring_up = self._state, self._state.device.bring_up
        targets = next_labels({"labels": facts.labels}) if facts.shared is None else facts.shared.targets.cpu()
        most = max(known.num_targets(replace(facts.rule, by_rows=False), rank) for rank in range(len(known.ranks)))
        chunks = chunks_of(targets, size, max(1, -(-most // size)), bring_up)
        self.num_chunks = len(chunks)
        with over_whole_rows(state.attention, facts.shared, batch, bring_up) as (given, batch):
            output = head.base_output(lambda: self._model(**select_inputs(self._model, given, facts.loss_fn)))
            hidden = output["last_hidden_state"]
            gradient = hidden.new_zeros(hidden.shape) if hidden.requires_grad else None
            with state.runner.whole_batch():
                if isinstance(facts.loss_fn, TokenLoss):
                    judge = partial(self._judge, facts, facts.loss_fn)
                    total = head.loss_of(state, output, batch, chunks, judge, gradient)
                else:
                    total = head.mean_loss(state, output, batch, chunks, facts.num_targets, gradient)
            if gradient is not None:
                state.backward(hidden, gradient)
        return total

    def _judge(
        self, facts: BatchFacts, loss_fn: TokenLoss, found: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss for log-probabilities, and the gradient if a backward follows."""
        share = _share(facts)
        found = torch.nn.functional.pad(found[:, :-1], (1, 0))  # from next-token to label positions
        found.requires_grad_(torch.is_grad_enabled())
        loss = _scaled(loss_fn.of(found, facts.batch if share else _with_targets(facts.batch)), share, facts)
        if not found.requires_grad:
            return loss.detach(), None
        return loss.detach(), torch.nn.functional.pad(torch.autograd.grad(loss, found)[0][:, 1:], (0, 1))


def summed(
    parts: Generator[torch.Tensor, None, None], device: torch.device, each: Callable[[torch.Tensor], None] | None = None
) -> torch.Tensor:
    """Return the sum of loss parts, fp32 on the device. `each` is called with every part."""
    total = torch.zeros((), dtype=torch.float32, device=device)
    with closing(parts):  # close now, not when a traceback frees the generator
        for part in parts:
            if each is not None:
                each(part)
            total += part.detach().to(torch.float32)
    return total


def _share(facts: BatchFacts) -> float:
    """Return this rank's share of all targets."""
    known = facts.plan
    return known.num_targets(facts.rule, known.rank) / max(1, facts.num_targets) if known.has_peers else 1.0


def _scaled(loss: torch.Tensor, share: float, facts: BatchFacts) -> torch.Tensor:
    """Scale a loss part by `share`. A group loss with a nonzero share keeps the metrics."""
    if share and isinstance(facts.loss_fn, GroupLoss):
        facts.loss_fn.keep()
    return loss * share if share != 1.0 else loss


def _with_targets(batch: Batch) -> dict[str, Any]:
    """Return the batch with finite loss even without targets: ignored labels become 0. The result has weight 0."""
    labels = labels_of(batch)
    if labels is None or labels.is_floating_point():
        return dict(batch)
    return {**batch, "labels": labels.masked_fill(labels == IGNORED, 0)}
