"""The changes that a plan proposes: two tables, in the order of a search.

To propose another change, add a row. A setting that changes the training also has its words in `EFFECTS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from offload.app.config.config import Config
from offload.app.config.rules import RULE_SETTINGS
from offload.extras.large.tiles import tile_rows
from offload.extras.plan.forecast import Forecast
from offload.layout.residence import DEVICE

Change = dict[str, Any]
"""New values by setting."""
EFFECTS: Mapping[str, str] = {
    "train.max_grad_norm": "gradients are not clipped",
    "optimizer.states": "moments have fewer bits",
    "optimizer.master": "weights are rounded after each step",
    "train.precision": "compute has another precision",
    "train.compile": "compiled blocks round differently",
    "offload.frozen_weights": "frozen weights have fewer bits",
    "train.batch_size": "a step has another number of rows",
    "train.tokens_per_step": "a step has another number of rows",
    "data.sequence_length": "rows are shorter",
    "lora.rank": "an adapter is trained instead of the weights",
}
"""What a setting changes in the training. All others leave each number as it is, up to rounding in gradient sums."""
FOLDER = "FOLDER"
"""Placeholder for an unnamed disk folder."""
_SMALL_CHUNKS = 32 << 20, 1 << 20
_SHORTEST_ROW = 128
_RANK = 16
_DISK = {"offload.optimizer": "nvme"}
_DISK_WEIGHTS = {"offload.parameters": "nvme", **_DISK}
_DISK_ALL = {**_DISK_WEIGHTS, "offload.gradients": "nvme"}


def effects(change: Iterable[str]) -> str:
    """Return what a change of some settings changes in the training, in words. Empty: nothing, it is exact."""
    return " and ".join(dict.fromkeys(EFFECTS[key] for key in change if key in EFFECTS))


@dataclass(frozen=True)
class Lever:
    """A row: where it helps, the changes, and a further condition."""

    relieves: str
    """The short tier for which the changes are tried: device, host, or any."""
    changes: Change | Callable[[Forecast], Iterable[Change]]
    """One change, or changes that depend on the plan. One that sets nothing new is left out."""
    applies: Callable[[Forecast], bool] = lambda _: True


def changes(levers: Iterable[Lever], prediction: Forecast, tiers: Iterable[str] = ()) -> Iterator[Change]:
    """Yield the changes of a table for a plan, each once. tiers: only these short tiers; empty: all."""
    seen = list[Change]()
    for lever in levers:
        if (tiers and lever.relieves not in tiers) or not lever.applies(prediction):
            continue
        for change in lever.changes(prediction) if callable(lever.changes) else [lever.changes]:
            is_new = any(prediction.config.get(key) != value for key, value in change.items())
            if is_new and change not in seen:
                seen.append(change)
                yield change


def fixes(prediction: Forecast, *, exact: bool) -> list[Change]:
    """Return the changes for a run that does not fit, cheapest first: those that keep the training, or all others."""
    short = prediction.memory.shortfalls
    tiers = {"any"} if short else {"host"}  # without a shortage, a refusal: of the host
    if "cpu" in short:
        tiers.add("host")
    if "device" in short or ("cpu" in short and prediction.memory.is_one_memory):
        tiers.add("device")
    return [change for change in changes(FIXES, prediction, tiers) if exact != bool(effects(change))]


# -- conditions --------------------------------------------------------------------------------------------------------


def _is(key: str, *values: Any) -> Callable[[Forecast], bool]:
    return lambda prediction: prediction.config.get(key) in values


def _has(key: str, *values: Any) -> Callable[[Forecast], bool]:
    """Return whether the update rule has a setting, with one of the values, if given."""
    return lambda prediction: (
        key in RULE_SETTINGS[prediction.config.optimizer.name].keys
        and (not values or prediction.config.get(f"optimizer.{key}") in values)
    )


def _computes_fp32(prediction: Forecast) -> bool:
    return prediction.config.train.precision == "fp32" and prediction.hardware.rates.has_bf16


def _on_gpu(key: str, *values: Any) -> Callable[[Forecast], bool]:
    return lambda prediction: prediction.hardware.device != "cpu" and prediction.config.get(key) in values


def _has_folder(prediction: Forecast) -> bool:
    return bool(prediction.config.offload.nvme_dir)


# -- values that depend on the plan ------------------------------------------------------------------------------------


def _on_disk(prediction: Forecast) -> Iterator[Change]:
    folder: Change = {}
    if not _has_folder(prediction):
        if not prediction.hardware.rates.has_disk:
            return
        folder = {"offload.nvme_dir": (FOLDER,)}
        yield folder
    yield from ({**change, **folder} for change in (_DISK, _DISK_WEIGHTS, _DISK_ALL))


def _passes(prediction: Forecast) -> Iterator[Change]:
    train = prediction.config.train
    yield from more_passes(prediction, train.micro_batch_size or 1, train.passes)


def more_passes(prediction: Forecast, micro_rows: int, num_passes: int) -> Iterator[Change]:
    """Yield more than `num_passes` passes, of four micro-batches or one."""
    config = prediction.config
    if config.optimizer.has_gradients:
        parts = config.train.batch_size // prediction.num_groups // micro_rows
        yield from ({"train.passes": count} for count in (parts // 4, parts) if count > num_passes)


def tile(prediction: Forecast) -> Iterator[Change]:
    """Yield the tile size in tokens for one rank's part of a sequence."""
    config = prediction.config
    yield {"train.sequence_tile": tile_rows(int(config.data.sequence_length or 0) // config.train.sequence_parallel)}


def _fewer_rows(prediction: Forecast) -> Iterator[Change]:
    config, rows = prediction.config, prediction.config.train.batch_size
    while rows > prediction.num_groups:
        rows = max(prediction.num_groups, rows // 2)
        fewer = _of_rows(config, rows)
        if (config.train.micro_batch_size or 0) > rows:  # a micro-batch is never larger than the batch
            fewer["train.micro_batch_size"] = rows
        yield fewer


def _twice_the_rows(prediction: Forecast) -> Iterator[Change]:
    config = prediction.config
    twice = _of_rows(config, 2 * config.train.batch_size)
    if config.train.micro_batch_size is None:  # in micro-batches of the size that is known to fit
        twice["train.micro_batch_size"] = config.train.batch_size
    yield twice


def _of_rows(config: Config, rows: int) -> Change:
    """Return the change to a step of so many rows, in the setting in use."""
    if config.train.tokens_per_step is None:
        return {"train.batch_size": rows}
    return {"train.tokens_per_step": rows * config.row_tokens}


def _shorter_rows(prediction: Forecast) -> Iterator[Change]:
    length = int(prediction.config.data.sequence_length or 0)
    yield from ({"data.sequence_length": length // part} for part in (2, 4, 8) if length // part >= _SHORTEST_ROW)


def _adapter(_prediction: Forecast) -> Iterator[Change]:
    adapter: Change = {"lora.rank": _RANK, "lora.target_modules": ("all-linear",)}
    yield from (adapter, {**adapter, "offload.parameters": "files"})


def _each(key: str, *values: Any) -> Callable[[Forecast], Iterator[Change]]:
    return lambda _prediction: ({key: value} for value in values)


def wider_precision(prediction: Forecast) -> Iterator[Change]:
    """Yield fp32 if the machine computes bf16 more slowly, as CPUs without bf16 instructions do."""
    rates = prediction.hardware.rates
    is_bf16 = prediction.config.train.precision == "bf16"
    if is_bf16 and rates.flops_per_s and rates.flops("bf16") < rates.flops("fp32"):
        yield {"train.precision": "fp32"}


def _other_update(prediction: Forecast) -> Iterator[Change]:
    if prediction.hardware.device != "cpu" and prediction.prepared.plan.residence.common != DEVICE:
        yield {"offload.update": "device" if prediction.prepared.plan.update == "cpu" else "cpu"}


def _other_parts(prediction: Forecast) -> Iterator[Change]:
    train = prediction.config.train
    rows = train.micro_batch_size or train.batch_size // prediction.num_groups
    yield from ({"train.micro_batch_size": rows // parts} for parts in (2, 4) if rows % parts == 0)
    yield from more_passes(prediction, rows, 1)


def dispatch(prediction: Forecast) -> Iterator[Change]:
    """Yield the change to blocks dispatched over ranks, unless there is one rank, several machines, or it is in use."""
    if prediction.num_ranks == 1 or prediction.hardware.num_machines > 1:
        return
    if prediction.config.offload.dispatch != "always":
        change: Change = {"offload.dispatch": "always"}
        if prediction.config.origin("offload.zero_stage") == "resolved":  # each rank needs all weights, some states
            change["offload.zero_stage"] = 2
        yield change


# -- the tables --------------------------------------------------------------------------------------------------------

FIXES: tuple[Lever, ...] = (
    Lever("device", {"train.micro_batch_size": 1}, lambda found: found.config.train.batch_size > found.num_groups),
    Lever("device", _each("train.head_chunk_bytes", *_SMALL_CHUNKS)),
    Lever("device", {"train.recompute": "always"}),
    Lever("device", tile, _is("train.sequence_tile", "none")),
    Lever("device", {"offload.activations": "cpu"}, _is("offload.activations", "auto", DEVICE)),
    Lever("device", {"offload.activations": "nvme"}, _has_folder),
    Lever(
        "device",
        {"offload.parameters": "cpu", "offload.optimizer": "cpu", "offload.gradients": "auto"},
        lambda found: DEVICE in (found.config.offload.parameters, found.config.offload.optimizer),
    ),
    Lever("device", {"offload.update": "cpu"}, lambda found: found.prepared.plan.update != "cpu"),
    Lever("any", _passes),
    Lever("host", {"offload.replica_states": "shared"}, lambda found: found.num_replicas > 1),
    Lever("host", {"offload.parameters": "files"}, lambda found: found.config.lora.adapts),
    Lever("host", _on_disk),
    # A tied output weight is cut into row blocks, with gradient sums stored next to the gradients.
    Lever("device", _DISK_ALL, lambda found: _has_folder(found) and found.config.offload.gradients != "nvme"),
    # From here on the training changes, first the least.
    Lever("host", {"train.max_grad_norm": None}, lambda found: found.config.optimizer.has_gradients),
    Lever("host", _each("optimizer.states", "bf16", "int8"), _has("states", "fp32")),
    Lever("host", {"optimizer.master": "bf16"}, _has("master", "fp32")),
    Lever("host", {"train.precision": "bf16"}, _computes_fp32),
    Lever("any", _each("offload.frozen_weights", "int8", "nf4"), lambda found: found.config.lora.adapts),
    Lever("any", _fewer_rows),
    Lever("any", _shorter_rows),
    Lever("any", _adapter, lambda found: not found.config.lora.adapts),
)
"""Changes that take less memory, cheapest first."""
INSTEAD: tuple[Lever, ...] = (
    Lever("any", _each("optimizer.states", "bf16", "int8"), _has("states")),
    Lever("any", {"optimizer.master": "bf16"}, _has("master", "fp32")),
    Lever("any", wider_precision),
    Lever("any", _other_update),
    Lever("any", {"offload.graphs": "cpu"}, _on_gpu("offload.graphs", "auto", DEVICE)),
    Lever("any", {"train.compile": "auto"}, _on_gpu("train.compile", "never")),
    Lever("any", _other_parts, _on_gpu("train.tokens_per_step", None)),  # with a number these parts were tried
    Lever("any", dispatch),
    Lever("any", _twice_the_rows),  # for the same traffic
)
"""Changes to compare with, fitting or not."""
