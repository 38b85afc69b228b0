"""`python -m offload` and the console script: command names and common flags."""

from __future__ import annotations

import importlib
import importlib.util
import io
import re
import signal
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from offload import __main__ as offload
from offload.app.config.command_line import as_utf8, run_command
from offload.errors import ConfigError

ROOT = Path(__file__).parents[2]


def test_the_commands_are_listed_and_are_there(capsys: Any) -> None:
    for words in ([], ["--help"], ["-h"]):
        assert offload.main(words) == 0
        shown = capsys.readouterr().out
        assert not [name for name in offload.COMMANDS if f"\n  {name} " not in shown]
    runnable = {path.stem for path in (ROOT / "offload").glob("*.py") if "run_command(main)" in path.read_text()}
    assert runnable - {"__main__"} == set(offload.COMMANDS)
    for name in offload.COMMANDS:
        assert importlib.util.find_spec(f"offload.{name}")
        assert callable(offload.module_of(name).main)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("plan", ["--hardware FILE|NAME", "--json", "--offload.host_memory"]),
        ("parity", ["--steps", "--same-order", "--json", "--offload.parameters"]),
    ],
)
def test_the_help_of_a_command_shows_its_own_options(name: str, options: list[str], capsys: Any) -> None:
    with pytest.raises(SystemExit) as left:
        offload.main([name, "--help"])
    assert left.value.code == 0
    shown = capsys.readouterr().out
    assert [option for option in options if option not in shown] == []


@pytest.mark.parametrize(
    "words", [*([name] for name in offload.COMMANDS), ["bench", "step"], ["bench", "nvme"]], ids=" ".join
)
def test_help_has_one_style_and_breaks_no_word(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 80 columns: plain lines, all words of the wide help. Break: draw tyro's boxes; leave a paragraph unbroken."""
    shown = []
    for columns in (80, 400):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit) as left:
            offload.main([*words, "--help"])
        assert left.value.code == 0
        shown.append(capsys.readouterr().out)
    narrow, wide = shown
    assert narrow.startswith("usage: python -m offload.")
    assert max(map(len, narrow.splitlines())) <= 80
    assert not re.search(r"[─│╭]|-----|\.\.\.$|default: *(None|False|''|)\)", narrow)
    assert Counter(narrow.split()) == Counter(wide.split())


def test_a_command_gets_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("offload.doctor")
    given: list[list[str]] = []
    monkeypatch.setattr(module, "main", lambda words: given.append(words) or 1)
    assert offload.main(["doctor", "--json", "x"]) == 1
    assert given == [["--json", "x"]]


@pytest.mark.parametrize(
    ("word", "said"), [("trian", "did you mean train?"), ("--debug", "unknown command"), ("x" * 5000, "characters")]
)
def test_another_word_is_refused(word: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")) as error:
        offload.main([word])
    assert len(str(error.value)) < 500


def test_what_is_printed_ends_no_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """An ASCII locale, and text with half a surrogate pair."""
    streams = [io.TextIOWrapper(io.BytesIO(), encoding) for encoding in ("ascii", "utf-8")]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # keep the signal handlers
    monkeypatch.setattr("offload.app.config.command_line._ignore_late_signals", lambda: None)
    with pytest.raises(SystemExit) as left:
        run_command(lambda _words: [print("三 \ud83d", file=stream) for stream in streams] and 0, [])
    assert left.value.code == 0
    assert [stream.buffer.getvalue().decode() for stream in streams] == ["\\u4e09 \\ud83d\n", "三 \\ud83d\n"]


def test_a_command_in_a_folder_that_is_gone_says_so(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    def fails(*_: Any) -> str:
        raise FileNotFoundError(2, "No such file or directory")

    monkeypatch.setattr(signal, "signal", lambda *_: None)  # keep the signal handlers
    monkeypatch.setattr("offload.app.config.command_line._ignore_late_signals", lambda: None)
    monkeypatch.setattr("offload.app.config.command_line.os.getcwd", fails)
    with pytest.raises(SystemExit) as left:
        run_command(fails, [])
    assert left.value.code == 2
    assert capsys.readouterr().err == "offload: the working directory is gone: change to a folder that exists.\n"


def test_a_word_is_utf8_whatever_the_locale() -> None:
    assert (
        as_utf8("один".encode().decode("ascii", "surrogateescape"), "--prompt") == as_utf8("один", "--prompt") == "один"
    )
    with pytest.raises(ConfigError, match="--prompt is not UTF-8 text"):
        as_utf8("\udcff", "--prompt")
