"""Derive tiers, lookahead and allocations from engine settings before anything is allocated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from offload.distributed.comm import Comm
from offload.errors import ConfigError, DoesNotFitError, counted, format_bytes
from offload.lanes.streams import overlaps
from offload.layout.codecs import EXACT, GRADIENT_CODECS, Codec
from offload.layout.planes import summed
from offload.layout.regions import ParameterInfo, Region, alike
from offload.layout.residence import DEVICE, DISK, FILES, HOST, SLOT, Residence
from offload.layout.sharding import Sharding
from offload.planning import device_updates
from offload.planning.device_updates import is_small_update
from offload.planning.disk import (
    activation_ring_bytes,
    add_early_tiles,
    lay_out,
    optimizer_bytes,
    read_from_files,
    read_ring,
    ring_bytes,
)
from offload.planning.machines import FreeMemory, Machine
from offload.planning.memory import (
    Allocation,
    UnitPlan,
    bytes_on,
    check_budgets,
    check_host,
    plan_memory,
    resident_regions,
    slot_bytes,
    staging_bytes,
    summed_regions,
    waits_on_disk,
)
from offload.planning.settings import Settings
from offload.tiers.placement import TIERS, Placement

_SHARE_OF_FREE_MEMORY = 0.9
"""Share of free memory used without a budget. The rest is left to other processes."""
_SHARE_FOR_STATES = 0.6
"""Share of device memory for states. The rest is left to activations."""
AUTO_LOOKAHEAD = 2
"""Units fetched ahead by default: one in transfer, one waiting for compute."""


@dataclass(frozen=True)
class Transfers:
    """Buffers for copies between tiers."""

    overlap: bool
    """True if copies and updates overlap compute."""
    rings: Mapping[str, int] = field(default_factory=dict)
    """Host ring sizes in bytes for disk reads and writes, by name."""
    ahead: int = 0
    """Number of units fetched ahead."""
    buffers: int = 1
    """Number of consecutive unit gradients with room on the device."""

    @property
    def stagings(self) -> int:
        """Number of consecutive region gradients with room on the host: one fills while the other is consumed."""
        return 1 + self.overlap


@dataclass(frozen=True)
class Plan:
    """Placement and data movement for a run."""

    residence: Residence
    """Tiers of all planes."""
    rings: Mapping[str, int]
    """Host ring sizes in bytes for disk reads and writes, by name."""
    overlap: bool
    """True if copies and updates overlap compute."""
    update: str
    """Update place for states stored on the host: "cpu", "device" or "both"."""
    ahead: int
    """Number of units fetched ahead."""
    device_bytes: int | None
    """Total device memory limit in bytes; spare memory may go to units. None: no limit."""
    full_device_bytes: int | None
    """The same limit for a device without other users: decisions that change bits take this limit. None: no limit."""
    allocations: list[Allocation]
    """Planned allocations."""
    unlimited_allocations: list[Allocation]
    """Allocations with unlimited memory."""
    summed: frozenset[int]
    """Indices of the regions whose gradients accumulate on the host, see `summed_regions` in `planning/memory.py`."""

    @property
    def corrects_cheaply(self) -> bool:
        """False if states are on disk: a correction is then a second disk pass, more expensive than waiting."""
        return not self.residence.indices_on(DISK)

    def lookahead(self, prefetch: str | int, num_regions: int) -> tuple[int, int | None]:
        """Return the number of cargoes fetched ahead, and the maximum held at the same time (None: as many as fit).

        Without a budget the device holds only the lookahead. With a budget, spare room keeps units on the device.
        """
        ahead = self.ahead
        if prefetch == "auto" and self.overlap:
            ahead = num_regions
        is_complete = self.residence.common == DEVICE or self.residence.keeps_weights
        if is_complete or self.device_bytes is not None:
            return ahead, None
        return ahead, 1 + self.ahead

    def updated_on_host(self, regions: Sequence[Region]) -> set[int]:
        """Return the indices of parameters updated on the host."""
        is_device = DEVICE in (self.update, self.residence.common)
        elsewhere = self.residence.updated_on_device
        host_regions = [region for region in regions if not is_device and region.index not in elsewhere]
        return {index for region in host_regions for index in region.parameters}

    @property
    def fits_device(self) -> bool:
        """True if the planned allocations fit the device."""
        return self.device_room_bytes is None or self.device_room_bytes >= 0

    @property
    def device_room_bytes(self) -> int | None:
        """Device bytes left by the plan; None: no limit."""
        if self.device_bytes is None:
            return None
        return self.device_bytes - bytes_on(DEVICE, self.allocations)

    def describe_updates(self, regions: Sequence[Region]) -> str:
        """Return a message about update placement; empty if all updates run on the host."""
        streamed = self.residence.updated_on_device
        if not streamed or self.update != "both":
            if self.update == "device":
                return "updates on the device"
            return ""
        trainable = [region for region in regions if region.trainable]
        on_device = [region for region in trainable if region.index in streamed]
        kept, all_bytes = (
            format_bytes(optimizer_bytes(some_regions, self.residence.sharding))
            for some_regions in (on_device, trainable)
        )
        return (
            f"updates of {len(on_device)} of {len(trainable)} regions on the device, with {kept} of the {all_bytes} of "
            "optimizer states, and of the others on the host"
        )

    def of(self, tier: str, name: str) -> Allocation:
        """Return the allocation with this name, ignoring notes in parentheses. Empty allocation if not found."""
        return _find(self.allocations, tier, name)

    def range(self, name: str) -> tuple[int, int]:
        """Return (planned, maximum) bytes for a device allocation."""
        planned = self.of(DEVICE, name).num_bytes
        if self.residence.common == DEVICE:
            return planned, planned
        return planned, max(planned, _find(self.unlimited_allocations, DEVICE, name).num_bytes)


def _find(plan: Sequence[Allocation], tier: str, name: str) -> Allocation:
    matches = (a for a in plan if a.tier == tier and a.name.split(" (")[0] == name)
    return next(matches, Allocation(tier, name, 0))


def describe_frozen_weights(infos: Sequence[ParameterInfo], regions: Sequence[Region], residence: Residence) -> str:
    """Return a message about quantized or file-backed frozen weights; empty if there are none."""
    files = ""
    if in_files := residence.indices_on(FILES):
        size = sum(region.travelling_bytes for region in regions if region.index in in_files)
        way = "through the page cache, which is large enough"
        if residence.file_staging_bytes:
            way = "bypassing the page cache"
        files = (
            f"frozen weights of {format_bytes(size)} are read from the model's own files, at most "
            f"{format_bytes(2 * size)} a step (once for the forward, once for the backward), {way}"
        )
    quantized: dict[str, list[Region]] = {}
    for region in regions:
        if not (region.trainable or region.is_stored_as_used):
            quantized.setdefault(region.codec.name, []).append(region)
    if not quantized:
        return files
    parts = [
        f"{len({index for region in some_regions for index in region.parameters})} frozen parameters are stored in "
        f"{name}, {format_bytes(sum(region.travelling_bytes for region in some_regions))}, and take "
        f"{format_bytes(sum(region.weight_bytes for region in some_regions))} on the device"
        for name, some_regions in quantized.items()
    ]
    others = [info for info in infos if not info.trainable and not info.is_quantized]
    small = [info for info in others if not info.can_be_quantized]
    stacked = [info for info in small if info.by_expert and info.is_vector]
    named = _without_layer_numbers(info.name for info in others if info.can_be_quantized)
    if stacked:
        named.append(f"{counted(len(stacked), 'stack')} of expert vectors")
    if len(small) > len(stacked):
        named.append(f"{len(small) - len(stacked)} vectors and small matrices")
    return "; ".join([*filter(None, [files]), *parts, f"others unquantized: {', '.join(named) or 'none'}"])


def _without_layer_numbers(names: Iterable[str]) -> list[str]:
    """Return names with a star for the numbers that differ: layers have the same parameters."""
    by_pattern: dict[str, list[str]] = {}
    for name in names:
        by_pattern.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name), []).append(name)
    return [pattern if len(same) > 1 else same[0] for pattern, same in by_pattern.items()]


def num_replicas(settings: Settings, comm: Comm) -> int:
    """Return the number of replicas."""
    if settings.replicas == "auto":
        return comm.num_machines
    return int(settings.replicas)


def gradient_codec(settings: Settings, comm: Comm) -> Codec:
    """Return the codec for gradients between replicas.

    Raises ConfigError for quantized gradients if one replica spans machines.
    """
    chosen = GRADIENT_CODECS[settings.link_gradients]
    if not chosen.decodes:
        return chosen
    if num_replicas(settings, comm) > 1:
        return chosen
    if len(set(comm.machines)) > 1:
        raise ConfigError(
            f"offload.link_gradients is {settings.link_gradients}, but one replica of the model is sharded over "
            f"{len(set(comm.machines))} machines, and gradients within a replica are summed exactly: set "
            "--offload.replicas auto (or a number of copies, with equally many ranks on each machine), or "
            "--offload.link_gradients exact."
        )
    return EXACT  # a single replica on one machine: no gradients are sent between replicas


def describe_links(regions: Sequence[Region], sharding: Sharding) -> str:
    """Return a message about quantized transfers and their effect on training; empty if all transfers are exact."""
    trainable = [region for region in regions if region.trainable]
    quantized = [region for region in trainable if not region.is_stored_as_used]
    notes = []
    if quantized:
        quantized_bytes = sum(r.travelling_bytes for r in quantized)
        exact_bytes = sum(r.weight_bytes for r in quantized)
        num_quantized, num_trainable = (
            len({index for region in some for index in region.parameters}) for some in (quantized, trainable)
        )
        notes.append(
            f"{num_quantized} of {num_trainable} trainable parameters are copied in {quantized[0].link.name}, "
            f"{format_bytes(quantized_bytes)} instead of {format_bytes(exact_bytes)}, and the run computes with the "
            "rounded values; master weights, checkpoints and exports are exact"
        )
    if sharding.gradients.decodes:
        notes.append(
            f"gradients are sent between {sharding.num_replicas} replicas in {sharding.gradients.name}; the rounding "
            "error of a step is added to the next one, and takes "
            f"{format_bytes(sum(map(sharding.error_bytes, regions)))} on each rank"
        )
    if not notes:
        return ""
    return f"approximate: {'; '.join(notes)}"


def sharding_of(settings: Settings, comm: Comm) -> Sharding:
    """Return the sharding of regions over ranks. Collective on the first call.

    Raises ConfigError if replicas cannot share states.
    """
    within, between = comm.split(num_replicas(settings, comm))
    spreads = settings.replica_states == "shared" and between.size > 1  # one replica has nothing to share
    if spreads and within.size == 1:
        raise ConfigError(
            f"offload.replica_states is shared, but each of {between.size} replicas is a single rank with all weights: "
            "a single copy with sharded states and gradients does the same. Set --offload.replicas 1, "
            "--offload.zero_stage 2 and --offload.replica_states whole."
        )
    gradients = gradient_codec(settings, comm)
    places = within.rank, within.size, settings.zero_stage, between.rank, between.size
    return Sharding(*places, gradients, spreads, settings.dispatch == "always" and within.size > 1)


def make_plan(
    settings: Settings,
    units: Sequence[UnitPlan],
    regions: Sequence[Region],
    comm: Comm,
    machine: Machine,
    *,
    checks: bool = True,
) -> Plan:
    """Choose tiers, update place and lookahead. Collective.

    checks: raise DoesNotFitError if a budget or the host is too small.
    """
    sharding = sharding_of(settings, comm)
    free = machine.free_memory(comm)
    request = _Request(settings, units, regions, sharding, free, machine.has_accelerator)
    plan_with = partial(_make_plan, request, comm.most_local if checks else None)
    place = settings.optimizer.place_update(settings.update, sharding.num_ranks)
    if place != "auto":
        return plan_with(place)
    on_host = plan_with("cpu")  # raises DoesNotFitError before any measurement
    # Wherever there is no choice, no rates are needed: to measure them takes seconds.
    if not checks or not machine.has_accelerator or settings.host_bound or on_host.residence.common == DEVICE:
        return on_host
    throttles = device_updates.slowest_throttles(comm, settings.throttles)
    if is_small_update(regions, sharding, throttles):
        return on_host
    speeds = machine.speeds(comm)
    chosen = on_host

    def seconds(plan: Plan) -> float:
        return device_updates.estimate_seconds(regions, plan.residence, throttles, speeds)

    for update in ("both", "device"):
        try:
            plan = plan_with(update)
        except DoesNotFitError:  # the ring of the device needs room too
            continue
        chosen = min(chosen, plan, key=seconds)
    return chosen


@dataclass(frozen=True)
class _Request:
    """Inputs of a plan."""

    settings: Settings
    """Engine settings."""
    units: Sequence[UnitPlan]
    """Units, in module order."""
    regions: Sequence[Region]
    """All regions."""
    sharding: Sharding
    """Region partition over ranks."""
    free: FreeMemory
    """Free memory of the machine."""
    has_accelerator: bool
    """False if the host computes."""

    @property
    def uses_pages(self) -> bool:
        """True if the device computes over weights in host memory. With a delay it computes over older ones."""
        return self.free.uses_pages and not self.settings.delay

    def overlaps(self, reads: bool) -> bool:
        """Return True if copies overlap compute. `reads`: disk reads block, so they must overlap compute."""
        return reads or overlaps(self.has_accelerator, self.settings.throttles, self.settings.delay_seed())

    def unsized_transfers(self, residence: Residence) -> Transfers:
        """Return the transfers before their buffers are sized. Disk reads are certain for model files, and possible
        with a disk folder.
        """
        reads = bool(residence.rows) or self.settings.placement.nvme_dir is not None
        return Transfers(self.overlaps(reads))

    def beside_device_memory(self, residence: Residence) -> _Request:
        """Return the request with the memory that remains for states on the host.

        Device memory may be host memory (`FreeMemory.in_host`), so less remains.
        """
        free = self.free
        prefetch = self.settings.prefetch
        if residence.common == DEVICE or not free.in_host:
            return self
        # The most the device may take: the lookahead chosen by `size_transfers` is not known yet.
        ahead = AUTO_LOOKAHEAD
        if isinstance(prefetch, int):
            ahead = prefetch
        transfers = replace(self.unsized_transfers(residence), ahead=ahead, buffers=2)
        beside = bytes_on(DEVICE, self.allocations(residence, transfers))
        return replace(self, free=replace(free, host_bytes=max(0, free.host_bytes - beside)))

    def allocations(self, residence: Residence, transfers: Transfers) -> list[Allocation]:
        """Return the lasting allocations for a table of residence."""
        rule = self.settings.optimizer
        by_matrix = [region for region in self.regions if region.by_matrix]
        sizes = (rule.parts[r.rule].workspace_bytes(piece.shape) for r in by_matrix for piece in r.pieces)
        return plan_memory(
            self.units,
            self.regions,
            residence,
            keeps_gradients=self.settings.keeps_gradients,
            splits=self.settings.splits,
            passes=self.settings.passes,
            rings=transfers.rings,
            ahead=transfers.ahead,
            buffers=transfers.buffers,
            stagings=transfers.stagings,
            workspace_bytes=max(sizes, default=0),
            num_directions=rule.num_directions,
        )


def choose_residence(request: _Request, residence: Residence, update: str) -> Residence:
    """Choose the tier of all planes and the places of the updates.

    residence: the table of `_choose_common`. update: the place of the updates, as in `lay_out`.
    """
    if residence.common == DEVICE:
        return residence
    settings = request.settings
    regions = request.regions
    sharding = request.sharding
    most_numel, room = _device_room(request, residence, update)  # first: states on the device need no host memory

    # All other states: memory first, then disk.
    factors = sum(4 * region.factor_numel(factor) for region in regions for factor in region.factors)
    reserved = factors + read_ring(residence, regions) + residence.file_staging_bytes
    reserved += sum(_activation_rings(request).values())
    below, host_bytes = _tiers_below(settings.placement, request.free, reserved)
    stagings = request.unsized_transfers(residence).stagings
    staged = 0
    if settings.optimizer.has_gradients:
        staged = staging_bytes(regions, stagings, sharding)
    laid_out = lay_out(
        [region for region in regions if region.index not in residence.rows],
        below,
        keeps_gradients=settings.keeps_gradients,
        staging_bytes=staged,
        host_bytes=host_bytes,
        sharding=sharding,
        update=update,
        most_numel=most_numel,
        device_bytes=room,
    )
    return replace(residence, rows={**residence.rows, **laid_out.rows})


def _device_room(request: _Request, residence: Residence, update: str) -> tuple[int | None, int]:
    """Return the most elements of a tile updated on the device, and the device bytes for optimizer states."""
    if update not in (DEVICE, "both"):
        return None, 0
    placement = request.settings.placement
    budget = _device_bytes(placement, request.free)
    most_numel = device_updates.tile_numel(request.regions, budget, request.sharding)
    if placement.optimizer_memory is not None:
        return most_numel, int(placement.optimizer_memory)
    if placement.optimizer != "auto" or budget is None or request.free.uses_pages:  # in one memory nothing is nearer
        return most_numel, 0
    # Weights first: each weight byte is copied to the device twice per step, other state bytes once per direction.
    streamed = device_updates.all_on_device(request.regions, most_numel, request.sharding)
    first = replace(residence, rows={**residence.rows, **streamed.rows}, keeps_weights=True)
    transfers = request.unsized_transfers(residence)
    planned = request.allocations(first, replace(transfers, buffers=transfers.stagings))
    room = max(0, budget - bytes_on(DEVICE, planned))
    if update == "both":
        room //= 3  # leave room for the step itself; step memory is unknown here
    return most_numel, room


def _activation_rings(request: _Request) -> dict[str, int]:
    placement = request.settings.placement
    has_ring = DISK in (placement.activations, placement.graphs)
    if not has_ring:
        return {}
    return activation_ring_bytes(request.regions, placement.budget(HOST))


def size_transfers(request: _Request, residence: Residence) -> Transfers:
    """Size the buffers for copies between tiers."""
    settings = request.settings
    regions = request.regions
    sharding = request.sharding
    rings = _activation_rings(request) | ring_bytes(residence, regions)
    transfers = Transfers(request.overlaps(bool(rings) or bool(residence.indices_on(FILES))), rings)
    if isinstance(settings.prefetch, int):
        buffers = 1
        if settings.prefetch:
            buffers = transfers.stagings
        transfers = replace(transfers, ahead=settings.prefetch, buffers=buffers)
    elif transfers.overlap and settings.placement.device_memory is None and request.free.device_bytes is None:
        # Without a limit. Under one, memory left over after a step goes to slots and a second buffer.
        transfers = replace(transfers, ahead=AUTO_LOOKAHEAD, buffers=2)
    # Early reads fill the wait for the norm. A record with gradients is not complete before the norm.
    defers = settings.keeps_gradients and settings.resolved_clip != "speculative"
    if not defers or any(waits_on_disk(region, residence) for region, _ in residence.alike(regions)):
        return transfers
    planned = bytes_on(HOST, request.allocations(residence, transfers))
    # Memory a custom training loop needs in place of the planned gradients.
    trainable = [region for region in regions if region.trainable]
    sums = sum(
        count * sharding.plane_bytes(region, summed(region.plane("gradients"))) for region, count in alike(trainable)
    )
    sums += staging_bytes(regions, transfers.stagings, sharding, accumulates=True, splits=settings.splits)
    budget = settings.placement.budget(HOST)
    if budget is None:
        budget = int(request.free.host_bytes * _SHARE_OF_FREE_MEMORY)
    elif HOST in (settings.placement.activations, settings.placement.graphs):
        budget = 0  # the size of offloaded activations depends on the batch
    return replace(transfers, rings=add_early_tiles(rings, budget - planned - sums))


def _check_memory(request: _Request, plan: Plan, num_sharing: int) -> None:
    """Raise DoesNotFitError if a budget or the host is too small for a plan. num_sharing: ranks on this machine."""
    residence = plan.residence
    free = request.free
    resident = resident_regions(request.units)
    # Streamed experts have slots of their own, counted apart.
    sizes = {u.name: slot_bytes(u, resident, residence) for u in request.units if not u.in_records}
    largest = max(sizes, key=lambda name: sizes[name])
    floor = f"The largest unit is {largest} ({format_bytes(sizes[largest])} of weights). "
    if plan.ahead and isinstance(request.settings.prefetch, int):
        floor += f"To use less, fetch fewer than {plan.ahead} units ahead with --offload.prefetch. "
    limits = {tier: request.settings.placement.budget(tier) for tier in TIERS}
    check_budgets(plan.allocations, limits, floor, num_sharing=num_sharing)
    check_host(
        plan.allocations,
        free.host_bytes,
        free.host_bound,
        model_bytes=free.model_bytes,
        is_device=free.in_host,
        num_sharing=num_sharing,
    )


def _make_plan(request: _Request, num_sharing: int | None, update: str) -> Plan:
    """Return the plan with a place of the updates. num_sharing: as in `_check_memory`; None: no check."""
    # The common tier first: where the device is host memory, this tier decides how much remains for the host.
    common = _choose_common(request)
    beside = request.beside_device_memory(common)
    residence = choose_residence(beside, common, update)
    on_disk = any(row.tiers.get("weights") == DISK for row in residence.rows.values())
    if request.settings.delay and (on_disk or residence.common == DEVICE):
        place = "on the device" if residence.common == DEVICE else "on disk"
        raise ConfigError(
            "train.delay is 1, which needs the weights before and after an update in host memory, but they are stored "
            f"{place}: set --train.delay 0, or --offload.parameters cpu --offload.optimizer cpu (or nvme)."
        )
    transfers = size_transfers(beside, residence)
    allocations = request.allocations(residence, transfers)
    # Limits for slots and buffers made of spare memory: see `Plan.range`.
    lower = replace(residence, common=HOST, keeps_weights=True)
    unlimited = request.allocations(lower, replace(transfers, ahead=0, buffers=transfers.stagings))
    device_bytes = full_device_bytes = request.settings.placement.budget(DEVICE)
    # All memory of the device, not the free part: a resumed run needs the same bits, also with less memory free.
    if full_device_bytes is None and request.free.total_device_bytes is not None:
        full_device_bytes = int(request.free.total_device_bytes * _SHARE_OF_FREE_MEMORY)
    if device_bytes is None and request.free.device_bytes is not None:
        left = request.free.device_bytes
        if request.free.in_host:  # both share memory
            left = min(left, request.free.host_bytes) + request.free.model_bytes
            left = max(0, left - bytes_on(HOST, allocations))
        device_bytes = int(left * _SHARE_OF_FREE_MEMORY)
    plan = Plan(
        residence=residence,
        rings=transfers.rings,
        overlap=transfers.overlap,
        update=_place_of_updates(residence, update),
        ahead=transfers.ahead,
        device_bytes=device_bytes,
        full_device_bytes=full_device_bytes,
        allocations=allocations,
        unlimited_allocations=unlimited,
        summed=summed_regions(request.regions, request.units, request.settings.passes, request.settings.splits),
    )
    if num_sharing is not None:
        _check_memory(request, plan, num_sharing)
    return plan


def _place_of_updates(residence: Residence, update: str) -> str:
    """Return the place of updates as a plan tells it: a request for both only where the device has room for some."""
    if update == SLOT:
        return DEVICE  # the table has the slots
    if update == "both" and residence.common != DEVICE and not residence.updated_on_device:
        return "cpu"
    return update


def _device_bytes(placement: Placement, free: FreeMemory) -> int | None:
    """Return the device bytes available for states; None: no limit."""
    budget = placement.budget(DEVICE)
    if budget is None:
        budget = free.device_bytes
    if budget is None:
        return None
    # Without a disk, states beyond the device go to the same memory: that leaves no more for activations.
    if free.uses_pages and placement.budget(DEVICE) is None and placement.nvme_dir is None:
        return int((min(budget, free.host_bytes) + free.model_bytes) * _SHARE_OF_FREE_MEMORY)
    return int(budget * _SHARE_FOR_STATES)


def _tiers_below(placement: Placement, free: FreeMemory, reserved: int) -> tuple[dict[str, str], int | None]:
    """Return the tiers below the device by kind, and the host bytes for them (None: no limit), as `lay_out` takes them.

    With "auto" and a disk folder, states beyond the host budget or free memory go to disk. `reserved` is subtracted
    first.
    """
    tiers = {state: getattr(placement, state) for state in ("parameters", "optimizer", "gradients")}
    tiers["parameters"] = tiers["parameters"].replace(FILES, HOST)  # for trainable parameters
    if tiers["parameters"] == DEVICE:  # copied from the master weights
        tiers["parameters"] = tiers["optimizer"]
    if tiers["gradients"] == DEVICE:  # next to the optimizer states, which did not fit the device
        tiers["gradients"] = HOST
    host_bytes = placement.budget(HOST)
    if placement.nvme_dir is None:  # no other tier: `check_host` reports a misfit
        tiers = {state: HOST if tier == "auto" else tier for state, tier in tiers.items()}
    elif host_bytes is None and "auto" in tiers.values():
        share = _SHARE_FOR_STATES if free.uses_pages else _SHARE_OF_FREE_MEMORY
        host_bytes = int(free.host_bytes * share)
    if host_bytes is not None:
        host_bytes = max(0, host_bytes - reserved)
    return tiers, host_bytes


def _choose_common(request: _Request) -> Residence:
    """Return a table with the common tier, and with the regions in model files.

    The common tier with "auto" is the device if everything fits, else the host, which stands for all tiers below the
    device. Raises ConfigError if parameters should stay in files and none is frozen.
    """
    placement = request.settings.placement
    free = request.free
    residence = Residence(sharding=request.sharding, uses_pages=request.uses_pages)
    if placement.parameters == FILES:
        files = read_from_files(request.sharding, request.regions, placement.budget(HOST), free.host_bytes)
        residence = replace(files, uses_pages=request.uses_pages)
        if not residence.rows:
            raise ConfigError(
                "offload.parameters is files, but no parameter is frozen, and trained weights cannot stay in the "
                "model's own files. Freeze some (requires_grad=False) before Engine(), or set --offload.parameters cpu."
            )
    # Here the host stands for all tiers below the device.
    wants = tuple(HOST if want in (DISK, FILES) else want for want in (placement.parameters, placement.optimizer))
    parameters, states = wants
    if "auto" in wants:
        budget = _device_bytes(placement, free)
        if budget is None and placement.nvme_dir is not None:  # the host computes, and host memory is limited
            budget = int(free.host_bytes * _SHARE_OF_FREE_MEMORY)
        fits = True
        if budget is not None:
            on_device = replace(residence, common=DEVICE)
            planned = request.allocations(on_device, request.unsized_transfers(residence))
            fits = bytes_on(DEVICE, planned) <= budget
        if placement.optimizer_memory is not None:  # a separate limit for these states on the device
            room = int(placement.optimizer_memory)
            fits = fits and optimizer_bytes(request.regions, request.sharding) <= room
        choice = DEVICE if fits else HOST
        if parameters == "auto":
            parameters = choice
        if states == "auto":  # beside weights on the host, states on the device save nothing
            states = HOST if parameters == HOST else choice
    return replace(residence, common=states, keeps_weights=DEVICE == parameters != states)


def budget_bytes(value: Any) -> int | None:
    if value is None:
        return None
    return int(value)
