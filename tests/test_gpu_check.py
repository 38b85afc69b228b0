"""`make gpu-check` runs and reports the parts, whatever they measure."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks import gpu_check
from offload.extras.tools.benches.report import Result
from tests import forks
from tests.lanes.patience import eventually

REPORTS = """
import sys
from pathlib import Path
from typing import Any
from benchmarks.gpu_check import store
store(Path(sys.argv[1]), sys.argv[2], note="half of it")
"""


COMMAND_S, SET_UP_S = 600, 120
"""Seconds of a command on a lent machine, and those for the set-up."""


def part(code: str, out: Path, name: str = "small") -> tuple[str, str]:
    """Run code as a part. Return (outcome, report line)."""
    words = [sys.executable, "-c", REPORTS + code, str(out), name]
    outcome, _, note = gpu_check.run_part(name, words, forks.PATIENCE_S, out)
    return outcome, note


def dry_run(out: Path, *parts: str) -> dict[str, Any]:
    """Run parts without a GPU, each with a time limit for slow machines. Return the results by name."""
    words = ["-m", "benchmarks.gpu_check", "--dry-run", "--limit", forks.MINUTES, "--out", out, *parts]
    done = forks.run(words, timeout=len(parts) * forks.MINUTES)
    if "CannotBuildError" in done.stdout:
        pytest.skip(done.stdout)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert {part["outcome"] for part in found["parts"].values()} == {"passed"}
    return {each["name"]: each for each in found["results"]}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "outcome"),
    [("", "passed"), (f"sys.exit({gpu_check.SKIPPED})", "skipped"), ("sys.exit(1)", "failed"), ("1 / 0", "failed")],
)
def test_what_became_of_a_part_is_told_and_kept(code: str, outcome: str, tmp_path: Path) -> None:
    out = tmp_path / "gpu.json"
    assert part(code, out) == (outcome, "half of it")
    assert json.loads(out.read_text())["parts"]["small"]["outcome"] == outcome


def test_a_part_that_takes_too_long_is_ended_with_its_own_processes_and_keeps_what_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, child = tmp_path / "gpu.json", tmp_path / "child"

    class OverWhenItsChildRuns(subprocess.Popen):
        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            eventually(child.exists)
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", OverWhenItsChildRuns)
    gpu_check.store(out, "copies", note="before")
    code = f"""
import subprocess
store(Path(sys.argv[1]), sys.argv[2], step=1)
started = subprocess.Popen(["sleep", "1000"])
new = Path({str(child)!r} + ".new")
new.write_text(str(started.pid))
new.rename({str(child)!r})
started.wait()
"""
    assert part(code, out) == ("too long", f"killed after {forks.PATIENCE_S} s; what it had measured is kept")
    parts = json.loads(out.read_text())["parts"]
    assert parts["small"]["step"] == 1
    assert parts["copies"] == {"note": "before"}
    assert eventually(lambda: has_ended(int(child.read_text())))  # a signal takes a moment


def has_ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_a_part_that_is_run_again_replaces_its_own_results_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_check, "this_machine", dict)
    out = tmp_path / "gpu.json"
    for name, value in (("small", 1.0), ("copies", 2.0), ("small", 3.0)):
        gpu_check.store(out, name, [Result("speed", value, "GB/s")])
    found = json.loads(out.read_text())["results"]
    assert {(each["part"], each["value"]) for each in found} == {("copies", 2.0), ("small", 3.0)}


def test_kernels_are_told_by_what_they_are_for() -> None:
    """Two kernels overlap, and a copy overlaps all kernels."""
    from benchmarks.gpu_parts import covered, kernel_seconds

    told = [
        ("nvjet_tst_128x256", 0.0, 4e6),
        ("flash::flash_bwd_kernel", 3e6, 5e6),
        ("fmha_cutlassF_bf16", 6e6, 7e6),
        ("Memcpy HtoD (Pinned -> Device)", 0.0, 9e6),
        ("offload::update<offload::AdamwStep>", 7e6, 8e6),
        ("at::native::vectorized_elementwise_kernel", 8e6, 8.5e6),
        ("nvjet_tst_128x256", 8.5e6, 9e6),
    ]
    by_kind, by_name, spans = kernel_seconds(told)
    assert by_kind == {"copies": 9.0, "attention": 3.0, "products": 4.5, "updates": 1.0, "others": 0.5}
    assert by_name["nvjet_tst_128x256"] == 4.5
    assert covered(spans) == 8e6


def test_each_part_can_be_run() -> None:
    from benchmarks import gpu_parts, lease, lease_compared, lease_unseen

    assert set(gpu_parts.RUN | lease.RUN | lease_unseen.RUN | lease_compared.RUN) == set(gpu_check.PARTS)


def test_each_command_of_a_lease_ends_within_its_limit_and_begins_with_what_no_card_has_shown() -> None:
    from benchmarks import lease_unseen

    for name in ("lease", "lease-steps"):
        assert sum(gpu_check.GROUPS[name].values()) <= COMMAND_S - SET_UP_S
    assert {*lease_unseen.CHECKS, "updates"} == set(gpu_check.UNSEEN_LIMITS_S)
    assert [*gpu_check.LEASE_LIMITS_S][: len(gpu_check.UNSEEN_LIMITS_S)] == [*gpu_check.UNSEEN_LIMITS_S]


def test_results_go_to_the_folder_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUT", str(tmp_path))
    monkeypatch.setattr(gpu_check, "gpu_name", lambda: None)
    written: list[Path] = []
    monkeypatch.setattr(gpu_check, "run_part", lambda *given: written.append(given[-1]) or ("passed", 1.0, ""))
    assert gpu_check.main(["lease", "lease-steps"]) == 0
    assert set(written) == {tmp_path / "gpu-check.json"}
    assert len(written) == len(gpu_check.LEASE_LIMITS_S | gpu_check.STEPS_LIMITS_S)


@pytest.mark.slow
def test_a_dry_run_of_a_lease_has_a_figure_or_a_reason_from_each_part(tmp_path: Path) -> None:
    """Break: leave the product in FP8 to the simulated device, which refuses it."""
    results = dry_run(tmp_path / "gpu.json", *gpu_check.GROUPS)
    assert {each["part"] for each in results.values()} == set(gpu_check.LIMITS_S)
    for each in results.values():
        assert each["value"] > 0 or each["unit"] in ("relative error", "equal") or each.get("reason"), each
    of_unseen = {name: each for name, each in results.items() if each["part"] in gpu_check.UNSEEN_LIMITS_S}
    assert [name for name, each in of_unseen.items() if each["unit"] == "refused"] == [], "a kernel has no shim"
    for name in ("8b, compile never, 32768 tokens a step", "8b, compile auto, 32768 tokens a step", "decoding nf4"):
        assert results[name]["value"] > 0
    assert results["8b, compile auto, 32768 tokens a step"]["compiled_graphs"]


@pytest.mark.slow
def test_a_dry_run_sees_how_launches_run_ahead_what_kernels_are_for_and_compiled_blocks(tmp_path: Path) -> None:
    results = dry_run(tmp_path / "gpu.json", "run-ahead", "profiled-3b", "compiled-block")
    assert results["the most memory in use, launches ahead"]["value"] > 0
    assert results["3b, a step's products"]["value"] > 0
    assert results["blocks of the 8b, compile always"]["graphs"] == 2


@pytest.mark.slow
def test_a_dry_run_measures_on_the_simulated_accelerator(tmp_path: Path) -> None:
    steps = dry_run(tmp_path / "gpu.json", "build", "sync", "14b")["14b, 16384 tokens a step"]
    assert steps["placement"] == "AdamW, what host memory does not hold on disk"  # the states exceed host memory
    assert set(steps["exposed_seconds"]) >= {"h2d", "d2h", "nvme_read"}


@pytest.mark.parametrize(
    ("script", "why"),
    [
        ("exit 0", None),
        ("echo '========= Error: not permitted'; exit 1", "Error: not permitted"),
        ("exit 3", "exit code 3"),
    ],
)
def test_a_sanitizer_that_may_not_watch_is_no_failure(script: str, why: str | None) -> None:
    from benchmarks.gpu_parts import refusal

    assert refusal(["sh", "-c", script], {}, forks.PATIENCE_S) == why
