"""All stored forecasts: what the README, docs/plans.md, the page "Will it fit?" and results/published.md print.

python -m benchmarks.forecasts                  # plans every entry without today's rates, then writes the pages
python -m benchmarks.forecasts --match 4090     # some entries alone
python -m benchmarks.forecasts --again          # also entries that another commit planned
python -m benchmarks.forecasts --most 0         # the pages alone

An entry is stored as soon as it is planned, so a run may be ended and begun again. `results/forecasts.json` has for
each entry the commit that planned it, a digest of the rates, and a digest of the entry itself. The rates are those of
the described machine, with the numbers that the planner adds. An entry takes seconds to minutes, and all of them hours.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import fit_grid, harness, plan_tables, published
from offload.app.config.command_line import say
from offload.app.hf.models import quiet_transformers
from offload.extras.plan import dispatched, machine_files, noise, timing, workload
from offload.machine import hardware

SUMMARY = "all stored forecasts, and the pages with them"
LEDGER = harness.RESULTS / "forecasts.json"
TABLES = {
    "readme": plan_tables.ReadmeRows(),
    "published": published.Rows(),
    "plans": plan_tables.PlanRows(),
    "fit": fit_grid.Points(),
}
"""Groups of entries by name, in the order of work."""
MODULES = (hardware, timing, workload, dispatched, noise, machine_files)
"""Modules with numbers beside the described rates."""
Key = tuple[str, str]
LACKING, OLDER = "not planned yet", "planned with other rates"
"""Faults that the pages show."""


def digest(value: Any) -> str:
    """Return a few characters that name a JSON value."""
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


@functools.cache
def rates_digest(machine: str) -> str:
    """Return the digest of a described machine and the planner's own numbers."""
    numbers = {
        f"{module.__name__}.{name}": value
        for module in MODULES
        for name, value in vars(module).items()
        if name.strip("_").isupper() and isinstance(value, int | float | tuple | dict) and _is_plain(value)
    }
    described = dataclasses.asdict(machine_files.read_machine(machine))
    for words in ("name", "sources", "notes"):
        del described[words]
    return digest([numbers, described])


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except TypeError:
        return False
    return True


def entries() -> Iterator[tuple[Key, str]]:
    """Yield the key and the machine of every entry: group, and name in the group."""
    for group, table in TABLES.items():
        yield from (((group, name), machine) for name, machine in table.names().items())


def make(key: Key) -> Any:
    """Plan one entry. Runs in a process of its own."""
    quiet_transformers()
    return TABLES[key[0]].make(key[1])


def read(group: str) -> dict[str, Any]:
    """Return the stored document of a group."""
    path = TABLES[group].path
    return json.loads(path.read_text()) if path.exists() else {}


def ledger() -> dict[str, dict[str, list[str]]]:
    """Return commit, digest of the rates and digest of the entry, by group and name."""
    return json.loads(LEDGER.read_text()) if LEDGER.exists() else {}


def faults(rows: Mapping[str, Mapping[str, list[str]]]) -> Iterator[tuple[Key, str]]:
    """Yield the entries that are not as planned, with a reason: another figure, or other rates than today's."""
    documents = {group: read(group) for group in TABLES}
    for (group, name), machine in entries():
        entry, row = TABLES[group].entry(documents[group], name), rows.get(group, {}).get(name)
        if entry is None:
            yield (group, name), LACKING
        elif row is not None and row[2] != digest(entry):
            yield (group, name), "changed by hand"
        elif row is None or row[1] != rates_digest(machine):
            yield (group, name), OLDER


def older(group: str) -> set[str]:
    """Return the entries of a group that were planned with other rates. Pages mark them."""
    return {name for (its, name), reason in faults(ledger()) if (its, reason) == (group, OLDER)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--only", nargs="+", choices=TABLES, default=list(TABLES), metavar="GROUP")
    parser.add_argument("--match", default="", metavar="WORD", help="plan entries with this word in their name alone")
    parser.add_argument("--most", type=int, metavar="N", help="plan so many entries at most")
    parser.add_argument("--again", action="store_true", help="also plan entries that another commit planned")
    parser.add_argument("--workers", type=int, default=os.cpu_count())


def run(arguments: argparse.Namespace) -> harness.Page:
    """Plan, store each entry, and write the pages."""
    commit, rows, machines = harness.head("")["commit"].removesuffix("-dirty"), ledger(), dict(entries())
    due = {key for key, _ in faults(rows)}
    if arguments.again:
        due |= {key for key in machines if rows.get(key[0], {}).get(key[1], [""])[0] != commit}
    todo = [key for key in machines if key in due and key[0] in arguments.only and arguments.match in key[1]]
    todo = todo[: arguments.most]
    begin = time.monotonic()
    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        tasks: dict[Future[Any], Key] = {pool.submit(make, key): key for key in todo}
        for number, task in enumerate(as_completed(tasks), start=1):
            group, name = key = tasks[task]
            told = f"{number} of {len(tasks)}, {time.monotonic() - begin:.0f} s: {group}, {name}"
            if (error := task.exception()) is not None:
                say(f"{told}: {error!r}")  # the next run tries it again
                continue
            store(key, task.result(), commit, rates_digest(machines[key]))
            say(told)
    pages()
    left = sum(1 for _ in faults(ledger()))
    return harness.Page(f"{len(machines) - left} of {len(machines)} entries are of today's rates", ledger())


def store(key: Key, made: Any, commit: str, rates: str) -> None:
    """Store an entry, and its row of the ledger."""
    group, name = key
    table, document, rows = TABLES[group], read(group), ledger()
    table.put(document, name, made)
    write(table.path, table.written(document))
    rows.setdefault(group, {})[name] = [commit, rates, digest(table.entry(json.loads(table.written(document)), name))]
    lines = [
        f' "{each}": {{\n'
        + ",\n".join(f"  {json.dumps(n)}: {json.dumps(rows[each][n])}" for n in TABLES[each].names() if n in rows[each])
        + "\n }"
        for each in TABLES
        if each in rows
    ]
    write(LEDGER, "{\n" + ",\n".join(lines) + "\n}\n")


def write(path: Path, text: str) -> None:
    """Write a file. A reader sees the old file or the new one."""
    new = path.with_suffix(".new")
    new.write_text(text, encoding="utf-8")
    new.replace(path)


def pages() -> None:
    """Write every page from the stored entries."""
    for group, table in TABLES.items():
        if table.page is not None:
            write(table.page, table.text(read(group), older(group)))
    subprocess.run([sys.executable, "docs/make.py"], cwd=harness.ROOT, check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    harness.begin(sys.modules[__name__])
