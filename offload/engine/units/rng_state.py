"""State of the default Python and numpy random generators, unknown to torch."""

from __future__ import annotations

import ctypes
import pickle
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

_BYTES = 625 * 4
"""Mersenne twister state: 624 words and the position."""


class RngState(NamedTuple):
    """State of both generators at one moment.

    Other threads may draw from the generators too, so the state is restored only after a draw.
    """

    python: tuple[Any, ...]
    """Python generator state."""
    numpy: dict[str, Any]
    """State dict from the numpy default generator."""
    memory: bytes | None
    """Raw numpy generator memory, cheap to read.

    None if incomplete: a cached normal number is pending, or the generator is not a Mersenne twister.
    """

    @classmethod
    def capture(cls, before: RngState | None = None) -> RngState:
        """Return the present state. Returns `before` itself if nothing was drawn since."""
        python, memory = random.getstate(), _generator_memory()
        if before is not None and memory is not None and memory == before.memory:
            return before if python == before.python else cls(python, before.numpy, memory)
        numpy: Any = np.random.get_state(legacy=False)
        is_complete = memory is not None and memory == _twister_memory(**numpy["state"]) and not numpy["has_gauss"]
        now = cls(python, numpy, memory if is_complete else None)
        return before if before is not None and now.equals(before) else now

    def equals(self, other: RngState) -> bool:
        """True if nothing was drawn between the two moments."""
        if self is other:
            return True
        return self.python == other.python and pickle.dumps(self.numpy) == pickle.dumps(other.numpy)

    def put_back(self) -> None:
        """Restore both generators to this moment."""
        if RngState.capture(self) is not self:
            random.setstate(self.python)
            np.random.set_state(self.numpy)

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore this moment during the context; afterwards, restore the present state."""
        now = RngState.capture(self)
        self.put_back()
        try:
            yield
        finally:
            now.put_back()


def _generator_memory() -> bytes | None:
    """Return the raw memory of the numpy default generator. None: not a Mersenne twister."""
    generator = np.random.mtrand.get_bit_generator()
    return ctypes.string_at(generator.ctypes.state_address, _BYTES) if type(generator) is np.random.MT19937 else None


def _twister_memory(key: np.ndarray[Any, Any], pos: int) -> bytes:
    """Return the raw memory for a Mersenne twister state."""
    return key.tobytes() + pos.to_bytes(4, sys.byteorder)
