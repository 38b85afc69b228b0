"""Random numbers that a forward draws from Python's or numpy's default generator, of which torch knows nothing."""

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
"""Of a Mersenne twister: 624 words, and how many of them are drawn."""


class Drawn(NamedTuple):
    """How far both generators were drawn at one moment. Other threads may draw from them as well: they are put back
    only where something has moved them that is to leave no trace.
    """

    python: tuple[Any, ...]
    """The state of Python's generator."""
    numpy: dict[str, Any]
    """The state of numpy's default generator."""
    memory: bytes | None
    """What numpy's generator has in memory, which takes no time to look at; None where that does not say everything: a
    normal number is drawn that nobody has taken yet, or it is no Mersenne twister.
    """

    @classmethod
    def so_far(cls, before: Drawn | None = None) -> Drawn:
        """Return how far they are drawn now: `before`, an earlier moment, itself where nothing was drawn since."""
        python, memory = random.getstate(), _memory()
        if before is not None and memory is not None and memory == before.memory:
            return before if python == before.python else cls(python, before.numpy, memory)
        numpy: Any = np.random.get_state(legacy=False)
        tells_all = memory is not None and memory == _whole(**numpy["state"]) and not numpy["has_gauss"]
        now = cls(python, numpy, memory if tells_all else None)
        return before if before is not None and now.is_as(before) else now

    def is_as(self, other: Drawn) -> bool:
        """True where nothing was drawn between the two moments."""
        if self is other:
            return True
        return self.python == other.python and pickle.dumps(self.numpy) == pickle.dumps(other.numpy)

    def put_back(self) -> None:
        """The next numbers are those that came after this moment."""
        if Drawn.so_far(self) is not self:
            random.setstate(self.python)
            np.random.set_state(self.numpy)

    @contextmanager
    def again(self) -> Iterator[None]:
        """Within, the numbers of that moment are drawn again; afterwards what would come now."""
        now = Drawn.so_far(self)
        self.put_back()
        try:
            yield
        finally:
            now.put_back()


def _memory() -> bytes | None:
    """Return what numpy's default generator has in memory, where that is a Mersenne twister."""
    generator = np.random.mtrand.get_bit_generator()
    return ctypes.string_at(generator.ctypes.state_address, _BYTES) if type(generator) is np.random.MT19937 else None


def _whole(key: np.ndarray[Any, Any], pos: int) -> bytes:
    """Return what a Mersenne twister of this state has in memory."""
    return key.tobytes() + pos.to_bytes(4, sys.byteorder)
