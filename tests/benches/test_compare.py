"""`benchmarks.compare` on handwritten files."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare
from benchmarks.harness import command_of
from offload import bench
from offload.errors import ConfigError

main = command_of(compare)


def write(path: Path, *results: dict[str, Any], **more: Any) -> str:
    path.write_text(json.dumps({"machine": {"cpu": "a"}, "versions": {"torch": "2"}, "results": results} | more))
    return str(path)


def result(name: str, value: float, unit: str = "ms", **more: Any) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "reference": None, "ratio": None, **more}


def compared(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["--json", *words]) == 0
    return dict(json.loads(capsys.readouterr().out))


def test_what_differs_by_more_than_the_spread_is_marked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = write(
        tmp_path / "a.json",
        result("time", 10.0, spread=0.1),
        result("rate", 10.0, "GB/s", spread=0.01),
        result("unsure", 10.0, spread=0.01),
        result("noise", 10.0, all=[8.0, 9.0, 10.0, 11.0, 12.0]),
        result("same", 10.0, threads=1),
        result("same", 20.0, threads=2),
        result("gone", 1.0),
    )
    after = write(
        tmp_path / "b.json",
        result("time", 8.0, spread=0.02),
        result("rate", 8.0, "GB/s", spread=0.01),
        result("unsure", 8.0, spread=0.5),
        result("noise", 9.0),
        result("same", 10.1, threads=1),
        result("same", 21.0, threads=2),
        result("new", 1.0),
        versions={"torch": "3"},
    )
    found = compared(capsys, before, after)
    rows = {each["name"]: (each["ratio"], each["spread"], each["verdict"]) for each in found["results"]}
    assert rows == {
        "time": (1.25, 0.1, "better"),
        "rate": (0.8, 0.02, "worse"),
        "unsure": (1.25, 0.5, ""),
        "noise": (pytest.approx(10 / 9), 0.2, ""),
        "same, 1 threads": (pytest.approx(10 / 10.1), 0.02, ""),
        "same, 2 threads": (pytest.approx(20 / 21), 0.02, "worse"),
    }
    assert [each["differs"] for each in found["results"]] == [True, True, False, False, False, True]
    assert found["only_in"] == {"before": ["gone"], "after": ["new"]}
    assert found["conditions"] == {"torch": ["2", "3"]}
    assert main([before, after]) == 0
    said = capsys.readouterr().out
    assert said.count("better │") == 1
    assert "only in A: gone" in said
    assert "torch: 2 in A, 3 in B" in said


def test_a_file_of_the_project_equals_itself(capsys: pytest.CaptureFixture[str]) -> None:
    path = str(Path(__file__).parents[2] / "benchmarks/results/step.json")
    found = compared(capsys, path, path)
    assert found["results"]
    assert not any(each["differs"] for each in found["results"])
    assert found["only_in"] == {"before": [], "after": []}


WRONG = (
    {"value": "abc"},
    {"value": None},
    {"value": math.nan},
    {"name": ["x"]},
    {"unit": 3},
    {"spread": "wide"},
    {"all": 3},
)


@pytest.mark.parametrize(
    "content",
    [
        *("", "[]", '{"results": [{"name": "x"}]}', '{"results": 3}'),
        *(json.dumps({"results": [result("x", 1.0) | wrong]}) for wrong in WRONG),
        json.dumps({"machine": 3, "results": [result("x", 1.0)]}),
    ],
)
def test_what_holds_no_results_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(ConfigError, match="is not the result of a benchmark"):
        main([str(tmp_path / "a.json"), str(tmp_path / "a.json")])
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        main([str(tmp_path / "b.json"), str(tmp_path / "a.json")])


def test_files_of_different_benchmarks_are_refused(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{name}.json", *(result(f"{name}{k}", 1.0) for k in range(9))) for name in "ab"]
    with pytest.raises(ConfigError, match=r"a\.json and .*b\.json have no result in common: give") as raised:
        main(files)
    assert raised.value.exit_code == 2
    assert "a0" not in str(raised.value)


def test_other_units_are_refused(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{unit}.json", result("x", 1.0, unit)) for unit in ("ms", "s")]
    with pytest.raises(ConfigError, match="x is in ms in one file and in s in the other"):
        main(files)


@pytest.mark.parametrize("name", ["compare", "sweep"])
def test_the_command_of_the_package_names_the_new_place(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"python -m benchmarks\.{name}"):
        bench.main([name, "a", "b"])
