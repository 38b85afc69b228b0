"""Plans for well-known models on GPUs and hosts of several sizes.

python benchmarks/plan_models.py > docs/plans.md

The configurations are presets (`offload/app/config/presets.py`); nothing is downloaded.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from offload.app.config.config import Config
from offload.app.config.presets import PRESETS
from offload.app.hf.models import quiet_transformers
from offload.errors import format_bytes
from offload.extras.plan.alternatives import apply_change, find_fix, place, to_flags
from offload.extras.plan.forecast import Forecast, Forecaster
from offload.extras.plan.machine_files import read_machine
from offload.machine.hardware import Hardware

MODELS: dict[str, dict[str, Any]] = {
    name: PRESETS[name.lower()] for name in ("Llama-3.1-8B", "Qwen3-14B", "Qwen3-32B", "Llama-3.1-70B", "Qwen3-30B-A3B")
}
GPUS = {"24 GB (RTX 4090)": "rtx-4090", "80 GB (H100)": "h100", "141 GB (H200)": "h200"}
HOSTS_GIB = (64, 128, 512)
_SYSTEM_BYTES = 4 << 30
SETTINGS = {
    "data.sequence_length": 4096,
    "train.batch_size": 16,
    "train.micro_batch_size": 1,
    "offload.nvme_dir": ["/nvme"],
}
_HEAD = """# Plans

What training of all parameters of five models would hold and take: AdamW with fp32 states, bf16 over split masters,
clipping, 16 rows of 4096 tokens a step, one at a time, one GPU, a disk (`--offload.nvme_dir`), everything else `auto`,
as the search places it, or with the smallest change that fits, where that does not. A host has 4 GiB less, which are
the system's. GPUs, links, hosts' memory and disks are those of `offload/extras/plan/described/`, where a figure has its
source; times are forecast, not measured. The share is of the products that the GPU could make. Made by
`python benchmarks/plan_models.py > docs/plans.md`; `python -m offload.plan` lists one of them by name.
"""
_TIERS = {"device": ("device",), "host": ("cpu", "pinned"), "disk": ("nvme",)}


def cell(found: Forecast) -> str:
    """Return the table cell of one plan."""
    if not found.fits or found.timing is None:
        return "does not fit"
    held = {name: found.memory.total(*tiers) for name, tiers in _TIERS.items()}
    sizes = ", ".join(f"{name} {format_bytes(num_bytes)}" for name, num_bytes in held.items() if num_bytes)
    timing = found.timing
    return f"{timing.tokens_per_second:,.0f} tokens/s ({100 * timing.mfu:.0f}%), {timing.bound_by}-bound; {sizes}"


def fitting(forecaster: Forecaster, config: Config, hardware: Hardware) -> str:
    """Return the table cell of a plan, or of the nearest plan that fits."""
    found = place(forecaster, forecaster.predict(config, hardware))
    change = {} if found.fits else find_fix(forecaster, found)
    if not change:
        return cell(found)
    return (
        f"`{to_flags(change)}`: {cell(place(forecaster, forecaster.predict(apply_change(config, change), hardware)))}"
    )


def planned_cells(forecaster: Forecaster, config: Config, described: str) -> list[str]:
    """Return the table cells of one row: a machine with each size of host memory."""
    machine = read_machine(described)
    hosts = [machine.with_(host_bytes=(size << 30) - _SYSTEM_BYTES) for size in HOSTS_GIB]
    return [fitting(forecaster, config, hardware) for hardware in hosts]


def main() -> None:
    quiet_transformers()
    print(_HEAD)
    longest = 0.0
    for name, shape in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "config.json"
            path.write_text(json.dumps(shape), encoding="utf-8")
            config = Config.load(None, {"model.path": str(path), **SETTINGS})
            forecaster = Forecaster(config, 1)
            print(f"## {name}\n")
            print(f"| | {' | '.join(f'host {size} GiB' for size in HOSTS_GIB)} |")
            print("|---|" + "---|" * len(HOSTS_GIB))
            for gpu, described in GPUS.items():
                begin = time.perf_counter()
                print(f"| {gpu} | {' | '.join(planned_cells(forecaster, config, described))} |", flush=True)
                longest = max(longest, time.perf_counter() - begin)
            print()
    print(f"the longest row took {longest:.2f} s", file=sys.stderr)


if __name__ == "__main__":
    main()
