"""The torchrun arguments in the launchers from examples/cluster/, and a real run with Ray."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from tests.cluster.test_disks import settings
from tests.forks import MINUTES, ROOT

FOLDER = ROOT / "examples/cluster"


def words_of(folder: Path, command: Sequence[object], **variables: str) -> list[str]:
    """Run a command with a fake `torchrun` and return the `torchrun` arguments."""
    programs = folder / ".venv/bin"
    programs.mkdir(parents=True, exist_ok=True)
    shown = {"torchrun": 'printf "%s\\n" "$@"', "scontrol": 'echo "$3-0\n$3-1"', "srun": 'SLURM_NODEID=1 exec "$@"'}
    for name, line in shown.items():
        (programs / name).write_text(f"#!/bin/sh\n{line}\n")
        (programs / name).chmod(0o755)
    if not (folder / "examples").exists():
        (folder / "examples").symlink_to(ROOT / "examples")
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(folder), **variables}
    found = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=True)
    return found.stdout.splitlines()


def test_slurm_and_skypilot_start_what_is_started_by_hand(tmp_path: Path) -> None:
    by_hand = {"HEAD": "gpu-0", "MACHINES": "2", "NODE": "1"}
    words = ["--train.steps", "2"]
    asked = words_of(tmp_path, [FOLDER / "torchrun.sh", *words], **by_hand)
    assert asked[-4:] == ["-m", "offload.train", *words]
    options = dict(zip(asked[:-4:2], asked[1:-4:2], strict=True))
    assert options == {
        "--nnodes": "2",
        "--nproc-per-node": "gpu",
        "--max-restarts": "3",
        "--rdzv-backend": "c10d",
        "--rdzv-endpoint": "gpu-0:29500",
        "--rdzv-conf": "is_host=false",
        "--rdzv-id": "offload",
    }
    of_slurm = {"SLURM_JOB_NODELIST": "gpu", "SLURM_NNODES": "2", "SLURM_JOB_ID": "offload"}
    assert words_of(tmp_path, [FOLDER / "slurm.sh", *words], **of_slurm) == asked
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    of_sky = {"SKYPILOT_NODE_IPS": "gpu-0\ngpu-1", "SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1"}
    assert words_of(tmp_path, ["bash", "-c", task["run"]], **of_sky)[:-6] == asked[:-4]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("ray") is None, reason="ray is not installed: pip install 'ray[train]'")
def test_ray_trains_in_two_workers_and_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for steps, said in ("2", "done: 2 steps"), ("4", "resumed at step 2"):
        words = [*settings(tmp_path), "--run.dir", run, "--train.steps", steps]
        found = subprocess.run(
            [sys.executable, FOLDER / "ray_train.py", "--workers", "2", *words],
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=MINUTES,
            check=False,
        )
        assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-4000:]
        assert said in found.stdout + found.stderr
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4]
    assert json.loads((run / "env.json").read_text())["world_size"] == 2
    assert {path.name for path in run.glob("checkpoints/step-4/rank-*")} == {"rank-0.bin", "rank-1.bin"}
