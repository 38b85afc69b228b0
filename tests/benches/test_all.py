"""`benchmarks.all`: every benchmark in one document. A failed benchmark affects no other."""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks import all as together
from benchmarks import limits
from benchmarks.alone import main_of
from offload.errors import ConfigError
from offload.extras.tools.benches.report import Result, spread


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that replaces a benchmark by a function from arguments to results."""

    def play(name: str, run: Callable[[Any], list[Result]], *options: str) -> None:
        module = ModuleType(together.PARTS[name][0])
        module.SUMMARY = name  # type: ignore[attr-defined]
        module.run = run  # type: ignore[attr-defined]
        module.add_arguments = lambda parser: [parser.add_argument(option) for option in options]  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)

    return play


def step(name: str, precision: str, tokens_per_second: float) -> Result:
    more = {"precision": precision, "parameters": 10**9, "tokens_per_second": tokens_per_second, "spread": 0.01}
    return Result(name, 10.0, "ms", details=more)


main = main_of(together)


def document(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["--json", *words]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_all_are_in_one_document(played: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    played("limits", lambda _: [Result("matrix product, fp32", 24.0, "TFLOP/s")])
    played("adam", lambda given: [Result("kernel", float(given.reps), "ms", "roofline", 0.9)], "--n", "--reps")
    played("nvme", Mock(side_effect=RuntimeError("no\ndisk")), "--size", "--pairs")
    options = ("--hidden", "--layers", "--vocabulary", "--sequence", "--steps", "--pairs")
    played("step", lambda _: [step("engine", "fp32", 1000.0), step("engine", "bf16", 500.0)], *options)
    found = document(capsys)
    assert set(found) == {"machine", "versions", "results", "left_out"}
    assert found["left_out"] == [{"name": "nvme", "why": "no disk"}]
    assert [(each["benchmark"], each["name"], each["value"]) for each in found["results"]] == [
        ("limits", "matrix product, fp32", 24.0),
        ("adam", "kernel", 5.0),
        ("step", "engine", 10.0),
        ("step", "engine", 10.0),
        ("step", "useful work of engine", 6.0),
        ("step", "useful work of engine", 3.0),
    ]
    of_fp32, of_bf16 = found["results"][-2:]
    assert (of_fp32["reference"], of_fp32["ratio"]) == ("matrix product, fp32", 0.25)
    assert (of_bf16["reference"], of_bf16["ratio"]) == (None, None), "that limit was not measured"


def test_some_with_words_of_ones_own(played: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    played("adam", lambda given: [Result(given.n, 1.0, "ms")], "--n")
    found = document(capsys, "--only", "adam", "--words", "adam --n 'one Mi'")
    assert [each["name"] for each in found["results"]] == ["one Mi"]
    assert main(["--only", "adam", "--words", "adam --n 7"]) == 0
    assert " 7 " in capsys.readouterr().out
    with pytest.raises(ConfigError, match="did you mean adam"):
        main(["--only", "adma"])


def test_the_limits_are_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(limits, "HOST_BYTES", 1 << 20)
    found = document(capsys, "--only", "limits")
    assert [each["unit"] for each in found["results"]][:3] == ["TFLOP/s", "TFLOP/s", "GB/s"]
    assert all(each["value"] > 0 for each in found["results"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--words", "adam --n '3"], "--words is .* No closing quotation; write --words 'NAME"),
        (["--words", " "], "--words is ' ': it names no benchmark"),
        (["--only", "nvme", "--words", "adam --n 3"], "given for adam, which --only leaves out"),
    ],
)
def test_wrong_words_are_refused(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        main(words)


def test_where_nothing_can_be_measured_it_fails(played: Callable[..., None]) -> None:
    played("adam", lambda _: 1 / 0, "--n")
    with pytest.raises(ConfigError, match="nothing could be measured: adam: division by zero"):
        main(["--only", "adam", "--words", "adam"])


def test_short_words_are_words_of_their_benchmarks() -> None:
    """The benchmark parsers accept the short words, so a renamed option fails here."""
    for module, words in together.PARTS.values():
        parser = argparse.ArgumentParser()
        importlib.import_module(module).add_arguments(parser)
        parser.parse_args(words.split())


def test_spread() -> None:
    assert spread([3.0]) == spread([]) == spread([2.0, 2.0]) == 0.0
    assert spread([1.0, 2.0, 3.0, 4.0, 5.0]) == pytest.approx(2 / 3)
