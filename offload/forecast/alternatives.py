"""What else could be done than what is forecast: what fits, what is faster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from offload.config.config import Config
from offload.config.rules import OFFERS
from offload.engine.units.activation_offload import GRAPHS
from offload.engine.units.tiles import tile_rows
from offload.errors import ConfigError, format_bytes, written_size
from offload.forecast.forecast import Alternative, Forecast, Forecaster
from offload.forecast.memory import KEPT
from offload.hf.models import locate
from offload.hf.read import weight_files
from offload.machine.hardware import Hardware
from offload.machine.probe import LEAST_BYTES, probe
from offload.planning.disk import optimizer_bytes
from offload.planning.from_config import placement
from offload.planning.memory import BUDGETS

_MORE_HOST_BYTES = 32 << 30
_FOLDER = "FOLDER"
"""Stands for a folder on a disk that nobody named."""
_SMALL_CHUNK_BYTES = 32 << 20
_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Of the graphs that have room on the host, and of states that have room on the device, those with which a step is
played.
"""
_WORTH = 0.02
"""By which part of its step the placement that the search finds has to be faster than the one that is given, and by
which part of its tokens a second another way has to differ."""
_OF_A_UNIT = frozenset(
    (
        "train.micro_batch_size",
        "train.recompute",
        "train.head_chunk_bytes",
        "offload.activations",
        "offload.parameters",
        "offload.optimizer",
        "offload.gradients",
        "offload.update",
    )
)
"""What leaves a unit alone on the device, or with fewer rows."""
_ENLARGED = 4
"""How often budgets are enlarged to what a plan needs, which with more of them places more there."""


def forecast(config: Config, hardware: Hardware | None = None, num_ranks: int = 1) -> Forecast:
    """Tell what a run of so many ranks on a machine (None: this one, measured), or on each of several alike, will hold
    and take, and what else could be done. Raises ConfigError.
    """
    hardware = hardware or this_hardware(config)
    forecaster = Forecaster(config, num_ranks)
    given = forecaster.tell(config, hardware)
    found = with_fix(forecaster, place(forecaster, given))
    others = list(alternatives(forecaster, given, found))
    others.sort(key=lambda other: other.tokens_per_second or 0, reverse=True)
    return replace(found, alternatives=tuple(others))


def this_hardware(config: Config, *, measures: bool = True) -> Hardware:
    """Return this machine, with the disks that a run uses: those of its folders, or that of the model's own files.
    Raises as `probe`.
    """
    reads = None
    if config.offload.parameters == "files":
        path = locate(config.model)
        files = weight_files(path) if path is not None and path.is_dir() else []
        reads = max((file for file in files if file.stat().st_size >= LEAST_BYTES), default=None)
    return probe(config.offload.device, placement(config).dirs, reads=reads, measures=measures)


def with_fix(forecaster: Forecaster, found: Forecast) -> Forecast:
    """Return a forecast with the smallest change that fits, where it does not."""
    fix = {} if found.fits else find_fix(forecaster, found) or _larger_budgets(forecaster, found)
    notes = found.notes
    for key, step in (("train.batch_size", "of fewer rows"), ("train.max_grad_norm", "without clipping")):
        if key in fix:
            notes = (*notes, f"a step {step} is other training: nothing else was found that fits.")
    fixed = _placed(forecaster, found, fix) if fix else None
    held = {} if fixed is None else {tier: sums["bytes"] for tier, sums in fixed.tiers.items()}
    return replace(found, fix=flags(fix), fix_bytes=held, notes=notes)


def alternatives(forecaster: Forecaster, given: Forecast, found: Forecast) -> Iterator[Alternative]:
    """Yield what else than a fix is worth a look: each of a few changes of the settings of `given` that alters whether
    it fits, or, of what fits, how fast it is beside `found`, which is what the search makes of these settings.
    """
    if found.memory.total("nvme") or "cpu" in found.memory.shortfalls or found.refusal:
        more_bytes, more = _more_host_memory(forecaster, given)
        if _is_different(found, more):
            yield _alternative(more, f"{format_bytes(more_bytes)} more host memory")
    for change in _changes(found):
        other = None if flags(change) == found.fix else _told(forecaster, found, change)
        # Where the states are now; elsewhere there may be room, as there is for more where fewer rows run at once.
        if other is not None and (not other.fits or "train.micro_batch_size" in change):
            other = place(forecaster, _told(forecaster, given, change) or other)
        if other is not None and _is_different(found, other):
            yield _alternative(other, flags(change))


def is_open(found: Forecast) -> bool:
    """Tell whether there is a placement to choose: not where everything has room on the device."""
    return not found.fits or found.prepared.plan.tiers != ("device", "device")


def _is_different(found: Forecast, other: Forecast) -> bool:
    """Tell whether another way fits where the one that is given does not, or the reverse; of two that fit, whether
    their tokens a second are farther apart than a forecast can tell.
    """
    if not found.fits or not other.fits:
        return found.fits != other.fits
    if found.timing is None or other.timing is None:
        return False
    return abs(other.timing.tokens_per_second / found.timing.tokens_per_second - 1) > _WORTH


def place(forecaster: Forecaster, found: Forecast, *, times: bool = True) -> Forecast:
    """Return the forecast of what `train` makes of settings: with what the search finds for what they leave open; the
    one that is given, where that does not pay. Without the `times`, the first placement that fits.
    """
    if tile := _tile(forecaster, found):
        tiled = place(
            forecaster, forecaster.tell(changed(found.config, tile), found.hardware, times=times), times=times
        )
        return replace(tiled, placed=f"{flags(tile)} {tiled.placed}".rstrip())
    change = forecaster.choose(found, times=times) if is_open(found) else {}
    chosen = _better(found, _told(forecaster, found, change, times=times) if change else None, change, times=times)
    if not times or chosen.hardware.device == "cpu":
        return chosen
    change = change if chosen is not found else {}
    for states in _states(found, chosen):
        # What was best without them may not be so beside them.
        for wanted in [change | states, states] if change else [states]:
            other = _better(chosen, _told(forecaster, found, wanted), wanted)
            chosen, change = (other, wanted) if other is not chosen else (chosen, change)
    for graphs in _graphs(forecaster, chosen) if chosen.config.offload.graphs == "auto" else ():
        chosen = _better(chosen, _told(forecaster, found, change | graphs), change | graphs)
    return chosen


def _tile(forecaster: Forecaster, found: Forecast) -> dict[str, Any]:
    """Return the change by which sequences are cut in tiles, where that is left open, and the device has no room for
    what a unit computes otherwise: not for one row at a time, with all else moved away; nothing where it has, or where
    other memory lacks too, which tiles do not save.
    """
    config, before = found.config, found.memory.shortfalls.get("device", 0)
    if config.train.sequence_tile != "auto" or found.memory.shortfalls.keys() != {"device"}:
        return {}
    least = {key: value for fix in _fixes(found) for key, value in fix.items() if key in _OF_A_UNIT}
    other = _told(forecaster, found, least, times=False) if least else found
    if other is None or "device" not in other.memory.shortfalls:
        return {}
    tile: dict[str, Any] = {"train.sequence_tile": _tile_rows(config)}
    tiled = _told(forecaster, found, tile, times=False)
    return tile if tiled is not None and tiled.memory.shortfalls.get("device", 0) < before else {}


def _better(found: Forecast, other: Forecast | None, change: Mapping[str, Any], *, times: bool = True) -> Forecast:
    """Return another forecast, of a change, where that fits and pays; else the one that was found."""
    if other is None or not other.fits or (times and other.timing is None):
        return found
    before = found.timing.step_seconds if found.fits and found.timing else None
    if before is not None and other.timing and other.timing.step_seconds > (1 - _WORTH) * before:
        return found
    return replace(other, placed=flags(change), unplaced_seconds=found.unplaced_seconds or before)


def _states(given: Forecast, found: Forecast) -> Iterator[dict[str, Any]]:
    """Yield more and more optimizer states that rest on the device and are updated there, beside those that the host
    updates, as far as the device's memory reaches; the most with weights that stream, too.
    """
    offload, prepared, budget = given.config.offload, found.prepared, found.memory.budgets["device"]
    is_open = offload.optimizer == "auto" and offload.optimizer_memory is None and offload.update in ("auto", "both")
    if not is_open or prepared.plan.tiers[1] == "device" or prepared.settings.host_bound or budget is None:
        return
    layout, regions = prepared.plan.layout, prepared.structure.regions
    wanted = optimizer_bytes((region for region in regions if region.trainable), layout.sharding)
    room = budget + optimizer_bytes((region for region in regions if region.index in layout.staying), layout.sharding)
    room -= sum(a.num_bytes for a in found.memory.allocations if a.tier == "device" and a.name != KEPT)
    both: dict[str, Any] = {"offload.optimizer": "auto", "offload.update": "both"}
    for share in _SHARES if wanted and room > 0 else ():
        yield {**both, "offload.optimizer_memory": int(share * min(room, wanted - 1))}


def _graphs(forecaster: Forecaster, found: Forecast) -> Iterator[dict[str, Any]]:
    """Yield more and more graphs of units that wait on the host, as far as its memory reaches."""
    whole: dict[str, Any] = {"offload.graphs": "cpu"}
    other = _told(forecaster, found, whole, times=False)
    if other is None or not other.fits:
        return
    if found.config.train.recompute == "never":  # all of them or none
        yield whole
        return
    num_bytes = sum(a.num_bytes for a in other.memory.allocations if a.name == GRAPHS) * found.num_ranks
    for share in _SHARES if num_bytes else ():
        yield {**whole, "offload.graphs_memory": int(share * num_bytes)}


def _told(forecaster: Forecaster, found: Forecast, change: Mapping[str, Any], *, times: bool = True) -> Forecast | None:
    """Return what a change comes to; None for settings that do not go together."""
    try:
        return forecaster.tell(changed(found.config, change), found.hardware, times=times)
    except ConfigError:
        return None


def _alternative(other: Forecast, change: str) -> Alternative:
    timing = other.timing
    seconds, tokens = (None, None) if timing is None else (timing.step_seconds, timing.tokens_per_second)
    return Alternative(change, seconds, tokens, other.fits)


def find_fix(forecaster: Forecaster, found: Forecast) -> dict[str, Any]:
    """Return the smallest change with which `train` fits, of which no key can be left out: one of those that cost least
    where one is enough, else several; empty without any.
    """
    changes, together = list(_fixes(found)), dict[str, Any]()
    fitting = (change for change in changes if _fits(forecaster, found, change))
    if (one := next(fitting, None)) is not None:
        return _fewest(forecaster, found, one)
    for change in changes:
        together |= change
        if _fits(forecaster, found, together):
            return _fewest(forecaster, found, together)
    return {}


def _fewest(forecaster: Forecaster, found: Forecast, change: Mapping[str, Any]) -> dict[str, Any]:
    """Return a change that fits without what the rest of it makes needless."""
    for key in change:
        fewer = {name: value for name, value in change.items() if name != key}
        if fewer and _fits(forecaster, found, fewer):
            return _fewest(forecaster, found, fewer)
    return dict(change)


def _fits(forecaster: Forecaster, found: Forecast, change: Mapping[str, Any]) -> bool:
    other = _placed(forecaster, found, change)
    return other is not None and other.fits


def _placed(forecaster: Forecaster, found: Forecast, change: Mapping[str, Any]) -> Forecast | None:
    """Return what a change comes to, placed where that is needed; None for settings that do not go together."""
    other = _told(forecaster, found, change, times=False)
    return other if other is None or other.fits else place(forecaster, other, times=False)


def _larger_budgets(forecaster: Forecaster, found: Forecast) -> dict[str, Any]:
    """Return the budgets, in whole MiB, that hold what passes those that are set; nothing where that is not enough."""
    change: dict[str, Any] = {}
    larger: Forecast | None = found
    for _ in range(_ENLARGED):
        if larger is None or larger.fits:
            break
        for tier, too_few in larger.memory.shortfalls.items():
            budget = larger.config.get(BUDGETS[tier])
            if budget is None:
                return {}
            num_sharing = 1 if tier == "device" else found.num_ranks
            change[BUDGETS[tier]] = (-(-(budget + num_sharing * too_few) >> 20)) << 20
        larger = _told(forecaster, found, change, times=False)
    if larger is None or not larger.fits:
        return {}
    return {key: f"{num_bytes >> 20}MiB" for key, num_bytes in change.items()}


def changed(config: Config, change: Mapping[str, Any]) -> Config:
    """Return a configuration with other values. Raises ConfigError."""
    config = config.with_resolved(**{key.replace(".", "__"): value for key, value in change.items()})
    config.check()
    return config


def flags(change: Mapping[str, Any]) -> str:
    """Return a change as it is written on a command line."""
    return " ".join(f"--{key} {_as_flag(key, value)}" for key, value in change.items())


def _as_flag(key: str, value: Any) -> Any:
    if isinstance(value, int) and key.endswith("_memory"):
        return written_size(value)
    return "none" if value is None else value[0] if isinstance(value, tuple) else value


def _more_host_memory(forecaster: Forecaster, given: Forecast) -> tuple[int, Forecast]:
    """Return how much more host memory is worth a look, and what that comes to: what is missing, in whole GiB."""
    more_bytes, found = 0, given
    for _ in range(_ENLARGED):
        too_few = found.memory.shortfalls.get("cpu", 0) * given.num_ranks
        if more_bytes and not too_few:
            break
        more_bytes += (-(-too_few >> 30) << 30) or _MORE_HOST_BYTES
        config, hardware = given.config, given.hardware
        if (budget := config.offload.host_memory) is not None:
            config = config.with_resolved(offload__host_memory=budget + more_bytes)
        found = place(forecaster, forecaster.tell(config, hardware.with_(host_bytes=hardware.host_bytes + more_bytes)))
    return more_bytes, found


def _changes(found: Forecast) -> Iterator[dict[str, Any]]:
    """Yield what else may be worth a look, whether or not it fits as it is."""
    config = found.config
    if "states" in OFFERS[config.optimizer.name].keys:
        yield from ({"optimizer.states": width} for width in ("bf16", "int8") if width != config.optimizer.states)
    yield from _shorter_masters(config)
    yield from wider(found)
    if found.hardware.device != "cpu":
        if found.prepared.plan.tiers[1] != "device":
            yield {"offload.update": "device" if found.prepared.plan.update == "cpu" else "cpu"}
        if config.offload.graphs in ("auto", "device"):
            yield {"offload.graphs": "cpu"}
        if config.train.compile == "never":
            yield {"train.compile": "auto"}
        rows = config.train.micro_batch_size or config.train.batch_size // found.num_groups
        yield from ({"train.micro_batch_size": rows // parts} for parts in (2, 4) if rows % parts == 0)
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
        if config.train.batch_size > found.num_groups and config.train.micro_batch_size != 1:
            yield {"train.micro_batch_size": 1}
        yield {"train.head_chunk_bytes": _SMALL_CHUNK_BYTES}
        if config.train.recompute != "always":
            yield {"train.recompute": "always"}
        if config.train.sequence_tile == "none":
            yield {"train.sequence_tile": _tile_rows(config)}
        if config.offload.activations in ("auto", "device"):
            yield {"offload.activations": "cpu"}
            if config.offload.nvme_dir:
                yield {"offload.activations": "nvme"}
        if "device" in (config.offload.parameters, config.offload.optimizer):
            yield {"offload.parameters": "cpu", "offload.optimizer": "cpu", "offload.gradients": "auto"}
        if found.prepared.plan.update != "cpu":
            yield {"offload.update": "cpu"}
    if on_host and found.num_replicas > 1:
        yield {"offload.replica_states": "shared"}
    if (on_host or not over) and config.train.precision == "fp32":
        yield {"train.precision": "bf16"}
    if on_host and "states" in OFFERS[config.optimizer.name].keys:
        yield from ({"optimizer.states": width} for width in ("bf16", "int8") if config.optimizer.states == "fp32")
    if on_host:
        yield from _shorter_masters(config)
    if on_host and (config.offload.nvme_dir or found.hardware.rates.has_disk):
        folder: dict[str, Any] = {} if config.offload.nvme_dir else {"offload.nvme_dir": (_FOLDER,)}
        if folder:
            yield folder
        yield {"offload.optimizer": "nvme", **folder}
        yield {"offload.parameters": "nvme", "offload.optimizer": "nvme", **folder}
        yield {"offload.parameters": "nvme", "offload.optimizer": "nvme", "offload.gradients": "nvme", **folder}
    elif on_device and config.offload.nvme_dir and found.config.offload.gradients != "nvme":
        # A weight that a head shares is cut in rows, whose sums rest with the gradients.
        yield {"offload.parameters": "nvme", "offload.optimizer": "nvme", "offload.gradients": "nvme"}
    if on_host and config.train.max_grad_norm is not None and config.has_gradients:  # gradients wait for their norm
        yield {"train.max_grad_norm": None}
    rows, micro_rows = config.train.batch_size if over else 0, config.train.micro_batch_size or 0
    while rows > found.num_groups:  # which is other training: last, and no further than it takes
        rows = max(found.num_groups, rows // 2)
        yield {"train.batch_size": rows} | ({"train.micro_batch_size": rows} if micro_rows > rows else {})


def _tile_rows(config: Config) -> int:
    """Return the tokens of a tile of what a rank has of a sequence."""
    return tile_rows(int(config.data.sequence_length or 0) // config.train.sequence_parallel)


def _shorter_masters(config: Config) -> Iterator[dict[str, Any]]:
    if "master" in OFFERS[config.optimizer.name].keys and config.optimizer.master == "fp32":
        yield {"optimizer.master": "bf16"}


def wider(found: Forecast) -> Iterator[dict[str, Any]]:
    """Yield the precision that a machine computes faster than bf16, as a CPU does without instructions for that."""
    flops = found.hardware.rates.flops_per_s
    if found.config.train.precision == "bf16" and flops and flops["bf16"] < flops["fp32"]:
        yield {"train.precision": "fp32"}
