"""Exchanges: gradients on their way from the device to the tier of the states, summed over ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from offload.engine.gradients.norms import CopySquares, Measures
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import Region
from offload.native import kernels
from offload.planning.memory import BUFFER
from offload.tiers.counters import Counters
from offload.tiers.device import Device
from offload.tiers.lease import Lease
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
