"""Memory use per tier: planned allocations plus memory added by a step."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from offload.engine.assemble import EnginePlan
from offload.engine.units.activation_offload import CHECKPOINTS, GRAPHS
from offload.engine.units.recompute_policy import spread
from offload.engine.units.saved_graph import SMALLEST_BYTES
from offload.forecast.workload import UnitWork, Workload
from offload.machine.hardware import Hardware
from offload.planning.memory import Allocation, bytes_on, gradient_lasts, resident_regions
from offload.planning.plan import Plan, budget_bytes
from offload.planning.settings import Settings

INPUTS, KEPT = "unit inputs", "kept tensors"
"""Allocation names, as in the engine ledgers."""
LASTING = "accumulated gradients"
OPERATIONS = "operations"
"""Peak bytes held by operations beyond all named allocations."""


@dataclass(frozen=True)
class Footprint:
    """Memory use on one rank.

    allocations: peak bytes by tier (device, pinned, cpu, nvme) and name.
    budgets: byte limit per tier; None: no limit. Pinned and cpu share one limit.
    host_bytes: total host memory for this rank, for any purpose.
    is_one_memory: device memory is part of host memory.
    loading_bytes: temporary host memory before the first step, while operations hold nothing yet.
    kept: indices of uses with the autograd graph saved on the device instead of recomputation.
    """

    allocations: tuple[Allocation, ...]
    budgets: Mapping[str, int | None]
    host_bytes: int
    is_one_memory: bool
    loading_bytes: int
    kept: frozenset[int]

    def total(self, *tiers: str) -> int:
        """Return the total bytes on some tiers."""
        return sum(a.num_bytes for a in self.allocations if a.tier in tiers)

    @property
    def operations_bytes(self) -> int:
        """Bytes operations take from host memory when compute runs on the CPU. No budget covers them."""
        return sum(a.num_bytes for a in self.allocations if (a.tier, a.name) == ("cpu", OPERATIONS))

    @property
    def shortfalls(self) -> dict[str, int]:
        """Bytes over budget per tier. "cpu" is pinned plus pageable memory."""
        operations = self.operations_bytes
        entered = self.total("cpu", "pinned") - operations
        taken = entered + max(operations, self.loading_bytes) + (self.total("device") if self.is_one_memory else 0)
        needs = {"device": self.total("device"), "cpu": entered, "nvme": self.total("nvme")}
        over = {tier: needs[tier] - most for tier, most in self.budgets.items() if most is not None}
        over["cpu"] = max(over.get("cpu", 0), taken - self.host_bytes)
        return {tier: num_bytes for tier, num_bytes in over.items() if num_bytes > 0}

    @property
    def fits(self) -> bool:
        """True if every tier stays within budget."""
        return not self.shortfalls


def footprint(prepared: EnginePlan, workload: Workload | None, hardware: Hardware, num_ranks: int = 1) -> Footprint:
    """Return the memory use on one rank. `workload` None: unknown; the result then covers planned allocations only."""
    found, kept = prepared.plan.allocations, frozenset[int]()
    if workload is not None:
        step = StepMemory(prepared, workload, hardware)
        found, kept = step.allocations, step.kept
    resting = prepared.plan.layout.resting(prepared.structure.regions)
    pins = hardware.device == "cuda"  # transfer buffers are pinned only on CUDA devices
    placed = (replace(a, tier="pinned") if pins and a.tier == "cpu" and a.name not in resting else a for a in found)
    return Footprint(
        allocations=tuple(a for a in placed if a.num_bytes),
        budgets=_budgets(prepared.settings, prepared.plan, hardware, num_ranks),
        host_bytes=hardware.host_bytes // num_ranks,
        is_one_memory=hardware.shares_memory or hardware.device == "cpu",
        loading_bytes=_loading_bytes(prepared),
        kept=kept,
    )


def device_budget(plan: Plan, hardware: Hardware) -> int | None:
    """Return the device memory limit for an engine in bytes; None: no limit."""
    there = None if hardware.device == "cpu" else hardware.device_bytes
    return min((each for each in (plan.device_bytes, there) if each is not None), default=None)


def _budgets(settings: Settings, plan: Plan, hardware: Hardware, num_ranks: int) -> dict[str, int | None]:
    host, disk = budget_bytes(settings.placement.host_memory), budget_bytes(settings.placement.nvme_memory)
    if disk is None and hardware.disk_bytes is not None:
        disk = hardware.disk_bytes // num_ranks
    return {"device": device_budget(plan, hardware), "cpu": host, "nvme": disk}


def _loading_bytes(prepared: EnginePlan) -> int:
    """Return the fp32 size of the largest unit. Without a checkpoint, weights are initialized one unit at a time."""
    infos = prepared.structure.infos
    return max(4 * sum(infos[index].numel for index in unit.parameters) for unit in prepared.structure.candidates)


class StepMemory:
    """Memory use on one rank during a step: planned allocations, tensors kept for the backward, and operation peaks."""

    def __init__(self, prepared: EnginePlan, workload: Workload, hardware: Hardware) -> None:
        self.settings, self.plan, self.workload, self.hardware = prepared.settings, prepared.plan, workload, hardware
        self._regions, self._resident = prepared.structure.regions, resident_regions(prepared.structure.units)
        self._has_backward = prepared.settings.optimizer.has_gradients
        # Row blocks add gradients to the gradient buffer or on the host.
        self._in_blocks = {region for unit in prepared.structure.units if unit.num_layers for region in unit.regions}

    @property
    def allocations(self) -> list[Allocation]:
        """All allocations by tier and name; host allocations have the names from the plan."""
        planned = _with(self.plan.allocations, "device", LASTING, self._lasting_bytes)
        return [*planned, *self._of_a_step(self.kept)]

    @cached_property
    def device_bytes(self) -> int:
        """Peak device bytes, with minimum sizes for slots and gradient buffer."""
        return self._planned_bytes + self._on_device(self.kept)

    def bytes_away(self, number: int) -> tuple[int, int]:
        """Return (input bytes, graph bytes) offloaded for a use, by call index. One number is always 0."""
        if not self._has_backward:
            return 0, 0
        call = self.workload.calls[number]
        if number in self.below:
            return 0, self._graph_bytes(call)
        return self._waits(call, number in self.kept)[1], 0

    @cached_property
    def kept(self) -> frozenset[int]:
        """Call indices with the graph saved on the device, with the same choice as `RecomputePolicy`."""
        calls, mode = self.workload.calls, self.settings.recompute
        budget = device_budget(self.plan, self.hardware)
        if not self._has_backward:
            return frozenset()
        always = frozenset(n for n, call in enumerate(calls) if call.keeps_graph or call.name is None)
        if mode == "always" or (mode == "never" and self._graphs_leave):
            return always
        if mode == "never" or budget is None:
            return frozenset(range(len(calls)))
        room = budget - self._planned_bytes
        more = sorted(self._last_within(always, room - self._on_device(always)))
        # The engine notices operation memory beside saved graphs only during a run and then saves fewer graphs.
        fewer = bisect_left(range(len(more)), True, key=lambda n: self._on_device(always.union(more[n:])) <= room)
        return always.union(more[fewer:])

    @cached_property
    def below(self) -> frozenset[int]:
        """Call indices with offloaded graphs."""
        return self._below(self.kept)

    def _below(self, kept: frozenset[int]) -> frozenset[int]:
        """Return the calls with offloaded graphs: as many calls outside `kept` as the tier has room for."""
        if not self._graphs_leave or not self._has_backward:
            return frozenset()
        calls = [
            (number, call) for number, call in enumerate(self.workload.calls) if number not in kept and call.is_cut
        ]
        if self.settings.recompute == "never":
            return frozenset(number for number, _ in calls)
        calls.reverse()
        chosen = spread([self._graph_bytes(call) for _, call in calls], self._room_below)
        return frozenset(calls[number][0] for number in chosen)

    @property
    def _graphs_leave(self) -> bool:
        return self.settings.placement.graphs in ("cpu", "nvme")

    @property
    def _room_below(self) -> int:
        tier, placement = self.settings.placement.graphs, self.settings.placement
        budget = budget_bytes(placement.host_memory if tier == "cpu" else placement.nvme_memory)
        there = self.hardware.host_bytes if tier == "cpu" else self.hardware.disk_bytes
        inputs = sum(map(self._first_away, self.workload.calls)) if placement.activations == tier else 0
        left = [each - bytes_on(tier, self.plan.allocations) - inputs for each in (budget, there) if each is not None]
        most = budget_bytes(placement.graphs_memory)
        return min([*left, *([] if most is None else [most])], default=sys.maxsize)

    def _graph_bytes(self, call: UnitWork) -> int:
        """Return the offloaded graph bytes of a use, inputs included."""
        inputs = call.input_bytes - call.staying_bytes - call.unsaved_bytes
        inputs = inputs if inputs >= SMALLEST_BYTES else 0
        return (call.leaving_bytes + inputs) * self.workload.num_micro_batches

    @cached_property
    def _planned_bytes(self) -> int:
        return bytes_on("device", self.plan.allocations) + self._lasting_bytes

    def _on_device(self, kept: frozenset[int]) -> int:
        return bytes_on("device", self._of_a_step(kept))

    def _of_a_step(self, kept: frozenset[int]) -> Iterator[Allocation]:
        """Yield the allocations a step adds: tensors kept for the backward, and operation memory."""
        work, of_operations = self.workload, "cpu" if self.hardware.device == "cpu" else "device"
        if not self._has_backward:
            yield Allocation(of_operations, OPERATIONS, self._of_forwards())
            return
        on_device: Counter[str] = Counter()
        away, of_graphs, below = 0, 0, self._below(kept)
        for number, call in self._each():
            away += self._first_away(call)
            if number in below:
                graph_bytes = self._graph_bytes(call)
                waits = _over_all(call, call.input_bytes + call.saved_bytes - call.unsaved_bytes, work)
                on_device[KEPT] += waits - graph_bytes
                of_graphs += graph_bytes
                continue
            name, bytes_away = self._waits(call, number in kept)
            on_device[name] += _over_all(call, call.input_bytes, work) - bytes_away
            if number in kept and call.name is not None and not call.keeps_graph:
                on_device[KEPT] += call.saved_bytes * work.num_micro_batches
        for name in (INPUTS, KEPT):
            yield Allocation("device", name, on_device[name])
        if away:
            yield Allocation(self.settings.placement.activations, CHECKPOINTS, away)
        if of_graphs:
            yield Allocation(self.settings.placement.graphs, GRAPHS, of_graphs)
        yield Allocation(of_operations, OPERATIONS, self._operations(kept, sum(on_device.values())))

    def _each(self) -> Iterator[tuple[int, UnitWork]]:
        """Yield (index, call). For a chunked head, only the last chunk."""
        work = self.workload
        ends = [number for number, call in enumerate(work.calls) if not call.is_cut and call.name is not None]
        skipped = range(ends[0], ends[-1]) if work.num_chunks > 1 and ends else range(0)
        yield from ((number, call) for number, call in enumerate(work.calls) if number not in skipped)

    def _waits(self, call: UnitWork, is_kept: bool) -> tuple[str, int]:
        """Return the allocation name for the inputs of a use, and the bytes offloaded from the device."""
        settings = self.settings
        goes_away = settings.placement.activations in ("cpu", "nvme")
        if not is_kept:
            away = (call.input_bytes - call.staying_bytes) * self.workload.num_micro_batches if goes_away else 0
            return INPUTS, away
        counts_as_input = settings.recompute == "auto" and not goes_away and call.is_cut
        return INPUTS if counts_as_input else KEPT, 0

    def _first_away(self, call: UnitWork) -> int:
        """Return the input bytes offloaded in the first step.

        The first step recomputes even graphs saved later, and the memory remains allocated for later steps.
        """
        always_kept = call.keeps_graph or call.name is None
        return 0 if always_kept or self.settings.recompute == "never" else self._waits(call, False)[1]

    def _operations(self, kept: frozenset[int], waiting_bytes: int) -> int:
        """Return the peak device bytes minus bytes kept at the end of the forward."""
        work, below = self.workload, self._below(kept)
        parts, held, most = work.num_micro_batches, 0, 0
        # A chunked head holds a full gradient for the hidden states, besides the hidden states.
        last = [call.result_bytes for call in work.calls if call.name is not None and call.is_cut][-1:]
        hidden = sum(last) * parts if work.num_chunks > 1 else 0
        for number, call in self._each():
            is_kept, leaves = number in kept, number in below
            of_input = self._graph_bytes(call) if leaves else self._waits(call, is_kept)[1]
            held += _over_all(call, call.input_bytes + (call.saved_bytes if leaves else 0), work) - of_input
            if call.name is None:
                held += call.saved_bytes * parts
                most = max(most, held + max(call.forward_temporary_bytes, call.backward_temporary_bytes) * parts)
                continue
            if not call.is_cut:
                of_weights = max(0, call.backward_temporary_bytes - call.result_bytes - call.gradient_bytes)
                most = max(most, held + 2 * hidden + parts * (2 * call.result_bytes + call.gradient_bytes) + of_weights)
                continue
            if is_kept:
                held += call.saved_bytes * parts
                if parts > 1 and not call.keeps_graph:  # with the results: the next unit reads a joined copy
                    held += call.result_bytes * parts
            joined = 2 * parts if parts > 1 else 0
            forward = max((parts - 1) * call.result_bytes + call.forward_temporary_bytes, joined * call.result_bytes)
            graph = call.saved_bytes if is_kept else 0
            backward = (parts - 1) * call.gradient_bytes + call.backward_temporary_bytes - graph
            if leaves:  # offloaded after the forward; prefetched during the backward of another graph
                forward += call.saved_bytes
                backward += call.input_bytes + self._graph_bytes(call) // parts
            elif self._waits(call, is_kept)[1]:  # fetched per micro-batch, double-buffered
                backward += min(2, parts) * call.input_bytes
            backward += self._gradient_bytes(call)
            backward = 2 * hidden + parts * call.result_bytes + max(backward, joined * call.gradient_bytes)
            most = max(most, held + max(forward, backward))
        return max(0, most - waiting_bytes)

    def _gradient_bytes(self, call: UnitWork) -> int:
        """Return parameter gradient bytes for a compiled unit, whose backward creates all gradients at once."""
        if self.settings.compile == "never" or not call.is_block:
            return 0
        regions = [region for region in self._regions if region.trainable and call.name in region.units]
        return sum(region.weight_bytes for region in regions)

    def _of_forwards(self) -> int:
        """Return the peak operation memory for a forward-only step (MeZO).

        The passes advance side by side: one runs a unit or stretch, and the others hold their input and result for it.
        The result of the first unit (`inputs_embeds`) stays referenced in every pass until the last block ends.
        """
        work = self.workload
        passes, parts = 2 * self.settings.optimizer.num_directions, work.num_micro_batches
        first = next((call for call in work.calls if call.name is not None), None)
        entered = 0 if first is None or first.is_block else first.result_bytes
        given = handed_on = staying = most = num_blocks = 0
        for _, call in self._each():
            staying += _over_all(call, call.staying_bytes, work)
            if call.name is None:
                waiting = parts * ((passes - 1) * handed_on + passes * given)
                most = max(most, waiting + parts * (call.saved_bytes + call.forward_temporary_bytes))
                continue
            given = handed_on
            waiting = ((passes - 1) * call.result_bytes + passes * given) * parts
            num_blocks += call.is_block
            if call.is_block and num_blocks > 1:  # the input of the first block is this tensor
                waiting += passes * entered * parts
            joined = 2 * parts * call.result_bytes if parts > 1 else 0
            most = max(most, waiting + max((parts - 1) * call.result_bytes + call.forward_temporary_bytes, joined))
            handed_on = call.result_bytes
        return most + passes * staying

    def _last_within(self, but: frozenset[int], room: int) -> set[int]:
        """Return the uses outside `but` with room for a saved graph.

        Late uses come first: their graphs are held for less time.
        """
        found = set()
        for number, call in reversed(list(enumerate(self.workload.calls))):
            size = call.saved_bytes * self.workload.num_micro_batches
            if number not in but and size <= room:
                found.add(number)
                room -= size
        return found

    @cached_property
    def _lasting_bytes(self) -> int:
        """Device bytes for fp32 gradient sums across several uses of a unit.

        Applies to shared blocks, and to a chunked head when the gradient buffer cannot accumulate.
        """
        if not self._has_backward:
            return 0
        uses = Counter(call.name for call in self.workload.calls if call.name is not None and call.is_cut)
        pieces = {call.name for call in self.workload.calls if call.name is not None and not call.is_cut}
        found = 0
        for region in self._regions:
            lasts = not region.trainable or gradient_lasts(region, self._resident) or region in self._in_blocks
            is_repeated = any(uses[name] > 1 for name in region.units)
            in_pieces = region.is_bf16 and not self.settings.splits and bool(pieces & set(region.units))
            if not lasts and (is_repeated or in_pieces):
                found += 4 * region.numel
        return found


def _over_all(call: UnitWork, num_bytes: int, work: Workload) -> int:
    """Return the total over all micro-batches, given bytes per micro-batch. Shared input bytes count once."""
    return num_bytes * work.num_micro_batches - call.shared_bytes * (work.num_micro_batches - 1)


def _with(allocations: Sequence[Allocation], tier: str, name: str, num_bytes: int) -> list[Allocation]:
    """Return the list with `num_bytes` added to one allocation."""
    before = next((a for a in allocations if (a.tier, a.name) == (tier, name)), Allocation(tier, name, 0))
    return [*(a for a in allocations if a is not before), replace(before, num_bytes=before.num_bytes + num_bytes)]
