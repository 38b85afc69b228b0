"""Random numbers that a forward draws from Python's or numpy's default generator, of which torch knows nothing."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np

from offload.engine.units.undo import Undo


class Drawn(NamedTuple):
    """How far both generators were drawn at one moment. Other threads may draw from them as well: they are put back
    only where something has moved them that is to leave no trace.
    """

    python: tuple[Any, ...]
    numpy: tuple[Any, ...]

    @classmethod
    def so_far(cls) -> Drawn:
        """Return how far they are drawn now."""
        return cls(random.getstate(), np.random.get_state())  # type: ignore[arg-type]

    def is_as(self, other: Drawn) -> bool:
        """True where nothing was drawn between the two moments."""
        (_, words, *rest), (_, others_words, *others) = self.numpy, other.numpy
        return self.python == other.python and rest == others and words.tobytes() == others_words.tobytes()

    def put_back(self) -> None:
        """The next numbers are those that came after this moment."""
        if not self.is_as(Drawn.so_far()):
            random.setstate(self.python)
            np.random.set_state(self.numpy)

    @contextmanager
    def again(self, undo: Undo) -> Iterator[None]:
        """Within, the numbers of that moment are drawn again; afterwards what would come now."""
        with undo.afterwards(Drawn.so_far().put_back):
            self.put_back()
            yield
