"""Outputs inside a unit, kept from a forward for the recomputation."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class KeptOutputs:
    """Outputs from one micro-batch in call order, such as outputs of streamed experts.

    With saved outputs, experts are fetched twice per step (forward and backward), not three times.
    """

    def __init__(self) -> None:
        self._recorded: list[torch.Tensor] | None = None
        self._replayed: Iterator[torch.Tensor] | None = None

    @contextmanager
    def recorded_in(self, outputs: list[torch.Tensor]) -> Iterator[None]:
        """Append outputs to `outputs` during the context (a forward)."""
        self._recorded = outputs
        try:
            yield
        finally:
            self._recorded = None

    @contextmanager
    def replayed(self, outputs: list[torch.Tensor]) -> Iterator[None]:
        """Replay these outputs during the context (a recomputation). An empty list: no replay."""
        self._replayed = iter(outputs) if outputs else None
        try:
            yield
        finally:
            self._replayed = None

    def record(self, output: torch.Tensor) -> None:
        """Save a copied output. The caller may change the original in place afterwards."""
        if self._recorded is not None:
            self._recorded.append(output.detach().clone())

    def next_replayed(self) -> torch.Tensor | None:
        """Return the saved output from the same call. None: compute the output, as in a first forward."""
        return None if self._replayed is None else next(self._replayed, None)
