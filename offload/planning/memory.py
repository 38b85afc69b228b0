"""Plan all lasting allocations per tier, exact to the byte. The engine allocates from this list."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import attrgetter

from offload.errors import DoesNotFitError, allocation_name, format_bytes
from offload.layout.planes import CODES, ERROR, WHOLE_MASTER, summed
from offload.layout.regions import SCRATCH_BYTES, Region, alike, without_repeats
from offload.layout.residence import DEVICE, DISK, FILES, HOST, Residence
from offload.layout.sharding import Sharding
from offload.planning.device_updates import UPDATE_RING
from offload.planning.device_updates import ring_bytes as update_ring_bytes
from offload.planning.disk import read_ring
from offload.schedule.build import window_bytes
from offload.tiers.decoder import DECODING, decoding_bytes
from offload.tiers.model_files import READ_RING, READ_STAGING
from offload.tiers.placement import TIERS

BUDGETS = {tier: f"offload.{field}" for tier, field in TIERS.items()}
"""Config key of the budget for each tier."""
_DISK_RINGS = f"{DISK} "
"""Begin of the names of disk rings."""
_SUMMED_PART = 1 << 23
"""Elements staged at once for a gradient sum: 32 MiB in fp32. The gradient of a large layer needs no more."""
# Names of allocations, equal in plan, ledgers, errors and reports.
SLOT = "unit slot"
BUFFER = "gradient buffer"
EXPERT_SLOT = "expert slot"
EXPERT_BUFFER = "expert gradient buffer"
SHARDS = "gradient shards"
SCRATCH = "reduction scratch"
BETWEEN = "sums over replicas"
WORKSPACE = "update workspace"
PERTURBED = "perturbed weights"
STAGING = "gradient staging"
RESIDENT = "resident weights"
LASTING = "accumulated gradients"
LOSS = "memory of the loss"
BESIDE = "codes of the unit in use"
_PASSING = (
    SLOT,
    BUFFER,
    EXPERT_SLOT,
    EXPERT_BUFFER,
    SHARDS,
    SCRATCH,
    BETWEEN,
    WORKSPACE,
    PERTURBED,
    STAGING,
    RESIDENT,
    LASTING,
    UPDATE_RING,
    DECODING,
    BESIDE,
)
"""Device allocations independent of the state placement."""


@dataclass(frozen=True)
class Allocation:
    """Named memory. Plan, errors and report use the same names."""

    tier: str
    """Tier: a name in `TIERS`."""
    name: str
    """Allocation name."""
    num_bytes: int
    """Size in bytes."""


@dataclass(frozen=True)
class UnitPlan:
    """Unit properties needed for planning."""

    name: str
    """Unit name."""
    regions: tuple[Region, ...]
    """Regions with the unit parameters."""
    resident: bool
    """True if the weights stay on the device."""
    in_records: bool = False
    """True if the unit contains the experts of a layer. Experts are fetched a few at a time into separate memory."""
    num_layers: int = 0
    """Number of layers using the weight this unit is a row block of; 0: not a row block.

    Gradients for a row block can arrive in several chunks, accumulated in the gradient buffer.
    """

    beside_bytes: int = 0
    """Device bytes beside the weights while the unit is in use, for stages."""
    companion: str = ""
    """Beginning of the names of the companion with this unit; empty: the trained model."""

    @cached_property
    def records(self) -> list[tuple[Region, ...]]:
        """Expert regions grouped by record. A record is fetched as one piece."""
        return [tuple(record) for _, record in groupby(self.regions, key=attrgetter("units"))]


def summed_regions(regions: Iterable[Region], units: Iterable[UnitPlan], passes: int, splits: bool) -> frozenset[int]:
    """Return the indices of the regions whose gradients accumulate on the host in fp32.

    These are all trainable regions over several passes, and beside streamed experts that train on several micro-batches
    (`splits`): gradients of an expert arrive once per micro-batch. Otherwise these are the row blocks of weights that
    several layers share: gradients of a block arrive in the backward of each layer.
    """
    units = list(units)
    of_experts = (region for unit in units if unit.in_records for region in unit.regions)
    arrive_often = passes > 1 or (splits and any(region.trainable for region in of_experts))
    shared = (region for unit in units if unit.num_layers > 1 for region in unit.regions)
    return frozenset(region.index for region in (regions if arrive_often else shared) if region.trainable)


def transient_gradient_bytes(region: Region, wide: bool = False) -> int:
    """Return the gradient bytes for a region in the backward. wide: fp32 accumulation instead of parameter dtype."""
    if not region.trainable:
        return 0
    if wide:
        return 4 * region.numel
    return region.weight_bytes


def slot_bytes(unit: UnitPlan, resident: set[int], residence: Residence) -> int:
    """Return the slot bytes for a unit: weights and co-fetched planes. Resident regions are excluded."""
    return sum(residence.slot_bytes(region) for region in unit.regions if region.index not in resident)


def resident_regions(units: Iterable[UnitPlan]) -> set[int]:
    """Return the indices of regions any unit keeps on the device."""
    return {region.index for unit in units if unit.resident for region in unit.regions}


def staging_bytes(
    regions: Iterable[Region],
    stagings: int,
    sharding: Sharding = Sharding(),  # noqa: B008 (frozen)
    accumulates: bool = False,
    splits: bool = False,
) -> int:
    """Return the staging bytes for `stagings` consecutive gradients, consumed immediately or added to stored sums.

    accumulates: gradients are added to stored sums. splits: these are fp32 sums over micro-batches or chunks.
    """
    wide = accumulates and (splits or sharding.size > 1)
    # A sum is over the shard reduced by this rank, in every stage: one gather follows, after the last pass.
    own = sharding.num_ranges
    if accumulates and sharding.size > 1:
        own = sharding.size
    sizes = []
    trainable = (region for region in regions if region.trainable)
    for region in without_repeats(trainable, stagings):
        itemsize = region.plane("gradients").dtype.itemsize
        if wide:
            itemsize = 4
        numel = region.numel // own
        parts = [slice(0, numel)]
        if accumulates:
            parts = summed_parts(numel)
        sizes += [itemsize * (part.stop - part.start) for part in parts]
    return window_bytes(sizes, stagings)


def summed_parts(numel: int) -> list[slice]:
    """Return the parts of a gradient, in elements, that are staged and added to a sum one after the other."""
    return [slice(start, min(start + _SUMMED_PART, numel)) for start in range(0, numel, _SUMMED_PART)]


def shard_bytes(regions: Iterable[Region], shards: int, sharding: Sharding) -> int:
    """Return the device bytes for fp32 reduction of bf16 gradients, `shards` regions at a time.

    fp32 gradients are reduced in place, except those from the rank that computes a block for all.
    """
    if sharding.size == 1:  # nothing to reduce
        return 0
    reduced = [region for region in regions if region.trainable and (region.is_short or sharding.dispatches)]
    return window_bytes([4 * region.numel // sharding.size for region in without_repeats(reduced, shards)], shards)


def scratch_bytes(regions: Iterable[Region], sharding: Sharding) -> int:
    """Return the device bytes for gradient pieces from other ranks.

    In fp32, two pieces per rank plus a sum and a term. Small shards use a quarter of a shard per piece.
    """
    largest = max((region.numel // sharding.size for region in regions if region.trainable), default=0)
    if sharding.size <= 1:
        return 0
    return min(SCRATCH_BYTES, (2 * sharding.size + 2) * largest)


def replica_sum_bytes(regions: Sequence[Region], stagings: int, residence: Residence) -> tuple[int, int]:
    """Return (shard bytes, scratch bytes) for gradient sums over replicas, beside the states.

    Shards are in fp32 for `stagings` consecutive regions, plus the sums if gradients are written to disk from there.
    Scratch holds the pieces received from other replicas.
    """
    sharding = residence.sharding
    if sharding.num_replicas == 1:
        return 0, 0
    trainable = (region for region in regions if region.trainable)
    few = without_repeats(trainable, stagings, residence.row_key)
    sizes = [
        4 * region.numel // sharding.size
        + waits_on_disk(region, residence) * region.plane("gradients").num_bytes(region.numel) // sharding.num_ranges
        for region in few
    ]
    largest = max((region.numel // sharding.num_ranks for region in few), default=0)
    scratch = min(SCRATCH_BYTES, 4 * (2 * sharding.num_replicas + 2) * largest)
    return window_bytes(sizes, stagings), scratch


def perturbed_bytes(units: Iterable[UnitPlan], num_directions: int) -> int:
    """Return the device bytes for weights perturbed in both directions.

    One unit in compute needs room for one direction; resident units need room for all directions.
    """
    passing = max((_trainable_bytes(unit) for unit in units if not unit.resident), default=0)
    return 2 * (passing + num_directions * sum(_trainable_bytes(unit) for unit in units if unit.resident))


def _trainable_bytes(unit: UnitPlan) -> int:
    return sum(region.weight_bytes for region in unit.regions if region.trainable)


def plan_memory(
    units: Sequence[UnitPlan],
    regions: Sequence[Region],
    residence: Residence,
    *,
    keeps_gradients: bool,
    splits: bool,
    passes: int = 1,
    rings: Mapping[str, int] | None = None,
    ahead: int = 0,
    buffers: int = 1,
    stagings: int = 1,
    workspace_bytes: int = 0,
    num_directions: int = 0,
) -> list[Allocation]:
    """Return every lasting allocation in a run.

    splits: a step has several micro-batches, with gradients accumulated in fp32.
    passes: passes of a step.
    rings: ring sizes in bytes for disk transfers.
    ahead: number of prefetched units.
    buffers: number of consecutive unit gradients with room on the device.
    stagings: number of consecutive region gradients with room on the host, if consumed immediately.
    workspace_bytes: device memory used by an update.
    num_directions: loss measurement directions in a forward-only step; 0: the step has a backward.
    """
    common = residence.common
    sharding = residence.sharding
    on_host = summed_regions(regions, units, passes, splits)
    resident = resident_regions(units)
    groups = alike(regions, by=lambda each: (residence.row_key(each), each.index in on_host, each.index in resident))
    kinds = [region for region, _ in groups]
    # An update needs the norm, and sums are complete at the end.
    plan = _planes(groups, residence, on_host, waits=keeps_gradients or bool(on_host))

    # Gradients on their way, and rings of the disk.
    if (on_host or not keeps_gradients) and not num_directions:
        if on_host:
            staged = [region for region in regions if region.index in on_host]
        else:
            few = without_repeats(regions, stagings, residence.row_key)
            staged = [region for region in few if not waits_on_disk(region, residence)]
        size = staging_bytes(staged, stagings, sharding, accumulates=bool(on_host), splits=splits or bool(on_host))
        plan.append(Allocation(common, STAGING, size))
    plan += [Allocation(HOST, name, size) for name, size in (rings or {}).items()]
    plan.append(Allocation(HOST, READ_RING, read_ring(residence, kinds)))
    plan.append(Allocation(HOST, READ_STAGING, residence.file_staging_bytes))

    # Weights on the device.
    streamed = [unit for unit in units if not unit.in_records]
    all_records = (record for unit in units if unit.in_records for record in unit.records)
    records = {
        tuple((region.kind, residence.row_key(region)) for region in record): record for record in all_records
    }.values()
    copied = [(region, count) for region, count in groups if not residence.is_used_in_place(region)]
    if copied:
        kept = sum(count * region.weight_bytes for region, count in copied if region.index in resident)
        plan.append(Allocation(DEVICE, RESIDENT, kept))
        # Frozen weights in few bits need slots even where exact weights are used in place.
        fetched = [region for unit in streamed for region in unit.regions]
        excluded = resident.union(region.index for region in fetched if residence.is_used_in_place(region))
        plan.append(_slots(streamed, excluded, ahead, residence))
        largest = max((sum(residence.slot_bytes(region) for region in record) for record in records), default=0)
        plan.append(Allocation(DEVICE, EXPERT_SLOT, stagings * largest))  # one record in use, the next on its way
        plan.append(Allocation(DEVICE, DECODING, decoding_bytes(kinds)))
    if common == HOST:
        plan.append(Allocation(DEVICE, UPDATE_RING, update_ring_bytes(residence, kinds)))
    plan.append(Allocation(DEVICE, WORKSPACE, workspace_bytes))
    plan.append(Allocation(DEVICE, BESIDE, max((unit.beside_bytes for unit in units if not unit.resident), default=0)))
    if num_directions:  # no backward: no gradients
        plan.append(Allocation(DEVICE, PERTURBED, perturbed_bytes(units, num_directions)))
        return [allocation for allocation in plan if allocation.num_bytes]

    # Gradients on the device, and sums over ranks.
    plan.append(Allocation(common, BETWEEN, sum(replica_sum_bytes(regions, stagings, residence))))
    plan.append(Allocation(common, ERROR.label, sum(count * sharding.error_bytes(region) for region, count in groups)))
    lasting = [(each, count) for each, count in groups if each.trainable and gradient_lasts(each, resident)]
    plan.append(Allocation(DEVICE, LASTING, sum(4 * count * region.numel for region, count in lasting)))
    passing = []
    for unit in streamed:
        if not unit.resident:
            is_wide = splits or unit.num_layers > 0  # several contributions are added in fp32
            own = [region for region in unit.regions if not gradient_lasts(region, resident)]
            passing.append(sum(transient_gradient_bytes(region, is_wide) for region in own))
    plan.append(Allocation(DEVICE, BUFFER, window_bytes(passing, buffers)))
    largest = max((sum(transient_gradient_bytes(region, splits) for region in record) for record in records), default=0)
    plan.append(Allocation(DEVICE, EXPERT_BUFFER, stagings * largest))
    plan.append(Allocation(DEVICE, SHARDS, shard_bytes(regions, stagings, sharding)))
    plan.append(Allocation(DEVICE, SCRATCH, scratch_bytes(kinds, sharding)))
    return [allocation for allocation in plan if allocation.num_bytes]


def _planes(
    groups: Sequence[tuple[Region, int]], residence: Residence, on_host: Collection[int], *, waits: bool
) -> list[Allocation]:
    """Return the planes and factors of all regions, by tier and label.

    groups: (region, number of such regions). on_host: indices of the regions whose gradients accumulate there. waits:
    gradients wait for the end of a backward.
    """
    common, sharding = residence.common, residence.sharding
    totals: dict[tuple[str, str], int] = {}
    for region, count in groups:
        if FILES in residence.row(region).tiers.values():  # read in place, through a ring
            continue
        if region.index in on_host:
            plane = region.plane("gradients")
            key = common, plane.label
            totals[key] = totals.get(key, 0) + count * sharding.plane_bytes(region, summed(plane))
        on_disk = residence.disk_bytes(region)
        for plane in region.planes:
            tier = residence.tier(region, plane)
            # Sums have their own plane, above; without a wait the staging memory is enough.
            has_no_plane = region.index in on_host or not waits
            if plane.state == "gradients" and tier != DISK and has_no_plane:
                continue
            key = tier, plane.label
            num_bytes = on_disk[plane.name] if tier == DISK else sharding.plane_bytes(region, plane)
            totals[key] = totals.get(key, 0) + count * num_bytes
        for factor in region.factors:
            key = common, factor.label
            totals[key] = totals.get(key, 0) + 4 * count * region.factor_numel(factor)
    return [Allocation(tier, label, num_bytes) for (tier, label), num_bytes in totals.items()]


def waits_on_disk(region: Region, residence: Residence) -> bool:
    """Return True if the gradients of a region wait on disk for the norm."""
    return residence.tier(region, region.plane("gradients")) == DISK


def _slots(units: Sequence[UnitPlan], resident: set[int], ahead: int, residence: Residence) -> Allocation:
    """Return the slot memory: all units if they stay, else the largest window of `1 + ahead` consecutive units, and at
    least the last units of the model and of its companions, whose heads alternate over chunks of tokens.
    """
    # Units with the same regions share a cargo.
    cargoes = {
        tuple(r.index for r in unit.regions if r.index not in resident): slot_bytes(unit, resident, residence)
        for unit in units
    }
    largest = max(units, key=lambda unit: slot_bytes(unit, resident, residence))
    if residence.keeps_weights:
        return Allocation(DEVICE, f"{SLOT} (all units stay)", sum(cargoes.values()))
    sizes = [size for size in cargoes.values() if size]
    note = f"largest unit: {largest.name}"
    if ahead:
        note += f", and {ahead} ahead"
    heads = {unit.companion: unit for unit in units}.values()
    size = max(window_bytes(sizes, 1 + ahead), sum(slot_bytes(unit, resident, residence) for unit in heads))
    return Allocation(DEVICE, f"{SLOT} ({note})", size)


def gradient_lasts(region: Region, resident: set[int]) -> bool:
    """Return True if a gradient has several contributions and leaves the device only after the backward.

    resident: as in `resident_regions`.
    """
    return len(region.units) > 1 or region.index in resident


def check_budgets(plan: Sequence[Allocation], budgets: dict[str, int | None], floor: str, num_sharing: int = 1) -> None:
    """Raise DoesNotFitError, with all allocations and the shortfall, if a tier exceeds the budget.

    budgets: byte limits for one rank; None: no limit.
    floor: sentence about the largest unit, used in the device message.
    num_sharing: ranks sharing the machine.
    """
    for tier, budget in budgets.items():
        on_tier = [allocation for allocation in plan if allocation.tier == tier]
        total = sum(allocation.num_bytes for allocation in on_tier)
        if budget is None or total <= budget:
            continue
        # The key is for all ranks of the machine, so the advice counts all of them.
        ranks = num_sharing if tier != DEVICE else 1  # a device belongs to one rank
        share = f" for each of the {ranks} ranks that share it" if ranks > 1 else ""
        key = BUDGETS[tier]
        step = " plus the memory of a step, which `python -m offload.plan` shows" if tier == DEVICE else ""
        raise DoesNotFitError(
            f"{key} is {format_bytes(budget)} ({budget} bytes){share} and the plan needs {format_bytes(total)} "
            f"({total} bytes), {format_bytes(total - budget)} ({total - budget} bytes) more: "
            f"{list_allocations(on_tier)}. {floor if tier == 'device' else ''}Nothing was allocated.",
            f"Raise --{key} to {total * ranks}{step}{_fix(tier, plan)}.",
        )


def bytes_on(tier: str, allocations: Iterable[Allocation]) -> int:
    """Return the bytes allocated on a tier."""
    return sum(allocation.num_bytes for allocation in allocations if allocation.tier == tier)


def list_allocations(allocations: Sequence[Allocation]) -> str:
    """Return the allocations as text, with sizes."""
    return ", ".join(f"{allocation_name(a.name)} {format_bytes(a.num_bytes)} ({a.num_bytes})" for a in allocations)


def _fix(tier: str, plan: Sequence[Allocation]) -> str:
    """Return advice other than a larger budget; empty if there is none."""
    if tier == HOST:
        return without_host_memory(plan)
    advice = []
    if tier == DEVICE:
        names = _names(plan, DEVICE)
        stays = f"{SLOT} (all units stay)" in names
        states = {name for name in names if not name.startswith(_PASSING)}
        lower = []
        if stays or "weights" in states:
            lower.append("--offload.parameters cpu")
        if states:
            lower.append("--offload.optimizer cpu")
        if lower:
            advice.append(f"move states off the device with {' '.join(lower)}")
        if UPDATE_RING in names:
            advice.append("update states on the host with --offload.update cpu")
    else:
        advice = [f"keep states off the disk with {_move_flags(_names(plan, tier), HOST)}", *_bf16_advice(plan, tier)]
    return _join_advice(advice)


def without_host_memory(plan: Sequence[Allocation]) -> str:
    """Return advice to save host memory, to append to a byte count; empty if there is none."""
    names = _names(plan, HOST)
    advice = list[str]()
    if _names(plan, DISK):  # the run has a disk: advise to move more there, not to begin with one
        if all(name.startswith(_DISK_RINGS) for name in names):
            return ", the minimum for the buffers that move states to and from disk"
        if lower := _move_flags(names, DISK):
            advice.append(f"move more states to disk with {lower}")
        return _join_advice(advice)
    advice += ["place states on disk with --offload.parameters nvme --offload.optimizer nvme --offload.nvme_dir FOLDER"]
    advice += _bf16_advice(plan, HOST)
    if "gradients" in names and WHOLE_MASTER not in names:  # in fp16 they wait in any case
        advice += [
            "train without clipping (--train.max_grad_norm none frees the memory of gradients waiting for the norm)"
        ]
    return _join_advice(advice)


def _move_flags(names: set[str], tier: str) -> str:
    """Return the flags to move the named states to a tier."""
    weights = {"weights", "low", WHOLE_MASTER, CODES}
    passing = (_DISK_RINGS, "gradient")
    moments = {name for name in names - weights if not name.startswith(passing)}
    states = {"parameters": weights & names, "optimizer": moments, "gradients": "gradients" in names}
    return " ".join(f"--offload.{state} {tier}" for state, is_present in states.items() if is_present)


def _bf16_advice(plan: Sequence[Allocation], tier: str) -> list[str]:
    """Return the bf16 advice if bf16 saves memory on the tier: gradients halve, states stay the same size."""
    has_gradients = not {"gradients", STAGING}.isdisjoint(_names(plan, tier))
    is_split = any(allocation.name in ("low", WHOLE_MASTER) for allocation in plan)
    if not (has_gradients and not is_split):
        return []
    return ["train with --train.precision bf16"]


def _names(plan: Sequence[Allocation], tier: str) -> set[str]:
    return {allocation.name for allocation in plan if allocation.tier == tier}


def _join_advice(advice: Sequence[str]) -> str:
    return "".join(f", or {sentence}" for sentence in advice)


def check_host(
    plan: Sequence[Allocation], free_bytes: int, bound: str, *, model_bytes: int, is_device: bool, num_sharing: int = 1
) -> None:
    """Raise DoesNotFitError, with the limit, all allocations and the shortfall, if the host has too little memory.

    Without this check the kernel would kill the process (SIGKILL) when the control group limit is exceeded.

    free_bytes: host memory available to this rank.
    bound: name of the tightest limit.
    model_bytes: memory the model occupies until the engine has copied the weights.
    is_device: compute runs on the host, so device memory counts as host memory.
    num_sharing: ranks on this machine.
    """
    on_host = [
        allocation for allocation in plan if allocation.tier == HOST or (is_device and allocation.tier == DEVICE)
    ]
    total = sum(allocation.num_bytes for allocation in on_host)
    if total <= free_bytes + model_bytes:
        return
    available_bytes = free_bytes + model_bytes
    ranks = f" for each of the {num_sharing} ranks that share it" if num_sharing > 1 else ""
    raise DoesNotFitError(
        f"the plan needs {format_bytes(total)} ({total} bytes) of host memory, but only "
        f"{format_bytes(available_bytes)} ({available_bytes} bytes) are available{ranks}, "
        f"{format_bytes(total - available_bytes)} ({total - available_bytes} bytes) less than needed: "
        f"{list_allocations(on_host)}. The limit is {bound}. Nothing was allocated.",
        f"Provide {(total - available_bytes) * num_sharing} bytes more{without_host_memory(plan)}.",
    )
