"""Forecast a run on this machine and describe the forecast to the user before the run begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from transformers import PreTrainedConfig

from offload.config.config import Config
from offload.errors import format_bytes
from offload.forecast.alternatives import changed, flags, is_open, place, this_hardware, wider, with_fix
from offload.forecast.forecast import Forecast, Forecaster
from offload.forecast.timing import Timing
from offload.machine.hardware import Hardware, Rates
from offload.machine.limits import least, memory_limits
from offload.machine.network import Network
from offload.planning.machines import ThisMachine

_UNKNOWN = Rates(1.0, 1.0, 1.0, {}, 1.0, 1.0, 1.0)
_MUCH_FASTER = 0.5
"""Relative step time in another precision that justifies a note."""
NAMES = {"device": "device", "pinned": "host, pinned", "cpu": "host", "nvme": "disk"}
"""Tier names in messages."""


def forecast_run(
    config: Config,
    architecture: PreTrainedConfig,
    num_ranks: int,
    machine: ThisMachine,
    say: Callable[[str], None],
    network: Network | None = None,
) -> tuple[Config, Forecast]:
    """Resolve open placement options by search, then forecast memory and step time for a run on this machine.

    The machine is measured only if no cached rates exist and a placement decision depends on them; `say` announces the
    measurement. With `network`, the forecast covers all machines. Returns the resolved config and the forecast. Raises
    ConfigError.
    """
    forecaster = Forecaster(config, num_ranks, architecture, machine)
    try:
        hardware, is_measured = _in(network, this_hardware(config, measures=False)), True
    except LookupError:
        hardware, is_measured = _in(network, _unmeasured(machine)), False
    found = forecaster.tell(config, hardware, times=is_measured)
    if is_open(found) and not is_measured:
        say("measuring this machine once, to choose where to store the states ...")
        found = forecaster.tell(config, _in(network, this_hardware(config)))
    found = with_fix(forecaster, place(forecaster, found))
    for text in (*placed(found), *slow_precision(forecaster, found)):
        say(text)
    return (found.config if found.placed else config), found


def _in(network: Network | None, hardware: Hardware) -> Hardware:
    """Return the hardware as one machine in the network. None: a single machine."""
    if network is None:
        return hardware
    rates = replace(hardware.rates, network_bytes_per_s=network.bytes_per_s, network_latency_s=network.latency_s)
    return hardware.with_(num_machines=network.num_machines, rates=rates)


def placed(found: Forecast) -> Iterator[str]:
    """Yield a line about the placement the search has chosen, if any."""
    if found.placed and found.timing is not None:
        instead = f" instead of {found.unplaced_seconds:.3g}" if found.unplaced_seconds else ""
        yield f"placement, chosen by a search: {found.placed}, {found.timing.step_seconds:.3g} s a step{instead}"


def slow_precision(forecaster: Forecaster, found: Forecast) -> Iterator[str]:
    """Yield a note with the bf16 and fp32 step times if fp32 is much faster."""
    for change in wider(found):
        now, other = found.timing, forecaster.tell(changed(found.config, change), found.hardware)
        if now and other.fits and other.timing and other.timing.step_seconds < _MUCH_FASTER * now.step_seconds:
            yield (
                f"note: this machine computes bf16 slowly: the plan predicts {now.step_seconds:.3g} s a step, and "
                f"{other.timing.step_seconds:.3g} with {flags(change)}."
            )


def _unmeasured(machine: ThisMachine) -> Hardware:
    """Return this machine with placeholder rates."""
    accelerator = machine.accelerator
    return Hardware(
        name="this machine",
        device=machine.device.partition(":")[0],
        num_devices=1,
        device_bytes=None if accelerator is None else accelerator.free_bytes,
        host_bytes=least(memory_limits()).free_bytes,
        disk_bytes=None,
        endurance_bytes=None,
        shares_memory=accelerator is not None and accelerator.is_integrated,
        rates=_UNKNOWN,
    )


def shortage(found: Forecast) -> str:
    """Return a sentence about the missing memory, or the reason for refusal."""
    short = " and ".join(
        f"{format_bytes(num_bytes)} ({num_bytes} bytes) of {NAMES[tier]} memory"
        for tier, num_bytes in found.memory.shortfalls.items()
    )
    return f"it does not fit: {short} too few." if short else f"it does not fit: {found.refusal}"


def summary(found: Forecast) -> str:
    """Return the forecast in one line: peak bytes per tier, step time and bottleneck."""
    parts = []
    for tier, held in found.tiers.items():
        parts.append(f"{tier} {format_bytes(held['bytes'])}{of_budget(found.tiers, tier)}")
    if found.timing is not None:
        parts.append(f"{found.timing.step_seconds:.3g} s a step, {found.timing.bound_by}-bound")
        if found.timing.bound_by != "compute" and (hidden := hidden_from(found.timing)):
            parts.append(hidden)
    return ", ".join(parts)


def hidden_from(timing: Timing) -> str:
    """Return a sentence about the token count needed to hide transfers behind compute; empty if no count is enough."""
    tokens = round(timing.tokens_per_second * timing.step_seconds)
    least = timing.hides_from_tokens
    return "" if least is None else f"compute hides transfers above {least:,} tokens a step; this step has {tokens:,}"


def of_budget(tiers: Mapping[str, Mapping[str, Any]], tier: str) -> str:
    """Return the budget part of a message (" of 24 GiB"), empty without a budget.

    Pinned and pageable host memory share one budget.
    """
    both = [tiers[each] for each in ("pinned", "cpu") if each in tiers]
    budget, is_shared = tiers[tier]["budget_bytes"], tiers[tier] in both and len(both) > 1
    if budget is None or (is_shared and tier == "pinned"):
        return ""
    together = f", with pinned memory {format_bytes(sum(each['bytes'] for each in both))}" if is_shared else ""
    return f"{together} of {format_bytes(budget)}"
