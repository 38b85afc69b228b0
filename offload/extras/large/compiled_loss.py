"""The cross entropy of a chunk of logits, with its gradient, compiled by torch.compile."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch

from offload.engine.comparison import OTHER_KERNELS, Sketch, largest_excess, same_bits, tolerance
from offload.engine.loss.cross_entropy import log_probs_with_gradient
from offload.engine.units.trial import ENGINE_ERRORS
from offload.errors import describe, shorten, warn

ROWS = 128
"""Tokens in one call of the graph: one shape for chunks of all sizes."""


def gradient_of_rows(
    logits: torch.Tensor, labels: torch.Tensor, slopes: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Return label log-probabilities, fp32 [rows], and write the gradient of the logits: for a compiler.

    As in `log_probs_with_gradient`, without parts of rows and without a scatter, which torch could not fuse.
    """
    columns, slope = labels[:, None], slopes[:, None]
    most = logits.amax(1, keepdim=True).float()
    sums = (logits - most).exp().sum(1, keepdim=True)
    own = logits.gather(1, columns) - most - sums.log()
    is_label = torch.arange(logits.shape[1], device=logits.device) == columns
    others = (logits - most).exp() * (-slope / sums)
    gradient.copy_(torch.where(is_label, slope * -own.expm1(), others))
    return own[:, 0]


class CompiledLoss:
    """A `Term` like `log_probs_with_gradient`, in a pass for each sum and one for the gradient.

    That moves 8 bytes for each bf16 logit, for 26 by kernels one by one, and only numbers of rows are in fp32. The last
    `ROWS` tokens of a chunk may be partly computed twice: a row has the same bits in any chunk. Fewer tokens, and
    values without a gradient, are not compiled. The first tokens with a vocabulary are a trial, after which a failure
    or a difference is warned of, and this vocabulary runs uncompiled.
    """

    def __init__(self, compiler: Callable[[Any], Any]) -> None:
        self._compiler = compiler
        self._refusals: dict[Any, str] = {}
        """By stride and dtype of the logits; empty if they run compiled."""

    def __call__(
        self, logits: torch.Tensor, labels: torch.Tensor, slopes: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = logits.detach()
        key = logits.stride(), logits.shape[1], logits.dtype
        if slopes is None or len(labels) < ROWS or not self._may_run(key, logits[:ROWS], labels[:ROWS], slopes[:ROWS]):
            return log_probs_with_gradient(logits, labels, slopes)
        log_probs = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
        gradient = torch.empty_like(logits)
        for begin in range(0, len(labels), ROWS):
            end = min(begin + ROWS, len(labels))
            rows = slice(end - ROWS, end)
            log_probs[rows] = self._run(logits[rows], labels[rows], slopes[rows], gradient[rows])
        return log_probs, gradient

    @cached_property
    def _function(self) -> Callable[..., torch.Tensor]:
        # Not before the first tokens: torch's compiler takes two seconds to import, and plans run on shapes alone.
        return self._compiler(gradient_of_rows)

    @torch.no_grad()
    def _run(self, logits: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return _on_shapes(logits, *others) if logits.is_meta else self._function(logits, *others)

    def _may_run(self, key: Any, *tensors: torch.Tensor) -> bool:
        if tensors[0].is_meta:
            return True
        if key not in self._refusals:
            self._refusals[key] = refusal = self._try(*tensors)
            if refusal:
                warn(f"the loss over the vocabulary is compiled, but runs uncompiled from here on: {refusal}.")
        return not self._refusals[key]

    def _try(self, logits: torch.Tensor, labels: torch.Tensor, slopes: torch.Tensor) -> str:
        """Return the reason against the compiled function, empty if there is none."""
        gradients = torch.empty_like(logits), torch.empty_like(logits)
        try:
            first, second = (self._run(logits, labels, slopes, gradient).clone() for gradient in gradients)
        except ENGINE_ERRORS:
            raise
        except Exception as error:
            return shorten(describe(error))
        if not (same_bits(first, second) and same_bits(*gradients)):
            return "its compiled results differ from run to run"
        plain = log_probs_with_gradient(logits, labels, slopes)
        for name, one, other in zip(("value", "gradient"), plain, (first, gradients[0]), strict=True):
            assert one is not None
            allowed = tolerance(OTHER_KERNELS, [one])
            if excess := largest_excess([Sketch.of(one)], [Sketch.of(other)], allowed.result, allowed.rounding):
                return f"a compiled {name} differs by {excess:.3g} of its norm"
        return ""


def _on_shapes(
    logits: torch.Tensor, _labels: torch.Tensor, _slopes: torch.Tensor, gradient: torch.Tensor
) -> torch.Tensor:
    """Return results on `meta`, by operations that move the bytes of the compiled passes."""
    torch.neg(logits, out=gradient)
    return logits.amax(1) + logits.sum(1)
