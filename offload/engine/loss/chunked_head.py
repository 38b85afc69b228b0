"""The loss of a causal LM without its full logits: the final hidden states of tokens with a target, in chunks, through
the model's own forward.

For each chunk the model runs with its base model replaced by one that hands back the chunk, so that soft-capping, logit
scaling and every other quirk of a family stay its own. `shift_labels` and `num_items_in_batch` make the sum of the
parts the loss of the whole.
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
from offload.engine.loss.label_trials import base_of
from offload.engine.loss.loss import find_loss
from offload.engine.state import EngineState
from offload.engine.units.rerouting import forward_replaced
from offload.engine.units.row_blocks import RowBlocks

Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
"""What a chunk gives, its leaf of hidden states [1, tokens, hidden], and where those of them lie that count, in the
hidden states of all rows one behind the other.
"""
Judging = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""Returns the loss, 0-dim, of the log-probabilities of the label that follows each token, fp32 [rows, tokens], and its
gradient in these; None for no backward.
"""
_ROUNDED_TO = 64
"""Tokens: products of other numbers are slower on a GPU, and what is known of a shape is known of few."""


@dataclass(frozen=True)
class Chunk:
    """Tokens that go through the head at once.

    places: where they lie in all rows one behind the other, int64.
    num_targets: how many of the first ones count; the others fill up.
    """

    places: torch.Tensor
    num_targets: int


def chunks_of(
    targets: torch.Tensor, size: int, num_chunks: int, bring_up: Callable[[torch.Tensor], torch.Tensor]
) -> list[Chunk]:
    """Return the tokens whose `next_labels` [rows, tokens], on the host, are targets, in chunks of `size`; of so many
    chunks the first ones count for nothing: what is overwritten comes first. `bring_up` takes places to the device.
    """
    all_places = bring_up((targets.flatten() != IGNORED).nonzero()[:, 0])
    found = []
    for places in all_places.split(size) if len(all_places) else ():
        missing = min(size, -(-len(places) // _ROUNDED_TO) * _ROUNDED_TO) - len(places)
        found.append(Chunk(nn.functional.pad(places, (0, missing)), len(places)))
    nothing = Chunk(all_places.new_zeros(1), 0)
    return [*[nothing] * (num_chunks - len(found)), *found]


class _CapturedError(Exception):
    """Carries the base model's output out of the model's forward."""

    def __init__(self, output: Any) -> None:
        super().__init__()
        self.output = output


class ChunkedHead:
    """Runs a model's head chunk by chunk. `vocabulary` is how many logits a token has."""

    def __init__(self, model: nn.Module, base: nn.Module, vocabulary: int = 0) -> None:
        self._model, self._base, self.vocabulary = model, base, vocabulary

    @property
    def num_logits(self) -> int:
        """How many logits of a token exist at once."""
        return self.vocabulary

    @classmethod
    def of(cls, model: nn.Module, vocabulary: int) -> ChunkedHead | None:
        """Return the head of a model that is known to allow chunks, by its vocabulary; None for 0."""
        if not vocabulary:
            return None
        base = base_of(model)
        assert base is not None
        return cls(model, base, vocabulary)

    def base_output(self, run: Callable[[], Any]) -> Any:
        """Run the model up to the output of its base model."""
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
        """Yield each chunk's part of the loss."""
        for run, leaf, targets, places in self._runs(output, batch, chunks):
            # No name for the outputs: the logits of a chunk go before the next one's come.
            loss = find_loss(run(labels=targets[None], shift_labels=targets[None], num_items_in_batch=tokens))
            yield loss, leaf, places

    def _log_probs(self, output: Any, batch: Batch, chunks: Iterable[Chunk]) -> Iterator[Part]:
        """Yield the log-probabilities of each chunk's targets, fp32 [targets]."""
        for run, leaf, targets, places in self._runs(output, batch, chunks):
            yield log_probs(run().logits[0], targets)[: len(places)], leaf, places

    def _runs(
        self, output: Any, batch: Batch, chunks: Iterable[Chunk]
    ) -> Iterator[tuple[Callable[..., Any], torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield what runs the model on each chunk, the chunk's leaf of hidden states, its targets [tokens], and the
        places of those that count.
        """
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
        """Run the model with this for the output of its base model."""
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
        """Go forward and backward through the head; return the loss, fp32, and fill the `gradient` of the hidden states
        of all rows where one is given.
        """
        total = torch.zeros((), dtype=torch.float32, device=output["last_hidden_state"].device)
        for loss in self._backward(state, self.losses(output, batch, chunks, tokens), gradient):
            total += loss.to(torch.float32)
        return total

    def loss_of(
        self,
        state: EngineState,
        output: Any,
        batch: Batch,
        chunks: Sequence[Chunk],
        judge: Judging,
        gradient: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return what `judge` makes of the log-probabilities of all targets, and go as `mean_loss` does. They have to
        be known before the first gradient is: logits are made once without a graph, and once more with one.
        """
        found = output["last_hidden_state"].new_zeros(batch["labels"].shape, dtype=torch.float32)
        with torch.no_grad():
            for values, _, places in self._log_probs(output, batch, chunks):
                found.view(-1)[places] = values
        loss, slopes = judge(found)
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
        """Go backward through each part; yield the parts, without their graphs."""
        with state.gradients.repeated(state.regions):
            for loss, leaf, places in parts:
                if loss.requires_grad:  # the head may be all that trains, or frozen over units that do
                    state.backward(loss, None, leaf)
                if gradient is not None and leaf.grad is not None:
                    gradient.view(-1, gradient.shape[-1])[places] = leaf.grad[0, : len(places)]
                yield loss.detach()

    def trial(self, output: Any, batch: Batch, chunks: Sequence[Chunk], tokens: int) -> float:
        """Return the loss as `mean_loss` makes it, without a backward."""
        return sum(float(loss) for loss, _, _ in self.losses(output, batch, chunks, tokens))


@dataclass(frozen=True)
class _Targets:
    """The tokens of a chunk, and what is known of their logits.

    chunk: the tokens.
    labels: the tokens that follow, int64 [n].
    log_sums: the log-sum-exp of the logits over the blocks so far, fp32 [n].
    own: the logits of the labels, fp32 [n].
    """

    chunk: Chunk
    labels: torch.Tensor
    log_sums: torch.Tensor
    own: torch.Tensor


class HeadByRows(ChunkedHead):
    """Runs a head that is cut in blocks of rows block by block, and in each chunk by chunk: no token has all of its
    logits at once.

    The log-sum-exp over the vocabulary is carried from block to block (Milakov and Gimelshein, arXiv:1805.02867); the
    backward makes the logits of each block again, and their softmax from that. The head's own code runs over the rows
    that are there, so that soft-capping, scaling and every other quirk that acts on single logits stays its own; the
    cross entropy is the engine's.
    """

    def __init__(self, head: ChunkedHead, blocks: RowBlocks) -> None:
        super().__init__(head._model, head._base, blocks.num_rows)
        self._blocks = blocks

    @property
    def num_logits(self) -> int:
        return self._blocks.most_rows

    def mean_loss(
        self,
        state: EngineState,
        output: Any,
        batch: Batch,
        chunks: Sequence[Chunk],
        tokens: int,
        gradient: torch.Tensor | None,
    ) -> torch.Tensor:
        def mean(found: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
            return -found.sum() / tokens, torch.full_like(found, -1 / tokens) if torch.is_grad_enabled() else None

        return self.loss_of(state, output, batch, chunks, mean, gradient)

    def loss_of(
        self,
        state: EngineState,
        output: Any,
        batch: Batch,
        chunks: Sequence[Chunk],
        judge: Judging,
        gradient: torch.Tensor | None,
    ) -> torch.Tensor:
        targets = self._targets(output, batch, chunks)
        loss, slopes = judge(self._found(targets, batch))
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

    def trial(self, output: Any, batch: Batch, chunks: Sequence[Chunk], tokens: int) -> float:
        return -float(self._found(self._targets(output, batch, chunks), batch).sum()) / tokens

    def sums_over(self, number: int, output: Any, batch: Batch, chunk: Chunk) -> Iterator[Part]:
        """Yield the sum of the log-sum-exps of a chunk over one block: what computes as much as a part of the loss."""
        logits, leaf = self._logits(output, batch, chunk, number)
        yield logits.float().logsumexp(1).sum(), leaf, chunk.places

    def _targets(self, output: Any, batch: Batch, chunks: Sequence[Chunk]) -> list[_Targets]:
        """Return the tokens of each chunk with what a pass over all blocks finds, which makes no graph."""
        labels, found = next_labels(batch).flatten(), []
        for chunk in chunks:
            log_sums = torch.full(chunk.places.shape, -torch.inf, dtype=torch.float32, device=labels.device)
            wanted = labels[chunk.places]
            wanted[chunk.num_targets :] = 0
            found.append(_Targets(chunk, wanted, log_sums, torch.zeros_like(log_sums)))
        with torch.no_grad():
            for number in range(len(self._blocks.blocks)):
                for each in found:
                    logits = self._logits(output, batch, each.chunk, number)[0].float()
                    torch.logaddexp(each.log_sums, logits.logsumexp(1), out=each.log_sums)
                    is_here, column = self._blocks.inside(number, each.labels)
                    each.own.copy_(torch.where(is_here, logits.gather(1, column[:, None])[:, 0], each.own))
        return found

    def _found(self, targets: Sequence[_Targets], batch: Batch) -> torch.Tensor:
        """Return the log-probabilities of the label that follows each token, fp32 [rows, tokens]; 0 where that is no
        target.
        """
        found = torch.zeros(batch["labels"].shape, dtype=torch.float32, device=batch["labels"].device)
        for each in targets:
            num = each.chunk.num_targets
            found.view(-1)[each.chunk.places[:num]] = (each.own - each.log_sums)[:num]
        return found

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
        """Make the logits of a chunk over one block again, and go backward from the `slopes` of the loss in the
        log-probabilities [rows, tokens]; add to the `total` of the gradients of hidden states [tokens, hidden].
        """
        num, places = targets.chunk.num_targets, targets.chunk.places
        logits, leaf = self._logits(output, batch, targets.chunk, number)
        if not logits.requires_grad:
            return
        gradient = (logits.detach().float() - targets.log_sums[:, None]).exp_().neg_()
        is_here, column = self._blocks.inside(number, targets.labels)
        gradient.scatter_add_(1, column[:, None], is_here[:, None].to(gradient.dtype))
        gradient *= slopes.flatten()[places][:, None]
        gradient[num:] = 0
        state.backward(logits, gradient.to(logits.dtype), leaf)
        if total is not None and leaf.grad is not None:
            total[places[:num]] += leaf.grad[0, :num]

    def _logits(self, output: Any, batch: Batch, chunk: Chunk, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of a chunk over one block [n, rows], and the leaf of hidden states under them."""
        run, leaf, _, _ = next(self._runs(output, batch, [chunk]))
        with self._blocks.only(number):
            return run().logits[0], leaf


def find_chunked_head(
    model: nn.Module,
    batch: Batch,
    run: Callable[[Batch], Any],
    output: Any = None,
    cut: Iterable[RowBlocks] = (),
) -> ChunkedHead | None:
    """Return the model's head in chunks, where that reproduces the whole loss; else None.

    The comparison decides: 13 families take `shift_labels` and ignore it. `run` is the model on a batch; `output` that
    of the base model under any labels, where that is known. `cut`: the weights that are cut in blocks of rows; a head
    with one of these goes block by block.
    """
    base, labels = base_of(model), batch.get("labels")
    if base is None or labels is None or "input_ids" not in batch or labels.dim() != 2 or labels.shape[1] < 4:
        return None
    head = ChunkedHead(model, base)
    labels = labels.masked_fill(labels == IGNORED, 0).clone()
    for row, of_row in enumerate(labels):  # targets at other places of each row
        of_row[1 + (2 * row + 1) % (len(of_row) - 1) :: 3] = IGNORED
    batch = {**batch, "labels": labels}
    tokens = int((labels[:, 1:] != IGNORED).sum())
    try:
        outputs = run(batch)
        whole = float(find_loss(outputs))
        output = head.base_output(lambda: run(batch)) if output is None else output
        if not isinstance(output, Mapping) or output["last_hidden_state"].shape[:2] != labels.shape:
            return None
        chunks = chunks_of(next_labels(batch).cpu(), -(-tokens // 2), 2, lambda places: places.to(labels.device))
        vocabulary = int(outputs.logits.shape[-1])
        plain = ChunkedHead(model, base, vocabulary)
        by_rows = [HeadByRows(plain, blocks) for blocks in cut if blocks.num_rows == vocabulary]
        heads = [*reversed(by_rows), plain]  # an embedding of as many rows comes before
        precise = next(iter(model.parameters())).dtype == torch.float32
        most = (1e-5 if precise else 1e-2) * max(1.0, abs(whole))
    except Exception:
        return None

    def reproduces(head: ChunkedHead) -> bool:
        try:
            return abs(head.trial(output, batch, chunks, tokens) - whole) <= most
        except Exception:  # an adapter over a head that is cut adds what all rows give
            return False

    return next(filter(reproduces, heads), None)
