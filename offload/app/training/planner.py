"""Door to the plan of a run: memory and step time, known before the engine starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from transformers import PreTrainedConfig

from offload.app.config.config import Config
from offload.app.network import Network
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
    """Model replicas."""
    document: Mapping[str, Any]
    """JSON object for plan.json."""


class Planner(Protocol):
    """A forecast for a run on this machine, before the engine starts.

    Another package adds one by name:

        def optimist(config, architecture, num_ranks, machine, say, network=None):
            return RunForecast(config, "all fits", "", 1, {"fits": True, "tiers": {}})

        PLANNERS.register("optimist", optimist)
    """

    def __call__(
        self,
        config: Config,
        architecture: PreTrainedConfig,
        num_ranks: int,
        machine: ThisMachine,
        say: Callable[[str], None],
        network: Network | None = None,
    ) -> RunForecast:
        """Choose open placement options, and forecast the run.

        `num_ranks`: ranks per machine. `network`: measured between several machines. `say` prints a line. Raises
        OffloadError if no forecast is possible; the run then starts without one.
        """


PLANNERS: Door[Planner] = Door("planner", {})
"""Planners by name. Runs use "forecast"."""


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
            error.advise(f"{misfit[0].upper()}{misfit[1:]}")
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
