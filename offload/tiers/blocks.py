"""Device memory in blocks, which a park empties under their tensors, and a resume fills again."""

from __future__ import annotations

from collections.abc import Callable
from weakref import ref

import torch

from offload.tiers.counters import Ledger

CACHES: list[Callable[[], None]] = []
"""Functions that drop tensors of a device kept for all engines of the process, such as constants."""


def drop_caches() -> None:
    """Drop all tensors of devices in `CACHES`."""
    for drop in CACHES:
        drop()


def as_bytes(block: torch.UntypedStorage) -> torch.Tensor:
    """Return all of a block, uint8 [bytes]."""
    return torch.empty(0, dtype=torch.uint8, device=block.device).set_(block)


class Blocks:
    """Allocations of a device in use. A block ends with the last tensor over its memory.

    Without memory, all tensors over a block stay, with their addresses unknown, and nobody may read or write them.
    """

    def __init__(self, ledger: Ledger, resize: Callable[[torch.UntypedStorage, int], None]) -> None:
        """`resize`: takes the memory of a storage away (0 bytes), or gives a storage zeroed memory."""
        self._ledger = ledger
        self._resize = resize
        self._blocks = set[ref[torch.UntypedStorage]]()
        self._emptied: list[tuple[torch.UntypedStorage, int]] = []
        """Blocks without memory, with their bytes."""
        self._entries: dict[str, int] = {}
        """Bytes by name in the ledger, from before the memory was taken."""

    def add(self, memory: torch.Tensor) -> torch.Tensor:
        """Record and return new memory."""
        self._blocks.add(ref(memory.untyped_storage(), self._blocks.discard))
        return memory

    def present(self) -> list[torch.UntypedStorage]:
        """Return all blocks."""
        return [block for block in [reference() for reference in list(self._blocks)] if block is not None]

    def empty(self) -> None:
        """Take the memory of all blocks away, also after a `refill` that failed."""
        if not self._emptied:
            self._emptied = [(block, block.nbytes()) for block in self.present()]
            self._entries = dict(self._ledger.allocations)
        for block, _ in self._emptied:
            self._resize(block, 0)
        self._ledger.clear()

    def refill(self) -> None:
        """Give all blocks memory again, with zeros."""
        for name, num_bytes in self._entries.items():
            self._ledger.reserve(name, num_bytes)
        for block, num_bytes in self._emptied:
            self._resize(block, num_bytes)
        self._emptied = []
