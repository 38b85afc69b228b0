"""The measure of plain prose: relative words and pronouns per thousand words."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.prose import LIMITS, ROOT, Limits, Measure, main


def test_docstrings_comments_and_pages_count_and_code_does_not(tmp_path: Path) -> None:
    (tmp_path / "one.py").write_text('"""What it is."""\nwhich = "that"  # a comment\n')
    (tmp_path / "one.md").write_text("`which` is such a word\n\n```\nwhat\n```\n")
    found = Measure(tmp_path)
    assert found.counts.total() == 9
    assert found.relative == pytest.approx(1000 * 3 / 9)
    assert found.share("what") == pytest.approx(1000 / 9)


def test_a_text_above_the_limit_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("one\n\n" + "it is what it is, " * 4)
    (message,) = Measure(page).broken(Limits(1000, 1000, 1000))
    assert message.startswith(f"{page}:3: ")
    assert len(Measure(page).broken(Limits(100))) == 3
    assert main([str(page), "--worst", "1"]) == 0
    assert f"{page}:3" in capsys.readouterr().out


def test_the_project_is_measured_as_a_whole() -> None:
    assert all((ROOT / name).exists() for name in LIMITS)
