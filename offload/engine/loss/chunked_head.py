"""Causal LM loss without full logits: chunks of final hidden states go through the model's own forward.

Only tokens with a target enter a chunk. For each chunk, the model runs with the base model replaced by a function that
returns the chunk, so soft-capping, logit scaling and other family-specific code stay unchanged. The engine computes the
cross entropy, with the gradient of the logits at once, as in Liger (arXiv:2410.10989). The head costs three products.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from offload.engine.comparison import OTHER_ORDER, tolerance
from offload.engine.loss.batch import IGNORED, Batch, Chunk, next_labels
from offload.engine.loss.cross_entropy import Term, log_probs_with_gradient
from offload.engine.loss.label_trials import find_base_model
from offload.engine.loss.loss import find_loss
from offload.engine.units.find import Splitting
from offload.engine.units.stages import Host
from offload.modules import forwards_replaced

LogProbLoss = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
"""Maps next-label log-probabilities, fp32 [rows, tokens], to (loss 0-dim, gradient). Gradient None: no backward."""
ROUNDED_TO = 64
"""Chunk sizes are multiples of 64 tokens: faster GPU matrix products, and fewer distinct shapes to plan for."""


class HeadInputs(NamedTuple):
    """Inputs of a head in chunks."""

    output: Any
    """Output of the base model."""
    batch: Batch
    """The batch on the device."""
    chunks: Sequence[Chunk]
    """The tokens with a target."""
    gradient: torch.Tensor | None = None
    """Receives the gradient of the hidden states, in their shape. None: no backward below the head."""
    term: Term = log_probs_with_gradient
    """Term of each token."""
    scale: float = 1.0
    """Factor on the loss in the backward."""


@dataclass(frozen=True)
class Part:
    """A chunk after the forward of the head."""

    logits: torch.Tensor
    """Logits [tokens, vocabulary], with a graph."""
    gradient: torch.Tensor | None
    """Gradient of the logits. None: no backward."""
    values: torch.Tensor
    """Term of each counted token, fp32. For the cross entropy, the log-probability of the label."""
    leaf: torch.Tensor
    """Hidden states below the graph [1, tokens, hidden]."""
    places: torch.Tensor
    """Positions of the counted tokens in the flattened rows."""

    @classmethod
    def of(
        cls,
        logits: torch.Tensor,
        labels: torch.Tensor,
        slopes: torch.Tensor | None,
        leaf: torch.Tensor,
        places: torch.Tensor,
        term: Term,
    ) -> Part:
        # The head may be the only trainable part, or frozen above trainable units, or above frozen ones.
        if not logits.requires_grad:
            slopes = None
        values, gradient = term(logits, labels, slopes)
        return cls(logits, gradient, values[: len(places)], leaf, places)


def build_chunks(
    targets: torch.Tensor, size: int, num_chunks: int, copy_to_device: Callable[[torch.Tensor], torch.Tensor]
) -> list[Chunk]:
    """Return the target positions in chunks with `size` tokens.

    `targets`: `next_labels` [rows, tokens], on the host. Empty chunks (no counted token) in front pad the list to
    `num_chunks`, because all ranks run equally many chunks. `copy_to_device` copies positions to the device.
    """
    # Found on the host: on the device the number of places would be a wait.
    all_places = copy_to_device((targets.flatten() != IGNORED).nonzero()[:, 0])
    chunks = []
    for places in all_places.split(size):
        if not len(places):  # torch splits an empty tensor into one empty part, not into none
            break
        missing = min(size, -(-len(places) // ROUNDED_TO) * ROUNDED_TO) - len(places)
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
        self._model = model
        self._base = base
        self.vocabulary = vocabulary
        self.num_logits = vocabulary

    @classmethod
    def of(
        cls, model: nn.Module, vocabulary: int, num_logits: int = 0, splitting: Splitting | None = None
    ) -> ChunkedHead | None:
        """Return the chunked head for a model already known to support chunks. None for `vocabulary` 0.

        `num_logits`: logits per token that exist at once, for a head with a weight split by `splitting`.
        """
        if not vocabulary:
            return None
        base = find_base_model(model)
        assert base is not None
        whole = cls(model, base, vocabulary)
        if not num_logits:
            return whole
        heads = (splitting or Splitting()).heads(whole)
        return next((head for head in heads if head.num_logits == num_logits), whole)

    def base_output(self, run: Callable[[], Any]) -> Any:
        """Run the model and return the base model output; the head does not run."""
        original = self._base.forward

        def capture(*args: Any, **kwargs: Any) -> Any:
            # No other way leads out of the model's forward before the head runs on all tokens.
            raise _CapturedError(original(*args, **kwargs))

        try:
            with forwards_replaced({self._base: capture}):
                run()
        except _CapturedError as captured:
            return captured.output
        raise TypeError("the model did not call its base model")

    def parts(self, inputs: HeadInputs, slopes: torch.Tensor | None = None) -> Iterator[Part]:
        """Yield every chunk. `slopes`: loss gradient with respect to the terms, fp32 [rows, tokens].

        Drop a part before the next one: both have logits.
        """
        for run, leaf, targets, places in self._runs(inputs):
            chunk_slopes = None
            if slopes is not None:
                chunk_slopes = nn.functional.pad(slopes.flatten()[places], (0, len(targets) - len(places)))
            # Not `logits[0]`: the backward of an index copies the gradient.
            yield Part.of(run().logits.flatten(0, 1), targets.clamp(min=0), chunk_slopes, leaf, places, inputs.term)

    def _runs(
        self, inputs: HeadInputs
    ) -> Iterator[tuple[Callable[..., Any], torch.Tensor, torch.Tensor, torch.Tensor]]:
        """Yield (function that runs the model, hidden state leaf, targets [tokens], counted positions) per chunk."""
        output, batch, chunks, *_ = inputs
        hidden = output["last_hidden_state"]
        states = hidden.detach().flatten(0, 1)
        ids, labels = batch["input_ids"].flatten(), next_labels(batch).flatten()
        for chunk in chunks:
            places = chunk.places
            targets = labels[places]
            targets[chunk.num_targets :] = IGNORED  # the filler repeats position 0, and must not count
            leaf = states[places][None].requires_grad_(hidden.requires_grad)
            # A copy of the whole output: the model's forward may read further fields.
            part = copy.copy(output)
            part["last_hidden_state"] = leaf
            yield partial(self._run, part, input_ids=ids[places][None]), leaf, targets, places[: chunk.num_targets]

    def _run(self, output: Any, **inputs: Any) -> Any:
        """Run the model with `output` in place of the base model output."""
        with forwards_replaced({self._base: lambda *_args, **_kwargs: output}):
            return self._model(**inputs)

    def mean_loss(self, host: Host, inputs: HeadInputs, tokens: int) -> torch.Tensor:
        """Run forward and backward through the head. Return the loss, fp32: the negative mean of the terms."""
        labels, slopes = inputs.batch["labels"], None
        if torch.is_grad_enabled():
            # The loss is the negative mean, so the slopes are known before the terms.
            slopes = torch.full(labels.shape, -inputs.scale / max(1, tokens), dtype=torch.float32, device=labels.device)
        return -self._backward(host, inputs, slopes) / tokens

    def loss_from_log_probs(self, host: Host, inputs: HeadInputs, compute_loss: LogProbLoss) -> torch.Tensor:
        """Return the loss that `compute_loss` computes from all target log-probabilities; otherwise like `mean_loss`.

        All log-probabilities must be known before the first gradient, so logits are computed twice: without and with a
        graph.
        """
        loss, slopes = compute_loss(self.label_log_probs(inputs))
        if slopes is not None:
            self._backward(host, inputs, slopes)
        return loss

    @torch.no_grad()
    def label_log_probs(self, inputs: HeadInputs) -> torch.Tensor:
        """Return the log-probability of each next label, fp32 [rows, tokens], 0 without a target."""
        labels = inputs.batch["labels"]
        values = torch.zeros(labels.shape, dtype=torch.float32, device=labels.device)
        for part in self.parts(inputs):
            values.view(-1)[part.places] = part.values
            del part  # the logits of one chunk at a time
        return values

    def _backward(self, host: Host, inputs: HeadInputs, slopes: torch.Tensor | None) -> torch.Tensor:
        """Run forward and backward of every chunk. Return the sum of the terms, fp32."""
        gradient, total = inputs.gradient, torch.zeros((), dtype=torch.float32, device=inputs.batch["labels"].device)
        with host.gradients.repeated(host.regions):
            for part in self.parts(inputs, slopes):
                if part.gradient is not None:
                    host.runner.backward(part.logits, part.gradient, part.leaf)
                if gradient is not None and part.leaf.grad is not None:
                    gradient.view(-1, gradient.shape[-1])[part.places] = part.leaf.grad[0, : len(part.places)]
                total += part.values.sum()
                del part  # the logits of one chunk at a time
        return total

    def trial_loss(self, inputs: HeadInputs, tokens: int) -> float:
        """Return the `mean_loss` value without a backward."""
        return -sum(float(part.values.sum()) for part in self.parts(inputs)) / tokens


def find_chunked_head(
    model: nn.Module,
    batch: Batch,
    run: Callable[[Batch], Any],
    output: Any = None,
    splitting: Splitting | None = None,
) -> ChunkedHead | None:
    """Return the model head in chunks if a trial reproduces the full loss; else None.

    A trial is necessary because 13 families accept `shift_labels` and ignore it. `run`: the model on a batch. `output`:
    base model output, if independent of the labels. `splitting`: a head with a split weight runs part by part.
    """
    base, labels = find_base_model(model), batch.get("labels")
    # Shorter rows have no room for two chunks of targets with ignored labels between them.
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
        if output is None:
            output = head.base_output(lambda: run(batch))
        if not isinstance(output, Mapping) or output["last_hidden_state"].shape[:2] != labels.shape:
            return None
        chunks = build_chunks(next_labels(batch).cpu(), -(-tokens // 2), 2, lambda places: places.to(labels.device))
        vocabulary = int(outputs.logits.shape[-1])
        plain = ChunkedHead(model, base, vocabulary)
        # The plain head last: a head in parts has fewer logits at once.
        heads = [*(splitting or Splitting()).heads(plain), plain]
        most = tolerance(OTHER_ORDER, [next(iter(model.parameters()))]).loss * max(1.0, abs(full_loss))
    except Exception:  # a model of another kind keeps full logits
        return None
    for head in heads:
        with suppress(Exception):  # e.g. an adapter over a split head adds logits for all rows
            if abs(head.trial_loss(HeadInputs(output, batch, chunks), tokens) - full_loss) <= most:
                return head
    return None
