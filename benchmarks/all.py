"""All benchmarks with short settings, in one table: each number with its limit or reference.

A benchmark that cannot run is listed with the reason, and the others continue.
"""

from __future__ import annotations

import argparse
import importlib
import shlex
import sys
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.alone import main_of
from benchmarks.limits import product_name
from offload.app.config.command_line import run_command, say
from offload.errors import ConfigError, nearest
from offload.extras.tools.benches.report import BenchmarkOutput, Result

SUMMARY = "limits, adam, nvme and step, shorter, in one table"
PARTS = {
    "limits": ("benchmarks.limits", ""),
    "adam": ("benchmarks.adam", "--n 8Mi --reps 5"),
    "nvme": ("offload.extras.tools.benches.nvme", "--size 256MiB --pairs 5"),
    "step": (
        "offload.extras.tools.benches.step",
        "--hidden 256 --layers 6 --vocabulary 4096 --sequence 128 --steps 4 --pairs 5",
    ),
}
"""Module and options of each benchmark, for a run of at most a minute."""
_FLOPS_PER_PARAMETER = 6
"""Per trained token: a multiplication and an addition in the forward, twice as many in the backward. Recomputed
forwards and attention products do not count.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    about = f"of {', '.join(PARTS)} (default: all)"
    parser.add_argument("--only", nargs="+", metavar="NAME", default=list(PARTS), help=about)
    about = "a benchmark and its options, in place of the short ones: --words 'nvme --dir /data'"
    parser.add_argument("--words", action="append", default=[], metavar="'NAME ...'", help=about)


def run(arguments: argparse.Namespace) -> BenchmarkOutput:
    """Run the benchmarks one after the other; return all results, each with the benchmark name."""
    words = {name: short.split() for name, (_, short) in PARTS.items()}
    own = dict(map(_own_words, arguments.words))
    for name in (*arguments.only, *own):
        if name not in words:
            raise ConfigError(f"{name!r} is no benchmark of all{nearest(name, words)}; these are {', '.join(words)}.")
    if unused := set(own) - set(arguments.only):
        raise ConfigError(f"--words are given for {', '.join(sorted(unused))}, which --only leaves out; name it there.")
    words.update(own)
    found = BenchmarkOutput([])
    for name in arguments.only:
        try:
            module = importlib.import_module(PARTS[name][0])
            say(f"{name}: {module.SUMMARY} ...")
            results = _measure(name, module, words[name])
        except Exception as error:
            if arguments.debug:
                traceback.print_exc()
            why = " ".join(str(error).split()) or type(error).__name__
            say(f"{name} cannot run here: {why}")
            found.left_out.append((name, why))
            continue
        for result in results:
            result.details = {"benchmark": name, **result.details}
        found.results += results
    if not found.results:
        raise ConfigError(f"nothing could be measured: {'; '.join(f'{name}: {why}' for name, why in found.left_out)}.")
    found.results += _useful_work(found.results)
    return found


def _own_words(text: str) -> tuple[str, list[str]]:
    """Return benchmark and options from one --words. Raises ConfigError."""
    try:
        name, *rest = shlex.split(text)
    except ValueError as error:
        why = str(error) if text.strip() else "it names no benchmark"
        raise ConfigError(f"--words is {text!r}: {why}; write --words 'NAME --option VALUE ...'.") from None
    return name, rest


def _measure(name: str, module: Any, words: Sequence[str]) -> list[Result]:
    parser = argparse.ArgumentParser(prog=name, exit_on_error=False)
    module.add_arguments(parser)
    results: list[Result] = module.run(parser.parse_args(words))
    return results


def _useful_work(results: Sequence[Result]) -> Iterator[Result]:
    """Yield for each step the useful products a second, against the largest measured product."""
    limits = {result.name: result for result in results if result.details["benchmark"] == "limits"}
    for result in results:
        more = result.details
        if more["benchmark"] != "step" or "tokens_per_second" not in more or "parameters" not in more:
            continue
        reached = _FLOPS_PER_PARAMETER * more["parameters"] * more["tokens_per_second"] / 1e12
        limit = limits.get(product_name(str(more["precision"])))
        details = {"benchmark": "step", "spread": more["spread"]}
        name = f"useful work of {result.name}"
        if limit is None:
            yield Result(name, reached, "TFLOP/s", details=details)
        else:
            yield Result(name, reached, "TFLOP/s", limit.name, reached / limit.value, details)


if __name__ == "__main__":
    run_command(main_of(sys.modules[__name__]))
