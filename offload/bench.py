"""`python -m offload.bench NAME`: measure this machine against the hardware limits and against other libraries."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator
from typing import Any

from offload.app.config.command_line import run_command
from offload.errors import ConfigError
from offload.extras.tools.benches.report import BenchmarkOutput

NAMES = ("step", "nvme")
"""Modules in offload.extras.tools.benches. Each has a `SUMMARY`, `add_arguments(parser)`, and `run(arguments)`, which
returns a list of Result, or a BenchmarkOutput.
"""
_MOVED = ("compare", "sweep")
_CLONE = "compare and sweep are in a clone of the project, as python -m benchmarks.NAME."


def main(words: list[str]) -> int:
    if words and words[0] in _MOVED:
        raise ConfigError(f"bench {words[0]} is now python -m benchmarks.{words[0]}: {_CLONE}")
    return measure(_parser().parse_args(words))


def declare(parser: argparse.ArgumentParser, module: Any) -> None:
    """Declare the options for a benchmark, and the options common to all benchmarks."""
    parser.add_argument("--json", action="store_true", help="print what is found as JSON")
    parser.add_argument("--debug", action="store_true", help="show tracebacks")
    parser.set_defaults(module=module)
    module.add_arguments(parser)


def measure(arguments: argparse.Namespace) -> int:
    """Run a benchmark and print the results."""
    output = measured(arguments)
    if arguments.json:
        print(output.document())
    else:
        output.show(arguments.module.SUMMARY)
    return 0


def measured(arguments: argparse.Namespace) -> Any:
    """Run a benchmark and return the output."""
    with _only_results_on_stdout():
        output = arguments.module.run(arguments)
    if isinstance(output, list):
        return BenchmarkOutput(output)
    return output


@contextlib.contextmanager
def _only_results_on_stdout() -> Iterator[None]:
    """Redirect other output to stderr, including child compilers. Only results go to stdout."""
    sys.stdout.flush()  # earlier text, which belongs to stdout
    # The descriptor, not sys.stdout: child processes write to it.
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m offload.bench", description=__doc__, epilog=_CLONE)
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name in NAMES:
        module = importlib.import_module(f"offload.extras.tools.benches.{name}")
        declare(names.add_parser(name, help=module.SUMMARY, description=module.SUMMARY + "."), module)
    return parser


if __name__ == "__main__":
    run_command(main)
