"""`python -m offload.bench NAME`: measure this machine against what it could do and against what others do on it."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator

from offload.benches.catalogue import BENCHMARKS, module_of
from offload.config.command_line import run_command


def main(words: list[str]) -> int:
    arguments = _parser().parse_args(words)
    benchmark = BENCHMARKS[arguments.name]
    with _only_results_on_stdout():
        found = module_of(arguments.name).run(arguments)

    from offload.benches.report import Measured

    found = Measured(found) if isinstance(found, list) else found
    if arguments.json:
        print(found.document())
    else:
        found.show(benchmark.summary)
    return 0


@contextlib.contextmanager
def _only_results_on_stdout() -> Iterator[None]:
    """Send to stderr what others print meanwhile, compilers that they start included: stdout is for the results."""
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m offload.bench", description=__doc__)
    names = parser.add_subparsers(dest="name", required=True, metavar="NAME")
    for name, benchmark in BENCHMARKS.items():
        sub = names.add_parser(name, help=benchmark.summary, description=benchmark.summary + ".")
        sub.add_argument("--json", action="store_true", help="print what is found as JSON")
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        module_of(name).add_arguments(sub)
    return parser


if __name__ == "__main__":
    run_command(main)
