"""Forecast a run on this machine and describe the forecast to the user before the run begins."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from transformers import PreTrainedConfig

from offload.app.config.config import Config
from offload.app.training.planner import Network, RunForecast, describe_budget
from offload.errors import counted, format_bytes
from offload.extras.plan.alternatives import (
    PARTS,
    apply_change,
    has_open_placement,
    in_parts,
    place_or_fix,
    this_hardware,
    to_flags,
)
from offload.extras.plan.forecast import Forecast, Forecaster
from offload.extras.plan.levers import wider_precision
from offload.extras.plan.timing import Timing
from offload.layout.residence import DEVICE
from offload.machine.hardware import Hardware, Rates
from offload.machine.limits import memory_limits, tightest_limit
from offload.planning.machines import ThisMachine

_UNKNOWN = Rates(1.0, 1.0, 1.0, {}, 1.0, 1.0, 1.0)  # any: a forecast without times reads none
_MUCH_FASTER = 0.5
"""Relative step time in another precision that justifies a note."""


def forecast_run(
    config: Config,
    architecture: PreTrainedConfig,
    num_ranks: int,
    machine: ThisMachine,
    say: Callable[[str], None],
    network: Network | None = None,
    document_share: float | None = None,
) -> RunForecast:
    """Resolve open placement options by search, then forecast memory and step time for a run on this machine.

    The machine is measured only if no cached rates exist and a placement decision depends on them; `say` announces the
    measurement. With `network`, the forecast covers all machines. Raises ConfigError.
    """
    forecaster = Forecaster(config, num_ranks, architecture, machine, document_share=document_share)
    try:
        hardware, is_measured = _with_network(network, this_hardware(config, measures=False)), True
    except LookupError:
        hardware, is_measured = _with_network(network, _placeholder_hardware(machine)), False
    whole = forecaster.predict(config, hardware, times=is_measured)
    prediction = in_parts(forecaster, whole, times=is_measured)
    if has_open_placement(prediction) and not is_measured:  # memory alone may have decided: all on the device
        say("measuring this machine once, to choose where to store the states ...")
        whole, is_measured = forecaster.predict(config, _with_network(network, this_hardware(config))), True
        prediction = in_parts(forecaster, whole)
    initial = prediction
    if is_measured:  # without rates all is on the device, and no placement can be compared
        prediction = place_or_fix(forecaster, prediction, lambda text: say(f"by the plan {text}"))
    for text in (
        *describe_parts(prediction),
        *describe_placement(prediction),
        *note_slow_precision(forecaster, prediction),
    ):
        say(text)
    return RunForecast(
        prediction.config if prediction.placement_flags or initial is not whole else config,
        describe_forecast(prediction),
        describe_misfit(prediction),
        prediction.num_replicas,
        prediction.to_dict(),
    )


def _with_network(network: Network | None, hardware: Hardware) -> Hardware:
    """Return the hardware as one machine in the network. None: a single machine."""
    if network is None:
        return hardware
    rates = replace(hardware.rates, network_bytes_per_s=network.bytes_per_s, network_latency_s=network.latency_s)
    return hardware.with_(num_machines=network.num_machines, rates=rates)


def describe_parts(prediction: Forecast) -> Iterator[str]:
    """Yield a line about the rows, passes and micro-batches found for train.tokens_per_step, if given."""
    config, train = prediction.config, prediction.config.train
    if train.tokens_per_step is None:
        return
    parts = to_flags({key: config.get(key) for key in PARTS})
    yield (
        f"train.tokens_per_step {train.tokens_per_step:,}: {counted(train.batch_size, 'row')} of "
        f"{config.row_tokens:,} tokens, {train.batch_size * config.row_tokens:,} together: {parts}"
    )


def describe_placement(prediction: Forecast) -> Iterator[str]:
    """Yield a line about the placement the search has chosen, if any."""
    if prediction.placement_flags and prediction.timing is not None:
        instead = f" instead of {prediction.seconds_without_search:.3g}" if prediction.seconds_without_search else ""
        step = f"{prediction.timing.step_seconds:.3g} s a step{instead}"
        yield f"placement, chosen by a search: {prediction.placement_flags}, {step}"


def note_slow_precision(forecaster: Forecaster, prediction: Forecast) -> Iterator[str]:
    """Yield a note with the bf16 and fp32 step times if fp32 is much faster."""
    for change in wider_precision(prediction):
        now, other = prediction.timing, forecaster.predict(apply_change(prediction.config, change), prediction.hardware)
        if now and other.fits and other.timing and other.timing.step_seconds < _MUCH_FASTER * now.step_seconds:
            yield (
                f"note: this machine computes bf16 slowly: the plan predicts {now.step_seconds:.3g} s a step, and "
                f"{other.timing.step_seconds:.3g} with {to_flags(change)}."
            )


def _placeholder_hardware(machine: ThisMachine) -> Hardware:
    """Return this machine with placeholder rates."""
    accelerator = machine.accelerator
    device_bytes = capability = None
    if accelerator is not None:
        device_bytes, capability = accelerator.free_bytes, accelerator.capability
    return Hardware(
        name="this machine",
        device=machine.device.partition(":")[0],
        num_devices=None,
        device_bytes=device_bytes,
        capability=capability,
        host_bytes=tightest_limit(memory_limits()).free_bytes,
        disk_bytes=None,
        endurance_bytes=None,
        shares_memory=accelerator is not None and accelerator.is_integrated,
        rates=_UNKNOWN,
    )


def describe_fix(prediction: Forecast) -> str:
    """Return a sentence about the smallest change that fits."""
    if prediction.fix:
        effect = ""
        if prediction.fix_effect:
            effect = f" (another training: {prediction.fix_effect}; no change was found that keeps it)"
        return f"the smallest change that fits: {prediction.fix}{effect}"
    if (tried := prediction.untried_after) is not None:
        return (
            f"no change that makes it fit is known yet: the search ended after {tried} forecasts, before all changes "
            f"were tried. `offload plan --tries {4 * tried}`, with the same settings, tries more."
        )
    return (
        "no change of the settings was found with which it fits this machine: choose a smaller model or a larger "
        "machine."
    )


def describe_misfit(prediction: Forecast) -> str:
    """Return the memory missing in a step, and the smallest change that fits; empty if the run fits.

    The text follows the error of an engine, with the memory of the states alone or the reason of a refusal.
    """
    if prediction.fits:
        return ""
    fix = describe_fix(prediction)
    missing = f"With all that a step needs, {prediction.missing} " if prediction.missing else ""
    listed = "" if prediction.fix else " `offload plan` lists the memory."
    return f"{missing}{fix[0].upper()}{fix[1:]}{listed}"


def describe_forecast(prediction: Forecast) -> str:
    """Return the forecast in one line: peak bytes per tier, step time and bottleneck."""
    tiers, memory = prediction.tiers, prediction.memory
    peaks = {tier: its["bytes"] for tier, its in tiers.items()}
    if memory.lent_bytes:
        peaks[DEVICE] += memory.lent_bytes
    parts = [f"{tier} {format_bytes(peak)}{describe_budget(tiers, tier)}" for tier, peak in peaks.items()]
    if memory.copy_bytes:
        parts.append(f"{format_bytes(memory.copy_bytes)} more on the host at checkpoints")
    if prediction.timing is not None:
        parts.append(f"{prediction.timing.step_seconds:.3g} s a step, {prediction.timing.bound_by}-bound")
        if prediction.timing.bound_by != "compute" and (hidden := describe_hiding(prediction.timing)):
            parts.append(hidden)
    return ", ".join(parts)


def describe_hiding(timing: Timing) -> str:
    """Return a sentence about the token count needed to hide transfers behind compute; empty if no count is enough."""
    least = timing.hides_from_tokens
    if least is None:
        return ""
    tokens = round(timing.tokens_per_second * timing.step_seconds)
    return f"compute hides transfers above {least:,} tokens a step; this step has {tokens:,}"
