"""The plans behind the page "Will it fit?": models, cards, numbers of cards, hosts, a disk or none, three methods.

`python -m benchmarks.forecasts --only fit` makes them. Every plan has 16 rows with 4096 tokens a step, in bf16, with
AdamW and clipping, everything else `auto`, as in `benchmarks/plan_tables.py`. A card computes at most 4 rows at a time,
or 1 where 4 do not fit. A plan with a disk is made only where the plan without one does not fit. The plan for the
largest host serves every smaller one that has room for it. Shapes are presets (`offload/app/config/presets.py`).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import harness
from benchmarks.plan_tables import SETTINGS, scratch
from offload.app.config.config import Config
from offload.app.config.presets import PRESETS
from offload.errors import OffloadError
from offload.extras.plan.alternatives import place
from offload.extras.plan.forecast import Forecast, Forecaster
from offload.extras.plan.machine_files import read_machine
from offload.machine.hardware import SYSTEM_BYTES, Hardware

GIB = 1 << 30
SYSTEM_GIB = SYSTEM_BYTES // GIB
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
LARGE = (
    "Qwen3-14B", "Qwen3-32B", "Qwen3-30B-A3B", "Mistral-Nemo-12B", "Mistral-Small-24B", "Mixtral-8x7B", "Gemma-2-9B",
    "Phi-4", "gpt-oss-20b", "Llama-3.1-70B",
)  # fmt: skip
"""Models without plans for such a card."""
DESKTOP = ("rtx-3090", "rtx-4080", "rtx-4090", "rtx-5090")
SERVER = ("l40s", "a100-80", "h100", "h200", "b200")
OWN_HOST = ("gb10",)
"""One card with its own host memory, in one size."""
CARDS = (*SMALL, *DESKTOP, *SERVER, *OWN_HOST)
FIRST = ("rtx-4070", "rtx-4080", "rtx-4090", "rtx-5090", "h100")
"""Cards in the tables of the page."""
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
        own = machine(card).all_host_bytes // GIB
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
        self.folder = folder
        path = folder / name  # a folder: frozen weights keep the dtype of the checkpoint
        path.mkdir(exist_ok=True)
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
        hardware = machine(card).with_host_memory(host_gib * GIB).with_(num_devices=count)
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


@functools.lru_cache(maxsize=1)
def plans_of(name: str, method: str) -> ModelPlans:
    """Return the plans for a model and a method; one of them at a time."""
    folder = scratch() / method
    folder.mkdir(exist_ok=True)
    return ModelPlans(name, method, folder)


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


class Points:
    """The entries of the page: a model and a method on a card."""

    path = harness.RESULTS / "fit.json"
    page = None

    def names(self) -> dict[str, str]:
        """Return the described machine by name of an entry. The cards of the page's tables come first."""
        cards = sorted(CARDS, key=lambda card: card not in FIRST)
        return {
            f"{name}, {method}, {card}": card
            for card in cards
            for name in MODELS
            for method in METHODS
            if card not in SMALL or name not in LARGE
        }

    def make(self, name: str) -> dict[str, Any]:
        """Return the rows by number of cards, or a refusal."""
        import torch

        torch.set_num_threads(1)
        model, method, card = name.split(", ")
        plans = plans_of(model, method)
        made: dict[str, Any] = {"parameters": plans.num_parameters}
        try:
            return made | {"rows": {str(count): plans.rows(card, count, sizes) for _, count, sizes in points([card])}}
        except (CannotPlanError, OffloadError) as error:
            return made | {"refusal": str(error).replace(f"{plans.folder}/", "")}

    def entry(self, document: Mapping[str, Any], name: str) -> Any:
        """Return the rows of an entry; None: not planned yet."""
        model, method, card = name.split(", ")
        found = document.get("models", {}).get(model, {}).get(method, {})
        return found.get("refusal") or found.get("cards", {}).get(card)

    def put(self, document: dict[str, Any], name: str, made: Mapping[str, Any]) -> None:
        """Put an entry into the document."""
        model, method, card = name.split(", ")
        found = document.setdefault("models", {}).setdefault(model, {}).setdefault(method, {"cards": {}})
        found["parameters"] = made["parameters"]
        if "refusal" in made:
            found |= {"refusal": made["refusal"], "cards": {}}
            return
        found.pop("refusal", None)
        cards = found["cards"] | {card: made["rows"]}
        found["cards"] = {each: cards[each] for each in CARDS if each in cards}

    def written(self, document: Mapping[str, Any]) -> str:
        """Return the text of the result file."""
        known = {
            "settings": {method: flags(method, MAX_MICRO_ROWS, 1, False) for method in METHODS},
            "system_gib": SYSTEM_GIB,
            "cards": described(),
        }
        return written({**known, "models": document["models"]})
