"""Runs the tests that have to find each mutation, and tells of mutations that no test finds.

make mutations                                    all of them: about ten minutes on two cores
make mutations ARGS="NAME ..."                    these alone
make mutations ARGS="--list"                      their names, and the tests that have to find them

The named tests run once without a mutation before: all are part of the quick run, and pass.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests import forks
from tests.mutations import Mutation, list_mutations

PATIENCE_S = 600
"""For the tests of one mutation, which take seconds. A mutation that makes them hang is not found."""
_FAILED = 1
"""An exit code of pytest. A mutation that cannot be made, and tests that cannot be collected, end it with others."""
_SUMMARY = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - (.*))?$", re.MULTILINE)

_OWN_CRASH = re.compile(
    r"^/\S+:\d+: (?:TypeError|AttributeError|NameError)\b.*|^/\S*/tests/mutations/.*$", re.MULTILINE
)
"""The line of an error that shows a mutation to be out of date: the code that it changes takes other arguments now."""


@dataclass(frozen=True)
class Outcome:
    """The end of the tests of one mutation."""

    mutation: Mutation
    seconds: float
    found: str
    """The test that failed, and its error. Empty where the mutation was not found."""
    trouble: str
    """The end of the output where the mutation was not found."""

    def line(self) -> str:
        verdict = f"{self.seconds:.0f} s" if self.found else "NOT FOUND"
        return f"{self.mutation.name:<48}{verdict:>10}  {self.found[:130]}"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make mutations", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="of mutations (default: all)")
    parser.add_argument("--jobs", type=int, default=2, help="how many mutations at a time (default: 2)")
    parser.add_argument("--tests", default=None, help="tests to run in place of the named ones, separated by commas")
    parser.add_argument("--list", action="store_true", help="print names and tests, and run nothing")
    arguments = parser.parse_args(words)
    known = list_mutations()
    for name in arguments.names:
        if name not in known:
            parser.error(f"{name!r} is none of {', '.join(known)}")
    chosen = [known[name] for name in arguments.names or known]
    if arguments.list:
        print("\n".join(f"{each.name:<48}{' '.join(each.found_by)}" for each in chosen))
        return 0
    forks.share()
    tests = tuple(arguments.tests.split(",")) if arguments.tests else ()
    if not tests and (problem := check({test for each in chosen for test in each.found_by}, arguments.jobs)):
        print(problem)
        return 1
    missed = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for outcome in pool.map(lambda each: seek(each, tests or each.found_by), chosen):
            print(outcome.line(), flush=True)
            if not outcome.found:
                print(outcome.trouble, flush=True)
                missed.append(outcome.mutation.name)
    print(f"{len(chosen) - len(missed)} of {len(chosen)} mutations found")
    if missed:
        print("No test that is named for them fails with", *missed)
    return bool(missed)


def check(tests: Iterable[str], jobs: int) -> str:
    """Run the tests without a mutation; return the problem where one fails or is no part of the quick run, else ""."""
    begin = time.monotonic()
    ordered = sorted(tests)
    _, out = run_tests(["--collect-only", *sorted({test.partition("::")[0] for test in ordered})])
    collected = {line.partition("[")[0] for line in out.splitlines()}
    for test in ordered:
        if not any(f"{one}::".startswith(f"{test}::") for one in collected):
            return f"{test} is no part of the quick run\n{out[-2000:]}"
    code, out = run_tests(["-n", str(jobs), "--dist", "loadfile", *ordered], timeout=forks.MINUTES)
    if code:
        return f"Tests fail without a mutation:\n{out[-4000:]}"
    print(f"{len(ordered)} tests or files pass without a mutation ({time.monotonic() - begin:.0f} s)", flush=True)
    return ""


def seek(mutation: Mutation, tests: Sequence[str]) -> Outcome:
    """Run the tests with the mutation until one fails."""
    begin = time.monotonic()
    try:
        code, out = run_tests(["-x", "--mutation", mutation.name, *tests])
    except subprocess.TimeoutExpired:
        return Outcome(mutation, time.monotonic() - begin, "", f"the tests hang, after {PATIENCE_S} s")
    if crash := _OWN_CRASH.search(out):
        return Outcome(mutation, time.monotonic() - begin, "", f"the mutation itself fails: {crash[0]}")
    failed = _SUMMARY.search(out)
    found = f"{failed[1]}: {failed[2] or ''}" if code == _FAILED and failed else ""
    return Outcome(mutation, time.monotonic() - begin, found, out[-2000:])


def run_tests(words: Sequence[str], timeout: float = PATIENCE_S) -> tuple[int, str]:
    """Run pytest on words, in a process that is forked; return the exit code and the output."""
    how = ["--tb=line", "-rfE", "-p", "no:cacheprovider", "-W", "ignore"]
    done = forks.run(["-m", "pytest", *how, *words], timeout=timeout, env={**os.environ, "COLUMNS": "200"})
    return done.returncode, done.stdout + done.stderr


if __name__ == "__main__":
    sys.exit(main())
