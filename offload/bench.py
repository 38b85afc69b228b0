"""`python -m offload.bench NAME`: measure this machine against what it could do and against what others do on it."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Iterator

from offload.config.command_line import run_command

# name -> what it measures. The module offload.benches.NAME
# has add_arguments(parser) and run(arguments) -> list[Result].
BENCHMARKS = {
    "adam": "updates on the CPU against the memory roofline, torch, DeepSpeed and 8-bit AdamW",
    "nvme": "files read and written by the I/O engines, against fio",
    "step": "a training step against plain PyTorch and DeepSpeed",
}


def main(words: list[str]) -> int:
    arguments = _parser().parse_args(words)
    benchmark = importlib.import_module(f"offload.benches.{arguments.name}")
    with _only_results_on_stdout():
        results = benchmark.run(arguments)

    from offload.benches.report import document, show

    if arguments.json:
        print(document(results))
    else:
        show(BENCHMARKS[arguments.name], results)
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
    for name, summary in BENCHMARKS.items():
        sub = names.add_parser(name, help=summary, description=summary + ".")
        sub.add_argument("--json", action="store_true", help="print machine, versions and results as JSON")
        sub.add_argument("--debug", action="store_true", help="show tracebacks")
        importlib.import_module(f"offload.benches.{name}").add_arguments(sub)
    return parser


if __name__ == "__main__":
    run_command(main)
