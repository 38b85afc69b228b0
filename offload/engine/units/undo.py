"""What has to be put back however a pass ends: also where an interrupt came in the middle of putting it back."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from typing import Any

import torch
from torch import nn


class Where(Enum):
    """Whose code runs, or was interrupted: nobody's, the engine's own, or a unit's. FAILED: nobody's, and a forward
    that failed, or a backward that did or was interrupted, is half done, which is to be given up.
    """

    NOWHERE, ENGINE, MODEL, FAILED = range(4)


class Undo:
    """Knows what is otherwise for a while. An interrupt may come at any line, in a `finally` as well: whoever gives a
    pass up calls `run`, and nothing stays as it was meanwhile. What `run` has put back, nobody puts back later: a
    generator that somebody's traceback holds may be closed in the middle of another pass.

    `where`: ENGINE between two calls: one was interrupted in the engine's own code, and has to be given up.
    """

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []
        self.where = Where.NOWHERE

    def afterwards(self, restore: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `restore` at the end, which may be called twice. To be entered before anything is changed."""
        return _Afterwards(self._pending, restore)

    @contextmanager
    def within(self, manager: AbstractContextManager[Any]) -> Iterator[None]:
        """Be within `manager`, one of torch's that is the whole thread's: one that stayed would be in the way."""
        entered: list[Any] = []

        def restore() -> None:
            while entered:
                manager.__exit__(None, None, entered.pop())  # no line between the two, nor here:

        with self.afterwards(restore):
            entered.append((manager.__enter__(), None)[1])
            yield

    def saved_tensors_hooks(self, pack: Callable[..., Any], unpack: Callable[..., Any]) -> AbstractContextManager[None]:
        """Within, autograd saves tensors by these hooks."""
        return self.within(torch.autograd.graph.saved_tensors_hooks(pack, unpack))

    @contextmanager
    def in_eval_mode(self, model: nn.Module) -> Iterator[None]:
        """Within, every module is in eval mode; afterwards each is in its own again."""
        modes = [(module, module.training) for module in model.modules()]

        def restore() -> None:
            for module, mode in modes:
                module.training = mode

        with self.afterwards(restore):
            model.eval()
            yield

    def run(self) -> None:
        """Put everything back, the last first."""
        while self._pending:
            self._pending[-1]()
            self._pending.pop()


class _Afterwards:
    """A generator would take twice the calls, in every use of a unit."""

    __slots__ = ("_pending", "_restore")

    def __init__(self, pending: list[Callable[[], None]], restore: Callable[[], None]) -> None:
        self._pending, self._restore = pending, restore

    def __enter__(self) -> None:
        self._pending.append(self._restore)

    def __exit__(self, *_error: object) -> None:
        if self._restore in self._pending:
            self._restore()
            self._pending.remove(self._restore)
