"""`python -m offload.doctor`: show machine properties and active code paths."""

from __future__ import annotations

import argparse
import json
from typing import Any

from offload.app.config.command_line import run_command
from offload.app.environment import describe_cores
from offload.errors import format_bytes
from offload.lanes.timeline import DISK_LANES
from offload.system import whole_cores

DESCRIPTION = (
    "Tell what this machine has: versions, kernels, the I/O engine, and what the directories for the nvme tier can do. "
    "Exit codes: 0 fine, 1 a directory cannot be used, 2 bad arguments."
)


def main(words: list[str]) -> int:
    arguments = _parser().parse_args(words)
    from offload.extras.tools.diagnosis import diagnose  # imports torch

    diagnosis = diagnose(arguments.nvme_dir, probes=arguments.probe or arguments.refresh, refresh=arguments.refresh)
    if arguments.json:
        print(json.dumps(diagnosis, indent=2))
    else:
        _show(diagnosis)
    return 0 if all(each["usable"] for each in diagnosis["nvme"]) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m offload.doctor", description=DESCRIPTION)
    parser.add_argument(
        "--nvme-dir",
        nargs="+",
        action="extend",
        default=[],
        metavar="DIR",
        help="directories to examine, as for --offload.nvme_dir of train; a small file without a name is written there",
    )
    parser.add_argument(
        "--probe",
        action="store_true",
        help="measure links, memory, compute and the directories' disks in a few seconds, and tell what limits a step; "
        "what was measured before is told at once",
    )
    parser.add_argument("--refresh", action="store_true", help="the same, and measure again")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    return parser


def _show(diagnosis: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    rows: list[tuple[str, ...]] = [*_machine(diagnosis["environment"]), *_live(diagnosis)]
    if not diagnosis["nvme"]:
        rows.append(("nvme dir", "none examined; name directories with --nvme-dir"))
    for each in diagnosis["nvme"]:
        rows += [(), *_directory(each)]
    if "probe" in diagnosis:
        rows += [(), *_rates(diagnosis["probe"]), *_limits(diagnosis["probe"])]
    for row in rows:
        table.add_row(*row)
    Console(highlight=False, markup=False).print(table)
    print(f"\nfor a report: {report_line(diagnosis)}")


def report_line(diagnosis: dict[str, Any]) -> str:
    """Return the machine in one line for a problem report, without names of folders or machines."""
    about, kernels = diagnosis["environment"], diagnosis["kernels"]
    cpu, memory = about["cpu"], about["memory"]
    versions, library = about["versions"], "C++"
    if not kernels["native"]:
        library = "torch"
    parts = [f"offload {about['offload']}", f"python {about['python']}"]
    parts += [f"{name} {versions[name]}" for name in ("torch", "transformers") if name in versions]
    parts += [about["platform"], f"{cpu.get('name') or cpu['machine']}, {cpu['num_cores']} cores"]
    if "total_bytes" in memory:
        parts.append(format_bytes(memory["total_bytes"]))
    gpus = [f"{gpu['name']} {gpu.get('capability', '')} {gpu['runtime']}" for gpu in about["gpus"]]
    parts += gpus or ["no gpu"]
    parts += [f"{library} {kernels['isa']}, {kernels['threads']} threads", diagnosis["io"]["engine"]]
    return "; ".join(" ".join(part.split()) for part in parts)


def _machine(about: dict[str, Any]) -> list[tuple[str, str]]:
    cpu, memory = about["cpu"], about["memory"]
    versions = [f"offload {about['offload']}", f"python {about['python']}"]
    versions += [f"{name} {version}" for name, version in about["versions"].items()]
    sizes = [
        f"{format_bytes(memory[f'{key}_bytes'])} {key}" for key in ("total", "available") if f"{key}_bytes" in memory
    ]
    cores = f"{cpu.get('name') or cpu['machine']}, {describe_cores(cpu)}"
    if quota := cpu.get("quota"):
        cores += f"\nat most {whole_cores(quota['cores'])} threads in the kernels, in torch, and in its compiler"
    gpus = [
        f"{gpu['name']}, {format_bytes(gpu['memory_bytes'])}, {gpu['runtime']}{_one_memory(gpu)}"
        for gpu in about["gpus"]
    ]
    return [
        ("versions", ", ".join(versions)),
        ("system", about["platform"]),
        ("cpu", cores),
        ("memory", ", ".join(sizes)),
        ("gpu", "\n".join(gpus) or "none: the device is a part of the memory of the CPU"),
    ]


def _one_memory(gpu: dict[str, Any]) -> str:
    """Return how a GPU in the host's memory uses weights there; empty for others."""
    if way := gpu.get("weights_in_host_memory"):
        return f"\nin the host's memory: weights there are {way}"
    return ""


def _live(diagnosis: dict[str, Any]) -> list[tuple[str, str]]:
    kernels = diagnosis["kernels"]
    io = diagnosis["io"]
    name, why_torch = "C++", ""
    if not kernels["native"]:
        name, why_torch = "torch", f"\nslower than C++: {kernels['missing_because']}"
    engine = io["engine"]
    if io["why_not_better"]:
        engine += f"\n{io['why_not_better']}"
    return [
        ("kernels", f"{name}, {kernels['isa']}, {kernels['threads']} threads{why_torch}"),
        ("I/O engine", engine),
        ("I/O memory", io["why_unregistered"] or "registered with the kernel"),
    ]


def _directory(about: dict[str, Any]) -> list[tuple[str, str]]:
    rows = [("nvme dir", about["dir"])]
    if about["file_system"]:
        rows.append(("", f"{about['file_system']}, {format_bytes(about['free_bytes'])} free"))
    verdict = f"cannot be used: {about['refusal']}"
    if about["direct"]:
        verdict = "usable, O_DIRECT"
    elif about["usable"]:
        verdict = f"usable, buffered: {about['why_buffered']}"
    return [*rows, ("", verdict)]


def _rates(about: dict[str, Any]) -> list[tuple[str, str]]:
    machine = about["hardware"]
    rates = machine["rates"]
    is_cpu = machine["device"] == "cpu"
    moved = {name: f"{rate / 1e9:.3g} GB/s" for name, rate in rates.items() if name.endswith("bytes_per_s") and rate}
    flops = ", ".join(f"{name} {rate / 1e9:,.4g} GFLOP/s" for name, rate in rates["flops_per_s"].items())
    both_ways = moved["both_ways_bytes_per_s"]
    if is_cpu:
        both_ways += " (copies within memory)"
    rows = [
        ("links", f"up {moved['h2d_bytes_per_s']}, down {moved['d2h_bytes_per_s']}, both at once {both_ways}"),
        ("in place", f"{moved['host_bytes_per_s']} of the host's memory read and written by all cores"),
        ("products", f"{flops}; {rates['launch_s'] * 1e6:.3g} us to begin an operation"),
    ]
    if not is_cpu:
        rows.insert(2, ("device", f"{format_bytes(machine['device_bytes'])} free, {moved['device_bytes_per_s']}"))
    if "nvme_read_bytes_per_s" in moved:
        reads, writes = (moved[f"nvme_{direction}_bytes_per_s"] for direction in ("read", "write"))
        both = ""
        if rate := moved.get("nvme_both_ways_bytes_per_s"):
            both = f", both at once {rate}"
        rows.append(("disks", f"read {reads}, write {writes}{both}, past the page cache"))
    return [*rows, ("", f"{next(iter(machine['sources'].values()))}; --refresh measures again")]


def _limits(about: dict[str, Any]) -> list[tuple[str, str]]:
    bounds = about["bounds"]
    names = {"update": "AdamW on the host", "h2d": "weights up", "d2h": "gradients down"}
    names |= {"nvme_read": "reading from disk", "nvme_write": "writing to disk"}
    parts = ", ".join(f"{names[lane]} {seconds:.3g} s" for lane, seconds in bounds["seconds"].items())
    hides = "nothing hides it, because the same cores compute"
    if about["hardware"]["device"] != "cpu" or bounds["lane"] in DISK_LANES:
        hides = f"compute takes as long with {bounds['num_tokens']:,} tokens a step, and hides it with more tokens"
    return [
        ("bounds", "\n".join(sorted((limit["text"] for limit in about["limits"]), key=about["bound_by"].__ne__))),
        ("a step", f"of 1e9 parameters in {bounds['precision']}, offloaded: {parts}"),
        ("limit", f"{names[bounds['lane']]}; {hides}"),
        *(("note", note) for note in about["notes"]),
    ]


if __name__ == "__main__":
    run_command(main)
