"""What a run on this machine will hold and take, told to whoever is about to begin it."""

from __future__ import annotations

from collections.abc import Callable

from transformers import PreTrainedConfig

from offload.config.config import Config
from offload.errors import format_bytes
from offload.forecast.alternatives import changed, flags, is_open, place
from offload.forecast.forecast import Forecast, Teller
from offload.machine.hardware import Hardware, Rates
from offload.machine.limits import least, memory_limits
from offload.machine.probe import probe
from offload.planning.from_config import placement
from offload.planning.machines import ThisMachine

_UNKNOWN = Rates(1.0, 1.0, 1.0, {}, 1.0, 1.0, 1.0)


def foretell(
    config: Config, architecture: PreTrainedConfig, num_ranks: int, machine: ThisMachine, say: Callable[[str], None]
) -> tuple[Config, Forecast]:
    """Decide by search where what is left open is to be, and tell what a run of so many ranks here will hold and take.

    The machine is measured where it was not before, which `say` is told, and where anything depends on it: what fits
    the device stays there. Raises ConfigError.
    """
    teller, folders = Teller(config, num_ranks, architecture), placement(config).dirs
    try:
        hardware, is_measured = probe(config.offload.device, folders, measures=False), True
    except LookupError:
        hardware, is_measured = _unmeasured(machine), False
    found = teller.tell(config, hardware, times=is_measured, machine=machine)
    if not is_open(found):
        return config, found
    if not is_measured:
        say("measuring this machine, once, to choose where the states are to be ...")
        found = teller.tell(config, probe(config.offload.device, folders), machine=machine)
    change, chosen = place(teller, found, machine)
    if not change or chosen.timing is None:
        return config, found
    instead = f" instead of {found.timing.step_seconds:.3g}" if found.timing and found.fits else ""
    say(f"placement, by search: {flags(change)}, {chosen.timing.step_seconds:.3g} s a step{instead}")
    return changed(config, change), chosen


def _unmeasured(machine: ThisMachine) -> Hardware:
    """Return this machine without its rates."""
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


def summary(found: Forecast) -> str:
    """Return a forecast in a line."""
    parts = []
    for tier, held in found.tiers.items():
        of = f" of {format_bytes(held['budget_bytes'])}" if held["budget_bytes"] is not None else ""
        parts.append(f"{tier} {format_bytes(held['bytes'])}{of}")
    if found.timing is not None:
        parts.append(f"{found.timing.step_seconds:.3g} s a step, {found.timing.bound_by}-bound")
    return ", ".join(parts)
