"""Streamed expert outputs from a forward, reused in the recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ExpertOutputs:
    """Expert outputs from one micro-batch in call order.

    With saved outputs, experts are fetched twice per step (forward and backward), not three times.
    """

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] | None = None
        self._given: Iterator[torch.Tensor] | None = None

    @contextmanager
    def kept_in(self, outputs: list[torch.Tensor]) -> Iterator[None]:
        """Append outputs to `outputs` during the context (a forward)."""
        self._kept = outputs
        try:
            yield
        finally:
            self._kept = None

    @contextmanager
    def given(self, outputs: list[torch.Tensor]) -> Iterator[None]:
        """Replay these outputs during the context (a recomputation). An empty list: no replay."""
        self._given = iter(outputs) if outputs else None
        try:
            yield
        finally:
            self._given = None

    def keep(self, output: torch.Tensor) -> None:
        """Save a copied output. The caller may change the original in place afterwards."""
        if self._kept is not None:
            self._kept.append(output.detach().clone())

    def again(self) -> torch.Tensor | None:
        """Return the saved output from the same call. None: compute the output, as in a first forward."""
        return None if self._given is None else next(self._given, None)
