"""What the ranks of a run do as one: fail with one message, go on or end after the same step, show a warning once.

Every function is collective over the comm, but for those that say otherwise; with one rank nothing is exchanged.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import TypeVar

from offload.distributed.comm import Comm
from offload.distributed.outcome import as_one
from offload.errors import (
    ConfigError,
    DoesNotFitError,
    InterruptedRun,
    OffloadError,
    RankLostError,
    is_common,
    leave_to_another_rank,
)

HEAR_S = 0.5
"""How long a rank that fails waits to hear that rank 0 failed with the same error, and prints it."""

_ENDED = re.compile(r"Rank (?P<rank>\d+) ended with: (?P<kind>\w+): ")  # how the comm tells of another rank's error
_CAUSES: dict[str, type[OffloadError]] = {kind.__name__: kind for kind in (ConfigError, DoesNotFitError)}
_Made = TypeVar("_Made")


def rank_0_first(comm: Comm, what: str, make: Callable[[Callable[[], object]], _Made]) -> _Made:
    """Return make(alive) of this rank. Rank 0 makes it before the others, which find what it left in a cache.

    Rank 0 calls `alive()` now and then on its way: a single exchange that takes half an hour is a rank that is stuck.
    """
    made: _Made
    with as_one(comm, what):
        if comm.rank == 0:
            try:
                made = make(lambda: _wait(comm, True, what))
            except Exception:
                _wait(comm, False, what)
                raise
            _wait(comm, False, what)
        else:
            while _wait(comm, False, what):
                pass
    with as_one(comm, what):
        if comm.rank:
            made = make(lambda: None)
    return made


def _wait(comm: Comm, is_busy: bool, what: str) -> bool:
    return comm.any(is_busy, f"{what} on rank 0")


def tally(comm: Comm, what: str, **counts: float) -> dict[str, float]:
    """Return the sum over ranks of each count, in one exchange."""
    return dict(zip(counts, comm.sum_in_order(list(counts.values()), what), strict=True))


class Notes:
    """Warnings: each text is shown once, by rank 0 where it has it, else by the lowest rank that has it.

    show: prints a line. Rank 0's are shown at once; the others' when the ranks next exchange them.
    """

    def __init__(self, comm: Comm, show: Callable[[str], None]) -> None:
        self._comm, self._show = comm, show
        self._new: list[str] = []
        self._known: set[str] = set()

    def add(self, text: str) -> None:
        """Take a warning. Not collective."""
        if self._comm.rank == 0:
            self._show(f"note: {text}")
        if self._comm.size > 1:
            self._new.append(text)

    @property
    def num_new(self) -> int:
        """How many of this rank's the others do not know. Not collective."""
        return len(self._new)

    def exchange(self) -> None:
        told = self._comm.gather_objects(self._new, "notes")
        self._new = []
        for rank, texts in enumerate(told):
            for text in texts:
                if text not in self._known and rank == self._comm.rank != 0:
                    self._show(f"[rank {rank}] note: {text}")
                self._known.add(text)


class Parting:
    """How this rank leaves the others with an error: what they are told, what it exits with, and who prints it."""

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._heard = threading.Event()
        self._loss = ""
        if comm.size > 1:
            comm.on_lost(self._on_lost)

    def _on_lost(self, error: RankLostError) -> None:
        self._loss = str(error)
        self._heard.set()

    def leave(self, error: BaseException) -> BaseException:
        """Close the comm with this rank's error, not collectively. Return what to raise: the error, or where another
        rank's ended this one, its kind, for the exit code; marked where another rank of this machine prints it.
        """
        comm = self._comm
        if comm.size == 1:
            return error
        cause = _ENDED.match(str(error)) if isinstance(error, RankLostError) else None
        if cause and cause["kind"] == "KeyboardInterrupt":  # of which this rank's own may be on its way
            error = InterruptedRun("interrupted; nothing was saved.")
        elif cause and cause["kind"] in _CAUSES:
            error = _CAUSES[cause["kind"]](str(error))
        if not self._speaks(error, int(cause["rank"]) if cause else None):
            leave_to_another_rank(error)
        # The others need not be told what they have, and may still be on their way out of the exchange that told them.
        comm.close(None if is_common(error) else error)
        return error

    def _speaks(self, error: BaseException, cause: int | None) -> bool:
        """One paragraph a machine: by the rank whose error it is, else by the lowest rank that is left.

        cause: the rank whose error ended this one. It prints that itself.
        """
        comm = self._comm
        here = [rank for rank, machine in enumerate(comm.machines) if machine == comm.machines[comm.rank]]
        is_of_all = is_common(error) or isinstance(error, InterruptedRun | KeyboardInterrupt)
        if is_of_all or (cause is not None and cause not in here):
            return comm.local_rank == 0
        if cause is not None:
            return False
        if isinstance(error, RankLostError):
            return error.rank == comm.rank or comm.rank == next(rank for rank in here if rank != error.rank)
        if comm.local_rank:  # lower ranks go first: one that had the same error has said so by now
            self._heard.wait(HEAR_S * (1 + comm.local_rank / 4))
        return comm.local_rank == 0 or f" ended with: {type(error).__name__}: {error} (it was " not in self._loss
