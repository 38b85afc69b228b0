"""The benchmarks by name."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Benchmark:
    """A module offload.benches.NAME with `add_arguments(parser)`, and `run(arguments)`, which returns a list of Result,
    or a Measured.
    """

    summary: str
    """What it measures."""
    short: tuple[str, ...] | None = None
    """Its words in `bench all`, so that it takes a minute at most; None where it takes no part."""


_SMALL = (
    "--hidden",
    "256",
    "--layers",
    "6",
    "--vocabulary",
    "4096",
    "--sequence",
    "128",
    "--steps",
    "4",
    "--pairs",
    "5",
)
BENCHMARKS = {
    "limits": Benchmark("what matrix products, memory and links of this machine reach at most", ()),
    "adam": Benchmark(
        "updates on the CPU against the memory roofline, torch, DeepSpeed and 8-bit AdamW",
        ("--n", "8Mi", "--reps", "5"),
    ),
    "nvme": Benchmark("files read and written by the I/O engines, against fio", ("--size", "256MiB", "--pairs", "5")),
    "step": Benchmark("a training step against plain PyTorch and DeepSpeed", _SMALL),
    "all": Benchmark("all of the above, shorter, in one table"),
    "sweep": Benchmark("training steps over tokens a step, placement and ZeRO stage, with a picture"),
    "compare": Benchmark("two files of results"),
}


def module_of(name: str) -> Any:
    """Return the module of a benchmark."""
    return importlib.import_module(f"offload.benches.{name}")
