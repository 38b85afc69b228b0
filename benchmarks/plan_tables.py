"""Forecasts for models, cards and hosts of common sizes: the page of plans, and the tables of the README.

python -m benchmarks.plan_tables models > docs/plans.md                           # seconds a plan
python -m benchmarks.plan_tables readme --out benchmarks/results/readme.json      # minutes; then python docs/make.py

Plans are for all parameters, with AdamW and clipping, in rows of 4096 tokens, by the described machines
(`offload/extras/plan/described/`). Shapes are presets (`offload/app/config/presets.py`); nothing is downloaded. One row
of the README by command, here the first one, with 917 tokens a second:

offload plan --model.path Qwen/Qwen3-14B --hardware rtx-4090 --host-memory 252GiB \\
    --data.sequence_length 4096 --train.batch_size 16 --train.micro_batch_size 4

A host has 4 GiB less than the table says, because the system keeps them; with all 256 GiB, the plan says some 900.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import harness
from offload.app.config.command_line import say
from offload.app.config.config import Config
from offload.app.config.presets import PRESETS
from offload.app.hf.models import quiet_transformers
from offload.errors import format_bytes
from offload.extras.plan.alternatives import MAX_FORECASTS, Tries, apply_change, find_fix, place, to_flags
from offload.extras.plan.forecast import Forecast, Forecaster
from offload.extras.plan.machine_files import read_machine
from offload.machine.hardware import Hardware

SUMMARY = "forecasts for models, cards and hosts of common sizes"
QUICK = {"models": ["Llama-3.1-8B"]}
SEQUENCE = 4096
SYSTEM_GIB = 4
"""Host memory left to the system."""
Changes = Iterable[Mapping[str, Any]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("table", choices=TABLES)
    parser.add_argument("--models", nargs="+", metavar="NAME", help="some of the models alone")


def run(arguments: argparse.Namespace) -> harness.Page:
    """Return the table."""
    quiet_transformers()
    with tempfile.TemporaryDirectory() as folder:
        return TABLES[arguments.table](arguments.models, Path(folder))


def forecasters_of(
    folder: Path, shapes: Mapping[str, Mapping[str, Any]], settings: Mapping[str, Any]
) -> dict[str, Forecaster]:
    """Return a forecaster for each model; the shapes stay in the folder."""
    found = {}
    for name, shape in shapes.items():
        path = folder / f"{name}.json"
        path.write_text(json.dumps(shape), encoding="utf-8")
        found[name] = Forecaster(Config.load(None, {"model.path": str(path), **settings}), 1)
    return found


def fastest(forecaster: Forecaster, hardware: Hardware, changes: Changes) -> Forecast | None:
    """Return the fastest fitting plan with one of the changes; None without one."""
    configs = [apply_change(forecaster.config, change) for change in changes]
    plans = [place(forecaster, forecaster.predict(config, hardware)) for config in configs]
    fitting = [plan for plan in plans if plan.fits and plan.timing is not None]
    return max(fitting, key=lambda plan: plan.timing.tokens_per_second, default=None)


# -- the page of plans ---------------------------------------------------------------------------------------

MODELS: dict[str, dict[str, Any]] = {
    name: PRESETS[name.lower()] for name in ("Llama-3.1-8B", "Qwen3-14B", "Qwen3-32B", "Llama-3.1-70B", "Qwen3-30B-A3B")
}
GPUS = {"24 GB (RTX 4090)": "rtx-4090", "80 GB (H100)": "h100", "141 GB (H200)": "h200"}
HOSTS_GIB = (64, 128, 512)
SETTINGS = {
    "data.sequence_length": SEQUENCE,
    "train.batch_size": 16,
    "train.micro_batch_size": 1,
    "offload.nvme_dir": ["/nvme"],
}
PLANS_HEAD = """# Plans

What training of all parameters of five models would hold and take: AdamW with fp32 states, bf16 over split masters,
clipping, 16 rows of 4096 tokens a step, one at a time, one GPU, a disk (`--offload.nvme_dir`), everything else `auto`,
as the search places it, or with the smallest change that fits, where that does not. A host has 4 GiB less, which are
the system's. Later steps use the rest of the device's budget too, for larger slots. GPUs, links, hosts' memory and
disks are those of `offload/extras/plan/described/`, where a figure has its source; times are forecast, not measured.
The share is of the products that the GPU could make. Made by `python -m benchmarks.plan_tables models > docs/plans.md`;
`python -m offload.plan` lists one of them by name.
"""
TIERS = {"device": ("device",), "host": ("cpu", "pinned"), "disk": ("nvme",)}


def plans_page(models: list[str] | None, folder: Path) -> harness.Page:
    """Return the page: a section for a model, a row for a GPU, a column for a size of host memory."""
    shapes = {name: shape for name, shape in MODELS.items() if models is None or name in models}
    lines, figures = [PLANS_HEAD], {}
    for name, forecaster in forecasters_of(folder, shapes, SETTINGS).items():
        figures[name] = {gpu: planned_cells(forecaster, forecaster.config, its) for gpu, its in GPUS.items()}
        titles = ["", *(f"host {size} GiB" for size in HOSTS_GIB)]
        cells = ([gpu, *row] for gpu, row in figures[name].items())
        lines += [f"## {name}\n", harness.table(titles, *cells), ""]
        say(name)
    return harness.Page("\n".join(lines) + "\n", figures)


def planned_cells(forecaster: Forecaster, config: Config, described: str) -> list[str]:
    """Return the table cells of one row: a machine with each size of host memory."""
    machine = read_machine(described)
    hosts = [machine.with_(host_bytes=(size - SYSTEM_GIB) << 30) for size in HOSTS_GIB]
    return [fitting(forecaster, config, hardware) for hardware in hosts]


def fitting(forecaster: Forecaster, config: Config, hardware: Hardware) -> str:
    """Return the table cell of a plan, or of the nearest plan that fits."""
    found = place(forecaster, forecaster.predict(config, hardware))
    change = {} if found.fits else find_fix(forecaster, found, Tries(forecaster, MAX_FORECASTS))
    if not change:
        return plans_cell(found)
    changed = place(forecaster, forecaster.predict(apply_change(config, change), hardware))
    return f"`{to_flags(change)}`: {plans_cell(changed)}"


def plans_cell(found: Forecast) -> str:
    """Return the table cell of one plan."""
    if not found.fits or found.timing is None:
        return "does not fit"
    sizes = ", ".join(f"{name} {format_bytes(size)}" for name, size in held_bytes(found).items() if size)
    timing = found.timing
    return f"{timing.tokens_per_second:,.0f} tokens/s ({100 * timing.mfu:.0f}%), {timing.bound_by}-bound; {sizes}"


def held_bytes(found: Forecast) -> dict[str, int]:
    """Return the planned bytes by place."""
    return {name: found.memory.total(*tiers) for name, tiers in TIERS.items()}


# -- the tables of the README --------------------------------------------------------------------------------

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


def readme_tables(models: list[str] | None, folder: Path) -> harness.Page:
    """Return the rows of both tables."""
    chosen = [row for row in ROWS if models is None or row[0] in models]
    shapes = {name: MODELS[name] for name in dict.fromkeys(model for model, *_ in chosen)}
    forecasters = forecasters_of(folder, shapes, SETTINGS)
    held = {
        option: {name: on_the_host(forecaster, change) for name, forecaster in forecasters.items()}
        for option, change in OPTIONS.items()
    }
    figures = {
        "tokens_a_step": SETTINGS["train.batch_size"] * SEQUENCE,
        "parameters": {name: harness.num_parameters(shape) for name, shape in (shapes | MEASURED).items()},
        "rows": [readme_row(forecasters[row[0]], *row) for row in chosen],
        "held": held,
    }
    return harness.Page(json.dumps(figures, indent=1), figures)


def readme_row(forecaster: Forecaster, model: str, gpu: str, host_gib: int, budget: str | None) -> dict[str, Any]:
    """Return one row of the table of speeds, for the fastest micro-batch."""
    hardware = read_machine(gpu).with_(host_bytes=(host_gib - SYSTEM_GIB) << 30)
    limit = {} if budget is None else {"offload.device_memory": budget}
    plan = fastest(forecaster, hardware, ({"train.micro_batch_size": rows} | limit for rows in MICRO_ROWS))
    row = {"model": model, "gpu": hardware.name, "host_gib": host_gib, "device_memory": budget}
    if plan is None or plan.timing is None:
        return row | {"fits": False}
    return row | {
        "fits": True,
        "device_bytes": hardware.device_bytes,
        "tokens_per_second": plan.timing.tokens_per_second,
        "bound_by": plan.timing.bound_by,
        "mfu": plan.timing.mfu,
        "micro_rows": plan.config.train.micro_batch_size,
        "placed": plan.placement_flags,
        "held_bytes": held_bytes(plan),
    }


def on_the_host(forecaster: Forecaster, option: Mapping[str, Any]) -> dict[str, int]:
    """Return the planned bytes in host memory and on disk."""
    config = apply_change(forecaster.config, SHORT | ON_THE_HOST | option)
    hardware = read_machine("rtx-4090").with_(host_bytes=4 << 40, disk_bytes=8 << 40)
    held = held_bytes(forecaster.predict(config, hardware, times=False))
    return {"host": held["host"], "disk": held["disk"]}


TABLES = {"models": plans_page, "readme": readme_tables}

if __name__ == "__main__":
    harness.begin(sys.modules[__name__])
