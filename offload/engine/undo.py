"""What has to be put back however a pass ends: also where an interrupt came in the middle of putting it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch


class Where(Enum):
    """Whose code runs, or was interrupted: nobody's, the engine's own, or a unit's."""

    NOWHERE, ENGINE, MODEL = range(3)


class Undo:
    """Knows what is otherwise for a while. An interrupt may come at any line, in a `finally` as well: whoever gives a
    pass up calls `run`, and nothing stays as it was meanwhile. What `run` has put back, nobody puts back later: a
    generator that somebody's traceback holds may be closed in the middle of another pass.
    """

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []

    @contextmanager
    def afterwards(self, restore: Callable[[], None]) -> Iterator[None]:
        """Call `restore` at the end, which may be called twice. To be entered before anything is changed."""
        self._pending.append(restore)
        try:
            yield
        finally:
            if restore in self._pending:
                restore()
                self._pending.remove(restore)

    @contextmanager
    def saved_tensors_hooks(self, pack: Callable[..., Any], unpack: Callable[..., Any]) -> Iterator[None]:
        """Within, autograd saves tensors by these hooks. Those that stayed would be the whole program's."""
        hooks, is_on = torch.autograd.graph.saved_tensors_hooks(pack, unpack), [False]

        def restore() -> None:
            if is_on[0]:
                is_on[0] = bool(hooks.__exit__())  # type: ignore[func-returns-value]

        with self.afterwards(restore):
            is_on[0] = hooks.__enter__() is None  # type: ignore[func-returns-value]  # no line between the two
            yield

    def run(self) -> None:
        """Put everything back, the last first."""
        while self._pending:
            self._pending[-1]()
            self._pending.pop()
