"""Gradients from the device to the tier of the states: summed over ranks, added to earlier passes, rounded once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch

from offload.engine.gradients.exchange import Exchange
from offload.engine.gradients.norms import Measures
from offload.engine.gradients.policies import NoPolicy, UpdatePolicy
from offload.engine.gradients.rank_sums import ReduceScatter, ReplicaSums
from offload.errors import OffloadError
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence
from offload.layout.regions import Region
from offload.native import kernels
from offload.tiers.counters import Counters
from offload.tiers.device import Device
from offload.tiers.lease import Lease, Ring, RingSlice
from offload.tiers.store import Store


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
        parts = store, measures, device, lanes, counters, debug
        self._exchange = ReduceScatter(sizes, *parts) if store.within.size > 1 else Exchange(*parts)
        if store.between.size > 1 and exist:
            self._exchange = ReplicaSums(self._exchange, *parts)
        self._store, self._measures, self._lanes = store, measures, lanes
        self.accumulates = False
        self.policy: UpdatePolicy = NoPolicy()
        self._staging = Ring(staging, "gradient staging")
        self._sent: set[int] = set()

    def begin_step(self) -> None:
        self.policy = NoPolicy()
        self._sent.clear()
        self._exchange.begin_step()
        self._staging.reset()

    def accumulate(self, accumulates: bool, staging: torch.Tensor) -> None:
        """Sum over several backward passes in the store's fp32 planes, or stop doing so."""
        self.accumulates, self._staging = accumulates, Ring(staging, "gradient staging")

    def sum_so_far(self, region: Region) -> torch.Tensor | None:
        """Return this rank's gradient sum of a region in this step; None: no gradients yet."""
        if not self.accumulates or region.index not in self._sent:
            return None
        self._lanes.wait(self._exchange.tickets)
        return self._store[region].sums

    def free(self) -> None:
        self._staging = Ring(torch.empty(0, dtype=torch.uint8), "")
        self._exchange.free()

    def finish(self) -> None:
        """Wait until all gradients have arrived; reduce and round accumulated sums.

        Afterwards the measures and planes are final. This is the only host wait in a step.
        """
        self._lanes.wait(self._exchange.tickets)
        if self.accumulates:
            for state in self._store.states:
                if state.sums is not None and state.region.index in self._sent:
                    self._exchange.finish_sum(state, state.sums)
            self._lanes.wait(self._exchange.tickets)
        self._sent.clear()
        self._measures.finish()

    def sends(self, region: Region) -> bool:
        """Return whether a region is sent: with a gradient on this rank, or with other ranks that may have one."""
        return self._store.comm.size > 1 or any(self._measures.touched[region.index])

    def send(self, region: Region, flat: torch.Tensor, source: Fence, is_final: bool = False) -> None:
        """Send a region's gradients to the update. `is_final`: `flat` is the sum over the whole step."""
        if self._store.comm.size > 1:
            for position, has in enumerate(self._measures.touched[region.index]):
                if not has:  # on this rank; another rank may have one
                    flat[self._store[region].span(position)].zero_()
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
        # Updates during the backward need the norm so far.
        measure = partial(self._measures.measure_shard, region, agrees=self.policy.updates_at_arrival)
        gradients = self._exchange.reduce(region, flat, source, measure)
        if self.policy.drops:
            self._exchange.drop(gradients)
        else:
            self._exchange.land(gradients, self._memory(region))

    def send_zeros(self, region: Region) -> None:
        """Record zero gradients for a region, without a D2H copy."""
        is_first = region.index not in self._sent
        self._sent.add(region.index)
        if is_first and not self.policy.drops:
            self._exchange.zero(region, self._memory(region))

    def _memory(self, region: Region) -> Iterator[tuple[slice, Lease]]:
        """Yield the memory for a region's gradients until the update, or for their sum over several passes.

        Then pass the region to the policy, unless further passes follow.
        """
        state = self._store[region]
        if state.sums is not None:
            yield slice(0, len(state.sums)), Lease.of({"gradients": state.sums}, state.gradient_fence)
            return
        if state.has_gradient_plane:
            yield from state.lend_gradients()
            self.policy.receive(region, state.gradients, state.gradient_fence)
            return
        own = self._store.sharding.own(region)
        staged, stretch = self._take_staging(own.stop - own.start, region.plane("gradients").dtype)
        yield slice(0, len(staged)), Lease.of({"gradients": staged}, stretch.fence, stretch.fills)
        self.policy.receive(region, staged, stretch.fence)
        stretch.close()

    def _add(self, region: Region, flat: torch.Tensor, source: Fence, is_final: bool) -> None:
        """Add a region's gradients to the sum over several passes, in fp32."""
        state = self._store[region]
        plane, fence = state.sums, state.gradient_fence
        assert plane is not None
        first = region.index not in self._sent
        self._sent.add(region.index)
        gradients = self._exchange.reduce(region, flat, source, None)
        if is_final:  # already summed over the whole step
            fence.record_writer(self._exchange.copy(gradients, plane, fence.before_fill()))
            return
        # Sums over micro-batches or ranks are rounded once, after all passes.
        staged, stretch = self._take_staging(len(gradients.flat), gradients.flat.dtype)
        stretch.fence.record_writer(self._exchange.copy(gradients, staged, stretch.fills))

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
        self._exchange.tickets.append(ticket)

    def _take_staging(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, RingSlice]:
        stretch = self._staging.take(numel * dtype.itemsize)
        assert stretch is not None, "staging has room for the largest region"
        return stretch.flat.view(dtype), stretch
