"""All mutations can be applied, and the command reports mutations not detected by tests.

`make mutations` checks the detection.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.mutations import __main__ as command
from tests.mutations import applied, list_mutations

NAME = "norm-in-single-precision"


def test_every_mutation_can_be_made_and_names_files() -> None:
    known = list_mutations()
    assert len(known) >= 40
    for name, mutation in known.items():
        assert all(Path(each.partition("::")[0]).is_file() for each in mutation.found_by), name
        with applied(name):
            pass


@pytest.mark.parametrize(
    ("collected", "unmutated", "mutated", "told"),
    [
        (True, 0, (1, "FAILED tests/engine/test_x.py::test_y[1] - assert 1 == 2"), ""),
        (True, 0, (0, "1 passed"), "NOT FOUND"),
        (True, 0, (2, "ERROR tests/engine/test_x.py"), "NOT FOUND"),
        (True, 0, (1, "/a/engine.py:3: TypeError: takes 2\nFAILED tests/engine/test_x.py::test_y"), "itself fails"),
        (True, 0, None, "hang"),
        (True, 1, (1, "FAILED tests/engine/test_x.py::test_y"), "without one, too"),
        (False, 0, (1, ""), "no part of the quick run"),
    ],
)
def test_the_command_tells_what_was_not_found(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    collected: bool,
    unmutated: int,
    mutated: tuple[int, str] | None,
    told: str,
) -> None:
    (test,) = list_mutations()[NAME].found_by

    def played(words: Sequence[str], timeout: float) -> tuple[int, str]:
        if "--collect-only" in words:
            return 0, f"{test}::test_y[1]" if collected else "nothing"
        if "--mutation" not in words:
            return unmutated, ""
        if mutated is None:
            raise subprocess.TimeoutExpired(list(words), timeout)
        return mutated

    monkeypatch.setattr(command, "run_tests", played)
    monkeypatch.setattr(command.forks, "share", lambda: None)
    assert command.main([NAME]) == bool(told)
    assert told in capsys.readouterr().out
