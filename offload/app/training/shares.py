"""A rank's share of batch rows, as model input."""

from __future__ import annotations

from dataclasses import dataclass

from offload.app.config.config import Config
from offload.app.training.objectives import Batch, Objective
from offload.app.training.task import Task
from offload.distributed.comm import Comm, share
from offload.errors import ConfigError


@dataclass(frozen=True)
class Share:
    """A rank's part in the batch rows, equal within a sequence group."""

    number: int
    """Share index."""
    num_shares: int
    """Total shares."""
    is_counted: bool
    """True on one rank per share. Only this rank counts tokens."""

    @classmethod
    def of(cls, config: Config, comm: Comm) -> Share:
        """Return this rank's share. Raises ConfigError."""
        number, place = comm.group_of(config.train.sequence_parallel)
        return cls(number, config.train.num_groups(comm.size), place == 0)

    def apply(self, objective: Objective, rows: Batch, step: int, num_rows: int) -> Batch:
        """Return the model batch for `rows`, this rank's share among `num_rows`."""
        return objective.apply(rows, step, share(num_rows, self.number, self.num_shares).start, num_rows)


def next_share(
    data: Task, objective: Objective, comm: Comm, own: Share, step: int, num_rows: int
) -> tuple[Batch | None, Exception | None]:
    """Return this rank's rows for a step (None: data exhausted), and an exception.

    With several ranks, an exception is returned, not raised, because the other ranks must hear first.
    """
    try:
        return own.apply(objective, data.batch(step, own.number, own.num_shares), step, num_rows), None
    except StopIteration:
        if step:
            return None, None
        failure: Exception = ConfigError("data.source has no rows for a first step; give more data.")
    except Exception as error:
        failure = error
    if comm.size == 1:
        raise failure
    return None, failure
