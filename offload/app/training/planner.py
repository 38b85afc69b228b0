"""Door to the plan of a run: memory and step time, known before the engine starts, over a measured network."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import torch
from transformers import PreTrainedConfig

from offload.accelerators import own_accelerator
from offload.app.config.config import Config
from offload.app.config.sections import DOCUMENTS
from offload.app.training.task import Task
from offload.distributed.comm import Comm
from offload.doors import Door
from offload.errors import DoesNotFitError, OffloadError, format_bytes, shorten
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


class PlacementDecision(NamedTuple):
    """Decided placement of a run."""

    config: Config
    forecast: RunForecast | None = None
    """None: unknown, or a rank other than 0."""
    misfit: str = ""
    """`RunForecast.misfit`, on all ranks."""
    late_notes: Sequence[str] = ()
    """Notes to show after the start of the engine. If the start fails, its error says the same."""


def decide_placement(
    config: Config,
    architecture: PreTrainedConfig,
    data: Task,
    comm: Comm,
    say: Callable[[str], None],
    note: Callable[[str], None],
) -> PlacementDecision:
    """Decide the placement of states, on rank 0 for all ranks. `say` prints a line, `note` a warning. Collective."""
    network = None
    if comm.num_far:
        if comm.num_machines == 1:  # see `Comm.num_machines`
            note("there is no memory forecast: the machines have different numbers of ranks.")
            return PlacementDecision(config)
        network = measure_network(comm)
    # The free memory of all ranks, agreed on here: rank 0 plans alone below, where an exchange would hang.
    machine = ThisMachine(own_accelerator(config.offload.device))
    machine = replace(machine, agreed_memory=machine.free_memory(comm))
    forecast = None
    late_notes: list[str] = []
    if comm.rank == 0:
        try:
            share = document_share(config, data)
            forecast = PLANNERS["forecast"](config, architecture, comm.local_size, machine, say, network, share)
        except (OffloadError, OSError) as error:  # no forecast is needed, and the engine reports errors better
            late_notes.append(f"there is no memory forecast: {error}")
        except Exception as error:
            if config.run.debug:
                traceback.print_exception(error)
            cause = shorten(" ".join(f"{type(error).__name__}: {error}".split()))
            hint = ""
            if not config.run.debug:
                hint = ", and --debug shows where"
            note(
                f"there is no memory forecast, because of a defect in the forecast ({cause}): training continues "
                f"without one{hint}."
            )
    decided = config, ""
    if forecast is not None:
        decided = forecast.config, forecast.misfit
    placed, misfit = comm.from_rank(0, decided, "placement")
    if forecast is not None:
        if misfit:
            late_notes.append(f"by the plan the run does not fit. {misfit}")
        if data.has_pictures:
            note("the memory forecast covers text only: images need more.")
        say(f"plan: at most {forecast.description}")
    return PlacementDecision(placed, forecast, misfit, late_notes)


def document_share(config: Config, data: Task) -> float | None:
    """Return the mean of squared document lengths in a row, as a share of the squared row length.

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
    if not whole:
        return None
    return squares / whole


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
    # One budget for both, told once: with the pageable part.
    budget, is_shared = tiers[tier]["budget_bytes"], tiers[tier] in both and len(both) > 1
    if budget is None or (is_shared and tier == "pinned"):
        return ""
    together = ""
    if is_shared:
        together = f", with pinned memory {format_bytes(sum(each['bytes'] for each in both))}"
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

    latency_s = seconds(1)  # a single byte: only the latency counts
    for num_bytes in _NUM_BYTES:
        duration = seconds(num_bytes)
        if duration > _SHORT_S:
            break
    duration = max(seconds(2 * num_bytes) - duration, duration / 2, 1e-9)  # a smaller value is noise
    return Network(comm.num_machines, num_bytes * (between.size - 1) * comm.local_size / duration, latency_s)
