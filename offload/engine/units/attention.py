"""Attention over whole rows on each rank. A subclass shares rows between ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from offload.distributed.comm import Comm


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

    @property
    def needs_mask(self) -> bool:
        """True if a token may not attend to all earlier tokens."""
        return self.documents is not None or (self.padding is not None and not bool(self.padding.all()))

    def to_device(self, copy_to_device: Callable[[torch.Tensor], torch.Tensor]) -> WholeRows:
        """Return a device copy; `copy_to_device` copies one tensor."""
        padding, documents = (t if t is None else copy_to_device(t) for t in (self.padding, self.documents))
        return WholeRows(self.length, copy_to_device(self.positions), padding, documents)


class UnsharedAttention:
    """No sequence parallelism: each rank has whole sequences."""

    comm = Comm()
    """Communicator for the ranks in the group."""

    def divert(self) -> None:
        """Redirect attention calls to this object."""

    def undo(self) -> None:
        """Restore the original attention."""

    def begin_pass(self, needs_mask: bool) -> None:
        """Start a pass.

        `needs_mask`: on some rank, tokens may not attend to all earlier tokens. All ranks then build masks, so unit
        arguments have equal structure on all ranks.
        """

    @contextmanager
    def over(self, rows: WholeRows) -> Iterator[None]:  # noqa: ARG002
        """Set the whole rows for attention during the context."""
        yield

    def refuse_own_loop(self) -> None:
        """Raise ConfigError if sequences are shared: a user training loop cannot call the model then."""
