"""Runs the tests for each mutation, and reports mutations not detected by any test.

    make mutations                                    all of them: about ten minutes on two cores
    make mutations ARGS="NAME ..."                    these alone
    make mutations ARGS="--list"                      their names, and the tests that have to find them

All named tests must belong to the quick run, and failed tests must pass without the mutation. The command checks both.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from tests import forks
from tests.forks import run_tests
from tests.mutations import Mutation, list_mutations

PATIENCE_S = 600
"""Seconds for the tests of one mutation, usually a few. A mutation that hangs the tests is not detected."""
_FAILED = 1
"""pytest's exit code for failed tests. Faulty mutations and uncollectable tests give other codes."""
_SUMMARY = re.compile(r"^(?:FAILED|ERROR) (\S.*?)(?: - (.*))?$", re.MULTILINE)

_OWN_CRASH = re.compile(
    r"^/\S+:\d+: (?:TypeError|AttributeError|NameError)\b.*|^/\S*/tests/mutations/.*$", re.MULTILINE
)
"""Error line from an outdated mutation: the patched code takes other arguments now."""


@dataclass(frozen=True)
class Outcome:
    """Test result for one mutation."""

    mutation: Mutation
    seconds: float
    test: str = ""
    """Node id of the failed test. Empty: the mutation was not detected."""
    error: str = ""
    """The failed test's error, shortened by pytest."""
    trouble: str = ""
    """Reason for a missed mutation, as lines of text."""

    def line(self) -> str:
        verdict = f"{self.seconds:.0f} s" if self.test else "NOT FOUND"
        return f"{self.mutation.name:<48}{verdict:>10}  {self.test}  {self.error}".rstrip()


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
    for options in {each.options for each in chosen}:
        named = {test for each in chosen if each.options == options for test in each.found_by}
        if not tests and (stranger := find_stranger(named, options)):
            print(f"{stranger} is no part of the quick run")
            return 1
    outcomes = []
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for outcome in pool.map(lambda each: seek(each, tests or each.found_by), chosen):
            print(outcome.line(), flush=True)
            print(outcome.trouble, end="", flush=True)
            outcomes.append(outcome)
    found = [each for each in outcomes if each.test]
    for options in {each.mutation.options for each in found}:
        failed = {each.test for each in found if each.mutation.options == options}
        code, out = run_tests(["-n", str(arguments.jobs), *options, *failed], forks.MINUTES)
        if code:
            print(f"Tests that failed with a mutation fail without one, too:\n{out[-4000:]}")
            return 1
    print(f"{len(found)} of {len(outcomes)} mutations found, by tests that pass without a mutation")
    if missed := [each.mutation.name for each in outcomes if not each.test]:
        print("No test that is named for them fails with", *missed)
    return bool(missed)


def find_stranger(tests: Iterable[str], options: Sequence[str] = ()) -> str:
    """Return the first test outside the quick run, or ""."""
    _, out = run_tests([*options, "--collect-only", *sorted({test.partition("::")[0] for test in tests})], PATIENCE_S)
    collected = {line.partition("[")[0] for line in out.splitlines()}
    return next(
        (test for test in sorted(tests) if not any(f"{one}::".startswith(f"{test}::") for one in collected)), ""
    )


def seek(mutation: Mutation, tests: Sequence[str]) -> Outcome:
    """Run the tests with the mutation until one fails."""
    begin = time.monotonic()
    try:
        code, out = run_tests(["-x", "--mutation", mutation.name, *mutation.options, *tests], PATIENCE_S)
    except subprocess.TimeoutExpired:
        return Outcome(mutation, time.monotonic() - begin, trouble=f"the tests hang, after {PATIENCE_S} s\n")
    seconds, failed = time.monotonic() - begin, _SUMMARY.search(out)
    if crash := _OWN_CRASH.search(out):
        return Outcome(mutation, seconds, trouble=f"the mutation itself fails: {crash[0]}\n")
    if code == _FAILED and failed:
        return Outcome(mutation, seconds, failed[1], failed[2] or "")
    return Outcome(mutation, seconds, trouble=f"{out[-2000:]}\n")


if __name__ == "__main__":
    sys.exit(main())
