"""Gradients from the device to the tier of the states: summed over ranks, added to earlier passes, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from offload.engine.gradients.norms import CopySquares, Measures
from offload.engine.gradients.policies import NoPolicy, UpdatePolicy
from offload.engine.gradients.replica_sums import ReplicaSums
from offload.errors import OffloadError
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import Region
from offload.native import kernels
from offload.planning.memory import BUFFER, SCRATCH, SHARDS, replica_sum_bytes
from offload.tiers.counters import Counters
from offload.tiers.device import Device
from offload.tiers.ring import Ring, RingSlice
from offload.tiers.store import Store
from offload.tiers.tile import RegionState

_CHUNK = 1 << 24


class GradientTransfer:
    """Moves gradients to their memory until the update.

    `Updates` sets the `policy` of a step, which is called for each region with gradients on their way. Over several
    ranks the gradients are summed here. Every opened trainable region is then included, because another rank may have
    gradients this rank lacks.
    """

    def __init__(
        self,
        store: Store,
        measures: Measures,
        device: Device,
        lanes: Lanes,
        counters: Counters,
        staging: torch.Tensor,
        sizes: Mapping[str, int],
        debug: bool,
        exist: bool,
    ) -> None:
        """`exist`: the update rule has gradients."""
        self._reduction: Reduction | None = None
        self._between: ReplicaSums | None = None
        if store.within.size > 1:
            self._reduction = Reduction(store, measures, device, lanes, counters, sizes, debug)
        if store.between.size > 1 and exist:
            stagings, regions = 2 if lanes.overlap else 1, [state.region for state in store.states]
            self._between = ReplicaSums(store, device, counters, replica_sum_bytes(regions, stagings, store.residence))
        self._store, self._measures = store, measures
        self._device, self._lanes, self._counters, self._debug = device, lanes, counters, debug
        self.accumulates = False
        self.policy: UpdatePolicy = NoPolicy()
        self._staging = Ring(staging, "gradient staging")
        self._sent: set[int] = set()
        self._tickets: list[Ticket] = []

    def begin_step(self) -> None:
        self.policy = NoPolicy()
        self._sent.clear()
        self._tickets.clear()
        if self._reduction is not None:
            self._reduction.begin_step()
        if self._between is not None:
            self._between.begin_step()
        self._staging.reset()

    def accumulate(self, accumulates: bool, staging: torch.Tensor) -> None:
        """Sum over several backward passes in the store's fp32 planes, or stop doing so."""
        self.accumulates, self._staging = accumulates, Ring(staging, "gradient staging")

    def sum_so_far(self, region: Region) -> torch.Tensor | None:
        """Return this rank's gradient sum of a region in this step; None: no gradients yet."""
        if not self.accumulates or region.index not in self._sent:
            return None
        self._lanes.wait(self._tickets)
        return self._store[region].sums

    def free(self) -> None:
        self._staging = Ring(torch.empty(0, dtype=torch.uint8), "")
        if self._reduction is not None:
            self._reduction.free()
        if self._between is not None:
            self._between.free()

    def finish(self) -> None:
        """Wait until all gradients have arrived; reduce and round accumulated sums.

        Afterwards the measures and planes are final. This is the only host wait in a step.
        """
        self._lanes.wait(self._tickets)
        if self.accumulates:
            for state in self._store.states:
                if state.sums is not None and state.region.index in self._sent:
                    self._finish_sum(state, state.sums)
            self._lanes.wait(self._tickets)
        self._sent.clear()
        self._measures.finish()

    def _finish_sum(self, state: RegionState, own: torch.Tensor) -> None:
        """Measure and round `own`, the sum over several passes."""
        region, plane = state.region, state.gradients
        assert plane is not None
        if self._between is not None:
            measure = partial(self._measures.measure_shard, region, agrees=False)
            self._tickets.append(self._between.exchange(region, own, plane, measure))
            return
        if self._reduction is not None:
            self._measures.measure_shard(region, own, agrees=False)
        else:
            self._copy_squares(self._measures.measure(region, own))
        if region.is_bf16:
            kernels.round_bf16_(own)
        if len(own) < len(plane):
            label = f"all-gather of the gradients of {region.name}"
            store = self._store
            self._tickets.append(
                store.collective_lane.submit(lambda: store.within.all_gather(plane, own, label), name=label)
            )
            self._counters.count("all_gather_elements", region.numel)
            self._counters.count("network_bytes", own.nbytes * store.within.num_far)

    def sends(self, region: Region) -> bool:
        """Return whether a region is sent: with a gradient on this rank, or with other ranks that may have one."""
        return self._store.comm.size > 1 or any(self._measures.touched[region.index])

    def _measure(self, region: Region) -> Callable[[torch.Tensor], None]:
        """Return the function that measures this rank's piece of the sum over all ranks."""
        # Updates during the backward need the norm so far.
        return partial(self._measures.measure_shard, region, agrees=self.policy.updates_at_arrival)

    def _reduce(
        self, region: Region, flat: torch.Tensor, source: Fence
    ) -> tuple[torch.Tensor, Fence, Sequence[Ticket]]:
        """Reduce a region's gradients over this replica.

        Return (flat gradients, their fence, tickets for readers to wait on).
        """
        if self._store.comm.size > 1:
            for position, has in enumerate(self._measures.touched[region.index]):
                if not has:  # on this rank; another rank may have one
                    flat[self._store[region].span(position)].zero_()
        if self._reduction is None:
            return flat, source, self._lanes.mark()
        is_final = not self.accumulates and self._between is None  # else measured after all passes or replicas
        measure = self._measure(region) if is_final else None
        whole = is_final and self._store.sharding.num_ranges == 1
        flat, source, ticket = self._reduction.reduce(region, flat, source, measure=measure, whole=whole)
        return flat, source, (ticket,)

    def send(self, region: Region, flat: torch.Tensor, source: Fence, is_final: bool = False) -> None:
        if self.accumulates:
            self._add(region, flat, source, is_final)
            return
        if region.index in self._sent:
            raise OffloadError(
                f"unit {' = '.join(region.units)} produced a second gradient after the first was copied to the host: "
                "the model took another path than in the recording pass. Use engine.model and engine.backward, which "
                "sum any number of passes."
            )
        self._sent.add(region.index)
        squares = self._measures.measure(region, flat) if self._store.comm.size == 1 else None
        # If the gradients are not copied to the host, the squares need a separate copy.
        if self.policy.drops or self._store.d2h_lane is not self._lanes.d2h:
            self._copy_squares(squares)
            squares = None
        flat, source, reads = self._reduce(region, flat, source)
        if self._between is not None:
            self._sum_over_replicas(self._between, region, flat, source, reads)
            return
        if self.policy.drops:
            self._tickets += reads if self._reduction is not None else ()
            return
        state = self._store[region]
        if state.has_gradient_plane:
            for span, lease in state.land():
                target = lease.planes["gradients"]
                lease.done_writing(self._copy_to_host(region, target, flat[span], source, reads, lease.fills, squares))
                squares = None
            self.policy.receive(region, state.gradients, state.landing)
            return
        staged, stretch = self._take_staging(len(flat), region.plane("gradients").dtype)
        stretch.fence.record_writer(self._copy_to_host(region, staged, flat, source, reads, stretch.fills, squares))
        self.policy.receive(region, staged, stretch.fence)
        stretch.close()

    def send_zeros(self, region: Region) -> None:
        """Record zero gradients for a region, without a D2H copy."""
        is_first, state = region.index not in self._sent, self._store[region]
        self._sent.add(region.index)
        if self.policy.drops or not is_first:
            return
        if self.accumulates:
            assert state.sums is not None
            state.landing.record_writer(self._zero(region, state.sums, state.landing.before_fill()))
        elif state.has_gradient_plane:
            for _, lease in state.land():
                lease.done_writing(self._zero(region, lease.planes["gradients"], lease.fills))
            self.policy.receive(region, state.gradients, state.landing)
        else:
            target, stretch = self._take_own_staging(region)
            stretch.fence.record_writer(self._zero(region, target, stretch.fills))
            self.policy.receive(region, target, stretch.fence)
            stretch.close()

    def _zero(self, region: Region, target: torch.Tensor, fills: Sequence[Ticket]) -> Ticket:
        ticket = self._store.d2h_lane.submit(target.zero_, fills=fills, name=f"zeros of {region.name}")
        self._tickets.append(ticket)
        return ticket

    def _sum_over_replicas(
        self, between: ReplicaSums, region: Region, flat: torch.Tensor, source: Fence, reads: Sequence[Ticket]
    ) -> None:
        """Sum a replica's gradients over all replicas and store the result."""
        state, measure = self._store[region], self._measure(region)
        if self.policy.drops:
            self._tickets.append(between.sum(region, flat, source, reads, measure, flat[:0])[2])
        elif state.gradients is None and state.has_room_on_disk:
            total, fence, ticket = between.sum(region, flat, source, reads, measure, None)
            for span, lease in state.land():
                fills, target = lease.fills, lease.planes["gradients"]
                copied = self._store.network_lane.submit(
                    partial(target.copy_, total[span]), reads=(ticket,), fills=fills, name=region.name
                )
                fence.record_reader(copied)
                lease.done_writing(copied)
                self._tickets.append(copied)
            self.policy.receive(region, None, state.landing)
        else:
            into, fence, stretch = state.gradients, state.landing, None
            if into is None:
                into, stretch = self._take_own_staging(region)
                fence = stretch.fence
            fills = fence.before_fill() if stretch is None else stretch.fills
            _, _, ticket = between.sum(region, flat, source, reads, measure, into, fills)
            fence.record_writer(ticket)
            self._tickets.append(ticket)
            self.policy.receive(region, into, fence)
            if stretch is not None:
                stretch.close()

    def _add(self, region: Region, flat: torch.Tensor, source: Fence, is_final: bool) -> None:
        """Add a region's gradients to its fp32 plane."""
        state = self._store[region]
        plane, fence = state.sums, state.landing
        assert plane is not None
        first = region.index not in self._sent
        self._sent.add(region.index)
        flat, source, reads = self._reduce(region, flat, source)
        if is_final:  # already summed over the whole step
            fence.record_writer(self._copy_to_host(region, plane, flat, source, reads, fence.before_fill()))
            return
        # Sums over micro-batches or ranks are rounded once, after all passes.
        dtype = flat.dtype if self._reduction is None else torch.float32
        staged, stretch = self._take_staging(len(flat), dtype)
        stretch.fence.record_writer(self._copy_to_host(region, staged, flat, source, reads, stretch.fills))

        def add() -> None:
            if first:
                plane.copy_(staged)
            else:
                kernels.accumulate(plane, staged)

        ticket = self._store.update_lane.submit(
            add, reads=stretch.fence.before_read(), fills=fence.before_fill(), name=f"add {region.name}"
        )
        stretch.fence.record_reader(ticket)
        stretch.close()
        fence.record_writer(ticket)
        self._tickets.append(ticket)

    def _copy_squares(self, squares: CopySquares | None) -> None:
        """Copy the squares to the host separately."""
        if squares is not None:
            self._tickets.append(self._lanes.d2h.submit(squares, reads=self._lanes.mark(), name="norm"))

    def _take_own_staging(self, region: Region) -> tuple[torch.Tensor, RingSlice]:
        own = self._store.sharding.own(region)
        return self._take_staging(own.stop - own.start, region.plane("gradients").dtype)

    def _take_staging(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, RingSlice]:
        stretch = self._staging.take(numel * dtype.itemsize)
        assert stretch is not None, "staging has room for the largest region"
        return stretch.flat.view(dtype), stretch

    def _copy_to_host(
        self,
        region: Region,
        target: torch.Tensor,
        flat: torch.Tensor,
        source: Fence,
        reads: Sequence[Ticket],
        fills: Sequence[Ticket],
        squares: CopySquares | None = None,
    ) -> Ticket:
        """Copy a region's gradients to `target`, and the squares (if given) to the host.

        Rounds to the target dtype in chunks, without a second full copy.
        """

        def copy() -> None:
            if squares is not None:
                squares()
            for start in range(0, flat.numel(), _CHUNK):
                part = slice(start, start + _CHUNK)
                self._device.copy(target[part], flat[part])
            if self._debug and source.buffer_type == BUFFER:
                flat.fill_(float("nan"))

        ticket = self._store.d2h_lane.submit(copy, reads=reads, fills=fills, name=region.name, num_bytes=target.nbytes)
        source.record_reader(ticket)
        self._tickets.append(ticket)
        self._store.count_d2h(target.nbytes)
        return ticket


class Reduction:
    """Reduce-scatter for gradients: each rank receives and measures the fp32 sum over its own range.

    In stage 0 an all-gather then gives all ranks the whole sum.
    """

    def __init__(
        self,
        store: Store,
        measures: Measures,
        device: Device,
        lanes: Lanes,
        counters: Counters,
        sizes: Mapping[str, int],
        debug: bool,
    ) -> None:
        self._store, self._measures, self._lanes, self._counters, self._debug = store, measures, lanes, counters, debug
        # For bf16 gradient sums (fp32 gradients are summed in place), and for data received from other ranks.
        self._shards = Ring(device.allocate(SHARDS, sizes[SHARDS]), "gradient shards")
        self._scratch = device.allocate(SCRATCH, sizes[SCRATCH])

    def begin_step(self) -> None:
        """Take back buffers left open by an interrupted step."""
        self._shards.reset()

    def free(self) -> None:
        self._shards, self._scratch = Ring(torch.empty(0, dtype=torch.uint8), ""), torch.empty(0, dtype=torch.uint8)

    def reduce(
        self,
        region: Region,
        flat: torch.Tensor,
        source: Fence,
        *,
        measure: Callable[[torch.Tensor], None] | None,
        whole: bool,
    ) -> tuple[torch.Tensor, Fence, Ticket]:
        """Sum `flat`, this rank's gradients for a region, over all ranks, after `source`.

        Returns (sum over this rank's shard in fp32, or with `whole` the full sum in `flat`; fence for this memory;
        ticket of the sum). `measure` is called with the shard before rounding.
        """
        store, part = self._store, self._store.sharding.shard(region)
        shard, fence = flat[part], source
        fills: Sequence[Ticket] = ()
        if flat.dtype != torch.float32:
            stretch = self._shards.take(4 * (part.stop - part.start))
            assert stretch is not None, "there is room for the largest shard"
            shard, fence, fills = stretch.flat.view(torch.float32), stretch.fence, stretch.fills
            stretch.close()  # no other stretch is taken before this one has a reader

        def work() -> None:
            store.within.reduce_scatter(shard, flat, f"reduce-scatter of {region.name}", scratch=self._scratch)
            if measure is not None:
                measure(shard)
            if whole:
                if fence is not source:
                    flat[part].copy_(shard)
                store.within.all_gather(flat, flat[part], f"all-gather of the gradients of {region.name}")
            elif self._debug and source.buffer_type == BUFFER:
                for rest in (flat[: part.start], flat[part.stop :]) if fence is source else (flat,):
                    rest.fill_(float("nan"))

        ticket = store.collective_lane.submit(
            work,
            reads=self._lanes.mark(),
            fills=fills,
            name=f"reduce {region.name}",
            num_bytes=(2 if whole else 1) * shard.nbytes,
        )
        source.record_reader(ticket)
        self._counters.count("reduce_scatter_elements", region.numel)
        far, piece_bytes = store.within.num_far, (part.stop - part.start) * flat.itemsize
        self._counters.count("network_bytes", (2 if whole else 1) * piece_bytes * far)
        if whole:
            self._counters.count("all_gather_elements", region.numel)
            fence.record_reader(ticket)
            return flat, source, ticket
        if fence is not source:
            fence.record_writer(ticket)
        return shard, fence, ticket
