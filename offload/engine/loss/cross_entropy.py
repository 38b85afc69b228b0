"""Log-probabilities of labels, and the gradient of the logits in the same pass."""

from __future__ import annotations

from collections.abc import Callable

import torch

_PIECE_BYTES = 32 << 20
"""Logits in fp32 at a time, in bytes: little memory, and a GPU can keep them in the cache."""


Term = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], tuple[torch.Tensor, torch.Tensor | None]]
"""Maps logits [tokens, vocabulary], labels (int64 [tokens], at least 0) and slopes (fp32 [tokens]; None: no gradient)
to a value of each token, fp32, and the gradient of their sum weighted by the slopes, like the logits.
"""


def log_probs_with_gradient(
    logits: torch.Tensor, labels: torch.Tensor, slopes: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return label log-probabilities, fp32 [tokens], and the gradient of their sum weighted by `slopes`.

    The gradient of a token's logits is slope * (one-hot label - softmax), so it is known without a second pass.

    logits: [tokens, vocabulary]. labels: int64 [tokens], at least 0. slopes: fp32 [tokens]; None: no gradient. The
    gradient has the shape and dtype of the logits.
    """
    logits, columns = logits.detach(), labels[:, None]
    log_probs = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
    gradient = None if slopes is None else torch.empty_like(logits)
    size = max(1, _PIECE_BYTES // (4 * logits.shape[1]))
    for rows in (slice(begin, begin + size) for begin in range(0, len(labels), size)):
        most = logits[rows].amax(1, keepdim=True).float()  # subtracted, or exp could overflow
        piece = (logits[rows] - most).exp_()
        sums = piece.sum(1, keepdim=True)
        own = logits[rows].gather(1, columns[rows]) - most - sums.log()
        log_probs[rows] = own[:, 0]
        if gradient is not None and slopes is not None:
            slope = slopes[rows, None]
            torch.mul(piece, -slope / sums, out=gradient[rows])
            # 1 - p for the label, by expm1: the difference would lose all digits where p is near 1.
            gradient[rows].scatter_(1, columns[rows], (slope * -own.expm1()).to(gradient.dtype))
        del piece  # before the next one
    return log_probs, gradient
