"""The loss of a causal LM without its full logits: the final hidden states of tokens with a target, in chunks, through
the model's own forward.

For each chunk the model runs with its base model replaced by one that hands back the chunk, so that soft-capping, logit
scaling and every other quirk of a family stay its own. `shift_labels` and `num_items_in_batch` make the sum of the
parts the loss of the whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from offload.engine.loss.batch import IGNORED, Batch
from offload.engine.loss.group_loss import log_probs
from offload.engine.loss.label_trials import base_of
from offload.engine.loss.loss import find_loss
from offload.engine.units.rerouting import forward_replaced

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
    labels: torch.Tensor, size: int, num_chunks: int, bring_up: Callable[[torch.Tensor], torch.Tensor]
) -> list[Chunk]:
    """Return the tokens whose next label [rows, columns], on the host, is a target, in chunks of `size`; of so many
    chunks the first ones count for nothing: what is overwritten comes first. `bring_up` takes places to the device.
    """
    rows, columns = (labels[:, 1:] != IGNORED).nonzero(as_tuple=True)
    all_places = bring_up(rows * labels.shape[1] + columns)
    found = []
    for places in all_places.split(size) if len(rows) else ():
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

    def losses(
        self, output: Any, batch: Batch, chunks: Iterable[Chunk], tokens: int
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield each chunk's part of the loss, its leaf of hidden states [1, tokens, hidden], and where those of them
        lie that count, in the hidden states of all rows one behind the other.
        """
        for run, leaf, targets, places in self._runs(output, batch, chunks):
            # No name for the outputs: the logits of a chunk go before the next one's come.
            loss = find_loss(run(labels=targets[None], shift_labels=targets[None], num_items_in_batch=tokens))
            yield loss, leaf, places

    def log_probs(
        self, output: Any, batch: Batch, chunks: Iterable[Chunk]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield the log-probabilities of each chunk's targets, fp32 [targets], and leaf and places as `losses`."""
        for run, leaf, targets, places in self._runs(output, batch, chunks):
            yield log_probs(run().logits[0], targets)[: len(places)], leaf, places

    def _runs(
        self, output: Any, batch: Batch, chunks: Iterable[Chunk]
    ) -> Iterator[tuple[Callable[..., Any], torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield what runs the model on each chunk, the chunk's leaf of hidden states, its targets [tokens], and the
        places of those that count.
        """
        hidden = output["last_hidden_state"]
        states, ids, labels = hidden.detach().flatten(0, 1), batch["input_ids"].flatten(), batch["labels"].flatten()
        for chunk in chunks:
            places = chunk.places
            targets = labels[places + 1]
            targets[chunk.num_targets :] = IGNORED
            leaf = states[places][None].requires_grad_(hidden.requires_grad)
            part = copy.copy(output)
            part["last_hidden_state"] = leaf
            yield partial(self._run, part, input_ids=ids[places][None]), leaf, targets, places[: chunk.num_targets]

    def _run(self, output: Any, **inputs: Any) -> Any:
        """Run the model with this for the output of its base model."""
        with forward_replaced(self._base, lambda *_args, **_kwargs: output):
            return self._model(**inputs)


def find_chunked_head(
    model: nn.Module, batch: Batch, run: Callable[[Batch], Any], output: Any = None
) -> ChunkedHead | None:
    """Return the model's head in chunks, where that reproduces the whole loss; else None.

    The comparison decides: 13 families take `shift_labels` and ignore it. `run` is the model on a batch; `output` that
    of the base model under any labels, where that is known.
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
        chunks = chunks_of(labels.cpu(), -(-tokens // 2), 2, lambda places: places.to(labels.device))
        parts = sum(float(loss) for loss, _, _ in head.losses(output, batch, chunks, tokens))
    except Exception:
        return None
    precise = next(iter(model.parameters())).dtype == torch.float32
    if not abs(parts - whole) <= (1e-5 if precise else 1e-2) * max(1.0, abs(whole)):
        return None
    return ChunkedHead(model, base, int(outputs.logits.shape[-1]))
