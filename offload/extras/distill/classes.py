"""What a teacher finds probable: each token of the vocabulary, or the first few and all others together.

One class for the others keeps a distribution: without it, the model would learn that nothing else can follow. TRL's
`ServerDistillationTrainer` has it as the tail bucket, and Anshumann et al. 2025 (arXiv:2503.16870) as the ghost token.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nn.functional import log_softmax

_PIECE_BYTES = 16 << 20
"""Log-probabilities in fp32 at a time, in bytes: a divergence has some six tensors of this size with its graph."""
VALUES = {"teacher_log_probs": torch.float32, "teacher_ids": torch.int32}
"""Batch values of stored classes, and fields of a record, in the order of `Classes`."""


class Classes(NamedTuple):
    """What a teacher finds probable, for some tokens."""

    log_probs: torch.Tensor
    """Log-probabilities, fp32 [tokens, classes]: those of `ids` and of all other tokens together."""
    ids: torch.Tensor
    """Tokens of the vocabulary, integers [tokens, classes - 1]. Without columns: each class is a token."""

    def of(self, log_probs: torch.Tensor) -> torch.Tensor:
        """Return these classes of other log-probabilities, fp32 [tokens, vocabulary]."""
        if not self.ids.shape[1]:
            return log_probs
        ids = self.ids.long()
        # Not from the sum of the others: 1 - p has no digits where p is near 1.
        rest = log_probs.scatter(1, ids, -math.inf).logsumexp(1, keepdim=True)
        return torch.cat([log_probs.gather(1, ids), rest], 1)


def pieces(logits: torch.Tensor) -> Iterator[slice]:
    """Yield some of the tokens at a time, from logits [tokens, vocabulary], for numbers in fp32."""
    size = max(1, _PIECE_BYTES // (4 * logits.shape[1]))
    return (slice(begin, begin + size) for begin in range(0, len(logits), size))


def top_classes(logits: torch.Tensor, temperature: float, top_k: int | None) -> Classes:
    """Return the classes of the `top_k` most probable tokens from logits [tokens, vocabulary]. None, or at least the
    vocabulary: each token is a class.
    """
    log_probs = log_softmax(logits.float() / temperature, 1)
    num_ids = _num_ids(top_k, logits.shape[1])
    found = Classes(log_probs, log_probs.topk(num_ids, 1).indices)
    return found._replace(log_probs=found.of(log_probs))


def record_type(top_k: int | None, vocabulary: int) -> np.dtype[Any]:
    """Return the type of the stored classes of a token: fp32 and int32, 8 bytes a token of the vocabulary with a class
    of its own, and 4 for all others.
    """
    num_ids = _num_ids(top_k, vocabulary)
    num_classes = vocabulary
    if num_ids:
        num_classes = num_ids + 1
    return np.dtype(list(zip(VALUES, ("<f4", "<i4"), ((num_classes,), (num_ids,)), strict=True)))


def _num_ids(top_k: int | None, vocabulary: int) -> int:
    if top_k is None or top_k >= vocabulary:
        return 0
    return top_k
