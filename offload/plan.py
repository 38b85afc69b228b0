"""`python -m offload.plan`: forecast memory and step time for `train`, on this or another machine."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from offload.config.command_line import OwnOption, importing, is_on, parse_command, run_command, take_gpus
from offload.errors import ConfigError, DoesNotFitError, allocation_name, counted, format_bytes

if TYPE_CHECKING:
    from offload.forecast.forecast import Alternative, Forecast
    from offload.machine.hardware import Hardware

DESCRIPTION = (
    "Tell what training would hold on each tier, by name, and what a step would take, with the settings of train; "
    "nothing is allocated, and no weights or data are read. Exit codes: 0 it fits, 2 bad configuration, 3 it does not, "
    "with the smallest change that does."
)
OPTIONS = {
    "hardware": OwnOption(
        "FILE|NAME",
        "(default: this machine)",
        "Plan for a described machine: a YAML file, or the name of one that is shipped, such as rtx-4090 or h100.",
    ),
    "machines": OwnOption(
        "N", "(default: 1)", "Plan for a run on so many such machines, each with the ranks that --gpus says."
    ),
    "link": OwnOption(
        "RATE",
        "(default: as the machine is described)",
        'What the network of a machine sends in a second, and gets, such as "25Gbit" or "3GB".',
    ),
    "json": OwnOption("{true,false}", "(default: false)", "Print one JSON object."),
}


def main(words: list[str]) -> int:
    num_ranks, words = take_gpus(words)
    config, own = parse_command(words, prog="python -m offload.plan", description=DESCRIPTION, own=OPTIONS)
    with importing():
        from offload.forecast.alternatives import forecast, this_hardware
        from offload.hf.models import quiet_transformers
        from offload.machine.hardware import Hardware
    quiet_transformers()
    described = own["hardware"]
    hardware = this_hardware(config) if described is None else Hardware.read(described)
    found = forecast(config, _connected(hardware, own["machines"], own["link"]), num_ranks)
    if is_on(own, "json"):
        print(json.dumps(found.to_dict(), indent=2))
    else:
        _show(found)
    return 0 if found.fits else DoesNotFitError.exit_code


def _connected(hardware: Hardware, machines: str | None, link: str | None) -> Hardware:
    """Return the hardware for a number of connected machines. Raises ConfigError."""
    from offload.machine.hardware import parse_link

    if machines is not None:
        if not machines.isdecimal() or int(machines) < 1:
            raise ConfigError(f"--machines is {machines!r}; it should be a whole number of machines, at least 1.")
        hardware = hardware.with_(num_machines=int(machines))
    if link is not None:
        try:
            rate = parse_link(link)
        except ConfigError:
            rate = 0.0
        if not rate:
            raise ConfigError(f'--link is {link!r}; it should be a rate such as "25Gbit" or "3GB", more than 0.')
        hardware = hardware.with_(rates=replace(hardware.rates, network_bytes_per_s=rate))
    if hardware.num_machines > 1 and hardware.rates.network_bytes_per_s is None:
        raise ConfigError(
            f"the run is on {hardware.num_machines} machines, but their network rate is unknown: give --link, such as "
            "--link 25Gbit, or rates.network_bytes_per_s in the description of --hardware."
        )
    return hardware


def _show(found: Forecast) -> None:
    from rich.console import Console
    from rich.table import Table

    from offload.forecast.here import NAMES, of_budget

    console = Console(highlight=False, markup=False)
    # No line breaks, so a flag can be copied with the value.
    console.print("\n".join(heading(found)), soft_wrap=True)
    table = Table(box=None, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(overflow="fold")
    table.add_column(justify="right", no_wrap=True)
    for tier, held in found.tiers.items():
        table.add_row(NAMES[tier], f"{format_bytes(held['bytes'])}{of_budget(found.tiers, tier)}", style="bold")
        for each in sorted(held["allocations"], key=lambda a: -a["bytes"]):
            table.add_row(f"  {allocation_name(each['name'])}", format_bytes(each["bytes"]))
    beside = {"while loading": found.memory.loading_bytes, "while operations run": found.memory.operations_bytes}
    for when, num_bytes in beside.items():
        if num_bytes:
            table.add_row(f"{when}, {NAMES['cpu']}", format_bytes(num_bytes))
    console.print(table)
    console.print("\n".join((*times(found), *verdict(found))), soft_wrap=True)


def heading(found: Forecast) -> Iterator[str]:
    """Yield the heading: model, hardware, and the placement chosen by `train`."""
    from offload.forecast.here import placed

    machines, ranks = found.hardware.num_machines, ""
    if found.total_ranks > 1:
        where = f" on {machines} machines, with {found.num_replicas} copies of the model" if machines > 1 else ""
        ranks = f", {counted(found.total_ranks, 'rank')}{where}; of one of them:"
    length = int(found.config.data.sequence_length or 0)
    rows = f"{counted(found.config.train.num_rows, 'row')} of {counted(length, 'token')} a step"
    precision = found.config.train.precision
    trained = sum(info.numel for info in found.prepared.structure.infos if info.trainable)
    of = f", {trained:,} of them trained" if found.config.adapts else ""
    yield f"{found.name}, {found.num_parameters:,} parameters{of}, {precision}, {rows}, on {found.hardware.name}{ranks}"
    yield from (f"note: {note}" for note in found.notes)
    yield from placed(found)


def times(found: Forecast) -> Iterator[str]:
    """Yield the step time and the alternatives."""
    from offload.forecast.here import hidden_from

    timing = found.timing
    if timing is None:
        return
    busy = ", ".join(f"{name} {seconds:.3g}" for name, seconds in timing.lane_seconds.items())
    yield (
        f"step: {timing.step_seconds:.3g} s, {timing.tokens_per_second:,.0f} tokens/s, "
        f"{100 * timing.mfu:.0f}% MFU; {timing.bound_by}-bound"
    )
    yield f"busy, in seconds: {'; '.join(filter(None, (busy, hidden_from(timing))))}"
    if where := found.prepared.plan.told_updates(found.prepared.structure.regions):
        yield where
    prepared = found.prepared
    yield from filter(None, (prepared.told_frozen_weights, prepared.told_links, prepared.structure.cutting.told))
    if found.network_bytes:
        yield f"network: {format_bytes(found.network_bytes)} a step from each machine to the others"
    if found.written_bytes:
        told = found.to_dict()
        day, days = told["nvme_written_bytes_per_day"], told["nvme_endurance_days"]
        lasts = f"; its rated endurance is used up in {days:,.0f} days" if days else ""
        yield f"disk: {format_bytes(found.written_bytes)} written a step, {format_bytes(day)} a day{lasts}"
    yield from (f"instead: {_alternative(found, each)}" for each in found.alternatives)


def _alternative(found: Forecast, other: Alternative) -> str:
    if not other.fits:
        return f"{other.change}: does not fit"
    if not found.fits or found.timing is None or other.tokens_per_second is None:
        return f"{other.change}: fits"
    ratio = other.tokens_per_second / found.timing.tokens_per_second
    return f"{other.change}: {ratio:.3g}x"


def verdict(found: Forecast) -> Iterator[str]:
    """Yield whether the run fits, and if not, the changes to make."""
    from offload.forecast.here import NAMES, shortage

    if found.fits:
        yield "it fits."
        return
    yield shortage(found)
    yield f"the smallest change that fits: {found.fix}" if found.fix else "no single setting makes it fit: see --help."
    if found.fix_bytes:
        held = (f"{NAMES[tier]} {format_bytes(num_bytes)}" for tier, num_bytes in found.fix_bytes.items())
        yield f"with that change: {', '.join(held)}"


if __name__ == "__main__":
    run_command(main)
