"""Tickets, and the race rule for a buffer: no read before the fill is done, no fill before the reads are done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

_MANY = 16


class CancelledError(Exception):
    """Raised for work cancelled before the start, together with the step."""


class Ticket:
    """Handle of one work item. `begin` and `end` are `time.perf_counter` seconds.

    `is_done` is set when the work is done; for GPU stream work, when the work is in the stream, and then `event` fires
    at the end. `position` counts all work in the lane. `lane` is the displayed lane name (the link name); `delayed_by`
    names the lane with the work that delayed this ticket. `watchers` are called when the work is done. `pool` receives
    the event for reuse.
    """

    __slots__ = ("begin", "delayed_by", "end", "error", "event", "is_done", "lane", "pool", "position", "watchers")

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
        self.delayed_by, self.position = lane, 0
        self.error: BaseException | None = None
        self.watchers: list[Callable[[], None]] = []

    def finish(self, error: BaseException | None = None) -> None:
        """Mark the work as done or failed, and wake the waiting threads. Call under the lock of the lanes."""
        self.error = error
        self.is_done = True  # after the error, because readers take no lock
        watchers, self.watchers = self.watchers, []
        for watcher in watchers:
            watcher()

    def synchronize(self) -> None:
        """Block until the work is over, on the device too. The ticket must be done."""
        if self.event is not None:
            self.event.synchronize()

    @property
    def is_over(self) -> bool:
        """True when no part of the work is left, on the device too."""
        return self.is_done and (self.event is None or bool(self.event.query()))


class Fence:
    """Race rule for one buffer: a read waits for the last fill, and a fill waits for all readers.

    `buffer_type` names the buffer. Tests disable all waits of one type and must detect the race.
    """

    __slots__ = ("_filled", "_readers", "buffer_type")

    def __init__(self, buffer_type: str) -> None:
        self.buffer_type = buffer_type
        self._filled: Sequence[Ticket] = ()
        self._readers: list[Ticket] = []

    def before_read(self) -> Sequence[Ticket]:
        """Return the tickets to wait for before a read."""
        return self._filled

    def before_fill(self) -> Sequence[Ticket]:
        """Return the tickets to wait for before a fill."""
        return (*self.before_read(), *self._readers)

    def record_reader(self, *tickets: Ticket) -> None:
        """Record readers."""
        if len(self._readers) >= _MANY:  # a buffer without further fills (frozen weights) would collect readers forever
            self._readers = [reader for reader in self._readers if not reader.is_over]
        self._readers += tickets

    def record_writer(self, *tickets: Ticket) -> None:
        """Record the writers of one joint fill. They run after all earlier users."""
        self._filled = tickets
        self._readers.clear()

    @property
    def has_failed(self) -> bool:
        """True if the last fill failed or was cancelled."""
        return any(ticket.error is not None for ticket in self._filled)

    def forgive(self) -> None:
        """Forget failed fills. The caller repairs the buffer content."""
        self._filled = [ticket for ticket in self._filled if ticket.error is None]
