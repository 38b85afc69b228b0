"""Compare two result files number by number and mark differences larger than the measurement spread."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.harness import Key
from offload.errors import ConfigError, shorten
from offload.extras.tools.benches.report import format_value, print_table, spread

SUMMARY = "two files of results"
LEAST_SPREAD = 0.02
"""Minimum spread, also used for results without spread or with a single measurement."""
_CONDITIONS = ("machine", "versions")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command-line options."""
    parser.add_argument("before", metavar="A", help="what another run printed with --json")
    parser.add_argument("after", metavar="B", help="what is compared with it")


@dataclass(frozen=True)
class Pair:
    """One number present in both files."""

    name: str
    """Name, with benchmark and thread count if known."""
    unit: str
    """Unit in both files."""
    before: float
    """Value in the first file."""
    after: float
    """Value in the second file."""
    ratio: float
    """Improvement factor of the second file: 2 is twice as fast."""
    spread: float
    """Larger spread of the two, relative to the median."""

    @property
    def differs(self) -> bool:
        """True if the values differ by more than the spread."""
        return not 1 / (1 + self.spread) <= self.ratio <= 1 + self.spread

    @property
    def change(self) -> str:
        """ "better", "worse", or empty."""
        return "" if not self.differs else "better" if self.ratio > 1 else "worse"


@dataclass(frozen=True)
class ResultComparison:
    """Comparison of two files."""

    pairs: list[Pair]
    """Numbers in both files, in the order of the first."""
    only_before: list[str]
    """Names missing in the second file."""
    only_after: list[str]
    """Names missing in the first file."""
    others: dict[str, tuple[Any, Any]]
    """Differing machine properties and versions."""

    def document(self) -> str:
        """Return the comparison as JSON text."""
        results = [asdict(pair) | {"differs": pair.differs, "verdict": pair.change} for pair in self.pairs]
        only = {"before": self.only_before, "after": self.only_after}
        return json.dumps({"results": results, "only_in": only, "conditions": self.others}, indent=2)

    def show(self, title: str) -> None:
        """Print the comparison as a table."""
        from rich.table import Table

        table = Table(
            title=title, caption="ratio: how many times better B is; marked where that is more than the spread"
        )
        for column in ("", "A", "B", "ratio", "spread", ""):
            table.add_column(column, justify="left" if not column else "right", no_wrap=True)
        for pair in self.pairs:
            values = [f"{format_value(value)} {pair.unit}" for value in (pair.before, pair.after)]
            table.add_row(pair.name, *values, f"{pair.ratio:.3f}", f"{pair.spread:.1%}", pair.change)
        print_table(table)
        for file_label, names in (("A", self.only_before), ("B", self.only_after)):
            if names:
                print(f"only in {file_label}: {', '.join(names)}")
        for key, (before, after) in self.others.items():
            print(f"{key}: {shorten(str(before))} in A, {shorten(str(after))} in B")


def run(arguments: argparse.Namespace) -> ResultComparison:
    """Read and compare both files.

    Raises ConfigError for a file without results, and for files without common numbers.
    """
    before, after = (_read(Path(path)) for path in (arguments.before, arguments.after))
    before_results, after_results = (_by_key(document["results"]) for document in (before, after))
    if not before_results.keys() & after_results.keys():
        raise ConfigError(
            f"{arguments.before} and {arguments.after} have no result in common: give two files of the same benchmark."
        )
    return ResultComparison(
        [_pair(key, before_results[key], after_results[key]) for key in before_results if key in after_results],
        [_title(key) for key in before_results if key not in after_results],
        [_title(key) for key in after_results if key not in before_results],
        dict(_others(before, after)),
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        results = document["results"]
        for result in results:
            number, width = float(result["value"]), _spread_of(result)
            if not (
                isinstance(result["name"], str) and isinstance(result["unit"], str) and math.isfinite(number + width)
            ):
                raise ValueError(f"name {result['name']!r}, unit {result['unit']!r}, value {number}")
        if not all(isinstance(document.get(part, {}), dict) for part in _CONDITIONS):
            raise ValueError(f"{' and '.join(_CONDITIONS)} are not mappings")
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path} is not the result of a benchmark ({type(error).__name__}: {shorten(str(error))}); give a file "
            "that a benchmark printed with --json."
        ) from None
    return dict(document)


def _by_key(results: list[dict[str, Any]]) -> dict[Key, dict[str, Any]]:
    return {harness.key(each): each for each in results}


def _pair(key: Key, before: Mapping[str, Any], after: Mapping[str, Any]) -> Pair:
    if before["unit"] != after["unit"]:
        raise ConfigError(f"{key[1]} is in {before['unit']} in one file and in {after['unit']} in the other.")
    before_value, after_value = float(before["value"]), float(after["value"])
    better, worse = before_value, after_value
    if harness.is_rate(before["unit"]):
        better, worse = worse, better
    if worse:
        ratio = better / worse
    else:
        ratio = math.inf if better else 1.0
    wider = max(_spread_of(before), _spread_of(after))
    return Pair(_title(key), before["unit"], before_value, after_value, ratio, wider)


def _spread_of(result: Mapping[str, Any]) -> float:
    """Return the recorded spread; older files have only the measurements to derive one."""
    if "spread" in result:
        return max(LEAST_SPREAD, float(result["spread"]))
    return max(LEAST_SPREAD, spread(result.get("all") or result.get("blocks") or ()))


def _others(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[tuple[str, tuple[Any, Any]]]:
    return [
        (key, (before_value, after_value))
        for part in _CONDITIONS
        for key in {**before.get(part, {}), **after.get(part, {})}
        if (before_value := before.get(part, {}).get(key)) != (after_value := after.get(part, {}).get(key))
    ]


def _title(key: Key) -> str:
    benchmark, name, threads = key
    return (f"{benchmark}: " if benchmark else "") + name + (f", {threads} threads" if threads else "")


if __name__ == "__main__":
    harness.begin(sys.modules[__name__])
