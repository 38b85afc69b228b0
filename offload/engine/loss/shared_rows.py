"""Rows shared by several ranks, split along tokens.

Labels are shifted before the split, so no target is lost at a border (ALST, arXiv:2506.13996, section 3.3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from offload.distributed.agreement import digest
from offload.distributed.comm import Comm
from offload.engine.loss.batch import IGNORED, Batch, next_labels
from offload.engine.units.attention import UnsharedAttention, WholeRows
from offload.errors import ConfigError

_SAMPLE_ROWS, _SAMPLE_TOKENS = 2, 16
"""Rows, and tokens per rank, for the trial run with shared rows."""


@dataclass(frozen=True)
class SharedRows:
    """Information about shared rows beyond this rank's tokens, on the batch device."""

    whole: WholeRows
    """Row properties for attention."""
    targets: torch.Tensor
    """Next label for each token on this rank, int64 [rows, own tokens]."""
    sample: Batch
    """The first tokens of a few rows."""


def share_rows(batch: Batch, loss_fn: object, comm: Comm) -> tuple[Batch, SharedRows | None]:
    """Return this rank's tokens from a batch given to all ranks in `comm`, and the shared row information.

    With one rank: the batch and None. Collective. Raises ConfigError.
    """
    if comm.size == 1:
        return batch, None
    _check(batch, loss_fn, comm.size)
    digests = {key: digest(value.cpu().numpy().tobytes()) for key, value in sorted(batch.items())}
    comm.agree("the batch of ranks that share sequences", digests)
    filled = _fill(batch, comm.size)
    length = filled["labels"].shape[1]
    own = slice(comm.rank * length // comm.size, (comm.rank + 1) * length // comm.size)
    mask, positions = filled.get("attention_mask"), filled["position_ids"]
    document_numbers = pad((positions[:, 1:] - positions[:, :-1] != 1).cumsum(1), (1, 0))
    has_documents = mask is None and bool(document_numbers.any())  # positions that restart, as in transformers
    whole = WholeRows(
        length, positions, None if mask is None else mask.bool(), document_numbers if has_documents else None
    )
    sample = {key: value[:_SAMPLE_ROWS, : comm.size * _SAMPLE_TOKENS] for key, value in batch.items()}
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
    positions = torch.arange(labels.shape[1], device=labels.device).expand(labels.shape)
    whole = {"position_ids": positions, **batch}
    missing = -labels.shape[1] % size
    if not missing:
        return whole
    filled = {key: pad(value, (0, missing)) for key, value in whole.items()}
    last = whole["position_ids"][:, -1:] + torch.arange(1, 1 + missing, device=labels.device)
    filled["position_ids"] = torch.cat([whole["position_ids"], last], 1)
    return {**filled, "labels": pad(labels, (0, missing), value=IGNORED)}


@contextmanager
def over_whole_rows(
    attention: UnsharedAttention,
    shared: SharedRows | None,
    batch: Batch,
    copy_to_device: Callable[[torch.Tensor], torch.Tensor],
) -> Iterator[tuple[Batch, Batch]]:
    """Within the context, attention covers all tokens of `shared` rows.

    Yield (model batch, head batch with shifted labels). `copy_to_device` copies a tensor to the device.
    """
    if shared is None:
        yield batch, batch
        return
    # The length of this mask tells the model the full row length. Attention inserts the actual mask.
    ones = torch.ones((), dtype=torch.int64, device=batch["labels"].device)
    carrier = ones.expand(len(batch["labels"]), shared.whole.length)
    with attention.over(shared.whole.to_device(copy_to_device)):
        yield {**batch, "attention_mask": carrier}, {**batch, "shift_labels": copy_to_device(shared.targets)}
