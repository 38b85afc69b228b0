"""Command for a benchmark in this folder, with the options and output of `python -m offload.bench`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offload import bench


def main_of(module: Any) -> Callable[[list[str]], int]:
    """Return the command for a module with `SUMMARY`, `add_arguments(parser)` and `run(arguments)`."""

    def main(words: list[str]) -> int:
        name = Path(module.__file__).stem
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=module.SUMMARY + ".")
        bench.declare(parser, module)
        return bench.measure(parser.parse_args(words))

    return main
