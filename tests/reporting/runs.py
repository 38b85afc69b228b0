"""Handwritten run folders, with numbers for computation in tests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from offload.app.telemetry.trace import Trace
from offload.lanes.timeline import Span
from tests.run_folder import write_rows

LANES = ("compute", "h2d", "d2h", "collective", "network", "nvme_read", "nvme_write", "update")
CONFIG: dict[str, Any] = {
    "run": {"dir": "x", "name": "train"},
    "model": {"path": None, "preset": "tiny"},
    "train": {"steps": 40, "precision": "fp32", "clip": "deferred", "max_grad_norm": 1.0, "recompute": "auto"},
    "optimizer": {"name": "adamw", "states": "fp32"},
    "offload": {"device_memory": 12 << 20, "host_memory": None},
}
PLAN: dict[str, Any] = {
    "fits": True,
    "tiers": {
        "device": {
            "bytes": 3000,
            "budget_bytes": 12000,
            "allocations": [{"name": "slot <b>", "bytes": 1000}, {"name": "gradient buffer", "bytes": 2000}],
        },
        "cpu": {"bytes": 8000, "budget_bytes": None, "allocations": [{"name": "weights", "bytes": 8000}]},
        "nvme": {"bytes": 500, "budget_bytes": None, "allocations": [{"name": "exp avg", "bytes": 500}]},
    },
}


def line(step: int, seconds: float, *, lanes: Mapping[str, tuple[float, float]], **more: Any) -> dict[str, Any]:
    """Return a metrics.jsonl line. lanes: (busy, exposed) seconds by name; compute takes the remaining time."""
    exposed = sum(each[1] for each in lanes.values())
    every = {name: dict.fromkeys(("busy_seconds", "exposed_seconds"), 0.0) for name in LANES}
    every["compute"]["busy_seconds"] = seconds - exposed
    for name, (busy, waited) in lanes.items():
        every[name] = {"busy_seconds": busy, "exposed_seconds": waited}
    return {
        "step": step,
        "tokens": 100,
        "loss": 8 / (1 + step / 10),
        "lr": 1e-3 * step,
        "grad_norm": 1.5,
        "tokens_per_second": 100 / seconds,
        "step_seconds": seconds,
        "lanes": every,
        "peak_device_bytes": 3000 + step,
        "peak_host_bytes": 8000,
        "peak_pinned_bytes": 0,
        **more,
    }


def spans(begin: float, seconds: float) -> list[Span]:
    """Return a step with two units: h2d runs for a fifth before compute, and for a tenth beside compute."""
    parts = [
        ("h2d", "model.layers.0", 0.0, 0.2),
        ("compute", "forward model.layers.0", 0.2, 0.4),
        ("h2d", "model.layers.1", 0.3, 0.5),
        ("compute", "forward model.layers.1", 0.5, 0.6),
        ("compute", "backward model.layers.1", 0.6, 0.9),
        ("d2h", "model.layers.1", 0.85, 0.95),
    ]
    return [Span(lane, name, begin + first * seconds, begin + last * seconds) for lane, name, first, last in parts]


def write_run(
    path: Path,
    lines: Sequence[Mapping[str, Any]],
    *,
    config: Mapping[str, Any] = CONFIG,
    plan: Mapping[str, Any] = PLAN,
    with_trace: bool = True,
) -> Path:
    """Write a run folder like train. The trace keeps the first three steps, the last ten and the slowest."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.yaml").write_text(yaml.safe_dump(dict(config)))
    (path / "plan.json").write_text(json.dumps(plan))
    env = {"world_size": 1, "host": "elsewhere", "pids": [1], "gpus": [], "cpu": {"name": "A CPU", "num_cores": 2}}
    (path / "env.json").write_text(json.dumps(env))
    write_rows(path / "metrics.jsonl", lines)
    if with_trace:
        trace, now = Trace(path / "trace.json.gz", LANES, is_serial=False), 100.0
        for each in lines:
            seconds = each["step_seconds"]
            trace.step(each["step"], now, now + seconds, spans(now, seconds))
            now += 1.25 * seconds
        trace.write()
    return path


def usual(num_steps: int = 40, **more: Any) -> list[dict[str, Any]]:
    """Return lines with three slow first steps; among the others step 17 is the slowest."""
    return [
        line(
            step,
            2.0 if step <= 3 else 0.9 if step == 17 else 0.4 + 0.001 * ((7 * step) % 13),
            lanes={"h2d": (0.16, 0.08), "d2h": (0.04, 0.02), "update": (0.01, 0.0)},
            **({"eval_loss": 7 - step / 20} if step % 10 == 0 else {}),
            **more,
        )
        for step in range(1, num_steps + 1)
    ]
