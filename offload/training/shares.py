"""A rank's share of the rows of a batch, as the model gets it."""

from __future__ import annotations

from dataclasses import dataclass

from offload.config.config import Config
from offload.data.dataset import Dataset, share
from offload.distributed.comm import Comm
from offload.errors import ConfigError
from offload.training.objectives import Batch, Objective


@dataclass(frozen=True)
class Share:
    """Which of a batch's rows a rank has: those that share sequences have the same."""

    number: int
    """The number of the share."""
    num_shares: int
    """How many shares there are."""
    is_counted: bool
    """True on one of the ranks that have the share, by which it is counted."""

    @classmethod
    def of(cls, config: Config, comm: Comm) -> Share:
        """Return this rank's. Raises ConfigError."""
        number, place = comm.group_of(config.train.sequence_parallel)
        return cls(number, config.train.num_groups(comm.size), place == 0)

    def apply(self, objective: Objective, rows: Batch, step: int, num_rows: int) -> Batch:
        """Return the model's batch of these rows, which are this rank's of `num_rows`."""
        return objective.apply(rows, step, share(num_rows, self.number, self.num_shares).start, num_rows)


def next_share(
    data: Dataset, objective: Objective, comm: Comm, own: Share, step: int, num_rows: int
) -> tuple[Batch | None, Exception | None]:
    """Return this rank's share of a step's rows, None at their end; and over several ranks what failed, of which the
    others have to hear first.
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
