"""Tickets, and the race rule for a buffer: never read before it was filled, never filled before it was read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_MANY = 16


class CancelledError(Exception):
    """Work that was given up before it began, because the step it belonged to was."""


class Ticket:
    """One piece of work of a lane. `begin` and `end` are seconds of `time.perf_counter`.

    `is_done` is set once the work was done, or, for work of a GPU's stream, once it is in the stream: then `event`
    fires when it is done. `position`: its place among all that its lane was ever given. `lane` is the name under which
    the lane is shown (of its link); `held_by` that of the lane whose work this had to wait for, where that is what made
    it late. `watchers` are called once it is done. `pool`: where its event is used again.
    """

    __slots__ = ("begin", "end", "error", "event", "held_by", "is_done", "lane", "pool", "position", "watchers")

    def __init__(
        self,
        lane: str,
        begin: float = 0.0,
        end: float = 0.0,
        is_done: bool = False,
        event: Any = None,
        pool: Any = None,
    ) -> None:
        self.lane, self.begin, self.end, self.is_done, self.event, self.pool = lane, begin, end, is_done, event, pool
        self.held_by, self.position = lane, 0
        self.error: BaseException | None = None
        self.watchers: list[Callable[[], None]] = []

    def finish(self, error: BaseException | None = None) -> None:
        """It is done, or failed; wake who waits for it. Under the lock of the lanes."""
        self.error = error
        self.is_done = True  # after the error: it is read without the lock
        watchers, self.watchers = self.watchers, []
        for watcher in watchers:
            watcher()

    def last(self, begin: float, end: float) -> None:
        """The work begins and ends at these times."""
        self.begin, self.end = begin, end

    def end_with(self, event: Any) -> None:
        """The work is over when a GPU comes to this event of a stream."""
        self.event = event

    def wait_for(self, other: Ticket) -> None:
        """Another's work made this one late."""
        self.held_by = other.lane

    def synchronize(self) -> None:
        """It is done: block until nothing of the work is left to do anywhere."""
        if self.event is not None:
            self.event.synchronize()

    @property
    def is_over(self) -> bool:
        """True once nothing of the work is left to do anywhere."""
        return self.is_done and (self.event is None or bool(self.event.query()))


class Fence:
    """The race rule for one buffer (DESIGN: no buffer is read before the ticket of the write that filled it, nor
    filled again before the tickets of its readers).

    `kind` says what the buffer is; the tests take the waits of one kind away and must see it.
    """

    __slots__ = ("_filled", "_readers", "kind")

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._filled: Sequence[Ticket] = ()
        self._readers: list[Ticket] = []

    def before_read(self) -> Sequence[Ticket]:
        """Return what a reader has to wait for."""
        return self._filled

    def before_fill(self) -> Sequence[Ticket]:
        """Return what the next writer has to wait for."""
        return (*self.before_read(), *self._readers)

    def read(self, *tickets: Ticket) -> None:
        """Note readers."""
        if len(self._readers) >= _MANY:  # what is never filled again (frozen weights) would collect them for ever
            self._readers = [reader for reader in self._readers if not reader.is_over]
        self._readers += tickets

    def fill(self, *tickets: Ticket) -> None:
        """Note who fills it, together, after everyone before."""
        self._filled = tickets
        self._readers.clear()

    @property
    def has_failed(self) -> bool:
        """True where what should have filled it failed, or was given up."""
        return any(ticket.error is not None for ticket in self._filled)

    def forgive(self) -> None:
        """What failed to fill it is made good by who calls this: nobody has to know of it any more."""
        self._filled = [ticket for ticket in self._filled if ticket.error is None]
