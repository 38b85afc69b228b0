"""What streamed experts give in a forward, kept for its recompute."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


class ExpertOutputs:
    """The outputs of the experts in one micro-batch of a unit, in the order of their calls. With them experts come up
    twice in a step (forward and backward), and not a third time for the recompute between.
    """

    def __init__(self) -> None:
        self._kept: list[torch.Tensor] | None = None
        self._given: Iterator[torch.Tensor] | None = None

    @contextmanager
    def kept_in(self, outputs: list[torch.Tensor]) -> Iterator[None]:
        """Within, a forward, outputs are added to a list."""
        self._kept = outputs
        try:
            yield
        finally:
            self._kept = None

    @contextmanager
    def given(self, outputs: list[torch.Tensor]) -> Iterator[None]:
        """Within, a recompute, experts give these again, if there are any."""
        self._given = iter(outputs) if outputs else None
        try:
            yield
        finally:
            self._given = None

    def keep(self, output: torch.Tensor) -> None:
        """Note an output, which the caller may change in place afterwards."""
        if self._kept is not None:
            self._kept.append(output.detach().clone())

    def again(self) -> torch.Tensor | None:
        """Return the output that the same call had before; None where it had none, as in any first forward."""
        return None if self._given is None else next(self._given, None)
