"""Gradients from the device to the tier of the states: summed over ranks, added to earlier passes, rounded once."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from offload.engine.gradients.norms import CopySquares, Measures
from offload.engine.gradients.policies import UpdatePolicy
from offload.errors import OffloadError
from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import Region
from offload.native import kernels
from offload.planning.memory import BUFFER, summed_parts
from offload.tiers.lease import Lease, Ring, RingSlice
from offload.tiers.store import Store
from offload.tiers.tile import RegionState

_CHUNK = 1 << 24
"""Elements of a gradient copied at once: bounds the temporary of a copy into another dtype."""

Measure = Callable[[torch.Tensor], None]
"""Callback for this rank's piece of a region's gradient sum, in fp32 before rounding."""
Leases = Iterable[tuple[slice, Lease]]
"""The memory for a region's gradients on this rank: (elements, lease on the plane `gradients`)."""


class Gradients(NamedTuple):
    """A region's gradients on the device, on their way to the tier of the states."""

    region: Region
    """The region."""
    flat: torch.Tensor
    """Gradients for the elements this rank reduces, flat."""
    fence: Fence
    """Fence for their memory."""
    reads: Sequence[Ticket]
    """Tickets to wait for before a read."""
    squares: CopySquares | None = None
    """Brings the measured squares to the host; None: known, or measured elsewhere."""
    measure: Measure | None = None
    """Measures the sum over all replicas."""


class Exchange:
    """The gradients of a single rank: measured, and copied to the tier of the states.

    `tickets`: work on the gradients of this step. All gradients have arrived when these are done.
    """

    def __init__(self, store: Store, measures: Measures, debug: bool) -> None:
        self._store = store
        self._device = store.device
        self._lanes = store.lanes
        self._counters = store.counters
        self._measures = measures
        self._debug = debug
        self.tickets: list[Ticket] = []

    def begin_step(self) -> None:
        """Start new tickets, and take back buffers left open by an interrupted step."""
        self.tickets.clear()

    def free(self) -> None:
        """Release all buffers."""

    def reduce(self, region: Region, flat: torch.Tensor, source: Fence, measure: Measure | None) -> Gradients:
        """Sum `flat`, this rank's gradients for a region behind the fence `source`, over ranks, on the device.

        `measure`: None if the sum is not final.
        """
        squares = None
        if measure is not None:
            squares = self._measures.measure(region, flat)
        if self._store.d2h_lane is not self._lanes.d2h:  # nothing else is copied to the host
            self._copy_squares(squares)
            squares = None
        return Gradients(region, flat, source, self._lanes.mark(), squares)

    def drop(self, gradients: Gradients) -> None:
        """Discard gradients, once they are measured."""
        self._copy_squares(gradients.squares)

    def land(self, gradients: Gradients, leases: Leases) -> None:
        """Store gradients in the leased memory."""
        for span, lease in leases:
            part = gradients._replace(flat=gradients.flat[span])
            lease.done_writing(self.copy(part, lease.planes["gradients"], lease.users))
            gradients = gradients._replace(squares=None)  # copied with the first part

    def finish_sum(self, state: RegionState, total: torch.Tensor) -> None:
        """Measure, round and store `total`, a sum over several passes on the tier of the states."""
        self._copy_squares(self._measures.measure(state.region, total))
        self._round(state.region, total)

    def _round(self, region: Region, total: torch.Tensor) -> Ticket:
        """Round a sum over several passes on the update lane; its bytes there include the measure of the sum."""
        work = partial(round_sum, region, total)
        ticket = self._store.update_lane.submit(work, name=f"round {region.name}", num_bytes=3 * total.nbytes)
        self.tickets.append(ticket)
        return ticket

    def copy(self, gradients: Gradients, target: torch.Tensor, users: Sequence[Ticket]) -> Ticket:
        """Copy gradients and squares to the tier of the states, after `users`.

        Rounds to the target dtype in chunks, without a second full copy.
        """
        region, flat, source, reads, squares, _ = gradients

        def copy() -> None:
            if squares is not None:
                squares()
            for start in range(0, flat.numel(), _CHUNK):
                part = slice(start, start + _CHUNK)
                self._device.copy(target[part], flat[part])
            if self._debug and source.buffer_type == BUFFER:
                flat.fill_(float("nan"))

        ticket = self._store.d2h_lane.submit(copy, reads=reads, users=users, name=region.name, num_bytes=target.nbytes)
        source.record_reader(ticket)
        self.tickets.append(ticket)
        if self._store.is_below_device:
            self._store.counters.count("d2h_bytes", target.nbytes)
        return ticket

    def zero(self, region: Region, leases: Leases) -> None:
        """Store zeros in the leased memory, without a copy from the device."""
        for _, lease in leases:
            plane = lease.planes["gradients"]
            ticket = self._store.d2h_lane.submit(plane.zero_, users=lease.users, name=f"zeros of {region.name}")
            self.tickets.append(ticket)
            lease.done_writing(ticket)

    def _copy_squares(self, squares: CopySquares | None) -> None:
        """Copy the squares to the host separately."""
        if squares is not None:
            self.tickets.append(self._lanes.d2h.submit(squares, reads=self._lanes.mark(), name="norm"))


def round_sum(region: Region, flat: torch.Tensor) -> None:
    """Round an fp32 sum in place to the gradient dtype of the region."""
    if region.compute == "bf16" and flat.dtype == torch.float32:  # fp16 sums are rounded when they are measured
        kernels.round_bf16_(flat)


class GradientTransfer:
    """Moves gradients to their memory until the update.

    `Updates` sets the `policy` of a step, which is called for each region with gradients on their way. Over several
    ranks the gradients are summed here. Every opened trainable region is then included, because another rank may have
    gradients this rank lacks.
    """

    def __init__(self, store: Store, measures: Measures, exchange: Exchange, staging: torch.Tensor) -> None:
        self._store = store
        self._measures = measures
        self._exchange = exchange
        self.accumulated: Collection[int] = ()
        """Indices of the regions whose contributions are summed in the store's fp32 planes."""
        self.policy = UpdatePolicy()
        self._staging = Ring(staging, "gradient staging")
        self._sent: set[int] = set()

    def begin_step(self) -> None:
        self.policy = UpdatePolicy()
        self._sent.clear()
        self._exchange.begin_step()
        self._staging.reset()

    def accumulate(self, indices: Collection[int], staging: torch.Tensor) -> None:
        """Sum the contributions to the regions with these indices, and no others, in the store's fp32 planes."""
        self.accumulated = indices
        self._staging = Ring(staging, "gradient staging")

    def sum_so_far(self, region: Region) -> torch.Tensor | None:
        """Return this rank's gradient sum of a region in this step; None: no gradients yet."""
        if region.index not in self.accumulated or region.index not in self._sent:
            return None
        self._store.lanes.wait(self._exchange.tickets)
        return self._store.states[region].sums

    def free(self) -> None:
        self._staging.free()
        self._exchange.free()

    def finish(self) -> None:
        """Wait until all gradients have arrived; reduce and round accumulated sums.

        Afterwards the measures and planes are final. This is the only host wait in a step.
        """
        # The contributions, and then the exchanges of their sums.
        self._store.lanes.wait(self._exchange.tickets)
        if self.accumulated:
            for state in self._store.states.values():
                if state.sums is not None and state.region.index in self._sent:
                    self._exchange.finish_sum(state, state.sums)
            self._store.lanes.wait(self._exchange.tickets)
        self._sent.clear()
        self._measures.finish()

    def sends(self, region: Region) -> bool:
        """Return whether a region is sent: with a gradient on this rank, or with other ranks that may have one."""
        return self._measures.has_peers or any(self._measures.touched[region.index])

    def send(self, region: Region, flat: torch.Tensor, source: Fence, is_final: bool = False) -> None:
        """Send a region's gradients to the update. `is_final`: `flat` is the sum over the whole step."""
        if self._measures.has_peers:
            for position, has in enumerate(self._measures.touched[region.index]):
                if not has:  # on this rank; another rank may have one
                    flat[self._store.states[region].span(position)].zero_()
        if region.index in self.accumulated:
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
            self._land(region, gradients)

    def send_zeros(self, region: Region) -> None:
        """Record zero gradients for a region, without a D2H copy."""
        is_first = region.index not in self._sent
        self._sent.add(region.index)
        if not is_first or self.policy.drops:  # zeros add nothing to a sum, or to a norm
            return
        state = self._store.states[region]
        if state.sums is not None:
            lease = Lease.of({"gradients": state.sums}, state.gradient_fence)
            self._exchange.zero(region, [(slice(0, len(state.sums)), lease)])
        else:
            self._land(region, None)

    def _land(self, region: Region, gradients: Gradients | None) -> None:
        """Store a region's gradients (None: zeros) until the update, and tell the policy."""
        state, stretch = self._store.states[region], None
        stored, fence = state.gradients, state.gradient_fence
        leases: Leases = state.lend_gradients()
        if not state.has_gradient_plane:  # the update follows at once, and frees the staging memory
            own = self._store.sharding.own(region)
            stored, stretch = self._take_staging(own.stop - own.start, region.plane("gradients").dtype)
            fence = stretch.fence
            leases = [(slice(0, len(stored)), Lease.of({"gradients": stored}, fence, stretch.users))]
        if gradients is None:
            self._exchange.zero(region, leases)
        else:
            self._exchange.land(gradients, leases)
        self.policy.receive(region, stored, fence)
        if stretch is not None:
            stretch.close()

    def _add(self, region: Region, flat: torch.Tensor, source: Fence, is_final: bool) -> None:
        """Add a region's gradients to the sum over several passes, in fp32."""
        state = self._store.states[region]
        plane, fence = state.sums, state.gradient_fence
        assert plane is not None
        first = region.index not in self._sent
        self._sent.add(region.index)
        gradients = self._exchange.reduce(region, flat, source, None)
        if is_final:  # already summed over the whole step
            fence.record_writer(self._exchange.copy(gradients, plane, fence.before_fill()))
            return
        for part in summed_parts(len(gradients.flat)):
            self._add_part(gradients._replace(flat=gradients.flat[part]), plane[part], fence, first)

    def _add_part(self, gradients: Gradients, total: torch.Tensor, fence: Fence, first: bool) -> None:
        """Add a part of a region's gradients to the same part of the sum. Sums are rounded once, after all passes."""
        staged, stretch = self._take_staging(len(gradients.flat), gradients.flat.dtype)
        stretch.fence.record_writer(self._exchange.copy(gradients, staged, stretch.users))

        def add() -> None:
            if first:
                total.copy_(staged)
            else:
                kernels.accumulate(total, staged)

        num_accesses = 1 if first else 2  # a sum is read and written
        ticket = self._store.update_lane.submit(
            add,
            reads=stretch.fence.before_read(),
            users=fence.before_fill(),
            name=f"add {gradients.region.name}",
            num_bytes=staged.nbytes + num_accesses * total.nbytes,
        )
        stretch.fence.record_reader(ticket)
        stretch.close()
        fence.record_writer(ticket)
        self._exchange.tickets.append(ticket)

    def _take_staging(self, numel: int, dtype: torch.dtype) -> tuple[torch.Tensor, RingSlice]:
        stretch = self._staging.take_planned(numel * dtype.itemsize)
        return stretch.flat.view(dtype), stretch
