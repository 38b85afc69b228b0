"""What else could be done than what is forecast: what fits, what is faster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from offload.config.config import Config
from offload.config.rules import OFFERS
from offload.errors import ConfigError, format_bytes
from offload.forecast.forecast import Alternative, Forecast, Teller
from offload.machine.hardware import Hardware
from offload.machine.probe import probe
from offload.planning.from_config import placement
from offload.planning.machines import Machine

_MORE_HOST_BYTES = 32 << 30
_FOLDER = "FOLDER"
"""Stands for a folder on a disk that nobody named."""
_SMALL_CHUNK_BYTES = 32 << 20
_WORTH = 0.02
"""By which part of its step the placement that the search finds has to be faster than the one that is given."""


def forecast(config: Config, hardware: Hardware | None = None, num_ranks: int = 1) -> Forecast:
    """Tell what a run of so many ranks on one machine (None: this one, measured) will hold and take, and what else
    could be done. Raises ConfigError.
    """
    if hardware is None:
        hardware = probe(config.offload.device, placement(config).dirs)
    teller = Teller(config, num_ranks)
    found = teller.tell(config, hardware)
    fix = {} if found.fits else find_fix(teller, found)
    notes = found.notes
    if "train.batch_size" in fix:
        notes = (*notes, "a step of fewer rows is other training: nothing else was found that fits.")
    return replace(found, fix=flags(fix), notes=notes, alternatives=tuple(alternatives(teller, found)))


def alternatives(teller: Teller, found: Forecast) -> Iterator[Alternative]:
    """Yield what a few changes come to, first the placement that the search finds, where that is faster."""
    change, best = place(teller, found)
    if change:
        yield replace(_alternative(best, flags(change)), is_found=True)
    larger = found.hardware.with_(host_bytes=found.hardware.host_bytes + _MORE_HOST_BYTES)
    more = teller.tell(_more_host_memory(found.config), larger)
    yield _alternative(more, f"{format_bytes(_MORE_HOST_BYTES)} more host memory")
    for change in _changes(found):
        if (other := _told(teller, found, change)) is not None:
            yield _alternative(other, flags(change))


def place(teller: Teller, found: Forecast, machine: Machine | None = None) -> tuple[dict[str, Any], Forecast]:
    """Return what the search makes of what is left open, by key, and its forecast, for a machine that is asked as in
    `Teller.tell`; nothing, and the one that is given, where that does not pay.
    """
    change = teller.choose(found, machine)
    other = _told(teller, found, change, machine=machine) if change else None
    if other is None or not other.fits or other.timing is None:
        return {}, found
    if found.fits and found.timing and other.timing.step_seconds > (1 - _WORTH) * found.timing.step_seconds:
        return {}, found
    return change, other


def _told(
    teller: Teller, found: Forecast, change: Mapping[str, Any], *, times: bool = True, machine: Machine | None = None
) -> Forecast | None:
    """Return what a change comes to; None for settings that do not go together."""
    try:
        return teller.tell(changed(found.config, change), found.hardware, times=times, machine=machine)
    except ConfigError:
        return None


def _alternative(other: Forecast, change: str) -> Alternative:
    timing = other.timing
    return Alternative(
        change,
        other.fits,
        None if timing is None else timing.step_seconds,
        None if timing is None else timing.tokens_per_second,
    )


def find_fix(teller: Teller, found: Forecast) -> dict[str, Any]:
    """Return the smallest change that fits: one key where one is enough, else several; empty without any."""
    changes = list(_fixes(found))
    for change in changes:
        if _fits(teller, found, change):
            return change
    together: dict[str, Any] = {}
    for change in changes:
        together |= change
        if _fits(teller, found, together):
            for key in list(together):  # what the others make needless
                fewer = {name: value for name, value in together.items() if name != key}
                if _fits(teller, found, fewer):
                    together = fewer
            return together
    return {}


def _fits(teller: Teller, found: Forecast, change: Mapping[str, Any]) -> bool:
    other = _told(teller, found, change, times=False)
    return other is not None and other.fits


def changed(config: Config, change: Mapping[str, Any]) -> Config:
    """Return a configuration with other values. Raises ConfigError."""
    config = config.with_resolved(**{key.replace(".", "__"): value for key, value in change.items()})
    config.check()
    return config


def flags(change: Mapping[str, Any]) -> str:
    """Return a change as it is written on a command line."""
    shown = {key: value[0] if isinstance(value, tuple) else value for key, value in change.items()}
    return " ".join(f"--{key} {'none' if value is None else value}" for key, value in shown.items())


def _more_host_memory(config: Config) -> Config:
    budget = config.offload.host_memory
    return config if budget is None else config.with_resolved(offload__host_memory=budget + _MORE_HOST_BYTES)


def _changes(found: Forecast) -> Iterator[dict[str, Any]]:
    """Yield what else may be worth a look, whether or not it fits as it is."""
    config = found.config
    if "states" in OFFERS[config.optimizer.name].keys:
        yield from ({"optimizer.states": width} for width in ("bf16", "int8") if width != config.optimizer.states)
    yield from _shorter_masters(config)
    if found.hardware.device != "cpu" and found.prepared.plan.tiers[1] != "device":
        yield {"offload.update": "cpu" if found.prepared.plan.update == "device" else "device"}
    twice: dict[str, Any] = {"train.batch_size": 2 * config.train.batch_size}
    if config.train.micro_batch_size is None:
        twice["train.micro_batch_size"] = config.train.batch_size
    yield twice


def _fixes(found: Forecast) -> Iterator[dict[str, Any]]:
    """Yield what takes less memory, what costs least first."""
    config, over = found.config, set(found.memory.shortfalls)
    refused_host = bool(found.refusal) and not over
    on_host = "cpu" in over or refused_host
    on_device = "device" in over or ("cpu" in over and found.memory.is_one_memory)
    if on_device:
        if config.train.batch_size > found.num_ranks and config.train.micro_batch_size != 1:
            yield {"train.micro_batch_size": 1}
        yield {"train.head_chunk_bytes": _SMALL_CHUNK_BYTES}
        if config.train.recompute != "always":
            yield {"train.recompute": "always"}
        if config.offload.activations in ("auto", "device"):
            yield {"offload.activations": "cpu"}
            if config.offload.nvme_dir:
                yield {"offload.activations": "nvme"}
        if "device" in (config.offload.parameters, config.offload.optimizer):
            yield {"offload.parameters": "cpu", "offload.optimizer": "cpu", "offload.gradients": "auto"}
        if found.prepared.plan.update == "device":
            yield {"offload.update": "cpu"}
    if (on_host or not over) and config.train.precision == "fp32":
        yield {"train.precision": "bf16"}
    if on_host and "states" in OFFERS[config.optimizer.name].keys:
        yield from ({"optimizer.states": width} for width in ("bf16", "int8") if config.optimizer.states == "fp32")
    if on_host:
        yield from _shorter_masters(config)
    if on_host and (config.offload.nvme_dir or found.hardware.rates.nvme_read_bytes_per_s):
        folder: dict[str, Any] = {} if config.offload.nvme_dir else {"offload.nvme_dir": (_FOLDER,)}
        if folder:
            yield folder
        yield {"offload.optimizer": "nvme", **folder}
        yield {"offload.parameters": "nvme", "offload.optimizer": "nvme", **folder}
        yield {"offload.parameters": "nvme", "offload.optimizer": "nvme", "offload.gradients": "nvme", **folder}
    rows, micro_rows = config.train.batch_size if over else 0, config.train.micro_batch_size or 0
    while rows > found.num_ranks:  # which is other training: last, and no further than it takes
        rows = max(found.num_ranks, rows // 2)
        yield {"train.batch_size": rows} | ({"train.micro_batch_size": rows} if micro_rows > rows else {})


def _shorter_masters(config: Config) -> Iterator[dict[str, Any]]:
    if config.optimizer.name == "mezo" and config.optimizer.master == "fp32":
        yield {"optimizer.master": "bf16"}
