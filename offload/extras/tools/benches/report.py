"""Common result format for all benchmarks."""

from __future__ import annotations

import dataclasses
import json
import platform
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from offload.app.environment import describe_environment, version_of

MIN_WIDTH = 160  # table width in characters: narrow output wraps instead of cutting names


@dataclasses.dataclass
class Result:
    """One measured number.

    ratio: improvement over `reference` (2 is twice as fast); None: no reference.
    details: more JSON fields. `show` prints some.
    """

    name: str
    value: float
    unit: str
    reference: str | None = None
    ratio: float | None = None
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Return the result as a flat dictionary."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "details"}
        return own | self.details


def machine() -> dict[str, Any]:
    """Return a machine description."""
    import psutil

    from offload.native import kernels

    return {
        "cpu": describe_environment()["cpu"].get("name") or platform.processor(),
        "architecture": platform.machine(),
        "logical_cpus": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernels": {key: value for key, value in kernels.describe().items() if key != "module"},
    }


def versions() -> dict[str, str]:
    """Return versions for the installed packages."""
    packages = ("offload", "torch", "transformers", "numpy", "deepspeed", "bitsandbytes", "torchao")
    package_versions = {name: version for name in packages if (version := version_of(name)) is not None}
    return {"python": platform.python_version(), "system": platform.system(), **package_versions}


def spread(values: Sequence[float]) -> float:
    """Return the relative spread: interquartile range over median; 0 for a single value."""
    if len(values) < 2:
        return 0.0
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / median if median else 0.0


@dataclasses.dataclass
class BenchmarkOutput:
    """Benchmark output."""

    results: list[Result]
    """Results in table order."""
    left_out: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    """(name, reason) for contenders not measured."""
    files: list[Path] = dataclasses.field(default_factory=list)
    """Other files written, for example pictures."""

    def document(self) -> str:
        """Return machine, versions and results as JSON text."""
        parts: dict[str, Any] = {"machine": machine(), "versions": versions()}
        parts["results"] = [result.fields() for result in self.results]
        if self.left_out:
            parts["left_out"] = [{"name": name, "why": why} for name, why in self.left_out]
        if self.files:
            parts["files"] = [str(file) for file in self.files]
        return json.dumps(parts, indent=2)

    def show(self, title: str) -> None:
        """Print the results as a table."""
        from rich.table import Table

        caption = "ratio: how many times better than the reference, median of interleaved pairs"
        table = Table(title=title, caption=caption)
        for column in ("", "threads", "median", "best", "GB/s", "reference", "ratio"):
            justify: Literal["left", "right"] = "right"
            if column in ("", "reference"):  # texts
                justify = "left"
            table.add_column(column, justify=justify, no_wrap=True)
        for result in self.results:
            more = result.details
            table.add_row(
                result.name,
                str(more.get("threads", "")),
                f"{format_value(result.value)} {result.unit}",
                _cell(more.get("best"), format_value),
                _cell(more.get("gigabytes_per_second"), "{:.1f}".format),
                result.reference or "",
                _cell(result.ratio, "{:.2f}".format),
            )
        print_table(table)
        for name, why in self.left_out:
            print(f"left out: {name}: {why}")
        for file in self.files:
            print(f"written: {file}")
        print(" · ".join(f"{name} {version}" for name, version in versions().items()))


def format_value(value: float) -> str:
    """Return a number as shown in tables."""
    if abs(value) >= 1:
        return f"{value:,.2f}"
    return f"{value:.3g}"


def _cell(value: float | None, text_of: Callable[[float], str]) -> str:
    """Return a number for a table. Empty: not measured."""
    if value is None:
        return ""
    return text_of(value)


def print_table(table: Any) -> None:
    """Print a rich table, at least `MIN_WIDTH` wide on any terminal."""
    from rich.console import Console

    console = Console()
    if console.width < MIN_WIDTH:
        console = Console(width=MIN_WIDTH)
    console.print(table)
