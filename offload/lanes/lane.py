"""Lane: an ordered work queue.

A lane runs work in submission order, each piece after the tickets named with it. A lane with `overtakes` obeys the
tickets only. All lanes in an engine share one lock. Each lane has a bell: a finished ticket, a cancellation or the
shutdown rings the bell to wake the lane thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload.lanes.ticket import Ticket

Run = Callable[[], object]
Tickets = Sequence[Ticket]


class Lane:
    """Interface between the engine and a lane."""

    name: str
    error: BaseException | None = None
    """First failure, kept until the failed work is cancelled or the lanes forget failures."""
    position: int = 0
    """Number of submissions so far."""

    def submit(
        self, work: Run, *, reads: Tickets = (), fills: Tickets = (), name: str = "", num_bytes: int = 0
    ) -> Ticket:
        """Queue `work`, a transfer of `num_bytes`. Work starts when all `reads` tickets are done, and fails with any
        error among them. The `fills` tickets guard the buffer to overwrite: they must be over, failed or not.
        """
        raise NotImplementedError

    def revoke(self, since: int = 0) -> None:
        """Cancel like `cancel`, but return at once."""

    def cancel(self, since: int = 0) -> None:
        """Cancel the work submitted after position `since`: drop pieces not yet begun, stop the throttle sleep of begun
        pieces, and forget their error. Returns when no such piece runs any more (on a GPU: when all are in the stream).
        """

    def finish(self) -> None:
        """Wait until all work is done or failed."""

    def drain(self) -> None:
        """Wait until all work is done, then raise the first lane error."""

    def abandon(self) -> None:
        """Cancel all work without waiting for begun pieces. The thread then ends. Takes no lock."""

    def close(self) -> None:
        """End the lane thread after the work in progress."""
