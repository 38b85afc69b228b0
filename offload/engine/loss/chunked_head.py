"""The loss of a causal LM without its full logits: the final hidden states in chunks of tokens, through the model's own
forward.

For each chunk the model runs with its base model replaced by one that hands back the chunk, so that soft-capping, logit
scaling and every other quirk of a family stay its own. `shift_labels` and `num_items_in_batch` make the sum of the
parts the loss of the whole.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from offload.engine.loss.batch import Batch
from offload.engine.loss.loss import IGNORED, find_loss


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
        base = model.base_model
        assert isinstance(base, nn.Module)
        return cls(model, base, vocabulary)

    def base_output(self, run: Callable[[], Any]) -> Any:
        """Run the model up to the output of its base model."""
        original = self._base.forward

        def capture(*args: Any, **kwargs: Any) -> Any:
            raise _CapturedError(original(*args, **kwargs))

        try:
            with self._replaced(capture):
                run()
        except _CapturedError as captured:
            return captured.output
        raise TypeError("the model did not call its base model")

    def losses(
        self,
        output: Any,
        batch: Batch,
        num_chunks: int,
        tokens: int,
        host_labels: torch.Tensor | None = None,
        skips: bool = True,
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, slice]]:
        """Yield each chunk's part of the loss, its leaf of hidden states [batch, columns, hidden], and its columns.

        `host_labels`: those of the batch on the host, where nobody waits who counts them. With `skips` only those with
        targets; else exactly `num_chunks`, of which some count for nothing.
        """
        hidden = output["last_hidden_state"]
        shifted = nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
        has_targets = ((batch["labels"] if host_labels is None else host_labels) != IGNORED).any(0).tolist()[1:]
        columns = -(-hidden.shape[1] // num_chunks)
        spans = [slice(start, start + columns) for start in range(0, hidden.shape[1], columns)]
        missing = 0 if skips else num_chunks - len(spans)
        for number, span in enumerate([*spans[:1] * missing, *spans]):  # what is overwritten comes first
            labels = shifted[:, span].contiguous()
            if number < missing:
                labels = torch.full_like(labels, IGNORED)
            elif skips and not any(has_targets[span]):
                continue
            leaf = hidden[:, span].detach().requires_grad_(hidden.requires_grad)
            part = copy.copy(output)
            part["last_hidden_state"] = leaf
            with self._replaced(lambda *_args, part=part, **_kwargs: part):
                # No name for the outputs: the logits of a chunk go before the next one's come.
                loss = find_loss(
                    self._model(
                        input_ids=batch["input_ids"][:, span],
                        labels=labels,
                        shift_labels=labels,
                        num_items_in_batch=tokens,
                    )
                )
            yield loss, leaf, span

    @contextmanager
    def _replaced(self, forward: Callable[..., Any]) -> Iterator[None]:
        own = self._base.__dict__.get("forward")
        self._base.forward = forward
        try:
            yield
        finally:
            if own is None:
                del self._base.forward
            else:
                self._base.forward = own


def find_chunked_head(model: nn.Module, batch: Batch, run: Callable[[Batch], Any]) -> ChunkedHead | None:
    """Return the model's head in chunks, where that reproduces the whole loss; else None.

    The comparison decides: 13 families take `shift_labels` and ignore it. `run` is the model on a batch.
    """
    base = getattr(model, "base_model", None)
    labels = batch.get("labels")
    if (
        base is None
        or base is model
        or labels is None
        or "input_ids" not in batch
        or labels.dim() != 2
        or labels.shape[1] < 4
    ):
        return None
    head = ChunkedHead(model, base)
    labels = labels.masked_fill(labels == IGNORED, 0).clone()
    labels[:, labels.shape[1] // 3] = IGNORED
    batch = {**batch, "labels": labels}
    tokens = int((labels[:, 1:] != IGNORED).sum())
    try:
        outputs = run(batch)
        whole = float(find_loss(outputs))
        output = head.base_output(lambda: run(batch))
        if not isinstance(output, Mapping) or output["last_hidden_state"].shape[:2] != labels.shape:
            return None
        parts = sum(float(loss) for loss, _, _ in head.losses(output, batch, 2, tokens))
    except Exception:
        return None
    precise = next(iter(model.parameters())).dtype == torch.float32
    if not abs(parts - whole) <= (1e-5 if precise else 1e-2) * max(1.0, abs(whole)):
        return None
    return ChunkedHead(model, base, int(outputs.logits.shape[-1]))
