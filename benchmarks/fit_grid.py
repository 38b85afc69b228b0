"""The plans behind the page "Will it fit?": models, cards, numbers of cards, hosts, a disk or none, three methods.

python -m benchmarks.fit_grid              # plans what fit.json lacks: an hour on two cores in all; then make docs
python -m benchmarks.fit_grid --again      # plans everything again, such as after a change in the forecast

Each model and method goes to fit.partial.json at once, and the next run continues from there. `--models` and `--cards`
choose a part to plan, beside the plans of the file. `--workers` counts processes.

Every plan has 16 rows with 4096 tokens a step, in bf16, with AdamW and clipping, everything else `auto`, as in
`benchmarks/plan_tables.py`. A card computes at most 4 rows at a time, or 1 where 4 do not fit. A host keeps 4 GiB for
the system. A plan with a disk is made only where the plan without one does not fit. The plan of the largest host serves
every smaller host that has room for it. The shapes of the models are presets (`offload/app/config/presets.py`).
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.plan_tables import SETTINGS, SYSTEM_GIB
from offload.app.config.command_line import say
from offload.app.config.config import Config
from offload.app.config.presets import PRESETS
from offload.app.hf.models import quiet_transformers
from offload.errors import OffloadError
from offload.extras.plan.alternatives import place
from offload.extras.plan.forecast import Forecast, Forecaster
from offload.extras.plan.machine_files import read_machine
from offload.machine.hardware import Hardware

SUMMARY = "the plans behind the page about which models fit"
RESULT = harness.RESULTS / "fit.json"
PARTIAL = RESULT.with_name("fit.partial.json")
COMMAND = "python -m benchmarks.fit_grid"
GIB = 1 << 30
MAX_MICRO_ROWS = 4
HOST_SHARE = 0.95
"""The plan of the largest host is also the plan of a host if it takes at most this share of the host memory."""

MODELS: dict[str, dict[str, Any]] = {
    # Without a quantization: frozen bases of all models are planned alike, in bf16 or nf4.
    name: {key: value for key, value in PRESETS[name.lower()].items() if key != "quantization_config"}
    for name in (
        "SmolLM2-135M", "SmolLM2-1.7B", "Llama-3.2-1B", "Llama-3.2-3B", "Llama-3.1-8B", "Llama-3.1-70B", "Qwen3-0.6B",
        "Qwen3-1.7B", "Qwen3-4B", "Qwen3-8B", "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B", "Mistral-7B",
        "Mistral-Nemo-12B", "Mistral-Small-24B", "Mixtral-8x7B", "Gemma-2-9B", "Gemma-3-4B", "Phi-4", "gpt-oss-20b",
    )
}  # fmt: skip
_LORA = {"lora.rank": 16, "lora.alpha": 32, "lora.target_modules": "all-linear"}
METHODS: dict[str, dict[str, Any]] = {"full": {}, "lora": _LORA, "nf4": _LORA | {"offload.frozen_weights": "nf4"}}
SMALL = ("rtx-4070",)
"""One card in a small desktop."""
DESKTOP = ("rtx-3090", "rtx-4080", "rtx-4090", "rtx-5090")
SERVER = ("l40s", "a100-80", "h100", "h200", "b200")
OWN_HOST = ("gb10",)
"""One card with its own host memory, in one size."""
CARDS = (*SMALL, *DESKTOP, *SERVER, *OWN_HOST)
COUNTS = (1, 2, 8)
HOSTS_GIB = (16, 32, 64, 128, 256, 1024)


@functools.cache
def machine(card: str) -> Hardware:
    """Return a description: one card and its machine."""
    return read_machine(card)


@functools.cache
def budget(card: str) -> int:
    """Return the device memory that a plan may use."""
    return (
        Forecaster(Config.load(None, {}), 1).predict(Config.load(None, {}), machine(card)).memory.budgets["device"] or 0
    )


def hosts(card: str, count: int) -> list[int]:
    """Return the sizes of host memory for a number of cards in GiB; empty for a number that is not in the grid."""
    if card in OWN_HOST:
        own = machine(card).host_bytes // GIB + SYSTEM_GIB
        return [own] if count == 1 else []
    if card in SMALL:
        return [size for size in HOSTS_GIB if size <= 128] if count == 1 else []
    if card in DESKTOP:
        return [size for size in HOSTS_GIB if count in (1, 2) and 32 * count <= size <= 256 * count]
    return [size for size in HOSTS_GIB if count in (1, 8) and 64 * count <= size <= max(1024, 256 * count)]


def points(cards: Sequence[str]) -> Iterator[tuple[str, int, list[int]]]:
    """Yield cards, numbers of cards, and sizes of host memory."""
    for card in cards:
        for count in COUNTS:
            if sizes := hosts(card, count):
                yield card, count, sizes


def described() -> dict[str, Any]:
    """Return the cards of the result file, with the sizes of the memories in GiB."""
    cards: dict[str, Any] = {}
    for card, count, sizes in points(CARDS):
        hardware = machine(card)
        about = {
            "name": hardware.name,
            "memory_gib": _gib(hardware.device_bytes or 0),
            "device_gib": _gib(budget(card)),
            "disk_gib": round((hardware.disk_bytes or 0) / GIB),
            "shares_memory": hardware.shares_memory,
            "hosts_gib": {},
        }
        cards.setdefault(card, about)["hosts_gib"][str(count)] = sizes
    return cards


def flags(method: str, rows: int, count: int, has_disk: bool) -> dict[str, Any]:
    """Return the settings of a plan beside the model."""
    disk = {"offload.nvme_dir": ["/nvme"]} if has_disk else {}
    plain = {key: value for key, value in SETTINGS.items() if key != "offload.nvme_dir"}
    return (
        {**plain, "train.micro_batch_size": min(rows, SETTINGS["train.batch_size"] // count)} | METHODS[method] | disk
    )


class CannotPlanError(Exception):
    """There is no forecast for a step."""


class ModelPlans:
    """Plans for one model and one method. Structures and workloads are measured once."""

    def __init__(self, name: str, method: str, folder: Path) -> None:
        path = folder / name  # a folder: frozen weights keep the dtype of the checkpoint
        path.mkdir()
        (path / "config.json").write_text(json.dumps(MODELS[name] | {"dtype": "bfloat16"}), encoding="utf-8")
        self._method, self._path = method, str(path)
        self._forecaster = Forecaster(self._config(1, 1, False), 1)
        self.num_plans = 0

    @property
    def num_parameters(self) -> int:
        """Parameters of the model, with the adapter."""
        return self._forecaster.predict(
            self._config(MAX_MICRO_ROWS, 1, False), machine("h100"), times=False
        ).num_parameters

    def _config(self, rows: int, count: int, has_disk: bool) -> Config:
        return Config.load(None, {"model.path": self._path, **flags(self._method, rows, count, has_disk)})

    def plan(self, card: str, count: int, host_gib: int, has_disk: bool, rows: int = MAX_MICRO_ROWS) -> Forecast:
        """Return the plan for one point, as `offload plan` makes it; without times if it does not fit."""
        hardware = machine(card).with_(host_bytes=(host_gib - SYSTEM_GIB) * GIB, num_devices=count)
        self._forecaster.num_ranks = count
        self.num_plans += 1
        config, forecaster = self._config(rows, count, has_disk), self._forecaster
        found = forecaster.predict(config, hardware, times=False)
        if not found.fits and not (other := place(forecaster, found, times=False)).fits:
            return other
        return place(forecaster, forecaster.predict(config, hardware))

    def row(self, card: str, count: int, host_gib: int, has_disk: bool) -> list[Any]:
        """Return the row for one point, as the result file has it.

        Fits: host GiB, disk or not, rows at a time, tokens a second, GiB on a device, on the host, on the disk, lane.
        Does not fit: host GiB, disk or not, 0, missing GiB on a device, the host, the disk.
        """
        for rows in (MAX_MICRO_ROWS, 1):
            found = self.plan(card, count, host_gib, has_disk, rows)
            if found.fits or "device" not in found.memory.shortfalls:
                break
        at = [host_gib, int(has_disk)]
        memory, timing = found.memory, found.timing
        if found.fits and timing is None:
            raise CannotPlanError("; ".join(found.notes))
        if timing is None or not found.fits:
            short = memory.shortfalls
            missing = (short.get("device", 0), short.get("cpu", 0) * count, short.get("nvme", 0) * count)
            return [*at, 0, *(_gib(each) for each in missing)]
        held = (memory.total("device"), memory.total("cpu", "pinned") * count, memory.total("nvme") * count)
        rate = float(f"{timing.tokens_per_second:.3g}")
        rows = found.config.train.micro_batch_size or 0
        return [*at, rows, int(rate) if rate >= 100 else rate, *(_gib(each) for each in held), timing.bound_by]

    def rows(self, card: str, count: int, sizes: list[int]) -> list[list[Any]]:
        """Return the rows of one number of cards, without points that change nothing."""
        largest = self.row(card, count, sizes[-1], False)
        found = []
        for size in sizes[:-1]:
            if largest[2] and largest[5] <= HOST_SHARE * (size - SYSTEM_GIB):
                return [*found, [size, *largest[1:]]]
            found.append(self.row(card, count, size, False))
            if not found[-1][2]:
                found.append(self.row(card, count, size, True))
        return [*found, largest] if largest[2] else [*found, largest, self.row(card, count, sizes[-1], True)]


def _gib(num_bytes: int) -> float:
    """Return a size in GiB with three digits."""
    size = float(f"{num_bytes / GIB:.3g}")
    return int(size) if size >= 100 or size == int(size) else size


def plan_all(name: str, method: str, cards: Sequence[str]) -> tuple[dict[str, Any], int, float]:
    """Return the rows for a model and a method by card and number of cards, the number of plans, and the seconds."""
    import torch

    torch.set_num_threads(1)
    quiet_transformers()
    begin = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        plans = ModelPlans(name, method, Path(folder))
        found: dict[str, Any] = {"parameters": plans.num_parameters, "cards": {}}
        try:
            for card, count, sizes in points(cards):
                found["cards"].setdefault(card, {})[str(count)] = plans.rows(card, count, sizes)
        except (CannotPlanError, OffloadError) as error:
            found = {"parameters": found["parameters"], "refusal": str(error).replace(f"{folder}/", "")}
    return found, plans.num_plans, time.process_time() - begin


def lacking_cards(found: dict[str, Any] | None, cards: Sequence[str]) -> Sequence[str]:
    """Return the cards without plans for a model and a method: none after a refusal."""
    if found is None:
        return cards
    return () if found.get("refusal") else tuple(card for card in cards if card not in found["cards"])


def written(document: dict[str, Any]) -> str:
    """Return the text of the result file: one line for a model and a method."""
    words = {"separators": (",", ":")}
    lines = [f'"{key}": {json.dumps(value)}' for key, value in document.items() if key != "models"]
    models = []
    for name in sorted(document["models"], key=list(MODELS).index):
        methods = document["models"][name]
        told = ",\n".join(
            f'  "{method}": {json.dumps(methods[method], **words)}' for method in METHODS if method in methods
        )
        models.append(f' "{name}": {{\n{told}\n }}')
    return "{\n" + ",\n".join(lines) + ',\n"models": {\n' + ",\n".join(models) + "\n}\n}\n"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("--cards", nargs="+", choices=CARDS, default=CARDS, metavar="NAME")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--again", action="store_true", help="plan the models again on the cards")


def run(arguments: argparse.Namespace) -> harness.Page:
    """Plan the missing points of the models and cards; write the result file once all are there."""
    document = begun(arguments)
    planned = document["models"]

    def missing() -> dict[tuple[str, str], Sequence[str]]:
        keys = itertools.product(arguments.models, METHODS)
        cards = {key: lacking_cards(planned.get(key[0], {}).get(key[1]), arguments.cards) for key in keys}
        return {key: lacking for key, lacking in cards.items() if lacking}

    with ProcessPoolExecutor(arguments.workers, mp_context=get_context("spawn")) as pool:
        tasks = {pool.submit(plan_all, *key, lacking): key for key, lacking in missing().items()}
        for number, task in enumerate(as_completed(tasks), start=1):
            name, method = tasks[task]
            try:
                found, num_plans, seconds = task.result()
            except Exception as error:  # the next run tries it again
                say(f"{number} of {len(tasks)}: {name}, {method}: {error!r}")
                continue
            methods = planned.setdefault(name, {})
            cards = methods.get(method, {}).get("cards", {}) | found.get("cards", {})
            methods[method] = found | {"cards": {card: cards[card] for card in CARDS if card in cards}}
            PARTIAL.write_text(written(document))
            say(f"{number} of {len(tasks)}: {name}, {method}: {num_plans} plans, {seconds:.0f} s of CPU")
    if missing():
        return harness.Page(f"plans are missing; {PARTIAL.name} has the others", document)
    RESULT.write_text(written(document))
    PARTIAL.unlink(missing_ok=True)
    return harness.Page(f"{RESULT.name} is complete", document)


def begun(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the result file so far, without the plans to make again."""
    before = json.loads((PARTIAL if PARTIAL.is_file() else RESULT).read_text())["models"]
    for name in arguments.models if arguments.again else ():
        for plans in before.get(name, {}).values():
            plans.pop("refusal", None)
            plans["cards"] = {card: rows for card, rows in plans["cards"].items() if card not in arguments.cards}
    return {
        "command": COMMAND,
        "settings": {method: flags(method, MAX_MICRO_ROWS, 1, False) for method in METHODS},
        "system_gib": SYSTEM_GIB,
        "cards": described(),
        "models": before,
    }


if __name__ == "__main__":
    harness.begin(sys.modules[__name__])
