"""Random orders of tests: the seed gives the order, and a failing order is printed with the seed."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import groupby
from types import SimpleNamespace

import pytest

from tests import flaky


def test_an_order_follows_from_its_seed_and_files_stay_together() -> None:
    orders = []
    for seed in (1, 1, 2):
        items = [SimpleNamespace(path=path, name=name) for path in "abc" for name in range(5)]
        flaky.shuffle(items, random.Random(seed), in_files=True)
        orders.append([(item.path, item.name) for item in items])
    assert orders[0] == orders[1] != orders[2]
    assert sorted(path for path, _ in groupby(orders[0], lambda item: item[0])) == ["a", "b", "c"]
    names = [name for path, name in orders[0] if path == "a"]
    assert names != sorted(names)


def test_a_failing_order_is_printed_with_its_seed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Sequence[str]] = []

    def played(words: Sequence[str], timeout: float) -> tuple[int, str]:
        asked.append(words)
        return (1, "FAILED tests/x.py::test_y - assert 1\n") if len(asked) == 2 else (0, "1 passed")

    monkeypatch.setattr(flaky, "run_tests", played)
    assert flaky.main(["--runs", "3", "tests/x.py", "-m", "slow"]) == 1
    assert len({words[1] for words in asked}) == 3
    assert [words[2:] for words in asked] == 3 * [["tests/x.py", "-m", "slow"]]
    text = capsys.readouterr().out
    assert f"seed {asked[1][1]}: FAILED tests/x.py::test_y - assert 1" in text
    assert "1 of 3 orders failed" in text


def test_changed_files_are_the_tests_of_the_difference_and_new_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    listed = {"diff": ["tests/a/test_x.py", "tests/conftest.py", "offload/x.py"], "ls-files": ["tests/test_new.py"]}
    monkeypatch.setattr(flaky, "_git", lambda kind, *_: listed[kind])
    assert flaky.changed_tests("main") == ["tests/a/test_x.py", "tests/test_new.py"]
    assert flaky.main(["--runs", "0"]) == 0
