"""Joint actions over ranks: share rows, fail with one message, end after the same step, show each warning once.

Functions are collective over the comm unless stated otherwise. A single rank exchanges nothing.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from offload.app.config.config import Config
from offload.app.training.objectives import Batch, Objective
from offload.app.training.task import Task
from offload.distributed.comm import Comm
from offload.distributed.outcomes import share_failure
from offload.distributed.share import share
from offload.errors import (
    ConfigError,
    DoesNotFitError,
    InterruptedRun,
    OffloadError,
    RankLostError,
    is_common,
    leave_to_another_rank,
)

ERROR_WAIT_S = 0.5
"""Seconds a failing rank waits for news of the same error on rank 0, which then prints the message."""

_ENDED = re.compile(r"Rank (?P<rank>\d+) ended with: (?P<error>\w+): ")  # the comm's report about another rank's error
_CAUSES: dict[str, type[OffloadError]] = {error.__name__: error for error in (ConfigError, DoesNotFitError)}
_Result = TypeVar("_Result")


def rank_0_first(comm: Comm, label: str, make: Callable[[Callable[[], object]], _Result]) -> _Result:
    """Return make(alive) on each rank. Rank 0 goes first, so the others find the result in a cache.

    Rank 0 calls `alive()` regularly, because a single exchange lasting half an hour would count as a stuck rank.
    """
    result: _Result
    with share_failure(comm, label):
        if comm.rank == 0:
            try:
                result = make(lambda: _wait(comm, True, label))
            except Exception:
                _wait(comm, False, label)
                raise
            _wait(comm, False, label)
        else:
            while _wait(comm, False, label):  # each round answers one `alive()` of rank 0
                pass
    with share_failure(comm, label):
        if comm.rank:
            result = make(lambda: None)
    return result


def _wait(comm: Comm, is_busy: bool, label: str) -> bool:
    return comm.from_rank(0, is_busy, f"{label} on rank 0")


def is_shared(comm: Comm, error: BaseException) -> bool:
    """Return whether every rank has this error, so that all may go on together. Not collective."""
    return comm.size == 1 or is_common(error)


def tally(comm: Comm, label: str, **counts: float) -> dict[str, float]:
    """Return the sum over ranks for each count, in one exchange."""
    return dict(zip(counts, comm.sum_in_order(list(counts.values()), label), strict=True))


class Notes:
    """Warnings, each shown once: by rank 0, or else by the lowest rank with the warning.

    show: prints a line. Warnings on rank 0 appear at once, others at the next exchange.
    """

    def __init__(self, comm: Comm, show: Callable[[str], None]) -> None:
        self._comm = comm
        self._show = show
        self._new: list[str] = []
        self._seen: set[str] = set()

    def add(self, text: str) -> None:
        """Add a warning. Not collective."""
        if self._comm.rank == 0:
            self._show(f"note: {text}")  # at once: the run may end before the next exchange
        self._new.append(text)

    @property
    def num_new(self) -> int:
        """Warnings on this rank not yet exchanged. Not collective."""
        return len(self._new)

    def exchange(self) -> None:
        texts_by_rank = self._comm.gather_objects(self._new, "notes")
        self._new = []
        for rank, texts in enumerate(texts_by_rank):
            for text in texts:
                if text not in self._seen and rank == self._comm.rank != 0:
                    self._show(f"[rank {rank}] note: {text}")
                # On all ranks: a later warning with this text is known.
                self._seen.add(text)


class RankExit:
    """Exit of one rank after an error.

    Decides the message to the other ranks, the exception for the exit code, and the printing rank.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._heard = threading.Event()
        self._loss = ""
        comm.on_lost(self._on_lost)

    def _on_lost(self, error: RankLostError) -> None:
        self._loss = str(error)
        self._heard.set()

    def leave(self, error: BaseException) -> BaseException:
        """Close the comm with this rank's error. Return the exception to raise. Not collective.

        If another rank's error ended this rank, the result has the same class as the other error, for the same exit
        code. The exception is marked if another rank on this machine prints the message.
        """
        comm = self._comm
        other_rank = None
        if isinstance(error, RankLostError) and (cause := _ENDED.match(str(error))):
            other_rank = int(cause["rank"])
            if cause["error"] == "KeyboardInterrupt":  # a signal for this rank may still be on the way
                error = InterruptedRun("interrupted; nothing was saved.")
            elif cause["error"] in _CAUSES:
                error = _CAUSES[cause["error"]](str(error))
        if not self._prints(error, other_rank):
            leave_to_another_rank(error)
        if is_shared(comm, error):  # the others know, and may still be leaving the exchange with the report
            comm.close()
        else:
            comm.close(error)
        return error

    def _prints(self, error: BaseException, cause: int | None) -> bool:
        """Return whether this rank prints: one paragraph per machine.

        The failed rank prints, or else the lowest remaining rank. cause: rank whose error ended this one; the other
        rank prints the error.
        """
        comm = self._comm
        # A user may see the output of one machine alone.
        local_ranks = [rank for rank, machine in enumerate(comm.machines) if machine == comm.machines[comm.rank]]
        is_of_all = is_shared(comm, error) or isinstance(error, InterruptedRun | KeyboardInterrupt)
        if is_of_all or (cause is not None and cause not in local_ranks):
            return comm.local_rank == 0
        if cause is not None:
            return False
        if isinstance(error, RankLostError):
            return error.rank == comm.rank or comm.rank == next(rank for rank in local_ranks if rank != error.rank)
        if comm.local_rank:  # lower ranks go first and have reported an equal error by now
            self._heard.wait(ERROR_WAIT_S * (1 + comm.local_rank / 4))
        return comm.local_rank == 0 or f" ended with: {type(error).__name__}: {error} (it was " not in self._loss


@dataclass(frozen=True)
class Share:
    """A rank's part in the batch rows, equal within a sequence group."""

    number: int
    num_shares: int
    is_counted: bool
    """True on one rank per share. Only this rank counts tokens."""

    @classmethod
    def of(cls, config: Config, comm: Comm) -> Share:
        number, place = comm.group_of(config.train.sequence_parallel)
        return cls(number, config.train.num_groups(comm.size), place == 0)

    def apply(self, objective: Objective, rows: Batch, step: int, num_rows: int) -> Batch:
        """Return the model batch for `rows`, this rank's share among `num_rows`."""
        return objective.apply(rows, step, share(num_rows, self.number, self.num_shares).start, num_rows)


def next_share(
    data: Task, objective: Objective, own: Share, step: int, num_rows: int
) -> tuple[Batch | None, Exception | None]:
    """Return this rank's rows for a step (None: data exhausted), and an exception.

    An exception is returned, not raised, because the other ranks must hear first.
    """
    try:
        return own.apply(objective, data.batch(step, own.number, own.num_shares), step, num_rows), None
    except StopIteration:
        if step:
            return None, None
        return None, ConfigError("data.source has no rows for a first step; give more data.")
    except Exception as error:
        return None, error
