"""Door to the plan of a run: memory and step time, known before the engine starts, over a measured network."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig

from offload.app.config.config import Config
from offload.app.config.sections import DOCUMENTS
from offload.app.training.task import Task
from offload.distributed.comm import Comm
from offload.doors import Door
from offload.errors import DoesNotFitError, format_bytes
from offload.planning.machines import ThisMachine


@dataclass(frozen=True)
class RunForecast:
    """The plan of a run."""

    config: Config
    """Configuration with the placement of the states, chosen by the planner if open."""
    description: str
    """Peak bytes by tier, step time and bottleneck, in one line."""
    misfit: str
    """Shortage and smallest change that fits, in a sentence. Empty: the run fits."""
    num_replicas: int
    document: Mapping[str, Any]
    """JSON object for plan.json."""


class Planner(Protocol):
    """A forecast for a run on this machine, before the engine starts. Door: a function under a name in `PLANNERS`."""

    def __call__(
        self,
        config: Config,
        architecture: PreTrainedConfig,
        num_ranks: int,
        machine: ThisMachine,
        say: Callable[[str], None],
        network: Network | None = None,
        document_share: float | None = None,
    ) -> RunForecast:
        """Choose open placement options, and forecast the run.

        `num_ranks`: ranks per machine. `network`: measured between several machines. `say` prints a line.
        `document_share`: of the data (`document_share`). Raises OffloadError if no forecast is possible; the run then
        starts without one.
        """


PLANNERS: Door[Planner] = Door("planner", {})
"""Planners by name. Runs use "forecast"."""


def document_share(config: Config, data: Task) -> float | None:
    """Return the mean of the squares of document lengths in a row, as a share of the square of the row length.

    Documents begin where positions restart, also in padding. The mean is over the first batches. None: attention runs
    over whole rows.
    """
    if config.model.attention != DOCUMENTS or not config.attends_documents:
        return None
    squares = whole = 0
    num_rows = 0
    with suppress(StopIteration):
        while num_rows < _MOST_ROWS:
            positions = data.batch(num_rows // data.batch_size)["position_ids"]
            is_start = torch.ones_like(positions, dtype=torch.bool)
            is_start[:, 1:] = positions.diff() != 1
            # Over the end of a row: the next row begins with a start of its own.
            starts = is_start.flatten().nonzero().flatten()
            squares += int((torch.cat([starts, starts.new_tensor([positions.numel()])]).diff() ** 2).sum())
            whole += len(positions) * positions.shape[1] ** 2
            num_rows += data.batch_size
    return squares / whole if whole else None


@contextmanager
def planned_advice(misfit: str) -> Iterator[None]:
    """Replace the advice in an error about memory by the planned change.

    The error knows only the first allocation without room, and its advice was not tried.

    misfit: `RunForecast.misfit`. Empty: the plan fits or is unknown, and the advice stays.
    """
    try:
        yield
    except DoesNotFitError as error:
        if misfit:
            error.advise(misfit)
        raise


def describe_budget(tiers: Mapping[str, Mapping[str, Any]], tier: str) -> str:
    """Return the budget part of a message (" of 24 GiB"), empty without a budget.

    Pinned and pageable host memory share one budget.
    """
    both = [tiers[each] for each in ("pinned", "cpu") if each in tiers]
    budget, is_shared = tiers[tier]["budget_bytes"], tiers[tier] in both and len(both) > 1
    if budget is None or (is_shared and tier == "pinned"):
        return ""
    together = f", with pinned memory {format_bytes(sum(each['bytes'] for each in both))}" if is_shared else ""
    return f"{together} of {format_bytes(budget)}"


_MOST_ROWS = 256
"""Rows for a mean over documents."""
_SHORT_S = 0.02
"""Shorter measurements are repeated with more bytes."""
_NUM_BYTES = (1 << 20, 1 << 24)


@dataclass(frozen=True)
class Network:
    """Network between identical machines."""

    num_machines: int
    bytes_per_s: float
    """Bytes per second one machine sends, while receiving the same amount."""
    latency_s: float
    """Seconds per exchange, independent of size."""


def measure_network(comm: Comm) -> Network:
    """Measure an all-gather between corresponding ranks on all machines. Collective.

    All machines have equal rank counts. The rate covers only the second half of the bytes, because rate-limited cloud
    networks often let a first burst pass at full speed.
    """
    _, between = comm.split(comm.num_machines)

    def seconds(num_bytes: int) -> float:
        full = torch.zeros(num_bytes * between.size, dtype=torch.uint8, device="cpu")
        best = float("inf")
        for _ in range(3):
            # A late rank would count as time of the network.
            comm.barrier("measuring of the network")
            begin = time.perf_counter()
            between.all_gather(full, full[between.rank * num_bytes :][:num_bytes], "measuring of the network")
            best = min(best, max(comm.gather_objects(time.perf_counter() - begin, "what the network takes")))
        return best

    latency_s = seconds(1)
    for num_bytes in _NUM_BYTES:
        duration = seconds(num_bytes)
        if duration > _SHORT_S:
            break
    duration = max(seconds(2 * num_bytes) - duration, duration / 2, 1e-9)  # a smaller value is noise
    return Network(comm.num_machines, num_bytes * (between.size - 1) * comm.local_size / duration, latency_s)
