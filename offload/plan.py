"""`python -m offload.plan`: forecast memory and step time for `train`, on this or another machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from offload.app.config.command_line import (
    HOST_MEMORY,
    CommandOption,
    importing,
    is_on,
    parse_command,
    run_command,
    say,
    take_gpus,
)
from offload.errors import ConfigError, DoesNotFitError, allocation_name, counted, format_bytes

if TYPE_CHECKING:
    from offload.extras.plan.forecast import Forecast
    from offload.machine.hardware import Hardware

DESCRIPTION = (
    "Tell what training would hold on each tier, by name, and what a step would take, with the settings of train; "
    "nothing is allocated, and no weights or data are read. Exit codes: 0 it fits, 2 bad configuration, 3 it does not, "
    "with the smallest change that does."
)
OPTIONS = {
    "hardware": CommandOption(
        "FILE|NAME",
        "(default: this machine)",
        "Plan for a described machine: a YAML file, or the name of one that is shipped, such as rtx-4090 or h100.",
    ),
    "host-memory": HOST_MEMORY,
    "machines": CommandOption(
        "N", "(default: 1)", "Plan for a run on so many such machines, each with the ranks that --gpus says."
    ),
    "link": CommandOption(
        "RATE",
        "(default: as the machine is described)",
        'What the network of a machine sends in a second, and gets, such as "25Gbit" or "3GB".',
    ),
    "tries": CommandOption(
        "N",
        "(default: 64)",
        "Forecasts of changes to make, at most, if the run does not fit: more find more, and take longer.",
    ),
    "json": CommandOption("{true,false}", "(default: false)", "Print one JSON object."),
}


def main(words: list[str]) -> int:
    num_ranks, words = take_gpus(words)
    config, own = parse_command(words, prog="python -m offload.plan", description=DESCRIPTION, own=OPTIONS)
    say(f"planning {config.model.label} on {own['hardware'] or 'this machine'} ...")  # the imports take seconds
    with importing():
        from offload.app.hf.models import quiet_transformers
        from offload.app.telemetry.progress import work_progress
        from offload.extras.plan.alternatives import MAX_FORECASTS, choose_hardware, forecast
    quiet_transformers()
    hardware = choose_hardware(config, own["hardware"], own["host-memory"])
    connected = _connected(hardware, own["machines"], own["link"])
    most = MAX_FORECASTS
    if own["tries"] is not None:
        most = _whole_number(own["tries"], "--tries", "of forecasts")
    with work_progress() as tell:
        prediction = forecast(config, connected, num_ranks, say, most, tell)
    if is_on(own, "json"):
        print(json.dumps(prediction.to_dict(), indent=2))
    else:
        _show(prediction)
    if prediction.fits:
        return 0
    return DoesNotFitError.exit_code


def _connected(hardware: Hardware, machines: str | None, link: str | None) -> Hardware:
    """Return the hardware for a number of connected machines. Raises ConfigError."""
    from offload.extras.plan.machine_files import parse_link

    if machines is not None:
        hardware = hardware.with_(num_machines=_whole_number(machines, "--machines", "of machines"))
    if link is not None:
        try:
            rate = parse_link(link)
        except ConfigError:  # one message for no rate, and for a rate of 0
            rate = 0.0
        if not rate:
            raise ConfigError(f'--link is {link!r}; it should be a rate such as "25Gbit" or "3GB", more than 0.')
        if hardware.num_machines == 1:
            raise ConfigError(
                f"--link is {link}, but the run is on 1 machine, without a network: set --machines, such as 2, or "
                "leave --link out."
            )
        hardware = hardware.with_(rates=replace(hardware.rates, network_bytes_per_s=rate))
    if hardware.num_machines > 1 and hardware.rates.network_bytes_per_s is None:
        raise ConfigError(
            f"the run is on {hardware.num_machines} machines, but their network rate is unknown: give --link, such as "
            "--link 25Gbit, or rates.network_bytes_per_s in the description of --hardware."
        )
    return hardware


def _whole_number(text: str, option: str, things: str) -> int:
    """Return the value of an option, at least 1. Raises ConfigError."""
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{option} is {text!r}; it should be a whole number {things}, at least 1.")
    return int(text)


def _show(prediction: Forecast) -> None:
    from rich.console import Console
    from rich.table import Table

    from offload.app.training.planner import describe_budget
    from offload.extras.plan.forecast import TIER_NAMES
    from offload.layout.residence import DEVICE, HOST

    console = Console(highlight=False, markup=False)
    # No line breaks, so a flag can be copied with the value.
    console.print("\n".join(describe_run(prediction)), soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    for tier, tier_plan in prediction.tiers.items():
        table.add_row(
            TIER_NAMES[tier],
            f"{format_bytes(tier_plan['bytes'])}{describe_budget(prediction.tiers, tier)}",
            style="bold",
        )
        for each in sorted(tier_plan["allocations"], key=lambda a: -a["bytes"]):
            table.add_row(f"  {allocation_name(each['name'])}", format_bytes(each["bytes"]))
    memory = prediction.memory
    for key, first in memory.before.items():
        for tier, num_bytes in first.peaks.items():
            table.add_row(f"before the first step, {key}, {TIER_NAMES[tier]}", format_bytes(num_bytes))
    for when, tier, num_bytes in (
        ("while loading", HOST, memory.loading_bytes),
        ("while operations run", HOST, memory.operations_bytes),
        ("at checkpoints", HOST, memory.copy_bytes),
        ("after the third step", DEVICE, memory.lent_bytes),
    ):
        if num_bytes:
            table.add_row(f"{when}, {TIER_NAMES[tier]}", format_bytes(num_bytes))
    console.print(table)
    console.print("\n".join((*describe_times(prediction), *describe_fit(prediction))), soft_wrap=True)


def describe_run(prediction: Forecast) -> Iterator[str]:
    """Yield the heading: model, hardware, and the placement chosen by `train`."""
    from offload.extras.plan.run_forecast import describe_parts, describe_placement

    machines = prediction.hardware.num_machines
    ranks = ""
    if prediction.total_ranks > 1:
        replicas = ""
        if machines > 1:
            replicas = f" on {machines} machines, with {prediction.num_replicas} copies of the model"
        ranks = f", {counted(prediction.total_ranks, 'rank')}{replicas}; of one of them:"
    length = int(prediction.config.data.sequence_length or 0)
    rows = f"{counted(prediction.config.num_rows, 'row')} of {counted(length, 'token')} a step"
    precision = prediction.config.train.precision
    trained = sum(info.numel for info in prediction.prepared.structure.infos if info.trainable)
    of = ""
    if prediction.config.lora.adapts:
        of = f", {trained:,} of them trained"
    parameters = f"{prediction.num_parameters:,} parameters{of}"
    hardware, host = prediction.hardware, ""
    if hardware.system_bytes:
        all_bytes, kept_bytes = format_bytes(hardware.all_host_bytes), format_bytes(hardware.system_bytes)
        host = f" with {all_bytes} of host memory, of which the system keeps {kept_bytes}"
    yield f"{prediction.name}, {parameters}, {precision}, {rows}, on {hardware.name}{host}{ranks}"
    yield from (f"note: {note}" for note in prediction.notes)
    yield from describe_parts(prediction)
    yield from describe_placement(prediction)


def describe_times(prediction: Forecast) -> Iterator[str]:
    """Yield the step time and the alternatives."""
    from offload.extras.plan.run_forecast import describe_hiding
    from offload.planning.plan import describe_frozen_weights, describe_links

    if (timing := prediction.timing) is not None:
        busy = ", ".join(f"{name} {seconds:.3g}" for name, seconds in timing.lane_seconds.items())
        yield (
            f"step: {timing.step_seconds:.3g} s, {timing.tokens_per_second:,.0f} tokens/s, "
            f"{100 * timing.mfu:.0f}% MFU; {timing.bound_by}-bound"
        )
        yield f"busy, in seconds: {'; '.join(filter(None, (busy, describe_hiding(timing))))}"
        if timing.compute_parts:
            parts = ", ".join(f"{name} {seconds:.3g}" for name, seconds in timing.compute_parts.items())
            yield f"compute, in seconds: {parts}"
    structure = prediction.prepared.structure
    plan = prediction.prepared.plan
    yield from filter(
        None,
        (
            plan.describe_updates(structure.regions),
            describe_frozen_weights(structure.infos, structure.regions, plan.residence),
            describe_links(structure.regions, plan.residence.sharding),
            structure.splitting.description,
        ),
    )
    if prediction.network_bytes:
        yield f"network: {format_bytes(prediction.network_bytes)} a step from each machine to the others"
    if prediction.written_bytes:
        document = prediction.to_dict()
        day = document["nvme_written_bytes_per_day"]
        days = document["nvme_endurance_days"]
        lasts = ""
        if days:
            lasts = f"; its rated endurance is used up in {days:,.0f} days"
        yield f"disk: {format_bytes(prediction.written_bytes)} written a step, {format_bytes(day)} a day{lasts}"
    for other in prediction.alternatives:
        effect = "fits"
        if not other.fits:
            effect = "does not fit"
        # A speed-up is over this plan, so both must be able to run.
        elif prediction.fits and timing is not None and other.tokens_per_second is not None:
            effect = f"{other.tokens_per_second / timing.tokens_per_second:.3g}x"
        yield f"instead: {other.change}{f' ({other.effect})' if other.effect else ''}: {effect}"


def describe_fit(prediction: Forecast) -> Iterator[str]:
    """Yield whether the run fits, and if not, the changes to make."""
    from offload.extras.plan.forecast import TIER_NAMES
    from offload.extras.plan.run_forecast import describe_fix

    if prediction.fits:
        yield "it fits."
        return
    yield prediction.shortage
    yield describe_fix(prediction)
    if prediction.fix_bytes:
        tier_sizes = (
            f"{TIER_NAMES[tier]} {format_bytes(num_bytes)}" for tier, num_bytes in prediction.fix_bytes.items()
        )
        yield f"with that change: {', '.join(tier_sizes)}"


if __name__ == "__main__":
    run_command(main)
