"""Causal LM loss without full logits: chunks of final hidden states go through the model's own forward.

Only tokens with a target enter a chunk. For each chunk, the model runs with the base model replaced by a function that
returns the chunk, so soft-capping, logit scaling and other family-specific code stay unchanged. With `shift_labels` and
`num_items_in_batch`, the chunk losses add up to the full loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.engine.loss.batch import IGNORED, Batch, next_labels
from offload.engine.loss.group_loss import log_probs
from offload.engine.loss.label_trials import find_base_model
from offload.engine.loss.loss import find_loss
from offload.engine.state import EngineState
from offload.engine.units.rerouting import forward_replaced
from offload.engine.units.row_blocks import RowBlocks

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""(Chunk result, hidden state leaf [1, tokens, hidden], positions of counted tokens in the flattened rows.)"""
LogProbLoss = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""Maps next-label log-probabilities, fp32 [rows, tokens], to (loss 0-dim, gradient). Gradient None: no backward."""
_ROUNDED_TO = 64
"""Chunk sizes are multiples of 64 tokens: faster GPU matrix products, and fewer distinct shapes to plan for."""


@dataclass(frozen=True)
class Chunk:
    """Tokens that go through the head at once.

    places: token positions in the flattened rows, int64.
    num_targets: number of counted tokens, at the front; the rest is filler.
    """

    places: torch.Tensor
    num_targets: int


def build_chunks(
    targets: torch.Tensor, size: int, num_chunks: int, copy_to_device: Callable[[torch.Tensor], torch.Tensor]
) -> list[Chunk]:
    """Return the target positions in chunks with `size` tokens.

    `targets`: `next_labels` [rows, tokens], on the host. Empty chunks (no counted token) in front pad the list to
    `num_chunks`, because all ranks run equally many chunks. `copy_to_device` copies positions to the device.
    """
    all_places = copy_to_device((targets.flatten() != IGNORED).nonzero()[:, 0])
    chunks = []
    for places in all_places.split(size) if len(all_places) else ():
        missing = min(size, -(-len(places) // _ROUNDED_TO) * _ROUNDED_TO) - len(places)
        chunks.append(Chunk(nn.functional.pad(places, (0, missing)), len(places)))
    empty = Chunk(all_places.new_zeros(1), 0)
    return [*[empty] * (num_chunks - len(chunks)), *chunks]


class _CapturedError(Exception):
    """Carries the base model output out of the model's forward."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class ChunkedHead:
    """Runs a model head chunk by chunk. `vocabulary`: logits per token. `num_logits`: logits per token that exist at
    once.
    """

    def __init__(self, model: nn.Module, base: nn.Module, vocabulary: int = 0) -> None:
        self._model, self._base, self.vocabulary, self.num_logits = model, base, vocabulary, vocabulary

    @classmethod
    def of(cls, model: nn.Module, vocabulary: int) -> ChunkedHead | None:
        """Return the chunked head for a model already known to support chunks. None for `vocabulary` 0."""
        if not vocabulary:
            return None
        base = find_base_model(model)
        assert base is not None
        return cls(model, base, vocabulary)

    def base_output(self, run: Callable[[], Any]) -> Any:
        """Run the model and return the base model output; the head does not run."""
        original = self._base.forward

        def capture(*args: Any, **kwargs: Any) -> Any:
            raise _CapturedError(original(*args, **kwargs))

        try:
            with forward_replaced(self._base, capture):
                run()
        except _CapturedError as captured:
            return captured.output
        raise TypeError("the model did not call its base model")

    def losses(self, output: Any, batch: Batch, chunks: Iterable[Chunk], tokens: int) -> Iterator[Part]:
        """Yield one loss per chunk."""
        for run, leaf, targets, places in self._runs(output, batch, chunks):
            # No variable for the outputs: the chunk logits must be freed before the next chunk runs.
            loss = find_loss(run(labels=targets[None], shift_labels=targets[None], num_items_in_batch=tokens))
            yield loss, leaf, places

    def _log_probs(self, output: Any, batch: Batch, chunks: Iterable[Chunk]) -> Iterator[Part]:
        """Yield target log-probabilities per chunk, fp32 [targets]."""
        for run, leaf, targets, places in self._runs(output, batch, chunks):
            yield log_probs(run().logits[0], targets)[: len(places)], leaf, places

    def _runs(
        self, output: Any, batch: Batch, chunks: Iterable[Chunk]
    ) -> Iterator[tuple[Callable[..., Any], torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (function that runs the model, hidden state leaf, targets [tokens], counted positions) per chunk."""
        hidden = output["last_hidden_state"]
        states, ids, labels = hidden.detach().flatten(0, 1), batch["input_ids"].flatten(), next_labels(batch).flatten()
        for chunk in chunks:
            places = chunk.places
            targets = labels[places]
            targets[chunk.num_targets :] = IGNORED
            leaf = states[places][None].requires_grad_(hidden.requires_grad)
            part = copy.copy(output)
            part["last_hidden_state"] = leaf
            yield partial(self._run, part, input_ids=ids[places][None]), leaf, targets, places[: chunk.num_targets]

    def _run(self, output: Any, **inputs: Any) -> Any:
        """Run the model with `output` in place of the base model output."""
        with forward_replaced(self._base, lambda *_args, **_kwargs: output):
            return self._model(**inputs)

    def mean_loss(
        self,
        state: EngineState,
        output: Any,
        batch: Batch,
        chunks: Sequence[Chunk],
        tokens: int,
        gradient: torch.Tensor | None,
    ) -> torch.Tensor:
        """Run forward and backward through the head. Return the loss, fp32.

        Fills `gradient` (for all hidden states) if given.
        """
        total = torch.zeros((), dtype=torch.float32, device=output["last_hidden_state"].device)
        for loss in self._backward(state, self.losses(output, batch, chunks, tokens), gradient):
            total += loss.to(torch.float32)
        return total

    def loss_from_log_probs(
        self,
        state: EngineState,
        output: Any,
        batch: Batch,
        chunks: Sequence[Chunk],
        compute_loss: LogProbLoss,
        gradient: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the loss that `compute_loss` computes from all target log-probabilities; otherwise like `mean_loss`.

        All log-probabilities must be known before the first gradient, so logits are computed twice: without and with a
        graph.
        """
        label_log_probs = output["last_hidden_state"].new_zeros(batch["labels"].shape, dtype=torch.float32)
        with torch.no_grad():
            for values, _, places in self._log_probs(output, batch, chunks):
                label_log_probs.view(-1)[places] = values
        loss, slopes = compute_loss(label_log_probs)
        if slopes is not None:
            parts = (
                ((values * slopes.flatten()[places]).sum(), leaf, places)
                for values, leaf, places in self._log_probs(output, batch, chunks)
            )
            for _ in self._backward(state, parts, gradient):
                pass
        return loss

    def _backward(
        self, state: EngineState, parts: Iterable[Part], gradient: torch.Tensor | None
    ) -> Iterator[torch.Tensor]:
        """Run one backward per part. Yield the detached losses."""
        with state.gradients.repeated(state.regions):
            for loss, leaf, places in parts:
                if loss.requires_grad:  # the head may be the only trainable part, or frozen above trainable units
                    state.backward(loss, None, leaf)
                if gradient is not None and leaf.grad is not None:
                    gradient.view(-1, gradient.shape[-1])[places] = leaf.grad[0, : len(places)]
                yield loss.detach()

    def trial_loss(self, output: Any, batch: Batch, chunks: Sequence[Chunk], tokens: int) -> float:
        """Return the `mean_loss` value without a backward."""
        return sum(float(loss) for loss, _, _ in self.losses(output, batch, chunks, tokens))


@dataclass(frozen=True)
class _Targets:
    """The tokens in a chunk, with logit statistics.

    chunk: the tokens.
    labels: the next labels, int64 [n].
    log_sums: log-sum-exp over all blocks so far, fp32 [n].
    label_logits: label logits, fp32 [n].
    """

    chunk: Chunk
    labels: torch.Tensor
    log_sums: torch.Tensor
    label_logits: torch.Tensor


class RowBlockHead(ChunkedHead):
    """Runs a head that is split into row blocks, block by block and chunk by chunk. No token has all logits at once.

    A running log-sum-exp over the vocabulary goes from block to block (Milakov and Gimelshein, arXiv:1805.02867). The
    backward recomputes the block logits and derives the softmax from the final log-sum-exp. The head's own code runs on
    the rows of each block, so soft-capping, scaling and other elementwise code stays unchanged. The engine computes the
    cross entropy.
    """

    def __init__(self, head: ChunkedHead, blocks: RowBlocks) -> None:
        super().__init__(head._model, head._base, blocks.num_rows)
        self._blocks, self.num_logits = blocks, blocks.most_rows

    def mean_loss(
        self,
        state: EngineState,
        output: Any,
        batch: Batch,
        chunks: Sequence[Chunk],
        tokens: int,
        gradient: torch.Tensor | None,
    ) -> torch.Tensor:
        def mean(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            return -values.sum() / tokens, torch.full_like(values, -1 / tokens) if torch.is_grad_enabled() else None

        return self.loss_from_log_probs(state, output, batch, chunks, mean, gradient)

    def loss_from_log_probs(
        self,
        state: EngineState,
        output: Any,
        batch: Batch,
        chunks: Sequence[Chunk],
        compute_loss: LogProbLoss,
        gradient: torch.Tensor | None,
    ) -> torch.Tensor:
        targets = self._targets(output, batch, chunks)
        loss, slopes = compute_loss(self._label_log_probs(targets, batch))
        if slopes is None:
            return loss
        total = None if gradient is None else torch.zeros_like(gradient, dtype=torch.float32).flatten(0, 1)
        for number in reversed(range(len(self._blocks.blocks))):
            regions = next(unit.regions for unit in state.units if unit.module is self._blocks.blocks[number])
            with state.gradients.repeated(regions):
                for each in targets:
                    self._backward_over(number, state, output, batch, each, slopes, total)
        if gradient is not None and total is not None:
            gradient.copy_(total.view_as(gradient))
        return loss

    def trial_loss(self, output: Any, batch: Batch, chunks: Sequence[Chunk], tokens: int) -> float:
        return -float(self._label_log_probs(self._targets(output, batch, chunks), batch).sum()) / tokens

    def sums_over(self, number: int, output: Any, batch: Batch, chunk: Chunk) -> Iterator[Part]:
        """Yield the log-sum-exp total of a chunk over one block, as costly as a part of the loss."""
        logits, leaf = self._logits(output, batch, chunk, number)
        yield logits.float().logsumexp(1).sum(), leaf, chunk.places

    def _targets(self, output: Any, batch: Batch, chunks: Sequence[Chunk]) -> list[_Targets]:
        """Return the statistics per chunk from a pass over all blocks, without a graph."""
        labels, statistics = next_labels(batch).flatten(), []
        for chunk in chunks:
            log_sums = torch.full(chunk.places.shape, -torch.inf, dtype=torch.float32, device=labels.device)
            chunk_labels = labels[chunk.places]
            chunk_labels[chunk.num_targets :] = 0
            statistics.append(_Targets(chunk, chunk_labels, log_sums, torch.zeros_like(log_sums)))
        with torch.no_grad():
            for number in range(len(self._blocks.blocks)):
                for each in statistics:
                    logits = self._logits(output, batch, each.chunk, number)[0].float()
                    torch.logaddexp(each.log_sums, logits.logsumexp(1), out=each.log_sums)
                    is_inside, column = self._blocks.inside(number, each.labels)
                    each.label_logits.copy_(
                        torch.where(is_inside, logits.gather(1, column[:, None])[:, 0], each.label_logits)
                    )
        return statistics

    def _label_log_probs(self, targets: Sequence[_Targets], batch: Batch) -> torch.Tensor:
        """Return next-label log-probabilities, fp32 [rows, tokens]; 0 without a target."""
        label_log_probs = torch.zeros(batch["labels"].shape, dtype=torch.float32, device=batch["labels"].device)
        for each in targets:
            num = each.chunk.num_targets
            label_log_probs.view(-1)[each.chunk.places[:num]] = (each.label_logits - each.log_sums)[:num]
        return label_log_probs

    def _backward_over(
        self,
        number: int,
        state: EngineState,
        output: Any,
        batch: Batch,
        targets: _Targets,
        slopes: torch.Tensor,
        total: torch.Tensor | None,
    ) -> None:
        """Recompute the chunk logits over one block and run the backward.

        `slopes`: loss gradient with respect to the log-probabilities, [rows, tokens]. Adds to `total`, the hidden state
        gradients [tokens, hidden].
        """
        num, places = targets.chunk.num_targets, targets.chunk.places
        logits, leaf = self._logits(output, batch, targets.chunk, number)
        if not logits.requires_grad:
            return
        gradient = (logits.detach().float() - targets.log_sums[:, None]).exp_().neg_()
        is_inside, column = self._blocks.inside(number, targets.labels)
        gradient.scatter_add_(1, column[:, None], is_inside[:, None].to(gradient.dtype))
        gradient *= slopes.flatten()[places][:, None]
        gradient[num:] = 0
        state.backward(logits, gradient.to(logits.dtype), leaf)
        if total is not None and leaf.grad is not None:
            total[places[:num]] += leaf.grad[0, :num]

    def _logits(self, output: Any, batch: Batch, chunk: Chunk, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the chunk logits over one block [n, rows], and the hidden state leaf below."""
        run, leaf, _, _ = next(self._runs(output, batch, [chunk]))
        with self._blocks.only(number):
            return run().logits[0], leaf


def find_chunked_head(
    model: nn.Module,
    batch: Batch,
    run: Callable[[Batch], Any],
    output: Any = None,
    row_blocks: Iterable[RowBlocks] = (),
) -> ChunkedHead | None:
    """Return the model head in chunks if a trial reproduces the full loss; else None.

    A trial is necessary because 13 families accept `shift_labels` and ignore it. `run`: the model on a batch. `output`:
    base model output, if independent of the labels. `row_blocks`: weights in row blocks; a head with such a weight runs
    block by block.
    """
    base, labels = find_base_model(model), batch.get("labels")
    if base is None or labels is None or "input_ids" not in batch or labels.dim() != 2 or labels.shape[1] < 4:
        return None
    head = ChunkedHead(model, base)
    labels = labels.masked_fill(labels == IGNORED, 0).clone()
    for row, row_labels in enumerate(labels):  # different target positions in each row
        row_labels[1 + (2 * row + 1) % (len(row_labels) - 1) :: 3] = IGNORED
    batch = {**batch, "labels": labels}
    tokens = int((labels[:, 1:] != IGNORED).sum())
    try:
        outputs = run(batch)
        full_loss = float(find_loss(outputs))
        output = head.base_output(lambda: run(batch)) if output is None else output
        if not isinstance(output, Mapping) or output["last_hidden_state"].shape[:2] != labels.shape:
            return None
        chunks = build_chunks(next_labels(batch).cpu(), -(-tokens // 2), 2, lambda places: places.to(labels.device))
        vocabulary = int(outputs.logits.shape[-1])
        plain = ChunkedHead(model, base, vocabulary)
        row_block_heads = [RowBlockHead(plain, blocks) for blocks in row_blocks if blocks.num_rows == vocabulary]
        heads = [*reversed(row_block_heads), plain]  # reversed: an equally large embedding precedes the head
        is_fp32 = next(iter(model.parameters())).dtype == torch.float32
        tolerance = (1e-5 if is_fp32 else 1e-2) * max(1.0, abs(full_loss))
    except Exception:
        return None

    def reproduces(head: ChunkedHead) -> bool:
        try:
            return abs(head.trial_loss(output, batch, chunks, tokens) - full_loss) <= tolerance
        except Exception:  # e.g. an adapter over a split head adds logits for all rows
            return False

    return next(filter(reproduces, heads), None)
