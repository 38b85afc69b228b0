"""Rows shared by several ranks, split along tokens.

Labels are shifted before the split, so no target is lost at a border (ALST, arXiv:2506.13996, section 3.3).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from offload.distributed.comm import Comm, digest
from offload.distributed.share import share
from offload.engine.loss.batch import IGNORED, Batch, next_labels
from offload.engine.units.attention import Copy
from offload.errors import ConfigError

_SAMPLE_ROWS, _SAMPLE_TOKENS = 2, 16
"""Rows, and tokens per rank, for the trial run with shared rows."""


@dataclass(frozen=True)
class WholeRows:
    """Metadata for whole rows with tokens on several ranks."""

    length: int
    """Row length in tokens over all ranks."""
    positions: torch.Tensor
    """Token positions, int64 [rows, length]."""
    padding: torch.Tensor | None = None
    """True for non-padding tokens, bool [rows, length]. None: unknown."""
    documents: torch.Tensor | None = None
    """Document number per token, int64 [rows, length]. None: one document per row."""

    def to_device(self, copy_to_device: Copy) -> WholeRows:
        """Return a device copy; `copy_to_device` copies one tensor."""
        padding, documents = (t if t is None else copy_to_device(t) for t in (self.padding, self.documents))
        return WholeRows(self.length, copy_to_device(self.positions), padding, documents)


@dataclass(frozen=True)
class SharedRows:
    """Information about shared rows beyond this rank's tokens, on the batch device."""

    whole: WholeRows
    """Row properties for attention."""
    targets: torch.Tensor
    """Next label for each token on this rank, int64 [rows, own tokens]."""
    sample: Batch
    """The first tokens of a few rows."""

    @property
    def needs_mask(self) -> bool:
        """True if a token may not attend to all earlier tokens."""
        padding = self.whole.padding
        return self.whole.documents is not None or (padding is not None and not bool(padding.all()))


def share_rows(batch: Batch, loss_fn: object, comm: Comm) -> tuple[Batch, SharedRows]:
    """Return this rank's tokens from a batch given to all ranks in `comm`, and the shared row information.

    Collective. Raises ConfigError.
    """
    size = comm.size
    _check(batch, loss_fn, size)
    digests = {key: digest(value.cpu().numpy().tobytes()) for key, value in sorted(batch.items())}
    comm.agree("the batch of ranks that share sequences", digests)  # each takes its tokens from its own copy
    filled = _fill(batch, size)
    length = filled["labels"].shape[1]
    own = share(length, comm.rank, size)
    mask, positions = filled.get("attention_mask"), filled["position_ids"]
    document_numbers = pad((positions[:, 1:] - positions[:, :-1] != 1).cumsum(1), (1, 0))
    has_documents = mask is None and bool(document_numbers.any())  # positions that restart, as in transformers
    documents = document_numbers if has_documents else None
    padding = None if mask is None else mask.bool()
    whole = WholeRows(length, positions, padding, documents)
    sample = {key: value[:_SAMPLE_ROWS, : size * _SAMPLE_TOKENS] for key, value in batch.items()}
    shared = SharedRows(whole, next_labels(filled)[:, own].contiguous(), sample)
    return {key: value[:, own].contiguous() for key, value in filled.items()}, shared


def _check(batch: Batch, loss_fn: object, size: int) -> None:
    if loss_fn is not None:
        raise ConfigError(
            f"train.sequence_parallel is {size}, but engine.step was called with a loss_fn, which would see only a "
            "part of each row: leave out loss_fn to use the model's own loss, or set --train.sequence_parallel 1."
        )
    labels = batch.get("labels")
    shape = labels.shape if isinstance(labels, torch.Tensor) and labels.dim() == 2 else None
    unsupported = [key for key, value in batch.items() if not isinstance(value, torch.Tensor) or value.shape != shape]
    if unsupported or "input_ids" not in batch:
        raise ConfigError(
            f"train.sequence_parallel is {size}, but the batch has {', '.join(unsupported or batch)}: ranks can share "
            "only token tensors of shape [rows, tokens], such as input_ids and labels. Set --train.sequence_parallel 1."
        )


def _fill(batch: Batch, size: int) -> dict[str, torch.Tensor]:
    """Return a batch with positions and a token count divisible by `size`.

    Filler tokens come last, so no other token attends to them, and have no labels.
    """
    labels = batch["labels"]
    # Alone, a rank's model would count its own tokens from 0. Positions in the batch go first.
    positions = torch.arange(labels.shape[1], device=labels.device).expand(labels.shape)
    whole = {"position_ids": positions, **batch}
    missing = -labels.shape[1] % size
    if not missing:
        return whole
    filled = {key: pad(value, (0, missing)) for key, value in whole.items()}
    # Counted on: a position 0 would begin a document.
    last = whole["position_ids"][:, -1:] + torch.arange(1, 1 + missing, device=labels.device)
    filled["position_ids"] = torch.cat([whole["position_ids"], last], 1)
    return {**filled, "labels": pad(labels, (0, missing), value=IGNORED)}
