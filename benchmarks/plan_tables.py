"""Forecasts for models, cards and hosts of common sizes: the page of plans, and the tables of the README.

`python -m benchmarks.forecasts` makes them. Plans are for all parameters, with AdamW and clipping, in rows of 4096
tokens, by the described machines (`offload/extras/plan/described/`). Shapes are presets
(`offload/app/config/presets.py`); nothing is downloaded. The first row of the README by command, with its tokens a
second:

offload plan --model.preset qwen3-14b --hardware rtx-4090 --host-memory 256GiB --offload.nvme_dir /tmp \\
    --data.sequence_length 4096 --train.batch_size 16 --train.micro_batch_size 2
"""

from __future__ import annotations

import atexit
import functools
import json
import tempfile
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import harness
from offload.app.config.config import Config
from offload.app.config.presets import PRESETS
from offload.errors import format_bytes
from offload.extras.plan.alternatives import MAX_FORECASTS, Tries, apply_change, find_fix, place, to_flags
from offload.extras.plan.forecast import Forecast, Forecaster
from offload.extras.plan.machine_files import read_machine
from offload.machine.hardware import Hardware

SEQUENCE = 4096
Changes = Iterable[Mapping[str, Any]]


@functools.cache
def scratch() -> Path:
    """Return a folder for configurations, which ends with the process."""
    made = tempfile.TemporaryDirectory()
    atexit.register(made.cleanup)
    return Path(made.name)


@functools.lru_cache(maxsize=1)
def forecaster_of(model: str) -> Forecaster:
    """Return the forecaster for a model of `MODELS`."""
    path = scratch() / f"{model}.json"
    path.write_text(json.dumps(MODELS[model]), encoding="utf-8")
    return Forecaster(Config.load(None, {"model.path": str(path), **SETTINGS}), 1)


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
GPUS = {"rtx-4090": "24 GB (RTX 4090)", "h100": "80 GB (H100)", "h200": "141 GB (H200)"}
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
as the search places it, or with the smallest change that fits, where that does not. Of a host's memory the system keeps
4 GiB. Later steps use the rest of the device's budget too, for larger slots. GPUs, links, hosts' memory and
disks are those of `offload/extras/plan/described/`, where a figure has its source; times are forecast, not measured.
The share is of the products that the GPU could make. Made by `python -m benchmarks.forecasts`; `python -m offload.plan`
lists one of them by name.
"""
TIERS = {"device": ("device",), "host": ("cpu", "pinned"), "disk": ("nvme",)}


OLDER = "†: planned before the last change of the machines' rates; the speed may be off by a third."


class PlanRows(harness.StoredRows):
    """The rows of docs/plans.md: a model on a card, with each size of host memory."""

    path = harness.RESULTS / "plans.json"
    page = harness.ROOT / "docs" / "plans.md"

    def names(self) -> dict[str, str]:
        """Return the described machine by name of an entry."""
        return {f"{model}, {gpu}": gpu for model in MODELS for gpu in GPUS}

    def make(self, name: str) -> list[str]:
        """Return the cells of a row."""
        model, gpu = name.split(", ")
        forecaster = forecaster_of(model)
        return planned_cells(forecaster, forecaster.config, gpu)

    def text(self, document: Mapping[str, Any], older: Collection[str]) -> str:
        """Return the page: a section for a model, a row for a GPU, a column for a size of host memory.

        older: rows to mark.
        """
        lines = [PLANS_HEAD, *([f"{OLDER}\n"] if older else [])]
        marks = {name: " †" * (name in older) for name in self.names()}
        for model in MODELS:
            titles = ["", *(f"host {size} GiB" for size in HOSTS_GIB)]
            names = {f"{model}, {gpu}": title for gpu, title in GPUS.items()}
            cells = (
                [title + marks[name], *document.get(name, ["not planned yet"] * 3)] for name, title in names.items()
            )
            lines += [f"## {model}\n", harness.table(titles, *cells), ""]
        return "\n".join(lines)


def planned_cells(forecaster: Forecaster, config: Config, described: str) -> list[str]:
    """Return the table cells of one row: a machine with each size of host memory."""
    machine = read_machine(described)
    hosts = [machine.with_host_memory(size << 30) for size in HOSTS_GIB]
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


class ReadmeRows:
    """The rows of the README's forecasts, and the columns of its table of host memory."""

    path = harness.RESULTS / "readme.json"
    page = None

    def names(self) -> dict[str, str]:
        """Return the described machine by name of an entry."""
        rows = {", ".join(map(str, row)): row[1] for row in ROWS}
        return rows | dict.fromkeys(
            (f"{model}, on the host" for model in dict.fromkeys(row[0] for row in ROWS)), "rtx-4090"
        )

    def make(self, name: str) -> Any:
        """Return a row, or the bytes held on the host by option."""
        forecaster = forecaster_of(name.partition(", ")[0])
        for row in ROWS:
            if name == ", ".join(map(str, row)):
                return readme_row(forecaster, *row)
        return {option: on_the_host(forecaster, change) for option, change in OPTIONS.items()}

    def entry(self, document: Mapping[str, Any], name: str) -> Any:
        """Return a stored row or column; None: not planned yet."""
        if name.endswith(", on the host"):
            model = name.partition(", ")[0]
            held = document.get("held", {})
            return {option: held[option][model] for option in OPTIONS} if model in held.get("default", {}) else None
        return next((row for row in document.get("rows", ()) if self._name(row) == name), None)

    def put(self, document: dict[str, Any], name: str, made: Any) -> None:
        """Put a row or a column into the document."""
        if name.endswith(", on the host"):
            for option in OPTIONS:
                document.setdefault("held", {}).setdefault(option, {})[name.partition(", ")[0]] = made[option]
            return
        rows = {self._name(row): row for row in document.get("rows", ())} | {name: made}
        document["rows"] = [rows[each] for each in self.names() if each in rows]

    def written(self, document: Mapping[str, Any]) -> str:
        """Return the text of the result file."""
        shapes = {model: MODELS[model] for model in dict.fromkeys(row[0] for row in ROWS)} | MEASURED
        known = {
            "tokens_a_step": SETTINGS["train.batch_size"] * SEQUENCE,
            "parameters": {name: harness.num_parameters(shape) for name, shape in shapes.items()},
        }
        return json.dumps(known | {key: document[key] for key in ("rows", "held") if key in document}, indent=1) + "\n"

    def _name(self, row: Mapping[str, Any]) -> str:
        return ", ".join(map(str, (row["model"], row.get("machine"), row["host_gib"], row["device_memory"])))


def readme_row(forecaster: Forecaster, model: str, gpu: str, host_gib: int, budget: str | None) -> dict[str, Any]:
    """Return one row of the table of speeds, for the fastest micro-batch."""
    hardware = read_machine(gpu).with_host_memory(host_gib << 30)
    limit = {} if budget is None else {"offload.device_memory": budget}
    plan = fastest(forecaster, hardware, ({"train.micro_batch_size": rows} | limit for rows in MICRO_ROWS))
    row = {"model": model, "machine": gpu, "gpu": hardware.name, "host_gib": host_gib, "device_memory": budget}
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
