"""Search for configurations with a better fit or higher speed than the forecast one."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from offload.amounts import Amount, Tell, tell_nobody
from offload.app.config.config import Config
from offload.app.hf.models import locate, without_weights
from offload.app.hf.read import has_weights, weight_files
from offload.app.training.parts import make_placement
from offload.engine.units.activation_offload import GRAPHS
from offload.engine.units.recompute_policy import PRODUCTS
from offload.errors import ConfigError, format_bytes
from offload.extras.plan.forecast import Alternative, Forecast, Forecaster
from offload.extras.plan.levers import INSTEAD, changes, dispatch, effects, fixes, more_passes, tile
from offload.extras.plan.machine_files import read_machine
from offload.extras.plan.memory import KEPT
from offload.extras.plan.probe import LEAST_BYTES, probe
from offload.layout.residence import DEVICE
from offload.machine.hardware import Hardware
from offload.planning.disk import optimizer_bytes
from offload.planning.memory import BUDGETS
from offload.sizes import parse_size

_MORE_HOST_BYTES = 32 << 30
_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares to simulate: graphs offloaded to the host, and optimizer states on the device."""
_PRODUCT_SHARES = (0.1, 0.25, 0.5, 1.0)
"""Shares of the product outputs offloaded to the host. Those that spare most for a byte come first: attention, a tenth
of the bytes in a Llama block.
"""
_MIN_GAIN = 0.02
"""Relative step time gain needed to adopt a placement, and throughput difference needed to list an alternative."""
PARTS = "train.micro_batch_size", "train.passes"
"""Settings that cut the rows of a step."""
_MOST_SIZES = 3
"""Micro-batches to time: the largest that fit."""
_UNIT_OPTIONS = frozenset(
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
"""Options able to reduce device memory to a single unit, or to fewer rows at a time."""
_HOST_GRAPHS: Mapping[str, Any] = {"offload.graphs": "cpu"}
_BOTH_UPDATES: Mapping[str, Any] = {"offload.optimizer": "auto", "offload.update": "both"}
_STARTS: tuple[Mapping[str, Any], ...] = (_HOST_GRAPHS, {"offload.update": "cpu"})
"""Changes from which the search starts again."""
MAX_FORECASTS = 64
"""Limit for the changes of a run that does not fit, and again for the alternatives. A try that has begun makes more.

A count, not a time, so that the advice is the same on a busy machine.
"""
_MAX_ENLARGEMENTS = 4
"""Maximum number of budget increases. A larger budget can make the plan use more memory on the tier."""


class Tries:
    """The limit of one search: a number of forecasts."""

    def __init__(self, forecaster: Forecaster, most: float) -> None:
        """`most`: forecasts to make from now on. A cached forecast is free."""
        self._forecaster = forecaster
        self._end = forecaster.num_made + most
        self.is_cut = False
        """True if something was left out for the limit."""

    def has_more(self) -> bool:
        """Return False after the limit, for something to try that is then left out."""
        self.is_cut = self.is_cut or self._forecaster.num_made >= self._end
        return not self.is_cut


def forecast(
    config: Config,
    hardware: Hardware | None = None,
    num_ranks: int = 1,
    say: Callable[[str], None] = lambda _text: None,
    most: int = MAX_FORECASTS,
    tell: Tell = tell_nobody,
) -> Forecast:
    """Forecast a run and list alternatives. Raises ConfigError.

    hardware: target machine, or one of several identical machines; None: measure this machine. On a target machine a
        preset represents a model to be downloaded, so frozen weights are planned in bf16.
    num_ranks: ranks per machine.
    say: receives a line before a long search.
    most: limit for the search if the run does not fit, in forecasts.
    tell: receives the number of forecasts so far, whenever asked.
    """
    forecaster = Forecaster(config, num_ranks, plans_downloads=hardware is not None)
    hardware = hardware or this_hardware(config)
    tell("planning", lambda: Amount(forecaster.num_made, unit="forecasts"))
    initial = in_parts(forecaster, forecaster.predict(config, hardware))
    prediction = place_or_fix(forecaster, initial, say, most)
    tries = Tries(forecaster, math.inf if prediction.fits else most)
    others = list(alternatives(forecaster, initial, prediction, tries))
    others.sort(key=lambda other: other.tokens_per_second or 0, reverse=True)  # those that do not fit come last
    notes = prediction.notes
    if tries.is_cut:
        notes = (*notes, f"alternatives were left out after {most} forecasts: --tries {4 * most} lists more.")
    return replace(prediction, alternatives=tuple(others), notes=notes)


def this_hardware(config: Config, *, measures: bool = True) -> Hardware:
    """Return this machine, with rates for the disks in use: configured folders, or the disk with the model files.

    Raises the errors of `probe`.
    """
    reads = None
    if config.offload.parameters == "files":
        path = locate(without_weights(config.model))
        if path is not None and has_weights(path):
            reads = max((file for file in weight_files(path) if file.stat().st_size >= LEAST_BYTES), default=None)
    return probe(config.offload.device, make_placement(config).dirs, reads=reads, measures=measures)


def choose_hardware(config: Config, described: str | None, host_memory: str | None) -> Hardware:
    """Return the machine for a plan, by the values of --hardware (None: this machine) and --host-memory.

    Raises ConfigError for a host memory without a description, and the errors of `this_hardware`.
    """
    if described is not None:
        hardware = read_machine(described)
        if (host_bytes := parse_size(host_memory, "--host-memory")) is not None:
            if host_bytes <= hardware.system_bytes:
                least = format_bytes(hardware.system_bytes)
                raise ConfigError(
                    f"--host-memory is {host_memory}, and the system keeps {least}: give all of the host."
                )
            hardware = hardware.with_host_memory(host_bytes)
        return hardware
    if host_memory is not None:
        raise ConfigError("--host-memory describes another machine; set --offload.host_memory for a limit on this one.")
    return this_hardware(config)


def place_or_fix(
    forecaster: Forecaster, initial: Forecast, say: Callable[[str], None], most: int = MAX_FORECASTS
) -> Forecast:
    """Return the forecast as `train` would run it. If it does not fit, it has the smallest fix, and no step time.

    say: receives the shortage before a search that takes seconds. most: limit for the search, in forecasts.
    """
    if not initial.fits:
        say(f"{initial.shortage} Looking for another placement, or the smallest change that fits ...")
    prediction = place(forecaster, initial)
    if prediction.fits:
        return prediction
    tries = Tries(forecaster, most)
    fix = find_fix(forecaster, prediction, tries)
    if fix and all(prediction.config.get(key) == "auto" for key in fix):  # no other value was asked for
        return _with_choice(forecaster, initial, fix)
    result = replace(prediction, timing=None)
    if not fix:
        return replace(result, untried_after=most) if tries.is_cut else result
    fixed = _try_placement(forecaster, prediction, fix)
    assert fixed is not None, "the search has planned the fix"
    fix_bytes = {tier: sums["bytes"] for tier, sums in fixed.tiers.items()}
    return replace(result, fix=to_flags(fix), fix_effect=effects(fix), fix_bytes=fix_bytes)


def alternatives(
    forecaster: Forecaster, initial: Forecast, prediction: Forecast, tries: Tries
) -> Iterator[Alternative]:
    """Yield alternatives beyond the fix: changes with a different answer to "does the run fit", or another throughput.

    initial: forecast before the placement search. prediction: forecast after the search. tries: limit for all but more
        host memory.
    """
    found = list[tuple[str, str, Forecast]]()
    if prediction.memory.total("nvme") or "cpu" in prediction.memory.shortfalls or prediction.refusal:
        text, more = _more_host_memory(forecaster, initial)
        found.append((text, "", more))
    others = [] if prediction.fits else fixes(prediction, exact=False)
    for change in (*others, *(each for each in changes(INSTEAD, prediction) if each not in others)):
        if not tries.has_more():
            break
        if to_flags(change) == prediction.fix:  # shown already
            continue
        other = _try_change(forecaster, prediction, change)
        # First with the current placement; if that does not fit, or smaller micro-batches free memory, with a new
        # search.
        if other is not None and (not other.fits or "train.micro_batch_size" in change):
            config = apply_change(initial.config, change)
            other = place(forecaster.of(config), _try_change(forecaster, initial, change) or other)
        if other is not None:
            found.append((to_flags(change), effects(change), other))
    for text, effect, other in found:
        if _is_different(prediction, other):
            seconds, tokens = (getattr(other.timing, name, None) for name in ("step_seconds", "tokens_per_second"))
            yield Alternative(text, seconds, tokens, other.fits, effect)


def has_open_placement(prediction: Forecast) -> bool:
    """Return True if there is a placement to choose, so not everything fits the device."""
    return not prediction.fits or prediction.prepared.plan.residence.common != DEVICE


def _is_different(prediction: Forecast, other: Forecast) -> bool:
    """Return True if only one of the two fits, or both fit and throughput differs by more than `_MIN_GAIN`."""
    if not prediction.fits or not other.fits:
        return prediction.fits != other.fits
    if prediction.timing is None or other.timing is None:
        return False
    return abs(other.timing.tokens_per_second / prediction.timing.tokens_per_second - 1) > _MIN_GAIN


def place(forecaster: Forecaster, prediction: Forecast, *, times: bool = True, tiles: bool = True) -> Forecast:
    """Return the forecast as `train` would run it, with open options decided by search.

    Keeps the given forecast if the gain is too small. `times` False: take the first placement with enough room.
    `tiles` False: without tiles of sequences.
    """
    if tiles and (tiling := _tile(forecaster, prediction)):
        return _with_choice(forecaster, prediction, tiling, times=times)
    chosen, change = _descend(forecaster, prediction, {}, times=times)
    if times and prediction.hardware.device != "cpu" and has_open_placement(prediction):
        # Options chosen one after the other depend on the first: host updates pay only beside graphs on the host.
        for start in _STARTS:
            if all(prediction.config.get(key) == "auto" for key in start):
                other, others_change = _descend(forecaster, prediction, start, times=times)
                min_gain = 0.0 if change else _MIN_GAIN  # of two changes, the faster one
                if _is_faster(chosen, other, times=times, min_gain=min_gain):
                    chosen, change = other, others_change
    if not change:
        return prediction
    return replace(chosen, placement_flags=to_flags(change), seconds_without_search=_step_seconds(prediction))


def _with_choice(
    forecaster: Forecaster, prediction: Forecast, change: Mapping[str, Any], *, times: bool = True
) -> Forecast:
    """Return the forecast with values chosen for open settings, and placed."""
    changed = forecaster.predict(apply_change(prediction.config, change), prediction.hardware, times=times)
    found = place(forecaster, changed, times=times)
    return replace(found, placement_flags=f"{to_flags(change)} {found.placement_flags}".rstrip())


def _descend(
    forecaster: Forecaster, initial: Forecast, start: Mapping[str, Any], *, times: bool
) -> tuple[Forecast, Mapping[str, Any]]:
    """Return the best forecast found one option after the other, with the changes, from the change `start` on."""
    first = initial
    if start:
        changed = _try_change(forecaster, initial, start, times=times, worth_s=math.inf)
        if changed is None or not changed.fits:
            return initial, {}
        first = changed
    chosen, change = first, start

    def candidates() -> Iterator[Mapping[str, Any]]:  # each stage begins with the choice of the one before
        if has_open_placement(first) and (placement := forecaster.choose(first, times=times)):
            yield {**start, **placement}
        if times and initial.config.origin("offload.dispatch") == "resolved":
            yield from ({**change, **each} for each in dispatch(initial))
        if not times or initial.hardware.device == "cpu":
            return
        # The best options without states on the device may not be the best with them: weights there leave less room.
        rooms = _device_state_room(first, chosen), _device_state_room(first, first)
        for share in _SHARES:
            for options, room in zip((change, start), rooms, strict=True):
                if room > 0:
                    yield {**options, **_BOTH_UPDATES, "offload.optimizer_memory": int(share * room)}
        if initial.config.offload.graphs == "auto":
            yield from _host_graph_shares(forecaster, initial, change)
        # Instead of whole graphs, also of those on the host. Compiled blocks keep none: other bits are no choice here.
        if initial.config.train.recompute == "auto" and initial.prepared.settings.compile != "always":
            others = {key: value for key, value in change.items() if not key.startswith("offload.graphs")}
            others["train.recompute"] = PRODUCTS
            yield others
            if initial.config.offload.graphs == "auto":
                yield from _host_graph_shares(forecaster, initial, others)

    for candidate in candidates():
        before = _step_seconds(chosen)
        worth_s = math.inf if before is None else (1 - _MIN_GAIN) * before
        other = _try_change(forecaster, initial, candidate, times=times, worth_s=worth_s)
        if other is not None and _is_faster(chosen, other, times=times):
            chosen, change = other, candidate
    return chosen, change


def _tile(forecaster: Forecaster, prediction: Forecast) -> dict[str, Any]:
    """Return the change to tile sequences, or an empty dict.

    Tiles are used only if the option is open and nothing else helps: device memory is short even with one row at a time
    and everything else offloaded, while all other tiers have room.
    """
    config, before = prediction.config, prediction.memory.shortfalls.get("device", 0)
    if config.train.sequence_tile != "auto" or prediction.memory.shortfalls.keys() != {"device"}:
        return {}
    exact = fixes(prediction, exact=True)
    least = {key: value for fix in exact for key, value in fix.items() if key in _UNIT_OPTIONS}
    other = _try_change(forecaster, prediction, least, times=False) if least else prediction
    if other is None or "device" not in other.memory.shortfalls:
        return {}
    (change,) = tile(prediction)
    tiled = _try_change(forecaster, prediction, change, times=False)
    if tiled is None or tiled.memory.shortfalls.get("device", 0) >= before:
        return {}
    return change


def in_parts(forecaster: Forecaster, initial: Forecast, *, times: bool = True, opens: Collection[str] = ()) -> Forecast:
    """Return the forecast with the micro-batch and the passes that train.tokens_per_step leaves to the plan.

    These are the fewest passes with room for the saved inputs, and there the largest micro-batch that fits; of smaller
    ones, and of more passes, the fastest, halved as long as that is faster. All parts are equal. If nothing fits, one
    row at a time in the fewest passes, so that every shortage shows. The result is not placed. Returns `initial` if
    nothing is open.

    times: False takes the first that fits. opens: further settings to choose, if not set.
    """
    config = initial.config
    opened = {
        key
        for key in PARTS
        if config.origin(key) == "default" and (config.train.tokens_per_step is not None or key in opens)
    }
    if not opened:
        return initial
    rows = config.train.batch_size // initial.num_groups

    def cut(num_passes: int, size: int) -> Forecast | None:
        """Return the forecast of so many passes in micro-batches of a size; None: impossible."""
        values = {"train.passes": num_passes, "train.micro_batch_size": size}
        changed = config.with_settings({key: (values[key], "resolved") for key in opened})
        try:
            changed.check()
            return forecaster.predict(changed, initial.hardware, times=False)
        except ConfigError:
            return None

    def sizes(num_passes: int) -> list[int]:
        """Return the equal micro-batches of a pass, the smallest first."""
        if "train.micro_batch_size" in opened:
            return divisors(rows // num_passes)
        return [config.train.micro_batch_size or rows]

    def halved(parts: Forecast) -> Forecast | None:
        """Return half the rows at a time in twice the passes, with half the graphs at once; None: impossible."""
        size = parts.config.train.micro_batch_size or rows
        if opened != set(PARTS) or size % 2:
            return None
        return cut(2 * parts.config.train.passes, size // 2)

    counts = [config.train.passes]
    if "train.passes" in opened:
        counts = divisors(rows)
    least = [parts for count in counts if (parts := cut(count, sizes(count)[0])) is not None]
    # One row at a time first: passes without room for it have room for no micro-batch. More passes before tiles, whose
    # trials take minutes.
    found = ((parts, tiles) for tiles in (False, True) for parts in least if _has_room(forecaster, parts, tiles))
    first, tiles = next(found, (None, False))
    if first is None:
        return next(iter(least), initial)
    num_passes = first.config.train.passes
    cuts = (cut(num_passes, size) for size in reversed(sizes(num_passes)))
    fitting = (parts for parts in cuts if parts is not None and _has_room(forecaster, parts, tiles))
    if not times:
        return next(fitting)
    tried = list(itertools.islice(fitting, _MOST_SIZES))
    if "train.passes" in opened:
        for each in tried[:2]:  # passes of few rows keep more of them: the second size may be the best of these
            size = each.config.train.micro_batch_size or rows
            counts = [change["train.passes"] for change in more_passes(initial, size, num_passes)]
            tried += [parts for count in counts if (parts := cut(count, size)) is not None]
    paced = [(_pace(forecaster, each), each) for each in tried]
    _, fastest = min(paced, key=operator.itemgetter(0))
    other = halved(fastest)
    seconds = math.inf if other is None else _pace(forecaster, fastest, searches=True)
    while other is not None:
        other_s = _pace(forecaster, other, searches=True)
        if other_s >= seconds:
            break
        fastest, seconds = other, other_s
        other = halved(fastest)
    return _timed(forecaster, fastest)


def _pace(forecaster: Forecaster, parts: Forecast, *, searches: bool = False) -> float:
    """Return the step seconds after a whole search, or after the first descent, which tells most parts apart."""
    timed = _timed(forecaster, parts)
    found = place(forecaster, timed) if searches else _descend(forecaster, timed, {}, times=True)[0]
    return _step_seconds(found) or math.inf


def _timed(forecaster: Forecaster, prediction: Forecast) -> Forecast:
    return forecaster.predict(prediction.config, prediction.hardware)


def _has_room(forecaster: Forecaster, prediction: Forecast, tiles: bool) -> bool:
    return place(forecaster, prediction, times=False, tiles=tiles).fits


def divisors(number: int) -> list[int]:
    """Return the divisors, the smallest first."""
    return [size for size in range(1, number + 1) if number % size == 0]


def _step_seconds(prediction: Forecast) -> float | None:
    """Return the step time of a run that fits; None: it does not fit, or the time is unknown."""
    return prediction.timing.step_seconds if prediction.fits and prediction.timing else None


def _is_faster(prediction: Forecast, other: Forecast, *, times: bool, min_gain: float = _MIN_GAIN) -> bool:
    """Return True if `other` fits and is fast enough to pay for the change."""
    if not other.fits or (times and other.timing is None):
        return False
    before = _step_seconds(prediction)
    return before is None or other.timing is None or other.timing.step_seconds <= (1 - min_gain) * before


def _device_state_room(initial: Forecast, prediction: Forecast) -> int:
    """Return the bytes of optimizer states that the device can store and update, beside host updates. At most 0: none.

    The room leaves only minimum slots for streamed weights, and no room for saved graphs.
    """
    offload, budget = initial.config.offload, prediction.memory.budgets["device"]
    prepared = prediction.prepared
    is_open = offload.optimizer == "auto" and offload.optimizer_memory is None and offload.update in ("auto", "both")
    if not is_open or prepared.plan.residence.common == DEVICE or prepared.settings.host_bound or budget is None:
        return 0
    residence, regions = prepared.plan.residence, prepared.structure.regions
    state_bytes = optimizer_bytes((region for region in regions if region.trainable), residence.sharding)
    staying = residence.indices_on(DEVICE)
    room = budget + optimizer_bytes((region for region in regions if region.index in staying), residence.sharding)
    room -= sum(a.num_bytes for a in prediction.memory.allocations if a.tier == "device" and a.name != KEPT)
    return min(room, state_bytes - 1)  # with all states there, no update would be left for the host


def _host_graph_shares(
    forecaster: Forecaster, prediction: Forecast, change: Mapping[str, Any]
) -> Iterator[dict[str, Any]]:
    """Yield `change` with growing numbers of bytes for graphs, or product outputs, in host memory, up to the free
    host memory.
    """
    change = {**change, **_HOST_GRAPHS}
    other = _try_change(forecaster, prediction, change, times=False)
    if other is None or not other.fits:
        return
    if other.config.train.recompute == "never":  # all graphs or none
        yield change
        return
    num_bytes = sum(a.num_bytes for a in other.memory.allocations if a.name == GRAPHS) * prediction.num_ranks
    shares = _PRODUCT_SHARES if other.config.train.recompute == PRODUCTS else _SHARES
    if num_bytes:
        yield from ({**change, "offload.graphs_memory": int(share * num_bytes)} for share in shares)


def _try_change(
    forecaster: Forecaster,
    prediction: Forecast,
    change: Mapping[str, Any],
    *,
    times: bool = True,
    worth_s: float | None = None,
) -> Forecast | None:
    """Return the forecast with a change; None: invalid combination. times, worth_s: as in `Forecaster.predict`."""
    try:
        config = apply_change(prediction.config, change)
        return forecaster.of(config).predict(config, prediction.hardware, times=times, worth_s=worth_s)
    except ConfigError:
        return None


def find_fix(forecaster: Forecaster, prediction: Forecast, tries: Tries) -> dict[str, Any]:
    """Return the smallest change needed to fit: no key can be dropped. Empty: nothing found.

    Other values of settings left open come first, then changes that keep the training, then larger budgets, then other
    training. Each are tried alone in the order of `FIXES`, then added up in this order. The result was planned, and
    fits.
    """
    exact, others = fixes(prediction, exact=True), fixes(prediction, exact=False)
    is_open = [all(prediction.config.get(key) == "auto" for key in change) for change in exact]
    open_ones = list(itertools.compress(exact, is_open))
    together = [change for change in exact if "train.passes" not in change]  # sums of passes take host memory

    def first(candidates: Iterable[dict[str, Any]]) -> dict[str, Any]:
        for change in candidates:
            if not tries.has_more():
                break
            if _fits(forecaster, prediction, change):
                return _drop_needless(forecaster, prediction, change)
        return {}

    found = first(open_ones) or first(_sums(open_ones)) or first(exact) or first(_sums(together))
    if not found and tries.has_more():
        found = _larger_budgets(forecaster, prediction)
    return found or first(others) or first(_sums(together, others))


def _sums(*parts: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return all changes up to each of the last part, added up."""
    sums = list(itertools.accumulate(itertools.chain(*parts), operator.or_))
    return sums[max(1, len(sums) - len(parts[-1])) :]


def _drop_needless(forecaster: Forecaster, prediction: Forecast, change: Mapping[str, Any]) -> dict[str, Any]:
    """Drop keys not needed for the run to fit."""
    for key in change:
        fewer = {name: value for name, value in change.items() if name != key}
        if fewer and _fits(forecaster, prediction, fewer):
            return _drop_needless(forecaster, prediction, fewer)
    return dict(change)


def _fits(forecaster: Forecaster, prediction: Forecast, change: Mapping[str, Any]) -> bool:
    other = _try_placement(forecaster, prediction, change)
    return other is not None and other.fits


def _try_placement(forecaster: Forecaster, prediction: Forecast, change: Mapping[str, Any]) -> Forecast | None:
    """Return the forecast with a change, with a placement search if needed; None: invalid combination."""
    other = _try_change(forecaster, prediction, change, times=False)
    if other is None or other.fits:
        return other
    return place(forecaster.of(other.config), other, times=False)


def _larger_budgets(forecaster: Forecaster, prediction: Forecast) -> dict[str, Any]:
    """Return budgets raised until the run fits, with the fewest bytes more; empty if larger budgets do not help.

    Tries the budgets of the short tiers, and the device budget alone: a larger one cuts units into fewer parts, which
    can take less of the host.
    """
    short = _raised_budgets(forecaster, prediction)
    device = {} if "device" in prediction.memory.shortfalls else _larger_device(forecaster, prediction)
    found = [_narrow(forecaster, prediction, change) for change in (short, device) if change]
    more_bytes = [sum(size - prediction.config.get(key) for key, size in change.items()) for change in found]
    best = min(zip(more_bytes, found, strict=True), key=operator.itemgetter(0), default=(0, {}))[1]
    return {key: f"{n >> 10}KiB" if n % (1 << 20) else f"{n >> 20}MiB" for key, n in best.items()}


def _raised_budgets(forecaster: Forecaster, prediction: Forecast) -> dict[str, int]:
    """Return the budgets of the short tiers, raised by the shortage, in bytes; empty if the run does not fit then.

    A plan can need more with a larger budget, since units are cut into parts by the budget. So each result is planned.
    """
    change: dict[str, int] = {}
    larger = prediction
    for _ in range(_MAX_ENLARGEMENTS):
        for tier, too_few in larger.memory.shortfalls.items():
            budget = larger.config.get(BUDGETS[tier])
            if budget is None:  # the memory of the machine itself is too small
                return {}
            # A budget of the host or of disks is for all ranks of a machine.
            num_sharing = 1 if tier == "device" else prediction.num_ranks
            change[BUDGETS[tier]] = (-(-(budget + num_sharing * too_few) >> 20)) << 20
        other = _try_change(forecaster, prediction, change, times=False)
        if other is None:
            return {}
        if other.fits:
            return change
        larger = other
    return {}


def _larger_device(forecaster: Forecaster, prediction: Forecast) -> dict[str, int]:
    """Return a device budget that fits, doubled up to the memory of the device, in bytes; empty: none does."""
    key, most = BUDGETS["device"], prediction.hardware.device_bytes
    budget = prediction.config.get(key)
    if not budget:
        return {}
    for _ in range(_MAX_ENLARGEMENTS):
        budget *= 2
        if most is not None and budget > most:
            break
        if _fits(forecaster, prediction, {key: budget}):
            return {key: budget}
    return {}


def _narrow(forecaster: Forecaster, prediction: Forecast, change: Mapping[str, int]) -> dict[str, int]:
    """Return smaller budgets that still fit, to a sixteenth, in bytes."""
    change = dict(change)
    for key in change:
        too_small = prediction.config.get(key)
        while change[key] - too_small > max(1 << 16, change[key] >> 4):
            middle = -(-(too_small + change[key]) // 2 >> 16) << 16
            if middle >= change[key]:  # rounded up to the budget that fits: without this the search would not end
                break
            if _fits(forecaster, prediction, {**change, key: middle}):
                change[key] = middle
            else:
                too_small = middle
    return change


def apply_change(config: Config, change: Mapping[str, Any]) -> Config:
    """Return the configuration with other values. Raises ConfigError."""
    config = config.with_resolved(**{key.replace(".", "__"): value for key, value in change.items()})
    if config.train.tokens_per_step and change.keys() & {"train.tokens_per_step", "data.sequence_length"}:
        # The rows are decided again.
        config = config.with_settings({"train.batch_size": (Config().train.batch_size, "default")})
    config.check()
    return config


def to_flags(change: Mapping[str, Any]) -> str:
    """Return a change as command-line flags."""
    flags = []
    for key, value in change.items():
        if isinstance(value, tuple):  # a list of one folder
            value = value[0]
        elif isinstance(value, int) and key.endswith("_memory"):
            value = written_size(value)
        flags.append(f"--{key} {'none' if value is None else value}")
    return " ".join(flags)


def _more_host_memory(forecaster: Forecaster, initial: Forecast) -> tuple[str, Forecast]:
    """Return a host memory in whole GiB more, enough for a plan without a shortfall there, and the forecast.

    The text names the limit that was set, or else the machine.
    """
    config, hardware = initial.config, initial.hardware
    budget, prediction = config.offload.host_memory, initial
    more_bytes, text = 0, ""
    for _ in range(_MAX_ENLARGEMENTS):
        too_few = prediction.memory.shortfalls.get("cpu", 0) * initial.num_ranks
        if more_bytes and not too_few:
            break
        more_bytes += (-(-too_few >> 30) << 30) or _MORE_HOST_BYTES
        text = f"a machine with {format_bytes(more_bytes)} more host memory"
        if budget is not None:
            change = {BUDGETS["cpu"]: f"{-(-(budget + more_bytes) >> 30)}GiB"}
            config, text = apply_change(config, change), to_flags(change)
        if budget is None or budget + more_bytes > initial.hardware.host_bytes:
            hardware = initial.hardware.with_(host_bytes=initial.hardware.host_bytes + more_bytes)
            text = text if budget is None else f"{text}, on a machine with that much"
        prediction = place(forecaster, forecaster.predict(config, hardware))
    return text, prediction


def written_size(num_bytes: int) -> str:
    """Return a size in settings notation, for example `14.8GiB`: three digits, rounded down."""
    shift = max(0, min(4, (num_bytes.bit_length() - 1) // 10)) * 10
    whole, scale = num_bytes >> shift, 1 << shift
    digits = max(0, 3 - len(str(whole))) if shift else 0
    size = num_bytes * 10**digits // scale / 10**digits
    return f"{size:g}{('B', 'KiB', 'MiB', 'GiB', 'TiB')[shift // 10]}"
