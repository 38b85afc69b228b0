"""The forecasts in the README: models, cards and hosts that many people have.

python -m benchmarks.readme_plans > benchmarks/results/readme.json     # minutes; then python docs/make.py

One row by command, here the first one, with 920 tokens a second:

offload plan --model.path Qwen/Qwen3-14B --hardware rtx-4090 --host-memory 252GiB \\
    --data.sequence_length 4096 --train.batch_size 16 --train.micro_batch_size 4

A host has 4 GiB less than the table says, because the system keeps them; with all 256 GiB, the plan says 900.

Like `benchmarks.plan_models`: all parameters, AdamW with fp32 states over split bf16 masters, clipping, rows of 4096
tokens, a disk, everything else `auto`. Each forecast is for the fastest fitting micro-batch of 4, 2 and 1 rows.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from benchmarks.plan_models import MODELS, SETTINGS
from offload.app.config.config import Config
from offload.app.config.presets import PRESETS
from offload.app.hf.models import quiet_transformers
from offload.extras.plan.alternatives import apply_change, place
from offload.extras.plan.forecast import Forecast, Forecaster
from offload.extras.plan.machine_files import read_machine
from offload.machine.hardware import Hardware

SYSTEM_GIB = 4
"""Host memory left to the system."""
MICRO_ROWS = (4, 2, 1)
ROWS: tuple[tuple[str, str, int, str | None], ...] = (
    ("Qwen3-14B", "rtx-4090", 256, None),
    ("Qwen3-14B", "rtx-4090", 128, None),
    ("Llama-3.1-8B", "rtx-4090", 128, None),
    ("Llama-3.1-8B", "rtx-4090", 64, None),
    ("Llama-3.1-8B", "rtx-4090", 128, "14GiB"),
    ("Qwen3-32B", "h100", 512, None),
)
"""Model, machine, host GiB, budget for the device (None: all of the card)."""
MEASURED = {"Llama-3.2-3B": PRESETS["3b"]}
"""Models with measured steps alone."""
ON_THE_HOST: dict[str, Any] = {"offload.parameters": "cpu", "offload.optimizer": "cpu", "offload.update": "cpu"}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no clipping": {"train.max_grad_norm": None},
    "bf16 moments": {"optimizer.states": "bf16"},
    "int8 moments": {"optimizer.states": "int8"},
    "optimizer on disk": {"offload.optimizer": "nvme"},
    "all on disk": {"offload.parameters": "nvme", "offload.optimizer": "nvme"},
}
"""Rows in the table of host memory: settings beside ON_THE_HOST."""
SHORT = {"train.batch_size": 1, "data.sequence_length": 256}
"""Few tokens for the table of host memory."""


def best(forecaster: Forecaster, hardware: Hardware, budget: str | None) -> Forecast | None:
    """Return the fastest fitting plan; None without one."""
    found = []
    for rows in MICRO_ROWS:
        change: dict[str, Any] = {"train.micro_batch_size": rows}
        if budget is not None:
            change["offload.device_memory"] = budget
        plan = place(forecaster, forecaster.predict(apply_change(forecaster.config, change), hardware))
        found.append(plan)
    fitting = [each for each in found if each.fits and each.timing is not None]
    return max(fitting, key=lambda each: each.timing.tokens_per_second if each.timing else 0.0, default=None)


def told(model: str, hardware: Hardware, host_gib: int, budget: str | None, plan: Forecast | None) -> dict[str, Any]:
    """Return one row of the result file."""
    row = {"model": model, "gpu": hardware.name, "host_gib": host_gib, "device_memory": budget}
    if plan is None or plan.timing is None:
        return row | {"fits": False}
    memory = plan.memory
    held = {"device": memory.total("device"), "host": memory.total("cpu", "pinned"), "disk": memory.total("nvme")}
    return row | {
        "fits": True,
        "device_bytes": hardware.device_bytes,
        "tokens_per_second": plan.timing.tokens_per_second,
        "bound_by": plan.timing.bound_by,
        "mfu": plan.timing.mfu,
        "micro_rows": plan.config.train.micro_batch_size,
        "placed": plan.placement_flags,
        "held_bytes": held,
    }


def host_bytes(forecaster: Forecaster, option: dict[str, Any]) -> dict[str, int]:
    """Return the planned bytes in host memory and on disk."""
    config = apply_change(forecaster.config, SHORT | ON_THE_HOST | option)
    hardware = read_machine("rtx-4090").with_(host_bytes=4 << 40, disk_bytes=8 << 40)
    memory = forecaster.predict(config, hardware, times=False).memory
    return {"host": memory.total("cpu", "pinned"), "disk": memory.total("nvme")}


def num_parameters(shape: dict[str, Any]) -> int:
    """Return the parameters of a model."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
    return sum(each.numel() for each in model.parameters())


def main() -> None:
    quiet_transformers()
    shapes = {name: MODELS[name] for name in dict.fromkeys(model for model, *_ in ROWS)}
    parameters = {name: num_parameters(shape) for name, shape in (shapes | MEASURED).items()}
    forecasters, rows = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for name, shape in shapes.items():
            path = Path(folder) / f"{name}.json"
            path.write_text(json.dumps(shape), encoding="utf-8")
            forecasters[name] = Forecaster(Config.load(None, {"model.path": str(path), **SETTINGS}), 1)
        held = {
            option: {name: host_bytes(forecaster, change) for name, forecaster in forecasters.items()}
            for option, change in OPTIONS.items()
        }
        for model, gpu, host_gib, budget in ROWS:
            hardware = read_machine(gpu).with_(host_bytes=(host_gib - SYSTEM_GIB) << 30)
            rows.append(told(model, hardware, host_gib, budget, best(forecasters[model], hardware, budget)))
    tokens = SETTINGS["train.batch_size"] * SETTINGS["data.sequence_length"]
    print(json.dumps({"tokens_a_step": tokens, "parameters": parameters, "rows": rows, "held": held}, indent=1))


if __name__ == "__main__":
    main()
