"""The rule of `tests.air`, on a few code lines."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import air


@pytest.mark.parametrize(
    "line",
    [
        "a, b, c = 1, 2, 3",
        "self.a = self.b = self.c = 0",
        "self.a, self.b, self.c = f()",
        "a, (b, *c) = 1, f()",
        "x = a if b else c if d else e",
        "x = [a if b else c for y in z] if d else e",
        "if a if b else c: pass",
        "while f(a if b else c): pass",
        "x = [y for y in z if (a if b else c)]",
        "x[a if b else c]",
        "f(x=a if b else c)",
        "x = [a for a in b for c in a for d in c]",
    ],
)
def test_a_line_with_two_thoughts_is_a_fault(line: str) -> None:
    ((number, _),) = air.faults(f"\n{line}\n")
    assert number == 2


@pytest.mark.parametrize(
    "line",
    [
        "a, b = 1, 2",
        "a, b, *c = f()",
        "x = a if b else c",
        "f(a if b else c)[0]",
        "if a: x = b if c else d",
        "x = {a: b for b in c for a in b}",
    ],
)
def test_a_line_with_one_thought_is_none(line: str) -> None:
    assert air.faults(line) == []


def test_the_command_names_each_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (path := tmp_path / "one.py").write_text("x = 1\nx[a if b else c]\n")
    assert air.main([str(path)]) == 1
    assert capsys.readouterr().out == f"{path}:2: a conditional expression in a subscript\n"
    path.write_text("x = 1\n")
    assert air.main([str(path)]) == 0
    assert not capsys.readouterr().out


def test_a_pattern_without_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(air, "HELD", ["offload/no_such_folder/*.py"])
    with pytest.raises(ValueError, match="no_such_folder"):
        air.held_files()
