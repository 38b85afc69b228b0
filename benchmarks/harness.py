"""The common part of all benchmarks: the command line, turns, results, and result files.

A benchmark is a module with `SUMMARY`, `add_arguments(parser)` and `run(arguments)`, like those of
`python -m offload.bench`. `run` returns a list of Result, or another output with `document()` and `show(title)`. A
module may have `QUICK`, the options of a run of seconds. The last line of a benchmark calls `begin`.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import shlex
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from offload import bench
from offload.app.config.command_line import run_command
from offload.extras.tools.benches.blocks import rotate
from offload.extras.tools.benches.report import Result, machine, spread, versions
from tests.ports import free_port, rank_variables

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Item = TypeVar("Item")
Key = tuple[str, str, str]

# -- the command line ----------------------------------------------------------------------------------------


def begin(module: Any) -> NoReturn:
    """Run a benchmark as a program."""
    run_command(command_of(module))


def command_of(module: Any) -> Callable[[list[str]], int]:
    """Return the command of a benchmark."""
    name = Path(module.__file__).stem

    def main(words: list[str]) -> int:
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=module.SUMMARY + ".")
        bench.declare(parser, module)
        parser.add_argument("--out", type=Path, metavar="FILE", help="write the results here; other rows there stay")
        quick = getattr(module, "QUICK", None)
        if quick is not None:
            parser.add_argument("--quick", action="store_true", help="a run of seconds; the figures mean nothing")
        if quick is not None and "--quick" in words:
            parser.set_defaults(**quick)
        arguments = parser.parse_args(words)
        of_run = head(f"python -m benchmarks.{name}", words)
        output = bench.measured(arguments)
        document = of_run | json.loads(output.document())
        if arguments.out is not None:
            write(arguments.out, merged(arguments.out, document))
        if arguments.json:
            print(json.dumps(document, indent=2))
        else:
            output.show(module.SUMMARY)
        return 0

    return main


@dataclass
class Page:
    """An output that is a page of text; `figures` are the data behind the page."""

    text: str
    figures: Mapping[str, Any]

    def document(self) -> str:
        """Return the figures as JSON text."""
        return json.dumps(self.figures)

    def show(self, _title: str) -> None:
        """Print the page."""
        print(self.text.removesuffix("\n"))


# -- runs ----------------------------------------------------------------------------------------------------


def turns(items: Sequence[Item], num_rounds: int) -> Iterator[tuple[int, Item]]:
    """Yield (round, item) for all items in each round, in rotated order: a busy machine disturbs all alike."""
    for number in range(num_rounds):
        for item in rotate(items, number):
            yield number, item


def is_rate(unit: str) -> bool:
    """True for units where more is better."""
    return unit.endswith("/s")


def summary(
    name: str, values: Sequence[float], unit: str, reference: tuple[str, Sequence[float]] | None = None, **more: Any
) -> Result:
    """Return the median over rounds, with the spread and all values.

    reference: name and values of another contender in the same rounds. The ratio is the median of the ratios by round,
    above 1 where this contender is better.
    more: further fields.
    """
    best = max if is_rate(unit) else min
    details = {"rounds": len(values), "best": best(values), "spread": round(spread(values), 4), "all": list(values)}
    median = statistics.median(values)
    if reference is None:
        return Result(name, median, unit, details=details | more)
    pairs = list(zip(values, reference[1], strict=True))
    ratios = [own / other if is_rate(unit) else other / own for own, other in pairs]
    details["ratio_spread"] = round(spread(ratios), 4)
    return Result(name, median, unit, reference[0], statistics.median(ratios), details | more)


def over_ranks(num_ranks: int, run: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of `run(*arguments, comm)` on rank 0 of several ranks: processes with a CPU thread each."""
    import torch
    import torch.multiprocessing as processes

    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        processes.spawn(_rank, (num_ranks, free_port(), file.name, run, arguments), nprocs=num_ranks)
        return torch.load(file.name, weights_only=False)


def _rank(rank: int, num_ranks: int, port: int, path: str, run: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    import torch

    from offload.distributed.joining import open_comm

    os.environ |= rank_variables(rank, num_ranks, port)
    torch.set_num_threads(1)
    with open_comm(device="cpu") as comm:
        found = run(*arguments, comm)
    if rank == 0:
        torch.save(found, path)


def num_parameters(shape: Mapping[str, Any]) -> int:
    """Return the parameters of a causal model with this configuration."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    return sum(each.numel() for each in model.parameters())


# -- result files --------------------------------------------------------------------------------------------


def head(command: str, words: Sequence[str] = ()) -> dict[str, Any]:
    """Return what a result file says about a run: command, commit, date, machine and versions."""
    git = ["git", "describe", "--always", "--dirty", "--exclude=*"]
    commit = ""
    with contextlib.suppress(OSError):  # a machine without git
        commit = subprocess.run(git, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": " ".join([command, shlex.join(words)]).strip(),
        "commit": commit,
        "date": datetime.date.today().isoformat(),
        "machine": machine(),
        "versions": versions(),
    }


def key(row: Mapping[str, Any]) -> Key:
    """Return the parts that identify a row: benchmark, name, threads."""
    return row.get("benchmark", ""), row["name"], str(row.get("threads", ""))


def merged(path: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the document with those rows of the file that were not measured again. A row has the commit of its run."""
    if "results" not in document:
        return dict(document)
    old = json.loads(path.read_text(encoding="utf-8")).get("results", []) if path.exists() else []
    new = [row | {"commit": document["commit"]} for row in document["results"]]
    rows = {key(row): row for row in (*old, *new)}
    return {**document, "results": list(rows.values())}


class StoredRows:
    """Rows in a result file, by name."""

    def names(self) -> dict[str, str]:
        """Return the described machine by name, in the order of the file."""
        raise NotImplementedError

    def entry(self, document: Mapping[str, Any], name: str) -> Any:
        """Return a stored row; None: not planned yet."""
        return document.get(name)

    def put(self, document: dict[str, Any], name: str, made: Any) -> None:
        """Put a row into the document."""
        document[name] = made

    def written(self, document: Mapping[str, Any]) -> str:
        """Return the text of the result file."""
        return json.dumps({name: document[name] for name in self.names() if name in document}, indent=1) + "\n"


def table(*rows: Sequence[str]) -> str:
    """Return rows of cells, the titles first, as a Markdown table."""
    head, *others = ("".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in rows)
    return "\n".join([head, f"|{'---|' * len(rows[0])}", *others])


def write(path: Path, document: Mapping[str, Any]) -> None:
    """Write a result file. A reader sees the old file or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    new.replace(path)
