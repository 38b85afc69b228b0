"""Memory use per tier: planned allocations plus memory added by a step."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from offload.checkpoint.manifest import Entry
from offload.checkpoint.writer import copy_bytes, share_bytes
from offload.engine.checkpoint_contents import region_entries
from offload.engine.prepare import EnginePlan
from offload.engine.spare_memory import divide_memory
from offload.engine.units.activation_offload import CHECKPOINTS, GRAPHS
from offload.engine.units.offloaded_graph import SMALLEST_BYTES
from offload.engine.units.recompute_policy import PRODUCTS, GraphChoice
from offload.extras.plan.dispatched import DispatchedBlocks
from offload.extras.plan.machine_files import share_of_rank
from offload.extras.plan.workload import PlannedProduct, ProductWork, UnitWork, Workload
from offload.layout.residence import DEVICE, DISK, HOST
from offload.machine.hardware import Hardware
from offload.planning.memory import BUFFER, LASTING, LOSS, SLOT, Allocation, bytes_on, gradient_lasts, resident_regions
from offload.planning.plan import Plan, budget_bytes
from offload.tiers.placement import OFFLOADED

INPUTS, KEPT = "unit inputs", "kept tensors"
"""Allocation names, as in the engine ledgers."""
OPERATIONS = "operations"
"""Peak bytes held by operations beyond all named allocations."""


class Kept(NamedTuple):
    """Call indices of uses with memory kept on the device from the forward to the backward."""

    graphs: frozenset[int] = frozenset()
    """Uses with the autograd graph, not recomputed."""
    products: frozenset[tuple[int, int]] = frozenset()
    """(Use, product) of kept outputs."""

    def of(self, number: int) -> set[int]:
        """Return the kept products in a use."""
        return {product for use, product in self.products if use == number}


_ON_HOST = "cpu", "pinned"
"""Tiers of allocations in host memory."""


@dataclass(frozen=True)
class Footprint:
    """Memory use on one rank.

    allocations: peak bytes by tier (device, pinned, cpu, nvme) and name.
    budgets: byte limit per tier; None: no limit. Pinned and cpu share one limit.
    host_bytes: total host memory for this rank, for any purpose.
    is_one_memory: device memory is part of host memory.
    loading_bytes: temporary host memory before the first step, while operations hold nothing yet.
    lent_bytes: spare device memory, lent to the slots and the gradient buffer after the third step or so. A run needs
        less, so the allocations and `shortfalls` are without it.
    copy_bytes: host memory for a copy of the states while a checkpoint is saved; 0: the run saves none.
    before: memory of each model that runs alone before the first step, by the setting that names it.
    """

    allocations: tuple[Allocation, ...]
    budgets: Mapping[str, int | None]
    host_bytes: int
    is_one_memory: bool
    loading_bytes: int
    kept: Kept
    lent_bytes: int = 0
    copy_bytes: int = 0
    before: Mapping[str, Footprint] = field(default_factory=dict)

    def total(self, *tiers: str) -> int:
        """Return the total bytes on some tiers."""
        return sum(a.num_bytes for a in self.allocations if a.tier in tiers)

    @property
    def peaks(self) -> dict[str, int]:
        """Bytes by tier, without operations on the host, which no budget covers."""
        totals = {tier: self.total(tier) for tier in dict.fromkeys(a.tier for a in self.allocations)}
        totals["cpu"] = totals.get("cpu", 0) - self.operations_bytes
        return {tier: num_bytes for tier, num_bytes in totals.items() if num_bytes}

    @property
    def operations_bytes(self) -> int:
        """Bytes operations take from host memory when compute runs on the CPU. No budget covers them."""
        return sum(a.num_bytes for a in self.allocations if (a.tier, a.name) == ("cpu", OPERATIONS))

    @property
    def named_host_bytes(self) -> int:
        """Bytes on the host in the budget: all but those of operations."""
        return self.total(*_ON_HOST) - self.operations_bytes

    @property
    def shortfalls(self) -> dict[str, int]:
        """Bytes over budget per tier, of the run or of a model before. "cpu" is pinned plus pageable memory."""
        named_bytes, device_bytes = self.named_host_bytes, self.total(DEVICE)
        # Buffers for inputs and graphs are made in the first steps, after the weights are loaded.
        waiting = (a.num_bytes for a in self.allocations if a.name in (CHECKPOINTS, GRAPHS) and a.tier in _ON_HOST)
        used_bytes = named_bytes + max(self.operations_bytes, self.loading_bytes - sum(waiting))
        if self.is_one_memory:
            used_bytes += device_bytes
        needs = {DEVICE: device_bytes, HOST: named_bytes, DISK: self.total(DISK)}
        excess = {tier: needs[tier] - budget for tier, budget in self.budgets.items() if budget is not None}
        excess["cpu"] = max(excess.get("cpu", 0), used_bytes - self.host_bytes)
        for first in self.before.values():
            excess.update({tier: max(few, excess.get(tier, 0)) for tier, few in first.shortfalls.items()})
        return {tier: num_bytes for tier, num_bytes in excess.items() if num_bytes > 0}


def footprint(
    prepared: EnginePlan,
    workload: Workload | None,
    hardware: Hardware,
    num_ranks: int = 1,
    step: StepMemory | None = None,
) -> Footprint:
    """Return the memory use on one rank. `workload` None: unknown; the result then covers planned allocations only.

    step: the memory of a step, if it is known already.
    """
    hardware = share_of_rank(hardware, num_ranks)
    allocations, kept = prepared.plan.allocations, Kept()
    lent_bytes = 0
    if workload is not None:
        step = step or StepMemory(prepared, workload, hardware)
        allocations, kept = step.allocations, step.kept
        lent_bytes = sum(step.lent) - sum(step.least)
    resting = prepared.plan.residence.resting_labels(prepared.structure.regions)
    pins = hardware.device == "cuda"  # transfer buffers are pinned only on CUDA devices
    tiered = (
        replace(a, tier="pinned") if pins and a.tier == "cpu" and a.name not in resting else a for a in allocations
    )
    host, disk = (prepared.settings.placement.budget(tier) for tier in OFFLOADED)
    if disk is None:  # for host memory, `shortfalls` compares the whole process
        disk = hardware.disk_bytes
    infos = prepared.structure.infos
    # Without a checkpoint, weights are initialized in fp32, one unit at a time. Quantized ones are read in pieces.
    units = (
        sum(infos[index].numel for index in unit.parameters if not infos[index].is_quantized)
        for unit in prepared.structure.candidates
    )
    return Footprint(
        allocations=tuple(a for a in tiered if a.num_bytes),
        budgets={DEVICE: device_budget(prepared.plan, hardware), HOST: host, DISK: disk},
        host_bytes=hardware.host_bytes,
        is_one_memory=hardware.shares_memory or hardware.device == "cpu",
        loading_bytes=4 * max(units),
        kept=kept,
        lent_bytes=lent_bytes,
    )


def with_copy(memory: Footprint, prepared: EnginePlan, trained_only: bool) -> Footprint:
    """Return the memory of a run that saves checkpoints, without the buffers of the model. `trained_only`: as in
    `Engine.begin_checkpoint`.
    """
    structure, sharding = prepared.structure, prepared.plan.residence.sharding
    contents: dict[str, Entry] = {}
    for region in structure.regions:
        if region.trainable or not trained_only:
            contents |= region_entries(region, structure.infos, sharding, is_late=prepared.settings.delay > 0)
    named_bytes = memory.named_host_bytes
    free_bytes = memory.host_bytes - named_bytes
    if memory.is_one_memory:
        free_bytes -= memory.total(DEVICE) + memory.lent_bytes
    size = copy_bytes(share_bytes(contents, sharding.num_ranks), memory.budgets[HOST], named_bytes, free_bytes)
    return replace(memory, copy_bytes=size)


def device_budget(plan: Plan, hardware: Hardware) -> int | None:
    """Return the device memory limit for an engine in bytes; None: no limit."""
    capacity = None if hardware.device == "cpu" else hardware.device_bytes
    return min((each for each in (plan.device_bytes, capacity) if each is not None), default=None)


class StepMemory:
    """Memory use on one rank during a step: planned allocations, tensors kept for the backward, and operation peaks."""

    def __init__(self, prepared: EnginePlan, workload: Workload, hardware: Hardware) -> None:
        self.settings = prepared.settings
        self.plan = prepared.plan
        self.hardware = hardware
        self.dispatched = DispatchedBlocks.of(prepared)
        self.workload = self.dispatched.held(workload)
        self._regions = prepared.structure.regions
        self._resident = resident_regions(prepared.structure.units)
        self._has_backward = prepared.settings.optimizer.has_gradients
        self.budget = device_budget(self.plan, hardware)
        self._choice = GraphChoice(
            self.settings.recompute, self.budget is not None, self.settings.placement.graphs in OFFLOADED
        )
        # Row blocks add gradients to the gradient buffer or on the host.
        in_layers = [unit for unit in prepared.structure.units if unit.num_layers]
        self._in_row_blocks = {region for unit in in_layers for region in unit.regions}

    @property
    def allocations(self) -> list[Allocation]:
        """All allocations by tier and name; host allocations have the names from the plan."""
        lasting = self.plan.of(DEVICE, LASTING)
        planned = [a for a in self.plan.allocations if a is not lasting]
        grown = replace(lasting, num_bytes=lasting.num_bytes + self._lasting_bytes)
        return [*planned, grown, *self._largest_step]

    @cached_property
    def device_bytes(self) -> int:
        """Peak device bytes, with minimum sizes for slots and gradient buffer."""
        return self._planned_bytes + bytes_on("device", self._largest_step)

    @property
    def least(self) -> tuple[int, int]:
        """Planned bytes of the slots, and of the gradient buffer."""
        return self.plan.range(SLOT)[0], self.plan.range(BUFFER)[0]

    @cached_property
    def lent(self) -> tuple[int, int]:
        """Bytes of the slots, and of the gradient buffer, once the engine has lent them the spare memory."""
        if self.budget is None:
            return self.least
        room_bytes = self.budget - (self.device_bytes - sum(self.least))
        return divide_memory(room_bytes, self.plan.range(SLOT), self.plan.range(BUFFER))

    @cached_property
    def _largest_step(self) -> list[Allocation]:
        """The allocations a step adds. The first step recomputes uses whose graphs are offloaded later."""
        later = list(self._step_allocations(self.kept, self.offloaded))
        if not any(self.offloaded) or self.settings.recompute == "never":
            return later
        first = list(self._step_allocations(Kept(self._always_kept), Kept()))
        if bytes_on("device", first) <= bytes_on("device", later):
            return later
        buffers = (CHECKPOINTS, GRAPHS)  # allocated once for all steps
        return [*(a for a in first if a.name not in buffers), *(a for a in later if a.name in buffers)]

    def offloaded_bytes(self, number: int) -> tuple[int, int]:
        """Return (input bytes, graph bytes) offloaded for a use, by call index. Kept products count as a graph beside
        the inputs; otherwise one number is 0.
        """
        if not self._has_backward:
            return 0, 0
        call = self.workload.calls[number]
        if number in self.offloaded.graphs:
            return 0, self._graph_bytes(call)
        outputs = sum(self._kept_sizes[number, product] for product in self.offloaded.of(number))
        return self._place_inputs(call, number in self.kept.graphs)[1], outputs

    @cached_property
    def kept(self) -> Kept:
        """Uses with memory kept on the device, by the rule of the engine."""
        if not self._has_backward:
            return Kept()
        selected: list[Any] = []
        if self.budget is not None and self._choice.fills_device:
            room = self.budget - self._planned_bytes
            room_for_kept = room - self._on_device(self._keeping(()))
            selected = self._choice.on_device(self._kept_sizes, room_for_kept, self._works)

            def fits(num_fewer: int) -> bool:
                return self._on_device(self._keeping(selected[: len(selected) - num_fewer])) <= room

            # The engine notices operation memory beside saved graphs only during a run and then saves fewer graphs.
            num_fewer = bisect_left(range(len(selected)), True, key=fits)
            selected = selected[: len(selected) - num_fewer]
        return self._keeping(selected)

    def _keeping(self, selected: Collection[Any]) -> Kept:
        """Return what stays on the device if the rule selects these uses, or products of uses."""
        if self._choice.mode == PRODUCTS:
            staying = [key for key in self._kept_sizes if self._choice.stays(key in selected)]
            return Kept(self._always_kept, frozenset(staying))
        uses = (n for n in range(len(self.workload.calls)) if self._choice.stays(n in selected))
        return Kept(self._always_kept.union(uses))

    @cached_property
    def _products(self) -> dict[tuple[int, int], PlannedProduct]:
        """Products to keep or not, by (use, product)."""
        if self._choice.mode != PRODUCTS:
            return {}
        found = [(n, call.products.products) for n, call in enumerate(self.workload.calls) if call.products is not None]
        return {(n, number): product for n, products in found for number, product in enumerate(products)}

    @cached_property
    def _kept_sizes(self) -> dict[Any, int]:
        """Bytes of the graphs, or product outputs, that may stay on the device, from the last use."""
        calls, parts = self.workload.calls, self.workload.num_micro_batches
        sizes: dict[Any, int] = {key: product.num_bytes for key, product in self._products.items()}
        if self._choice.mode != PRODUCTS:
            sizes = {n: call.saved_bytes for n, call in enumerate(calls) if n not in self._always_kept}
        return {number: sizes[number] * parts for number in reversed(sizes)}

    @cached_property
    def _works(self) -> dict[Any, float]:
        """`Product.work` over all micro-batches."""
        parts = self.workload.num_micro_batches
        return {key: parts * product.work for key, product in self._products.items()}

    def products(self, number: int) -> ProductWork | None:
        """Return the work beside what is kept anywhere. None: the use keeps none."""
        return self._with_products(number, self.kept.of(number) | self.offloaded.of(number))

    def _with_products(self, number: int, kept: set[int]) -> ProductWork | None:
        products = self.workload.calls[number].products
        return None if products is None or not kept else products.keeping(kept)

    @cached_property
    def _always_kept(self) -> frozenset[int]:
        """Call indices with the graph saved in every mode."""
        return frozenset(n for n, call in enumerate(self.workload.calls) if call.keeps_graph or call.name is None)

    @cached_property
    def offloaded(self) -> Kept:
        """Offloaded graphs, or product outputs."""
        return self._choose_offloaded(self.kept)

    def _choose_offloaded(self, kept: Kept) -> Kept:
        """Return what is offloaded, if `kept` stays on the device."""
        if not self._choice.can_offload or not self._has_backward:
            return Kept()
        if self._choice.mode == PRODUCTS:
            sizes = {key: size for key, size in self._kept_sizes.items() if key not in kept.products}
            return Kept(products=frozenset(self._choice.offloaded(sizes, self._offload_room(), self._works)))
        calls = reversed(list(enumerate(self.workload.calls)))
        sizes = {n: self._graph_bytes(call) for n, call in calls if n not in kept.graphs and call.is_cut}
        chosen = set(self._choice.offloaded(sizes, self._offload_room()))
        return Kept(frozenset(n for n in sizes if self._choice.leaves(n in chosen)))

    def _offload_room(self) -> int:
        """Return the bytes for graphs on the tier of the graphs."""
        placement, tier = self.settings.placement, self.settings.placement.graphs
        used = bytes_on(tier, self.plan.allocations)
        if placement.activations == tier:  # the first step takes this memory before there is a graph
            used += sum(map(self._first_offloaded_bytes, self.workload.calls))
        capacity = self.hardware.host_bytes if tier == HOST else self.hardware.disk_bytes
        rooms = [each - used for each in (placement.budget(tier), capacity) if each is not None]
        if (limit := budget_bytes(placement.graphs_memory)) is not None:
            rooms.append(limit)
        return min(rooms, default=sys.maxsize)

    def _graph_bytes(self, call: UnitWork) -> int:
        """Return the offloaded graph bytes of a use, inputs included."""
        num_bytes = call.leaving_bytes
        inputs = call.input_bytes - call.staying_bytes - call.unsaved_bytes
        if inputs >= SMALLEST_BYTES:  # a smaller tensor stays
            num_bytes += inputs
        return num_bytes * self.workload.num_micro_batches

    @cached_property
    def _planned_bytes(self) -> int:
        return bytes_on("device", self.plan.allocations) + self._lasting_bytes

    def _on_device(self, kept: Kept) -> int:
        return bytes_on("device", self._step_allocations(kept, self._choose_offloaded(kept)))

    def _step_allocations(self, kept: Kept, offloaded: Kept) -> Iterator[Allocation]:
        """Yield the allocations a step adds: tensors kept for the backward, and operation memory."""
        work, operations_tier = self.workload, "cpu" if self.hardware.device == "cpu" else "device"
        yield Allocation("device", LOSS, work.loss_bytes)
        if not self._has_backward:
            yield Allocation(operations_tier, OPERATIONS, self._forward_only_bytes())
            return
        on_device: Counter[str] = Counter()
        input_bytes_offloaded = offloaded_graph_bytes = 0
        for number, call in self._calls():
            input_bytes_offloaded += self._first_offloaded_bytes(call)
            if number in offloaded.graphs:  # all but the small tensors of a graph
                graph_bytes = self._graph_bytes(call)
                total_bytes = _total_bytes(call, call.input_bytes + call.saved_bytes - call.unsaved_bytes, work)
                on_device[KEPT] += total_bytes - graph_bytes
                offloaded_graph_bytes += graph_bytes
                continue
            name, offloaded_bytes = self._place_inputs(call, number in kept.graphs)
            on_device[name] += _total_bytes(call, call.input_bytes, work) - offloaded_bytes
            if number in kept.graphs and call.name is not None and not call.keeps_graph:
                on_device[KEPT] += call.saved_bytes * work.num_micro_batches
        on_device[KEPT] += sum(self._kept_sizes[key] for key in kept.products)
        offloaded_graph_bytes += sum(self._kept_sizes[key] for key in offloaded.products)
        for name in (INPUTS, KEPT):
            yield Allocation("device", name, on_device[name])
        if input_bytes_offloaded:
            yield Allocation(self.settings.placement.activations, CHECKPOINTS, input_bytes_offloaded)
        if offloaded_graph_bytes:
            yield Allocation(self.settings.placement.graphs, GRAPHS, offloaded_graph_bytes)
        operations = self._operations(kept, offloaded, sum(on_device.values()))
        if operations_tier == DEVICE:  # the loss ends before the backward begins
            operations = max(0, operations - work.loss_bytes)
        yield Allocation(operations_tier, OPERATIONS, operations)

    def _calls(self) -> Iterator[tuple[int, UnitWork]]:
        """Yield (index, call). For a chunked head, only the last chunk, of the last row block."""
        work = self.workload
        ends = [number for number, call in enumerate(work.calls) if not call.is_cut and call.name is not None]
        skipped = range(0)
        if ends:
            skipped = range(ends[0], max(ends[0], ends[-1] - work.chunk_heads + 1))
        yield from ((number, call) for number, call in enumerate(work.calls) if number not in skipped)

    def _place_inputs(self, call: UnitWork, is_kept: bool) -> tuple[str, int]:
        """Return the allocation name for the inputs of a use, and the bytes offloaded from the device."""
        is_offloaded = self.settings.placement.activations in OFFLOADED
        if is_kept:
            counts_as_input = self.settings.recompute == "auto" and not is_offloaded and call.is_cut
            return INPUTS if counts_as_input else KEPT, 0
        if not is_offloaded:
            return INPUTS, 0
        return INPUTS, (call.input_bytes - call.staying_bytes) * self.workload.num_micro_batches

    def _first_offloaded_bytes(self, call: UnitWork) -> int:
        """Return the input bytes offloaded in the first step.

        The first step recomputes even graphs saved later, and the memory remains allocated for later steps.
        """
        if call.keeps_graph or call.name is None or self.settings.recompute == "never":
            return 0
        return self._place_inputs(call, False)[1]

    def _operations(self, kept: Kept, offloaded: Kept, waiting_bytes: int) -> int:
        """Return the peak device bytes minus bytes kept at the end of the forward."""
        work = self.workload
        parts = work.num_micro_batches
        hidden = 0
        if work.num_chunks > 1:
            # A chunked head holds a full gradient for the hidden states, besides the hidden states.
            last_result = [call.result_bytes for call in work.calls if call.name is not None and call.is_cut][-1:]
            hidden = sum(last_result) * parts
        kept_bytes = peak_bytes = 0
        for number, call in self._calls():
            is_kept, is_offloaded = number in kept.graphs, number in offloaded.graphs
            own, below = kept.of(number), offloaded.of(number)
            if call.products is not None and (own or below):
                kept_bytes += sum(self._kept_sizes[number, product] for product in own)
                call = call.with_products(call.products.keeping(own))
            held_bytes = call.input_bytes
            if is_offloaded:
                held_bytes += call.saved_bytes
                offloaded_bytes = self._graph_bytes(call)
            else:
                _, offloaded_bytes = self._place_inputs(call, is_kept)
            kept_bytes += _total_bytes(call, held_bytes, work) - offloaded_bytes
            if not offloaded_bytes:  # already counted for the stretch
                kept_bytes -= call.stretch_bytes * parts
            if call.name is None:  # outside of units: autograd's own graph, never recomputed
                kept_bytes += call.saved_bytes * parts
                temporary_bytes = max(call.forward_temporary_bytes, call.backward_temporary_bytes) * parts
                peak_bytes = max(peak_bytes, kept_bytes + temporary_bytes)
                continue
            if not call.is_cut:  # a chunk of the head has its backward at once
                of_weights = max(0, call.backward_temporary_bytes - call.result_bytes - call.gradient_bytes)
                results = parts * (2 * call.result_bytes + call.gradient_bytes)
                peak_bytes = max(peak_bytes, kept_bytes + 2 * hidden + results + of_weights)
                continue
            if is_kept:
                kept_bytes += call.saved_bytes * parts
            joined = 2 * parts if parts > 1 else 0  # parts, and the whole they are copied into
            forward = max((parts - 1) * call.result_bytes + call.forward_temporary_bytes, joined * call.result_bytes)
            backward = (parts - 1) * call.gradient_bytes + call.backward_temporary_bytes
            if is_kept:  # measured with a graph made in the backward
                backward -= call.saved_bytes
            if is_offloaded:  # offloaded after the forward; prefetched during the backward of another graph
                forward += call.saved_bytes
                backward += call.input_bytes + self._graph_bytes(call) // parts
            elif self._place_inputs(call, is_kept)[1]:
                # With overlap, the next part or use is fetched ahead.
                num_inputs = 2 if self.plan.overlap else min(2, parts)
                backward += num_inputs * call.input_bytes
            backward += sum(self._kept_sizes[number, product] for product in below) // parts  # fetched ahead
            if self.settings.compile == "always" and call.is_block:  # a compiled backward creates all gradients at once
                regions = [region for region in self._regions if region.trainable and call.name in region.units]
                backward += sum(region.weight_bytes for region in regions)
            backward = 2 * hidden + parts * call.result_bytes + max(backward, joined * call.gradient_bytes)
            peak_bytes = max(peak_bytes, kept_bytes + max(forward, backward))
        return max(0, peak_bytes - waiting_bytes)

    def _forward_only_bytes(self) -> int:
        """Return the peak operation memory for a forward-only step (MeZO).

        The passes advance side by side: one runs a unit or stretch, and the others hold their input and result for it.
        The result of the first unit (`inputs_embeds`) stays referenced in every pass until the last block ends.
        """
        work = self.workload
        passes, parts = 2 * self.settings.optimizer.num_directions, work.num_micro_batches
        first = next((call for call in work.calls if call.name is not None), None)
        embedding_bytes = 0 if first is None or first.is_block else first.result_bytes
        input_bytes = result_bytes = 0
        staying_bytes = peak_bytes = 0
        num_blocks = 0
        for _, call in self._calls():
            staying_bytes += _total_bytes(call, call.staying_bytes, work)
            if call.name is None:
                waiting_bytes = parts * ((passes - 1) * result_bytes + passes * input_bytes)
                peak_bytes = max(peak_bytes, waiting_bytes + parts * (call.saved_bytes + call.forward_temporary_bytes))
                continue
            input_bytes = result_bytes
            waiting_bytes = ((passes - 1) * call.result_bytes + passes * input_bytes) * parts
            num_blocks += call.is_block
            if call.is_block and num_blocks > 1:  # the input of the first block is this tensor
                waiting_bytes += passes * embedding_bytes * parts
            joined_bytes = 2 * parts * call.result_bytes if parts > 1 else 0
            running_bytes = (parts - 1) * call.result_bytes + call.forward_temporary_bytes
            peak_bytes = max(peak_bytes, waiting_bytes + max(running_bytes, joined_bytes))
            result_bytes = call.result_bytes
        return peak_bytes + passes * staying_bytes

    @cached_property
    def _lasting_bytes(self) -> int:
        """Device bytes for fp32 gradient sums across several uses of a unit.

        Applies to shared blocks, and to a chunked head when the gradient buffer cannot accumulate.
        """
        if not self._has_backward:
            return 0
        uses = Counter(call.name for call in self.workload.calls if call.name is not None and call.is_cut)
        often = {name for name, count in uses.items() if count > 1}
        pieces = {call.name for call in self.workload.calls if call.name is not None and not call.is_cut}
        num_bytes = 0
        for region in self._regions if often or pieces else ():
            lasts = not region.trainable or gradient_lasts(region, self._resident) or region in self._in_row_blocks
            is_repeated = not often.isdisjoint(region.units)
            in_pieces = region.is_short and not self.settings.splits and not pieces.isdisjoint(region.units)
            if not lasts and (is_repeated or in_pieces):  # the plan itself counts sums that always last
                num_bytes += 4 * region.numel
        return num_bytes


def _total_bytes(call: UnitWork, num_bytes: int, work: Workload) -> int:
    """Return the total over all micro-batches, given bytes per micro-batch. Shared input bytes count once."""
    return num_bytes * work.num_micro_batches - call.shared_bytes * (work.num_micro_batches - 1)
