"""What a run on this machine will hold and take, told to whoever is about to begin it."""

from __future__ import annotations

from transformers import PreTrainedConfig

from offload.accelerators import own_accelerator
from offload.config.config import Config
from offload.errors import format_bytes
from offload.forecast.forecast import Forecast, Teller
from offload.machine.hardware import Hardware, Rates
from offload.machine.limits import least, memory_limits
from offload.machine.probe import probe
from offload.planning.from_config import placement
from offload.planning.machines import ThisMachine

_UNKNOWN = Rates(1.0, 1.0, 1.0, {}, 1.0, 1.0, 1.0)


def foretell(config: Config, architecture: PreTrainedConfig, num_ranks: int) -> Forecast:
    """Tell what a run of so many ranks here will hold and, where this machine was measured before (by `plan`, or
    `doctor --probe`), what a step takes. Nothing is measured now. Raises ConfigError.
    """
    machine, is_measured = ThisMachine(own_accelerator(config.offload.device)), True
    try:
        hardware = probe(config.offload.device, placement(config).dirs, measures=False)
    except LookupError:
        hardware, is_measured = _unmeasured(machine), False
    return Teller(config, num_ranks, architecture).tell(config, hardware, times=is_measured, machine=machine)


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
        parts.append(f"{found.timing.step_seconds:.3g} s a step, which {found.timing.bound_by} binds")
    return ", ".join(parts)
