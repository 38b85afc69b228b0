"""Tests for `make bits`: hashes are stable, a mutation changes them, and the file keeps unmeasured lines."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from offload.optim.adamw import AdamW
from tests.bits import __main__ as bits
from tests.bits import worker
from tests.bits.__main__ import FILE, read, written
from tests.cases.features import CASES, HASHED, TRAINER_RUNS
from tests.engine.device import cpu_only


@cpu_only("hashes are those of a CPU")
@pytest.mark.parametrize("name", ["llama-cpu-bf16", "resume"])
def test_a_hash_is_stable_and_a_mutation_changes_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = worker.run(name)
    assert worker.run(name) == found
    update = AdamW.update

    def late(self: AdamW, states: Any, gradient: Any, step: Any) -> Any:
        return update(self, states, gradient, replace(step, step=step.step + 1))

    monkeypatch.setattr(AdamW, "update", late)
    changed = worker.run(name)
    assert all(one != other for one, other in zip(found.split("-"), changed.split("-"), strict=True))


WORKER = """
import json, sys, time
print(json.dumps({"cases": {}}), flush=True)
for line in sys.stdin:
    name = json.loads(line)["name"]
    if name == "late":
        time.sleep(600)
    if name == "dead":
        sys.exit("on purpose")
    print(json.dumps({"hash": name}), flush=True)
"""


def test_a_killed_process_is_named_and_the_next_configuration_has_a_new_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Break: ask the dead process again."""
    (tmp_path / "tests/bits").mkdir(parents=True)
    (tmp_path / "tests/bits/worker.py").write_text(WORKER)
    monkeypatch.setattr(bits, "ROOT", tmp_path)
    started = bits.Worker(tmp_path, tmp_path / "log")
    assert started.reply() == {"cases": {}}
    assert started.ask(name="a") == {"hash": "a"}
    assert "the process ended:\non purpose" in started.ask(name="dead")["error"]
    assert started.ask(name="b") == {"hash": "b"}
    monkeypatch.setattr(bits, "PATIENCE_S", 1)
    assert "the process was killed: no reply in 1 s" in started.ask(name="late")["error"]
    monkeypatch.setattr(bits, "PATIENCE_S", 300)
    assert started.ask(name="c") == {"hash": "c"}
    started.close()


def test_the_file_has_a_line_for_each_configuration() -> None:
    names = {*HASHED, *TRAINER_RUNS}
    assert len(names) == sum(len(case.bits) for case in CASES.values()) + len(TRAINER_RUNS), "two runs with one name"
    for machine, lines in read(FILE.read_text()).items():
        assert "plain " in machine
        assert set(lines) <= names
    assert any(set(lines) == names for lines in read(FILE.read_text()).values())


def test_a_changed_hash_loses_its_lines_of_other_machines() -> None:
    before = {"mine": {"a": "1", "b": "2", "gone": "0"}, "other": {"a": "3", "b": "4"}}
    after = read(written(before, "mine", {"a": "1", "b": "5", "c": "6"}, ["a", "b", "c"]))
    assert after == {"mine": {"a": "1", "b": "5", "c": "6"}, "other": {"a": "3"}}
