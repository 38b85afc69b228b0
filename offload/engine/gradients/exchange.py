"""Exchanges: gradients on their way from the device to the tier of the states, summed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from offload.engine.gradients.norms import CopySquares, Measures
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import Region
from offload.native import kernels
from offload.planning.memory import BUFFER, SCRATCH, SHARDS
from offload.tiers.counters import Counters
from offload.tiers.device import Device
from offload.tiers.lease import Lease
from offload.tiers.ring import Ring
from offload.tiers.store import Store
from offload.tiers.tile import RegionState

_CHUNK = 1 << 24

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

    def __init__(
        self, store: Store, measures: Measures, device: Device, lanes: Lanes, counters: Counters, debug: bool
    ) -> None:
        self._store, self._measures, self._device, self._lanes = store, measures, device, lanes
        self._counters, self._debug = counters, debug
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
        squares = None if measure is None else self._measures.measure(region, flat)
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
            lease.done_writing(self.copy(part, lease.planes["gradients"], lease.fills))
            gradients = gradients._replace(squares=None)

    def finish_sum(self, state: RegionState, total: torch.Tensor) -> None:
        """Measure, round and store `total`, a sum over several passes on the tier of the states."""
        self._copy_squares(self._measures.measure(state.region, total))
        self._round(state.region, total)

    def copy(self, gradients: Gradients, target: torch.Tensor, fills: Sequence[Ticket]) -> Ticket:
        """Copy gradients and squares to the tier of the states, after `fills`.

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

        ticket = self._store.d2h_lane.submit(copy, reads=reads, fills=fills, name=region.name, num_bytes=target.nbytes)
        source.record_reader(ticket)
        self.tickets.append(ticket)
        self._store.count_d2h(target.nbytes)
        return ticket

    def zero(self, region: Region, leases: Leases) -> None:
        """Store zeros in the leased memory, without a copy from the device."""
        for _, lease in leases:
            plane = lease.planes["gradients"]
            ticket = self._store.d2h_lane.submit(plane.zero_, fills=lease.fills, name=f"zeros of {region.name}")
            self.tickets.append(ticket)
            lease.done_writing(ticket)

    def _gather(self, region: Region, whole: torch.Tensor, own: torch.Tensor, reads: Sequence[Ticket] = ()) -> Ticket:
        """Gather the sums of all ranks in this replica, each rank's `own` part."""
        store, label = self._store, f"all-gather of the gradients of {region.name}"
        self._counters.count("all_gather_elements", region.numel)
        self._counters.count("network_bytes", own.nbytes * store.within.num_far)
        work = partial(store.within.all_gather, whole, own, label)
        return store.collective_lane.submit(work, reads=reads, name=label, num_bytes=own.nbytes)

    def _copy_squares(self, squares: CopySquares | None) -> None:
        """Copy the squares to the host separately."""
        if squares is not None:
            self.tickets.append(self._lanes.d2h.submit(squares, reads=self._lanes.mark(), name="norm"))

    def _round(self, region: Region, flat: torch.Tensor) -> None:
        if region.is_bf16 and flat.dtype == torch.float32:
            kernels.round_bf16_(flat)


class ReduceScatter(Exchange):
    """Each rank in a replica receives and measures the fp32 sum over its own range.

    In stage 0 an all-gather then gives all ranks the whole sum.
    """

    def __init__(self, sizes: Mapping[str, int], *parts: Any) -> None:
        """`sizes`: device buffer sizes in bytes, by plan name. `parts`: as for `Exchange`."""
        super().__init__(*parts)
        # For bf16 gradient sums (fp32 gradients are summed in place), and for data received from other ranks.
        self._shards = Ring(self._device.allocate(SHARDS, sizes[SHARDS]), "gradient shards")
        self._scratch = self._device.allocate(SCRATCH, sizes[SCRATCH])

    def begin_step(self) -> None:
        super().begin_step()
        self._shards.reset()

    def free(self) -> None:
        self._shards, self._scratch = Ring(torch.empty(0, dtype=torch.uint8), ""), torch.empty(0, dtype=torch.uint8)

    def reduce(self, region: Region, flat: torch.Tensor, source: Fence, measure: Measure | None) -> Gradients:
        store, part = self._store, self._store.sharding.shard(region)
        whole = measure is not None and store.sharding.num_ranges == 1
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
        piece_bytes = (part.stop - part.start) * flat.itemsize
        self._counters.count("network_bytes", (2 if whole else 1) * piece_bytes * store.within.num_far)
        if whole:
            self._counters.count("all_gather_elements", region.numel)
            fence.record_reader(ticket)
            return Gradients(region, flat, source, (ticket,))
        if fence is not source:
            fence.record_writer(ticket)
        return Gradients(region, shard, fence, (ticket,))

    def drop(self, gradients: Gradients) -> None:
        self.tickets += gradients.reads

    def finish_sum(self, state: RegionState, total: torch.Tensor) -> None:
        region, plane = state.region, state.gradients
        assert plane is not None
        self._measures.measure_shard(region, total, agrees=False)
        self._round(region, total)
        if len(total) < len(plane):
            self.tickets.append(self._gather(region, plane, total))
