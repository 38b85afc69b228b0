"""The form in which every benchmark gives its results."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
from typing import Any

MIN_WIDTH = 160  # of the table, in characters: a pipe or a narrow terminal wraps it rather than cutting names


@dataclasses.dataclass
class Result:
    """One measured number.

    ratio: how many times better than `reference` it is (2 is twice as fast); None for what is compared with nothing.
    details: more fields for the JSON; those that `show` prints are named there.
    """

    name: str
    value: float
    unit: str
    reference: str | None = None
    ratio: float | None = None
    details: dict[str, Any] = dataclasses.field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Return the result as one flat dictionary."""
        own = {field.name: getattr(self, field.name) for field in dataclasses.fields(self) if field.name != "details"}
        return own | self.details


def machine() -> dict[str, Any]:
    """Return what the numbers were measured on. Takes about a second (py-cpuinfo)."""
    import cpuinfo
    import psutil

    from offload.native import kernels

    cpu = cpuinfo.get_cpu_info()
    return {
        "cpu": cpu.get("brand_raw", platform.processor()),
        "architecture": platform.machine(),
        "logical_cpus": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "kernels": {key: value for key, value in kernels.describe().items() if key != "module"},
    }


def versions() -> dict[str, str]:
    """Return the versions of what was compared; what is not installed is left out."""
    found = {"python": platform.python_version(), "system": platform.system()}
    for package in ("offload", "torch", "transformers", "numpy", "deepspeed", "bitsandbytes", "torchao"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def document(results: list[Result]) -> str:
    """Return machine, versions and results as JSON text."""
    parts = {"machine": machine(), "versions": versions(), "results": [result.fields() for result in results]}
    return json.dumps(parts, indent=2)


def show(title: str, results: list[Result]) -> None:
    """Print the results as a table."""
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, caption="ratio: how many times faster than the reference, median of interleaved pairs")
    for column in ("", "threads", "median", "best", "GB/s", "reference", "ratio"):
        table.add_column(column, justify="left" if column in ("", "reference") else "right", no_wrap=True)
    for result in results:
        more = result.details
        table.add_row(
            result.name,
            str(more.get("threads", "")),
            f"{result.value:.2f} {result.unit}",
            f"{more['best']:.2f}" if "best" in more else "",
            f"{more['gigabytes_per_second']:.1f}" if "gigabytes_per_second" in more else "",
            result.reference or "",
            f"{result.ratio:.2f}" if result.ratio is not None else "",
        )
    console = Console()
    console = console if console.width >= MIN_WIDTH else Console(width=MIN_WIDTH)
    console.print(table)
    console.print(" · ".join(f"{name} {version}" for name, version in versions().items()), style="dim")
