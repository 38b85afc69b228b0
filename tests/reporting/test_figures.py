"""The figures on a page, against counts in the run folder."""

from __future__ import annotations

import gzip
import json
import os
import socket
import statistics
from pathlib import Path
from typing import Any

import pytest

from offload import report
from offload.errors import ConfigError
from offload.extras.tools.reporting.advice import advise
from offload.extras.tools.reporting.figures import Figures
from offload.extras.tools.reporting.run_record import RunRecord, TracedStep, TraceSpan
from offload.extras.tools.reporting.timeline import rows
from offload.sizes import parse_size
from tests.reporting.runs import CONFIG, PLAN, line, usual, write_run


def figures_of(path: Path) -> Figures:
    return Figures.of(RunRecord.read(path))


def test_the_curves_are_the_lines_of_the_metrics(tmp_path: Path) -> None:
    lines = usual()
    figures = figures_of(write_run(tmp_path, lines))
    for name in ("loss", "lr", "grad_norm"):
        assert figures.series[name] == tuple((each["step"], each[name]) for each in lines)
    assert figures.series["eval_loss"] == ((10, 6.5), (20, 6.0), (30, 5.5), (40, 5.0))
    for name in ("tokens_per_second", "step_seconds"):
        assert figures.series[name] == tuple((each["step"], each[name]) for each in lines[3:])
    assert (figures.num_steps, figures.num_asked, figures.num_tokens) == (40, 40, 4000)


def test_the_median_and_the_slowest_step_are_those_of_the_warm_steps(tmp_path: Path) -> None:
    lines = usual()
    figures = figures_of(write_run(tmp_path, lines))
    seconds = [each["step_seconds"] for each in lines[3:]]
    assert figures.median.seconds == statistics.median_low(seconds)
    assert (figures.slowest.step, figures.slowest.seconds) == (17, 0.9)
    assert figures.tokens_per_second == statistics.median(100 / each for each in seconds)
    h2d = next(each for each in figures.slowest.lanes if each.name == "h2d")
    assert (h2d.busy_s, h2d.exposed_s, h2d.hidden_s) == (0.16, 0.08, 0.08)
    assert [each.name for each in figures.slowest.lanes] == ["compute", "h2d", "d2h", "update"]


def test_a_step_that_the_trace_keeps_no_more_is_shown_by_the_nearest_in_time(tmp_path: Path) -> None:
    lines = usual()
    figures = figures_of(write_run(tmp_path, lines))
    kept = {each["step"]: each["step_seconds"] for each in lines[-10:]}
    step = figures.median
    nearest = min(abs(seconds - step.seconds) for seconds in kept.values())
    assert abs(kept[step.shown.number] - step.seconds) == nearest
    assert step.shown.seconds == pytest.approx(kept[step.shown.number], abs=1e-8)
    assert figures.slowest.shown.number == figures.slowest.step == 17


def test_a_slow_first_step_stands_for_no_other(tmp_path: Path) -> None:
    """A first step records the model, with other lane times, so it never represents a later step."""
    seconds = {step: 0.422 if step <= 3 else 0.4 + 0.001 * step for step in range(1, 41)}
    lines = [line(step, each, lanes={"h2d": (0.1, 0.1)}) for step, each in seconds.items()]
    step = figures_of(write_run(tmp_path, lines)).median
    assert (step.step, step.shown.number) == (22, 30), "the slowest of those before the last ten"


def test_pieces_are_joined_only_with_their_like() -> None:
    pieces = [("forward 0", 0.0, 0.5), ("forward 1", 0.5, 0.501)]
    pieces += [("backward 1", 0.501, 0.502), ("backward 0", 0.502, 1.0)]
    step = TracedStep(1, 1.0, tuple(TraceSpan("compute", name, begin, end) for name, begin, end in pieces))
    (row,) = rows(step)
    assert [(bar.kind, bar.begin + bar.width) for bar in row.bars] == [("forward", 50.1), ("backward", 100.0)]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 4, 9, 13])
def test_a_short_run_shows_its_very_steps(tmp_path: Path, num_steps: int) -> None:
    figures = figures_of(write_run(tmp_path, usual(num_steps)))
    assert figures.first_warm == min(4, num_steps)
    for step in (figures.median, figures.slowest):
        assert step.shown.number == step.step


def test_bars_are_hidden_where_a_unit_computes_and_exposed_where_none_does(tmp_path: Path) -> None:
    figures = figures_of(write_run(tmp_path, usual(9)))
    shown = {row.lane: row.bars for row in rows(figures.median.shown)}
    assert list(shown) == ["compute", "h2d", "d2h"]
    found = {lane: [(each.kind, each.begin, each.begin + each.width) for each in bars] for lane, bars in shown.items()}
    expected = {
        "compute": [("forward", 20, 40), ("forward", 50, 60), ("backward", 60, 90)],
        "h2d": [("exposed", 0, 20), ("hidden", 30, 40), ("exposed", 40, 50)],
        "d2h": [("hidden", 85, 90), ("exposed", 90, 95)],
    }
    for lane, bars in expected.items():
        assert [each[0] for each in found[lane]] == [each[0] for each in bars]
        for had, wants in zip(found[lane], bars, strict=True):
            assert had[1:] == pytest.approx(wants[1:], abs=0.01)


def test_the_busiest_lane_binds(tmp_path: Path) -> None:
    lines = [line(step, 0.5, lanes={"h2d": (0.45, 0.1), "d2h": (0.1, 0.25)}) for step in range(1, 20)]
    for each in lines[10:]:
        each["step_seconds"] = 0.52  # 0.02 s are outside the engine
    binding = figures_of(write_run(tmp_path, lines)).binding
    assert (binding.lane, binding.limit_s, binding.step_s) == ("h2d", 0.45, 0.52)
    assert binding.times_limit == pytest.approx(0.52 / 0.45)
    assert binding.outside_s == pytest.approx(0.02)
    assert not binding.is_serial


def test_what_the_own_thread_did_is_told(tmp_path: Path) -> None:
    lines = [line(step, 0.5, lanes={"h2d": (0.1, 0.1), "update": (0.05, 0.05)}) for step in range(1, 9)]
    path = write_run(tmp_path, lines)
    binding = figures_of(path).binding
    assert binding.is_serial
    advice = advise(RunRecord.read(path), figures_of(path))
    assert "GPU" in advice[0].change
    assert advice[0].saves_s == pytest.approx(0.15)


def test_a_hundredth_of_a_step_is_not_worth_a_machine(tmp_path: Path) -> None:
    lines = [line(step, 0.5, lanes={"h2d": (0.003, 0.003)}) for step in range(1, 9)]
    path = write_run(tmp_path, lines)
    assert figures_of(path).binding.is_serial
    changes = [each.change for each in advise(RunRecord.read(path), figures_of(path))]
    assert not [change for change in changes if "GPU" in change]


def test_memory_is_the_plan_and_the_highest_peak(tmp_path: Path) -> None:
    tiers = {each.name: each for each in figures_of(write_run(tmp_path, usual())).tiers}
    assert list(tiers) == ["device", "cpu", "nvme"]
    assert (tiers["device"].planned_bytes, tiers["device"].budget_bytes, tiers["device"].peak_bytes) == (
        3000,
        12000,
        3040,
    )
    assert tiers["device"].allocations == (("gradient buffer", 2000), ("slot <b>", 1000))
    assert tiers["cpu"].budget_bytes is None
    assert tiers["nvme"].peak_bytes is None


@pytest.mark.parametrize(
    ("lane", "settings", "said"),
    [
        ("h2d", {}, "--offload.device_memory"),
        ("d2h", {}, "--offload.device_memory"),
        ("update", {}, "--train.clip speculative"),
        ("update", {"train": {"clip": "speculative", "max_grad_norm": 1.0}}, "--optimizer.states bf16"),
        ("update", {"train": {"clip": "deferred", "max_grad_norm": None}}, "--optimizer.states bf16"),
        ("update", {"optimizer": {"name": "mezo", "states": "fp32"}, "train": {"clip": "deferred"}}, "tokens a step"),
        ("nvme_read", {}, "--offload.host_memory"),
        ("collective", {}, "--offload.zero_stage"),
    ],
)
def test_the_lane_that_compute_waits_for_most_comes_first(
    tmp_path: Path, lane: str, settings: dict[str, Any], said: str
) -> None:
    other = "d2h" if lane == "nvme_read" else "nvme_read"
    lines = [line(step, 0.5, lanes={other: (0.1, 0.02), lane: (0.2, 0.1)}) for step in range(1, 9)]
    path = write_run(tmp_path, lines, config={**CONFIG, **settings})
    first = advise(RunRecord.read(path), figures_of(path))[0]
    assert first.change.startswith((said, f"More {said}", f"A lower {said}"))
    assert first.saves_s == pytest.approx(0.1)
    assert f"{lane} (busy for 40% of it)" in first.why


def test_what_the_program_decided_is_not_advised(tmp_path: Path) -> None:
    waits = [line(step, 0.5, lanes={"update": (0.2, 0.1), "collective": (0.1, 0.02)}) for step in range(1, 9)]
    computes = [line(step, 0.5, lanes={}) for step in range(1, 9)]
    recomputes = {"train": {"recompute": "always"}}
    advised = "--train.clip", "--offload.zero_stage", "--train.recompute"
    for is_decided in (False, True):
        changes = ""
        for name, lines, config in (("waits", waits, CONFIG), ("computes", computes, {**CONFIG, **recomputes})):
            path = write_run(tmp_path / f"{name}-{is_decided}", lines, config=config)
            settings = (path / "config.yaml").read_text()
            if is_decided:
                settings = settings.replace("clip: deferred", "clip: deferred  # resolved; by the first steps")
                settings = settings.replace("recompute: always", "recompute: always  # resolved")
                settings = settings.replace("offload:\n", "offload:\n  zero_stage: 3  # resolved\n")
            (path / "config.yaml").write_text(settings)
            changes += "; ".join(each.change for each in advise(RunRecord.read(path), figures_of(path)))
        assert [flag in changes for flag in advised] == [not is_decided] * 3, changes


@pytest.mark.parametrize("num_steps", [7, 8])
def test_a_page_has_one_median_step(tmp_path: Path, num_steps: int) -> None:
    figures = figures_of(write_run(tmp_path, [line(step, step / 10, lanes={}) for step in range(1, num_steps + 1)]))
    assert figures.binding.step_s == figures.median.seconds


def test_a_full_lane_is_not_told_to_begin_earlier(tmp_path: Path) -> None:
    path = write_run(tmp_path, [line(step, 0.5, lanes={"h2d": (0.49, 0.3)}) for step in range(1, 9)])
    first = advise(RunRecord.read(path), figures_of(path))[0]
    assert "--offload.device_memory" not in first.change
    assert "--train.batch_size" in first.change


def test_a_budget_with_room_and_faster_alternatives_of_the_plan_are_told(tmp_path: Path) -> None:
    alternatives = [
        {"change": "32 GiB more host memory", "step_seconds": 0.25, "fits": True},
        {"change": "slower", "step_seconds": 0.6, "fits": True},
        {"change": "a thousandth faster", "step_seconds": 0.3996, "fits": True},
        {"change": "no room", "step_seconds": 0.1, "fits": False},
    ]
    plan = {**PLAN, "step_seconds": 0.4, "bound_by": "h2d", "alternatives": alternatives}
    path = write_run(tmp_path, [line(step, 0.5, lanes={}) for step in range(1, 9)], plan=plan)
    figures = figures_of(path)
    assert set(figures.planned) == {"step_seconds", "bound_by", "alternatives"}
    changes = [each.change for each in advise(RunRecord.read(path), figures)]
    (room,) = [each for each in changes if each.startswith("--offload.device_memory")]
    enough = parse_size(room.split()[1])
    assert enough is not None
    assert 3008 <= enough < 3500, "no less than the peak"
    assert "more rows in a micro-batch" in room
    assert changes[-1] == "32 GiB more host memory"
    assert not {"slower", "no room", "a thousandth faster"} & set(changes)


def test_a_run_far_slower_than_its_plan_is_told_so_before_anything_else(tmp_path: Path) -> None:
    lines = [line(step, 1.0, lanes={}) for step in range(1, 9)]
    for planned, told in ((0.25, True), (0.8, False)):
        path = write_run(tmp_path / str(planned), lines, plan={**PLAN, "step_seconds": planned})
        first = [each.why for each in advise(RunRecord.read(path), figures_of(path))][:1]
        assert any("4 times as long as planned" in why for why in first) == told


def test_a_budget_is_only_said_to_be_too_large_where_it_was_set_and_more_of_it_is_not_advised(tmp_path: Path) -> None:
    host = {"bytes": 8000, "budget_bytes": 100_000, "allocations": []}
    plan = {**PLAN, "tiers": {**PLAN["tiers"], "cpu": host}}
    waits = [line(step, 0.5, lanes={"h2d": (0.2, 0.1), "update": (0.1, 0.0)}) for step in range(1, 9)]
    path = write_run(tmp_path / "waits", waits, plan=plan)
    changes = [each.change for each in advise(RunRecord.read(path), figures_of(path))]
    assert changes[0].startswith("More --offload.device_memory")
    assert not any("would be enough" in change for change in changes), "the host's budget is the machine's"
    config = {**CONFIG, "offload": {"device_memory": None, "host_memory": 100_000}}
    path = write_run(tmp_path / "set", waits, plan=plan, config=config)
    changes = [each.change for each in advise(RunRecord.read(path), figures_of(path))]
    assert [change for change in changes if "would be enough" in change] == [
        "--offload.host_memory 8.2KiB would be enough"
    ]
    (path / "env.json").write_text('{"world_size": 4}')
    changes = [each.change for each in advise(RunRecord.read(path), figures_of(path))]
    assert "--offload.host_memory 32.8KiB would be enough" in changes, "the ranks share it"


def test_what_is_torn_missing_or_strange_is_told_and_the_rest_is_there(tmp_path: Path) -> None:
    path = write_run(tmp_path, usual(12), with_trace=False)
    with (path / "metrics.jsonl").open("a") as metrics:
        metrics.write(
            '[1]\n{"step": true}\n{"step": 13, "loss": null, "step_seconds": "x", "lanes": 3}\n{"step": 14, "lo'
        )
    (path / "plan.json").write_text('{"tiers": {"device": 3, "cpu": {"allocations": [1, {"bytes": 2}], "bytes": null}}')
    run = RunRecord.read(path)
    assert len(run.steps) == 13
    figures = Figures.of(run)
    assert figures.series["loss"][-1] == (13, None)
    assert figures.median.shown is None
    told = " ".join(run.notes)
    for name in ("metrics.jsonl: 3 lines", "plan.json cannot be read", "trace.json.gz is missing"):
        assert name in told
    (path / "plan.json").write_text(
        '{"tiers": {"device": 3, "cpu": {"allocations": [1, {"bytes": 2}], "bytes": null}}}'
    )
    assert [each.allocations for each in figures_of(path).tiers] == [(), (("None", 2),)]


def test_a_step_of_no_time_counts_for_nothing(tmp_path: Path) -> None:
    lines = [{**line(step, 0.5, lanes={"h2d": (0.1, 0.1)}), "step_seconds": 0.0} for step in range(1, 6)]
    path = write_run(tmp_path, lines)
    figures = figures_of(path)
    assert figures.median is figures.binding is None
    assert not RunRecord.read(path).traced_steps


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"{}"), gzip.compress(b'{"traceEvents": [{}]}')],
    ids=["empty", "text", "none", "strange"],
)
def test_a_trace_that_cannot_be_read_is_told(tmp_path: Path, content: bytes) -> None:
    path = write_run(tmp_path, usual(5))
    (path / "trace.json.gz").write_bytes(content)
    run = RunRecord.read(path)
    assert not run.traced_steps
    assert any("trace.json.gz cannot be read" in note for note in run.notes)


def test_a_run_that_goes_on_is_seen(tmp_path: Path) -> None:
    path = write_run(tmp_path, usual(5))
    env = {"host": socket.gethostname(), "pids": [os.getpid()]}
    (path / "env.json").write_text(json.dumps(env))
    assert RunRecord.read(path).is_running
    assert not RunRecord.read(path, is_over=True).is_running
    os.utime(path / "env.json", (1, 1))  # older than the process, so the run belongs to another process
    assert not RunRecord.read(path).is_running
    (path / "env.json").write_text(json.dumps({**env, "host": "elsewhere"}))
    assert not RunRecord.read(path).is_running


def test_what_is_no_run_is_one_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for words, said in (
        ([], "no run is given"),
        ([str(tmp_path / "file")], "is a file"),
        ([str(tmp_path / "nowhere")], "does not exist"),
        ([str(tmp_path)], "not the folder of a run"),
    ):
        with pytest.raises(ConfigError, match=said):
            report.main(words)


def test_json_has_the_figures_and_writes_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write_run(tmp_path / "run", usual())
    before = sorted(path.iterdir())
    assert report.main([str(path), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["runs"]
    assert sorted(path.iterdir()) == before
    assert found["slowest"]["step"] == 17
    assert found["slowest"]["shown"] == 17
    assert found["median"]["shown"] in range(31, 41)
    assert found["binding"]["lane"] == "compute"
    assert found["series"]["loss"][0] == [1, 8 / 1.1]
    assert found["advice"][0]["saves_s"] == pytest.approx(0.1)
