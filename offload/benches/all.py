"""All benchmarks with short settings, in one table: each number with the limit or the rival that it is held against.

A benchmark that cannot run here is left out with its reason, and the others go on.
"""

from __future__ import annotations

import argparse
import shlex
import traceback
from collections.abc import Iterator, Sequence

from offload.benches.catalogue import BENCHMARKS, module_of
from offload.benches.limits import product_name
from offload.benches.report import Measured, Result
from offload.config.command_line import say
from offload.errors import ConfigError, nearest

_FLOPS_PER_PARAMETER = 6
"""Of a token that is trained on: a multiplication and an addition in the forward, twice as many in the backward. What a
recomputed forward takes is no useful work, and attention's own products are left out.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of this benchmark."""
    names = [name for name, benchmark in BENCHMARKS.items() if benchmark.short is not None]
    parser.add_argument(
        "--only", nargs="+", metavar="NAME", default=names, help=f"of {', '.join(names)} (default: all)"
    )
    about = "a benchmark and its options, in place of the short ones: --words 'nvme --dir /data'"
    parser.add_argument("--words", action="append", default=[], metavar="'NAME ...'", help=about)


def run(arguments: argparse.Namespace) -> Measured:
    """Measure one after the other; return all results, each of which says whose it is."""
    words = {name: benchmark.short for name, benchmark in BENCHMARKS.items() if benchmark.short is not None}
    own = dict(map(_own_words, arguments.words))
    for name in (*arguments.only, *own):
        if name not in words:
            raise ConfigError(f"{name!r} is no benchmark of all{nearest(name, words)}; these are {', '.join(words)}.")
    if unused := set(own) - set(arguments.only):
        raise ConfigError(f"--words are given for {', '.join(sorted(unused))}, which --only leaves out; name it there.")
    words.update(own)
    found = Measured([])
    for name in arguments.only:
        say(f"{name}: {BENCHMARKS[name].summary} ...")
        try:
            results = _measure(name, words[name])
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


def _own_words(text: str) -> tuple[str, tuple[str, ...]]:
    """Return the benchmark and the options that one --words gives. Raises ConfigError."""
    try:
        name, *rest = shlex.split(text)
    except ValueError as error:
        why = str(error) if text.strip() else "it names no benchmark"
        raise ConfigError(f"--words is {text!r}: {why}; write --words 'NAME --option VALUE ...'.") from None
    return name, tuple(rest)


def _measure(name: str, words: Sequence[str]) -> list[Result]:
    module = module_of(name)
    parser = argparse.ArgumentParser(prog=f"python -m offload.bench {name}", exit_on_error=False)
    module.add_arguments(parser)
    results: list[Result] = module.run(parser.parse_args(list(words)))
    return results


def _useful_work(results: Sequence[Result]) -> Iterator[Result]:
    """Yield for each step what its useful products come to, against the largest product that was measured."""
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
