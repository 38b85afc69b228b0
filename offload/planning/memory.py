"""The list of allocations: what each tier will hold, to the byte. The engine allocates from this very list."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from offload.errors import DoesNotFitError, allocation_name, format_bytes
from offload.layout.codecs import EXACT
from offload.layout.planes import CODES, ERROR, summed
from offload.layout.regions import SCRATCH_BYTES, DiskLayout, Region, Sharding
from offload.planning.device_updates import UPDATE_RING
from offload.planning.disk import read_ring
from offload.schedule.build import window_bytes
from offload.tiers.decoding import DECODING, decoding_bytes
from offload.tiers.model_files import READ_RING
from offload.tiers.watched_files import READ_STAGING

BUDGETS = {"device": "offload.device_memory", "cpu": "offload.host_memory", "nvme": "offload.nvme_memory"}
"""The setting that bounds each tier."""
SLOT, BUFFER = "unit slot", "gradient buffer"
EXPERT_SLOT, EXPERT_BUFFER = "expert slot", "expert gradient buffer"
SHARDS, SCRATCH = "gradient shards", "reduction scratch"
BETWEEN = "sums over replicas"
WORKSPACE = "update workspace"
PERTURBED = "perturbed weights"
STAGING, RESIDENT, LASTING = "gradient staging", "resident weights", "accumulated gradients"
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
)
"""What the device holds wherever the states are."""


@dataclass(frozen=True)
class Allocation:
    """Memory under a name that the plan, the errors and the report share."""

    tier: str
    """The tier: device, cpu or nvme."""
    name: str
    """The name."""
    num_bytes: int
    """The bytes."""


@dataclass(frozen=True)
class UnitPlan:
    """What the plan knows of a unit."""

    name: str
    """The name of the unit."""
    regions: tuple[Region, ...]
    """The regions that hold the unit's parameters."""
    resident: bool
    """True if the unit's weights stay on the device."""
    in_records: bool = False
    """True if the unit is a layer's experts, which come up a few at a time, through memory of their own."""
    num_layers: int = 0
    """How many layers have the weight of which the unit is a block of rows; 0 for units that are none. The gradients of
    such a unit may come chunk by chunk, and add up in the buffer.
    """

    @property
    def records(self) -> list[tuple[Region, ...]]:
        """The regions of experts that come up together."""
        return [tuple(its) for _, its in groupby(self.regions, key=lambda region: region.units)]


def adds_up(units: Iterable[UnitPlan]) -> bool:
    """Return True if gradients of a step add up on the host, in fp32: several layers share a weight that is larger than
    the device's share.
    """
    return any(unit.num_layers > 1 and any(region.trainable for region in unit.regions) for unit in units)


def transient_gradient_bytes(region: Region, wide: bool = False) -> int:
    """Bytes of a region's gradients on their way from a backward pass: in the dtype of the parameters, or in fp32
    where micro-batches add up.
    """
    if not region.trainable:
        return 0
    return 4 * region.numel if wide else region.weight_bytes


def slot_bytes(unit: UnitPlan, resident: set[int], layout: DiskLayout = DiskLayout()) -> int:  # noqa: B008 (frozen)
    """Bytes of a unit's weights in a device slot, and of what comes up beside them, without the regions that are on the
    device anyway.
    """
    return sum(cargo_bytes(region, layout) for region in unit.regions if region.index not in resident)


def cargo_bytes(region: Region, layout: DiskLayout) -> int:
    """Bytes of a region in a slot."""
    return region.weight_bytes + sum(plane.num_bytes(region.numel) for plane in layout.co_fetched(region))


def resident_regions(units: Iterable[UnitPlan]) -> set[int]:
    """Return the indices of the regions that some unit keeps on the device."""
    return {region.index for unit in units if unit.resident for region in unit.regions}


def staging_bytes(
    regions: Iterable[Region],
    stagings: int,
    sharding: Sharding = Sharding(),  # noqa: B008 (frozen)
    accumulates: bool = False,
    splits: bool = False,
) -> int:
    """Bytes through which the gradients of `stagings` neighbours pass that do not wait, or are added to what waits:
    those that micro-batches, chunks of a head that is cut in rows (`splits`) or ranks have summed in fp32.
    """
    wide = accumulates and (splits or sharding.size > 1)
    own = sharding.size if accumulates and sharding.size > 1 else sharding.num_ranges
    sizes = [(4 if wide else r.plane("gradients").dtype.itemsize) * r.numel // own for r in regions if r.trainable]
    return window_bytes(sizes, stagings)


def shard_bytes(regions: Iterable[Region], shards: int, sharding: Sharding) -> int:
    """Bytes of the device in which `shards` neighbours' bf16 gradients are summed over ranks, in fp32. (Those in fp32
    are summed where they are.)
    """
    split = [4 * region.numel // sharding.size for region in regions if region.trainable and region.is_bf16]
    return window_bytes(split, shards) if sharding.size > 1 else 0


def scratch_bytes(regions: Iterable[Region], sharding: Sharding) -> int:
    """Bytes of the device for pieces of gradients that come from other ranks: two sets of one per rank, a sum and a
    term, in fp32, of a quarter of a shard where shards are small.
    """
    largest = max((region.numel // sharding.size for region in regions if region.trainable), default=0)
    return min(SCRATCH_BYTES, (2 * sharding.size + 2) * largest) if sharding.size > 1 else 0


def between_bytes(regions: Sequence[Region], stagings: int, layout: DiskLayout) -> tuple[int, int]:
    """Bytes beside the states in which the gradients of `stagings` neighbours are summed over replicas: for shards in
    fp32, with the sums where these go to disk from there, and for pieces that come from the other replicas.
    """
    sharding = layout.sharding
    if sharding.num_replicas == 1:
        return 0, 0
    trained = [region for region in regions if region.trainable]
    sizes = [
        4 * region.numel // sharding.size
        + ("gradients" in layout.of(region)) * region.plane("gradients").num_bytes(region.numel) // sharding.num_ranges
        for region in trained
    ]
    largest = max((region.numel // sharding.num_ranks for region in trained), default=0)
    scratch = min(SCRATCH_BYTES, 4 * (2 * sharding.num_replicas + 2) * largest)
    return window_bytes(sizes, stagings), scratch


def perturbed_bytes(units: Iterable[UnitPlan], num_directions: int) -> int:
    """Bytes of the device for weights on both sides of where they are: of the unit that computes, along one direction,
    and of all that stay, along each.
    """
    passing = max((_trained_bytes(unit) for unit in units if not unit.resident), default=0)
    return 2 * (passing + num_directions * sum(_trained_bytes(unit) for unit in units if unit.resident))


def _trained_bytes(unit: UnitPlan) -> int:
    return sum(region.weight_bytes for region in unit.regions if region.trainable)


def plan_memory(
    units: Sequence[UnitPlan],
    regions: Sequence[Region],
    *,
    parameters_tier: str,
    optimizer_tier: str,
    keeps_gradients: bool,
    splits: bool,
    layout: DiskLayout | None = None,
    rings: Mapping[str, int] | None = None,
    ahead: int = 0,
    buffers: int = 1,
    stagings: int = 1,
    workspace_bytes: int = 0,
    update_ring_bytes: int = 0,
    num_directions: int = 0,
) -> list[Allocation]:
    """Return every lasting allocation of a run. `splits`: a step has several micro-batches, whose gradients add
    up in fp32. `ahead`: how many units are fetched before they are needed. `buffers`, `stagings`: how many neighbours'
    gradients have room on the device and, where they do not wait there, on the host. `layout`: what is on disk;
    `rings`: the bytes of the buffers through which it moves. `workspace_bytes`: what an update takes on the device;
    `update_ring_bytes`: the ring there through which states of the host stream to be updated. `num_directions`: along
    which a step without gradients measures the loss; 0 for one with a backward.
    """
    states_tier, layout = "device" if optimizer_tier == "device" else "cpu", layout or DiskLayout()
    sharding = layout.sharding
    totals: dict[tuple[str, str], int] = {}
    sums_on_host = adds_up(units)
    for region in regions:
        if region.index in layout.files:
            continue
        on_disk = layout.of(region)
        if sums_on_host and region.trainable:
            plane = region.plane("gradients")
            key = states_tier, plane.label
            totals[key] = totals.get(key, 0) + sharding.share(summed(plane), 4 * region.numel)
        for plane in region.planes if keeps_gradients or "gradients" in on_disk else region.states:
            if sums_on_host and plane.kind == "gradients" and "gradients" not in on_disk:
                continue
            tier = "device" if layout.stays(region, plane) else "nvme" if plane.name in on_disk else states_tier
            key = tier, plane.label
            totals[key] = totals.get(key, 0) + sharding.share(plane, plane.num_bytes(region.numel))
        for factor in region.factors:
            key = states_tier, factor.label
            totals[key] = totals.get(key, 0) + 4 * region.factor_numel(factor)
    plan = [Allocation(tier, label, num_bytes) for (tier, label), num_bytes in totals.items()]
    if (sums_on_host or not keeps_gradients) and not num_directions:
        staged = [region for region in regions if sums_on_host or "gradients" not in layout.of(region)]
        plan.append(
            Allocation(
                states_tier, STAGING, staging_bytes(staged, stagings, sharding, sums_on_host, splits or sums_on_host)
            )
        )
    plan += [Allocation("cpu", name, size) for name, size in (rings or {}).items()]
    plan.append(Allocation("cpu", READ_RING, read_ring(layout, regions)))
    plan.append(Allocation("cpu", READ_STAGING, layout.file_staging_bytes))

    resident = resident_regions(units)
    records = [its for unit in units if unit.in_records for its in unit.records]
    in_slots = [r for r in regions if states_tier == "cpu" or sharding.gathers or r.travels is not EXACT]
    if in_slots:
        kept = sum(region.weight_bytes for region in in_slots if region.index in resident)
        plan.append(Allocation("device", RESIDENT, kept))
        stay = parameters_tier == "device" and states_tier == "cpu"
        there = resident.union(region.index for region in regions if region not in in_slots)
        plan.append(_slots([unit for unit in units if not unit.in_records], there, stay, ahead, layout))
        largest = max((sum(cargo_bytes(region, layout) for region in its) for its in records), default=0)
        plan.append(Allocation("device", EXPERT_SLOT, stagings * largest))
        plan.append(Allocation("device", DECODING, decoding_bytes(regions)))
    if states_tier == "cpu":
        plan.append(Allocation("device", UPDATE_RING, update_ring_bytes))
    plan.append(Allocation("device", WORKSPACE, workspace_bytes))
    if num_directions:
        plan.append(Allocation("device", PERTURBED, perturbed_bytes(units, num_directions)))
        return [allocation for allocation in plan if allocation.num_bytes]
    plan.append(Allocation(states_tier, BETWEEN, sum(between_bytes(regions, stagings, layout))))
    plan.append(Allocation(states_tier, ERROR.label, sum(map(sharding.error_bytes, regions))))
    lasting = [region for region in regions if region.trainable and gradient_lasts(region, resident)]
    plan.append(Allocation("device", LASTING, sum(4 * region.numel for region in lasting)))
    passing = []
    for unit in units:
        if not unit.resident and not unit.in_records:
            is_wide = splits or unit.num_layers > 0
            passing.append(sum(transient_gradient_bytes(r, is_wide) for r in unit.regions if r not in lasting))
    plan.append(Allocation("device", BUFFER, window_bytes(passing, buffers)))
    largest = max((sum(transient_gradient_bytes(region, splits) for region in its) for its in records), default=0)
    plan.append(Allocation("device", EXPERT_BUFFER, stagings * largest))
    plan.append(Allocation("device", SHARDS, shard_bytes(regions, stagings, sharding)))
    plan.append(Allocation("device", SCRATCH, scratch_bytes(regions, sharding)))
    return [allocation for allocation in plan if allocation.num_bytes]


def _slots(units: Sequence[UnitPlan], resident: set[int], stay: bool, ahead: int, layout: DiskLayout) -> Allocation:
    """Return the memory through which units stream: for the largest, for neighbours, or for all where they stay."""
    cargoes = {
        tuple(r.index for r in unit.regions if r.index not in resident): slot_bytes(unit, resident, layout)
        for unit in units
    }
    largest = max(units, key=lambda unit: slot_bytes(unit, resident, layout))
    if stay:
        return Allocation("device", f"{SLOT} (all units stay)", sum(cargoes.values()))
    sizes = [size for size in cargoes.values() if size]
    note = f"largest unit: {largest.name}" + (f", and {ahead} ahead" if ahead else "")
    return Allocation("device", f"{SLOT} ({note})", window_bytes(sizes, 1 + ahead))


def gradient_lasts(region: Region, resident: set[int]) -> bool:
    """True where a region's gradients are known to have several contributions, and land after the backward. `resident`:
    as of `resident_regions`.
    """
    return len(region.units) > 1 or region.index in resident


def check_budgets(plan: Sequence[Allocation], budgets: dict[str, int | None], floor: str, num_sharing: int = 1) -> None:
    """Refuse a rank's plan that a tier's budget cannot hold: DoesNotFitError with every allocation and the shortfall.

    `floor` says which unit is the largest and what it needs at least, for the device's message. `num_sharing` ranks
    share what the machine has: the budgets are of one of them.
    """
    for tier, budget in budgets.items():
        wanted = [allocation for allocation in plan if allocation.tier == tier]
        total = sum(allocation.num_bytes for allocation in wanted)
        if budget is None or total <= budget:
            continue
        ranks = num_sharing if tier != "device" else 1
        share = f" for each of the {ranks} ranks that share it" if ranks > 1 else ""
        key = BUDGETS[tier]
        step = " and what a step adds, which `python -m offload.plan` tells" if tier == "device" else ""
        raise DoesNotFitError(
            f"{key} is {format_bytes(budget)} ({budget} bytes){share} and the plan needs {format_bytes(total)} "
            f"({total} bytes), {format_bytes(total - budget)} ({total - budget} bytes) more: {name_all(wanted)}. "
            f"{floor if tier == 'device' else ''}Nothing was allocated. Raise --{key} to {total * ranks}"
            f"{step}{_fix(tier, plan)}."
        )


def bytes_on(tier: str, allocations: Iterable[Allocation]) -> int:
    """Return the bytes that allocations take of a tier."""
    return sum(allocation.num_bytes for allocation in allocations if allocation.tier == tier)


def name_all(allocations: Sequence[Allocation]) -> str:
    """Return allocations and their bytes as messages list them."""
    return ", ".join(f"{allocation_name(a.name)} {format_bytes(a.num_bytes)} ({a.num_bytes})" for a in allocations)


def _fix(tier: str, plan: Sequence[Allocation]) -> str:
    """Say what else than a larger budget would help; nothing where nothing does."""
    if tier == "cpu":
        return without_host_memory(plan)
    ways = []
    if tier == "device":
        names = _names(plan, "device")
        stays, states = f"{SLOT} (all units stay)" in names, {name for name in names if not name.startswith(_PASSING)}
        parameters = "--offload.parameters cpu" if stays or "weights" in states else ""
        lower = " ".join(filter(None, [parameters, "--offload.optimizer cpu" if states else ""]))
        ways += [f"place states lower with {lower}"] if lower else []
        ways += ["update states on the host with --offload.update cpu"] if UPDATE_RING in names else []
    else:
        ways = [f"keep states higher with {_placed(_names(plan, tier), 'cpu')}", *_narrower(plan, tier)]
    return _joined(ways)


def without_host_memory(plan: Sequence[Allocation]) -> str:
    """Say what takes less of the host's memory, to be put behind a number of bytes; nothing where nothing does."""
    names, ways = _names(plan, "cpu"), list[str]()
    if _names(plan, "nvme"):
        if all(name.startswith("nvme") for name in names):
            return ", which the tiles need that move to and from disk, however little stays in memory"
        lower = _placed(names, "nvme")
        return _joined([f"let more of them go to disk with {lower}"] if lower else [])
    ways += ["place states on disk with --offload.parameters nvme --offload.optimizer nvme --offload.nvme_dir FOLDER"]
    ways += _narrower(plan, "cpu")
    if "gradients" in names:
        ways += ["train without clipping (--train.max_grad_norm none frees the waiting gradients)"]
    return _joined(ways)


def _placed(names: set[str], tier: str) -> str:
    """Return the flags that place what has these names on a tier."""
    weights, passing = {"weights", "low", CODES}, ("nvme", "gradient")
    moments = {name for name in names - weights if not name.startswith(passing)}
    kinds = {"parameters": weights & names, "optimizer": moments, "gradients": "gradients" in names}
    return " ".join(f"--offload.{kind} {tier}" for kind, there in kinds.items() if there)


def _narrower(plan: Sequence[Allocation], tier: str) -> list[str]:
    """Say that bf16 takes less of a tier, where it does: states have as many bytes in it, gradients half."""
    has_gradients = not {"gradients", STAGING}.isdisjoint(_names(plan, tier))
    is_split = any(allocation.name == "low" for allocation in plan)
    return ["train with --train.precision bf16"] if has_gradients and not is_split else []


def _names(plan: Sequence[Allocation], tier: str) -> set[str]:
    return {allocation.name for allocation in plan if allocation.tier == tier}


def _joined(ways: Sequence[str]) -> str:
    return "".join(f", or {way}" for way in ways)


def check_host(
    plan: Sequence[Allocation], free_bytes: int, bound: str, *, given_bytes: int, is_device: bool, num_sharing: int = 1
) -> None:
    """Refuse a rank's plan that the host cannot hold: DoesNotFitError with what bounds it, every allocation and the
    shortfall. Who takes memory that a control group does not have is ended by signal 9, long after a plan could tell.

    free_bytes: what this rank may take of the host's memory. bound: what bounds that, as a sentence names it.
    given_bytes: what the model takes of it until the engine has its weights. is_device: the host computes as well, so
    that the device's memory is of it. num_sharing: ranks of this machine.
    """
    wanted = [
        allocation for allocation in plan if allocation.tier == "cpu" or (is_device and allocation.tier == "device")
    ]
    total = sum(allocation.num_bytes for allocation in wanted)
    if total <= free_bytes + given_bytes:
        return
    there = free_bytes + given_bytes
    ranks = f" for each of the {num_sharing} ranks that share it" if num_sharing > 1 else ""
    raise DoesNotFitError(
        f"the plan needs {format_bytes(total)} ({total} bytes) of host memory and {format_bytes(there)} ({there} "
        f"bytes) are there{ranks}, {format_bytes(total - there)} ({total - there} bytes) too few: {name_all(wanted)}. "
        f"What bounds it is {bound}. Nothing was allocated. Make that {(total - there) * num_sharing} bytes more"
        f"{without_host_memory(plan)}."
    )
