"""A rank's share of the rows of a batch, as the model gets it."""

from __future__ import annotations

from offload.data.dataset import Dataset, share
from offload.distributed.comm import Comm
from offload.errors import ConfigError
from offload.training.objectives import Batch, Objective


def own_share(objective: Objective, comm: Comm, rows: Batch, step: int, num_rows: int) -> Batch:
    """Return the model's batch of this rank's share of `num_rows`."""
    return objective.apply(rows, step, share(num_rows, comm.rank, comm.size).start, num_rows)


def next_share(
    data: Dataset, objective: Objective, comm: Comm, step: int, num_rows: int
) -> tuple[Batch | None, Exception | None]:
    """Return this rank's share of a step's rows, None at their end; and over several ranks what failed, of which the
    others have to hear first.
    """
    try:
        return own_share(objective, comm, data.batch(step, comm.rank, comm.size), step, num_rows), None
    except StopIteration:
        if step:
            return None, None
        failure: Exception = ConfigError("data.source has no rows for a first step; give more data.")
    except Exception as error:
        failure = error
    if comm.size == 1:
        raise failure
    return None, failure
