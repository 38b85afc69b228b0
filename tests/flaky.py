"""Run test files in random orders, to find tests that sometimes fail.

    make flaky                                        quick tests in files changed since the branch left main, ten times
    make flaky ARGS="--since HEAD~5 --runs 3"         files changed since another commit
    make flaky ARGS="tests/tiers -m slow"             these tests: words for pytest

Each run has a seed, from which the order follows: `pytest --order-seed SEED FILES` repeats a failure.
"""

from __future__ import annotations

import argparse
import random
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from tests.forks import MINUTES, ROOT, run_tests

_FAILED = re.compile(r"^(?:FAILED|ERROR) .*$", re.MULTILINE)
_NO_TESTS = 5
"""pytest's exit code where all tests are marked out of the quick run."""


def shuffle(items: list[Any], dice: random.Random, in_files: bool = False) -> None:
    """Change the order of files, and with `in_files` of the tests in each. Tests of a file stay together."""
    files = list(dict.fromkeys(item.path for item in items))
    dice.shuffle(files)
    if in_files:
        dice.shuffle(items)
    items.sort(key=lambda item: files.index(item.path))


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make flaky", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--since", default="main", metavar="COMMIT", help="for the changed files (default: main)")
    parser.add_argument("--runs", type=int, default=10, help="number of orders (default: 10)")
    parser.add_argument("tests", nargs=argparse.REMAINDER, help="words for pytest, in place of the changed files")
    arguments = parser.parse_args(words)
    tests = arguments.tests or changed_tests(arguments.since)
    if not tests:
        print(f"no test file has changed since {arguments.since}")
        return 0
    num_failed = 0
    for seed in random.sample(range(10**6), arguments.runs):
        found = failures(seed, tests)
        num_failed += bool(found)
        print(f"seed {seed}: {found or 'passed'}", flush=True)
    print(f"{num_failed} of {arguments.runs} orders failed; to repeat one: pytest --order-seed SEED {' '.join(tests)}")
    return bool(num_failed)


def changed_tests(commit: str) -> list[str]:
    """Return the test files changed since the common ancestor with a commit, and those unknown to git."""
    changed = _git("diff", "--name-only", "--diff-filter=d", "--merge-base", commit)
    unknown = _git("ls-files", "--others", "--exclude-standard", "tests")
    return sorted(path for path in changed + unknown if re.search(r"^tests/.*\btest_\w+\.py$", path))


def _git(*words: str) -> list[str]:
    return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()


def failures(seed: int, tests: Sequence[str]) -> str:
    """Return the failed tests of one order as lines, or ""."""
    try:
        code, out = run_tests(["--order-seed", str(seed), *tests], MINUTES)
    except subprocess.TimeoutExpired:
        return f"the tests hang, after {MINUTES} s"
    if code in (0, _NO_TESTS):
        return ""
    return "\n".join(_FAILED.findall(out)) or out[-2000:]


if __name__ == "__main__":
    sys.exit(main())
