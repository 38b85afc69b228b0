"""`benchmarks.sweep`: points, derived results, and two real training runs."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest

from benchmarks import sweep
from benchmarks.harness import command_of
from benchmarks.sweep import Point, Steps
from offload.errors import ConfigError, DiskError, DoesNotFitError
from tests import forks
from tests.run_folder import write_text


def arguments(*words: str) -> Namespace:
    parser = ArgumentParser()
    sweep.add_arguments(parser)
    return parser.parse_args(words)


class Played:
    """Simulated training: a token takes 1 microsecond, or 1.5 when streamed. 512 tokens do not fit."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str], int]] = []

    def __call__(self, point: Point, settings: Sequence[str], num_steps: int) -> Steps:
        self.asked.append((point.name, list(settings), num_steps))
        if point.tokens >= 512 and point.placement == "device":
            raise DoesNotFitError("1 GiB are missing")
        seconds = point.tokens * 1e-6 * (1.0 if point.placement == "device" else 1.5) * (1 + len(self.asked) % 2)
        lanes = {"compute": {"exposed_seconds": 0.0}, "h2d": {"exposed_seconds": seconds / 3}, "d2h": {}}
        line = {"step_seconds": seconds, "lanes": lanes, "peak_device_bytes": 5, "peak_host_bytes": 7}
        return [line] * num_steps


def test_points_are_those_asked_for() -> None:
    found = sweep.points(arguments("--batch", "8", "4", "--sequence", "64", "--placement", "cpu", "cpu+nvme"))
    assert [point.name for point in found] == ["cpu: 4 x 64", "cpu: 8 x 64", "cpu+nvme: 4 x 64", "cpu+nvme: 8 x 64"]
    assert list(found[2].words())[4:-2] == ["--offload.parameters", "cpu", "--offload.optimizer", "nvme"]
    ranks = sweep.points(arguments("--batch", "4", "--placement", "cpu", "--stage", "0", "3", "--gpus", "2"))
    assert list(found[0].words())[-2:] == ["--gpus", "1"], "whatever the settings say"
    assert len(sweep.points(arguments("--batch", "4", "4", "--placement", "cpu", "cpu"))) == 1
    assert [point.line for point in ranks] == ["cpu, stage 0, 2 ranks", "cpu, stage 3, 2 ranks"]
    assert list(ranks[0].words())[-4:] == ["--gpus", "2", "--offload.zero_stage", "0"]
    assert len(sweep.points(arguments("--batch", "4", "--placement", "cpu", "--stage", "0", "3"))) == 1
    assert arguments("--batch", "4", "--", "--model.preset", "small").settings == ["--model.preset", "small"]


@pytest.mark.parametrize(
    "words", [["--batch", "0"], ["--steps", "0"], ["--placement", "disk"], ["--placement", "a+b+c"]]
)
def test_wrong_points_are_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{words[0]} is"):
        sweep.points(arguments(*words))


def test_each_point_has_its_result_and_the_lines_are_drawn(tmp_path: Path) -> None:
    given = arguments(
        *("--batch", "1", "4", "8", "--sequence", "64", "--placement", "device", "cpu", "--rounds", "3"),
        *("--steps", "2", "--picture", str(tmp_path / "more" / "sweep.svg"), "--", "--train.precision", "bf16"),
    )
    played = Played()
    found = sweep.sweep(sweep.points(given), given, played)
    assert all(asked[1:] == (["--train.precision", "bf16"], 2) for asked in played.asked)
    assert [result.name for result in found.results] == [
        *("device: 1 x 64", "device: 4 x 64", "cpu: 1 x 64", "cpu: 4 x 64", "cpu: 8 x 64")
    ]
    assert found.left_out == [("device: 8 x 64", "does not fit: 1 GiB are missing")]
    by_name = {result.name: result for result in found.results}
    assert by_name["device: 1 x 64"].ratio is None
    assert by_name["cpu: 1 x 64"].reference == "device: 1 x 64"
    assert by_name["cpu: 8 x 64"].ratio is None, "nothing to compare with"
    assert by_name["cpu: 4 x 64"].details["waits_for"] == "h2d"
    assert by_name["cpu: 4 x 64"].details["tokens_per_step"] == 256
    assert json.loads(found.document())["left_out"][0]["name"] == "device: 8 x 64"
    light, dark = (file.read_text() for file in found.files)
    assert [file.name for file in found.files] == ["sweep.svg", "sweep-dark.svg"]
    for text in (light, dark):
        texts = {each.text for each in ElementTree.fromstring(text).iter("{http://www.w3.org/2000/svg}text")}
        assert {"device", "cpu", "64", "512", "tokens a step", "tokens a second"} <= texts
        assert "http" not in text.replace("http://www.w3.org/2000/svg", ""), "nothing is fetched"
    assert light != dark


def test_where_no_point_can_be_measured_it_says_why() -> None:
    given = arguments("--batch", "8", "16", "--sequence", "64", "--placement", "device")
    with pytest.raises(DoesNotFitError, match="no point could be measured.*1 GiB are missing"):
        sweep.sweep(sweep.points(given), given, Played())


def test_what_was_measured_is_told_also_where_the_picture_cannot_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ("--batch", "1", "--sequence", "64", "--placement", "cpu", "--picture")
    (tmp_path / "file").touch()
    given, played = arguments(*words, str(tmp_path / "file" / "x.svg")), Played()
    with pytest.raises(DiskError, match="cannot be written: .*--picture"):
        sweep.sweep(sweep.points(given), given, played)
    assert not played.asked, "before anything is trained"
    (tmp_path / "x-dark.svg").mkdir()
    given = arguments(*words, str(tmp_path / "x.svg"))
    found = sweep.sweep(sweep.points(given), given, played)
    assert [result.name for result in found.results] == ["cpu: 1 x 64"]
    assert [name for name, _ in found.left_out] == ["the picture"]


@pytest.mark.parametrize(
    ("code", "said"), [(-9, "signal 9, .*--offload.host_memory"), (-11, "signal 11"), (1, "code 1")]
)
def test_a_run_that_ends_without_a_word_is_told(monkeypatch: pytest.MonkeyPatch, code: int, said: str) -> None:
    done = CompletedProcess([], code, "", "")
    monkeypatch.setattr(sweep.subprocess, "run", lambda *_, **__: done)
    with pytest.raises(ConfigError, match=said):
        sweep.train_in_child(Point(1, 2, "cpu", 3, 1), [], 1)


@pytest.mark.slow
def test_two_points_are_trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """One point does not fit."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path, 300)
    monkeypatch.setattr(sweep.subprocess, "run", lambda command, **_: forks.run(command[1:], cwd=tmp_path))
    words = ["--data.source", "text.txt", "--offload.device_memory", "4MiB", "--train.precision", "fp32"]
    points = ["--batch", "2", "--sequence", "16", "--placement", "device", "cpu", "--steps", "2", "--rounds", "1"]
    assert command_of(sweep)(["--json", *points, "--", *words]) == 0
    found = json.loads(capsys.readouterr().out)
    (streamed,) = found["results"]
    assert (streamed["name"], streamed["unit"], streamed["tokens_per_step"]) == ("cpu: 2 x 16", "tokens/s", 32)
    assert streamed["value"] > 0
    assert streamed["peak_device_bytes"] <= 4 << 20
    ((name, why),) = [each.values() for each in found["left_out"]]
    assert name == "device: 2 x 16"
    assert why.startswith("does not fit: ")
