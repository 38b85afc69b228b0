"""The loss of a batch in parts, each of which has its own backward."""

from __future__ import annotations

from collections.abc import Generator

import torch

from offload.engine.loss.batch_agreement import PassPlan
from offload.engine.loss.chunked_head import ChunkedHead
from offload.engine.loss.loss import IGNORED, Batch, LossFunction, LossRule, run_loss, select_inputs, split_rows
from offload.engine.state import EngineState


class Losses:
    """Runs the model on a batch, in micro-batches and with its head in chunks. `head` is there once it is known that
    the model's allows that. `is_plain`, once and for all: some unit cannot be cut, so that the model is called on one
    micro-batch after the other.

    Ranks may have different numbers of rows: all of them run as many parts as the largest batch needs.
    """

    def __init__(self, state: EngineState, micro_rows: int | None, chunk_bytes: int | None) -> None:
        self._model, self._state = state.model, state
        self._micro_rows, self._chunk_bytes = micro_rows, chunk_bytes
        self._labels: torch.Tensor | None = None
        self.head: ChunkedHead | None = None
        self.is_plain = False

    @property
    def splits(self) -> bool:
        """True where every unit gives the same when the batch is cut in rows, as far as that is known."""
        pages = [page for unit in self._state.units if not unit.resident for page in unit.known.values()]
        return all(page.splits for page in pages if page.is_compared)

    def know(self, labels: torch.Tensor | None) -> None:
        """Note the labels of a batch on the host, where nobody waits who counts them."""
        self._labels = None if labels is None else labels.cpu()

    def parts(
        self, batch: Batch, known: PassPlan, rule: LossRule, loss_fn: LossFunction | None
    ) -> Generator[torch.Tensor, None, None]:
        """Yield the loss in parts; those of all ranks add up to the mean over their target tokens.

        The units cut the batch themselves where they can (the model is called once, and its weights stream once);
        otherwise the model is called on one micro-batch after the other.
        """
        own = known.ranks[known.rank]
        if known.num_parts > 1 and self.is_plain:
            yield from self._micro_batches(batch, known, rule, loss_fn)
            return
        with self._state.as_ours(), self._state.runner.micro_batches(own.rows, own.micro_rows, known.num_parts > 1):
            num_chunks = self._num_chunks(known)
            if num_chunks > 1:
                yield self._chunked(batch, num_chunks, known.num_targets(rule))
                return
            share = 1.0
            if known.has_peers:
                share = known.num_targets(rule, known.rank) / max(1, known.num_targets(rule))
                batch = batch if share else _with_targets(batch)
            yield _scaled(run_loss(self._model, batch, loss_fn), share)

    def _micro_batches(
        self, batch: Batch, known: PassPlan, rule: LossRule, loss_fn: LossFunction | None
    ) -> Generator[torch.Tensor, None, None]:
        tokens = known.num_targets(rule)
        parts = list(split_rows(batch, self._micro_rows))
        counted = batch if self._labels is None else {"labels": self._labels}
        counts = [rule.targets(part) for part in split_rows(counted, self._micro_rows)]
        for number in range(known.num_parts):
            position = min(number, len(parts) - 1)
            part, share, extra = parts[position], counts[position] / max(1, tokens), {}
            if number >= len(parts):
                share = 0.0
            if not share:  # others may have what this one lacks
                if not known.has_peers:
                    continue
                part = _with_targets(part)
            elif loss_fn is None and rule.takes_count:
                share, extra = 1.0, {"num_items_in_batch": tokens}
            with self._state.as_ours():
                loss = run_loss(self._model, part, loss_fn, **extra)
            yield _scaled(loss, share)

    def _num_chunks(self, known: PassPlan) -> int:
        """Return into how many chunks the tokens go through the head, 1 where the logits are made whole."""
        if self.head is None or known.ranks[0].has_loss_function or self._chunk_bytes is None:
            return 1
        most = 1
        for told in known.ranks:
            rows, length = dict(told.shapes)["labels"]
            columns = max(1, self._chunk_bytes // (rows * self.head.vocabulary * 4))
            most = max(most, -(-length // columns))
        return most

    def _chunked(self, batch: Batch, num_chunks: int, tokens: int) -> torch.Tensor:
        """Run the model up to its head, then the head in chunks, forward and backward; return the loss.

        The backward of the units below runs here too: the loss that comes back has nothing left to do.
        """
        assert self.head is not None
        output = self.head.base_output(lambda: self._model(**select_inputs(self._model, batch, False)))
        hidden = output["last_hidden_state"]
        gradient = torch.zeros_like(hidden, requires_grad=False) if hidden.requires_grad else None
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        skips = self._state.comm.size == 1  # else another rank may have targets where this one has none
        with self._state.runner.whole_batch(), self._state.gradients.repeated(self._state.regions):
            for loss, leaf, span in self.head.losses(output, batch, num_chunks, tokens, self._labels, skips=skips):
                if loss.requires_grad:  # the head may be all that trains, or frozen over units that do
                    loss.backward()
                if gradient is not None and leaf.grad is not None:
                    gradient[:, span] = leaf.grad
                total += loss.detach().to(torch.float32)
        if gradient is not None:
            hidden.backward(gradient)
        return total


def _scaled(loss: torch.Tensor, share: float) -> torch.Tensor:
    return loss * share if share != 1.0 else loss


def _with_targets(batch: Batch) -> dict[str, torch.Tensor]:
    """Return a batch whose loss is a number also where none of its labels is a target; it counts for nothing."""
    labels = batch.get("labels")
    if labels is None or labels.is_floating_point():
        return dict(batch)
    return {**batch, "labels": labels.masked_fill(labels == IGNORED, 0)}
