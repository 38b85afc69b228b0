"""Gradient sums over ranks: inside a replica, and over model replicas (hybrid sharding, arXiv:2304.11277, section
3.2.2).

Gradients between replicas are exact, or quantized with error feedback: qgZ in ZeRO++ (arXiv:2306.10209, section 3.4);
error feedback (arXiv:1901.09847, algorithm 1); errors with fewer bits than gradients, as in LoCo (arXiv:2407.04480).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from offload.distributed.comm import Comm, pieces_of
from offload.doors import Door
from offload.engine.gradients.norms import Measures
from offload.engine.gradients.transfer import Exchange, Gradients, Leases, Measure, round_sum
from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import Region
from offload.planning.memory import BETWEEN, BUFFER, SCRATCH, SHARDS, replica_sum_bytes
from offload.planning.settings import Settings
from offload.tiers.device import Device
from offload.tiers.lease import Ring
from offload.tiers.store import Store
from offload.tiers.tile import RegionState


def open_exchange(store: Store, measures: Measures, sizes: Mapping[str, int], settings: Settings) -> Exchange:
    """Return the exchange for the ranks of `store`. `sizes`: device buffer sizes in bytes, by plan name."""
    parts = store, measures, bool(settings.debug)
    exchange = Exchange(*parts)
    if store.sharding.dispatches:
        exchange = EXCHANGES["dispatch"](sizes, *parts)
    elif store.within.size > 1:
        exchange = EXCHANGES["reduce-scatter"](sizes, *parts)
    if store.between.size > 1 and settings.optimizer.has_gradients:
        return ReplicaSums(exchange, *parts)
    return exchange


def _gathering(region: Region) -> str:
    return f"all-gather of the gradients of {region.name}"


class ReduceScatter(Exchange):
    """Each rank in a replica receives and measures the fp32 sum over its own range.

    In stage 0 an all-gather then gives all ranks the whole sum.
    """

    def __init__(self, sizes: Mapping[str, int], store: Store, measures: Measures, debug: bool) -> None:
        """`sizes`: device buffer sizes in bytes, by plan name. The others: as for `Exchange`."""
        super().__init__(store, measures, debug)
        # For bf16 gradient sums (fp32 gradients are summed in place), and for data received from other ranks.
        self._shards = Ring(self._device.allocate(SHARDS, sizes[SHARDS]), "gradient shards")
        self._scratch = self._device.allocate(SCRATCH, sizes[SCRATCH])

    def begin_step(self) -> None:
        super().begin_step()
        self._shards.reset()

    def free(self) -> None:
        self._shards.free()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def reduce(self, region: Region, flat: torch.Tensor, source: Fence, measure: Measure | None) -> Gradients:
        store, part = self._store, self._store.sharding.shard(region)
        whole = measure is not None and store.sharding.num_ranges == 1
        shard, fence = flat[part], source
        users: Sequence[Ticket] = ()
        if flat.dtype != torch.float32:
            stretch = self._shards.take_planned(4 * (part.stop - part.start))
            shard = stretch.flat.view(torch.float32)
            fence, users = stretch.fence, stretch.users
            stretch.close()  # no other stretch is taken before this one has a reader

        def work() -> None:
            store.within.reduce_scatter(shard, flat, f"reduce-scatter of {region.name}", scratch=self._scratch)
            if measure is not None:
                measure(shard)
            if whole:
                if fence is not source:
                    flat[part].copy_(shard)
                store.within.all_gather(flat, flat[part], _gathering(region))
            elif self._debug and source.buffer_type == BUFFER:
                unused = [flat]
                if fence is source:  # the sum lies among the gradients
                    unused = [flat[: part.start], flat[part.stop :]]
                for rest in unused:
                    rest.fill_(float("nan"))

        num_exchanges = 1 + whole  # a gather follows
        ticket = store.collective_lane.submit(
            work,
            reads=self._lanes.mark(),
            users=users,
            name=f"reduce {region.name}",
            num_bytes=num_exchanges * shard.nbytes,
        )
        source.record_reader(ticket)
        self._counters.count("reduce_scatter_elements", region.numel)
        piece_bytes = (part.stop - part.start) * flat.itemsize
        self._counters.count("network_bytes", num_exchanges * piece_bytes * store.within.num_far)
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
        store = self._store
        assert plane is not None
        self._measures.measure_shard(region, total, agrees=False)
        ticket = self._round(region, total)
        if len(total) < len(plane):
            self.tickets.append(store.gather(region, plane, total, _gathering(region), (ticket,)))


class ExactSums:
    """Exact all-reduce. Each rank sums one piece of a shard in fp32, in replica order, rounds once and sends it to all.

    All ranks get equal bits, at the volume of a ring (Rabenseifner's all-reduce).
    """

    def __init__(self, between: Comm, device: Device, scratch: torch.Tensor) -> None:
        self.between = between
        self.device = device
        self.scratch = scratch

    def sent_bytes(self, terms: torch.Tensor, into: torch.Tensor) -> int:
        """Return the bytes a rank sends to each other rank."""
        step = len(terms) // self.between.size
        num_bytes = step * terms.itemsize
        if len(into) > step:  # others store this rank's piece of the sum too
            num_bytes += step * into.itemsize
        return num_bytes

    def run(
        self, state: RegionState, terms: torch.Tensor, own_sum: torch.Tensor, target: torch.Tensor, measure: Measure
    ) -> None:
        """Sum `terms`, a region's gradients for a shard [n], over replicas.

        `own_sum`: fp32 memory for this rank's piece of the sum, possibly the piece inside `terms`. `target`: memory for
        the result, possibly `terms` or the piece inside; nothing is written if empty.
        """
        between, label = self.between, f"sum over replicas of {state.region.name}"
        between.reduce_scatter(own_sum, terms, label, scratch=self.scratch)
        measure(own_sum)
        if len(target):
            own_target = target
            if len(target) != len(own_sum):
                own_target = pieces_of(target, between.size)[between.rank]
            self.keep(state.region, own_sum, own_target)
            if own_target is not target:
                between.all_gather(target, own_target, label)

    def keep(self, region: Region, own_sum: torch.Tensor, own_target: torch.Tensor) -> None:
        """Round this rank's piece of a sum and copy it to the gradients' memory."""
        if own_target.data_ptr() != own_sum.data_ptr():
            self.device.copy(own_target, own_sum)
        round_sum(region, own_target)


class ReplicaSums(Exchange):
    """Sums gradients over the ranks with the same position in all replicas, after the sum inside each replica.

    Runs from host to host on the `network` lane if states are on the host.
    """

    def __init__(self, inner: Exchange, store: Store, measures: Measures, debug: bool) -> None:
        """`inner`: sums inside a replica. The others: as for `Exchange`."""
        super().__init__(store, measures, debug)
        regions = list(store.states)
        num_neighbours = 1
        if self._lanes.overlap:  # one is filled while the other is sent
            num_neighbours = 2
        sizes = replica_sum_bytes(regions, num_neighbours, store.residence)
        memory = store.stage(BETWEEN, sum(sizes))
        self._inner = inner
        self._ring = Ring(memory[: sizes[0]], BETWEEN)
        exact = ExactSums(store.between, self._device, memory[sizes[0] :])
        codec = store.sharding.gradients
        self._sums: ExactSums = codec.replica_sums(exact, shares_sums=not store.sharding.spreads)

    def begin_step(self) -> None:
        super().begin_step()
        self._inner.begin_step()
        self._ring.reset()

    def free(self) -> None:
        self._inner.free()
        self._ring.free()
        del self._sums

    def reduce(self, region: Region, flat: torch.Tensor, source: Fence, measure: Measure | None) -> Gradients:
        return self._inner.reduce(region, flat, source, None)._replace(measure=measure)

    def drop(self, gradients: Gradients) -> None:
        self._sum(gradients, gradients.flat[:0])

    def land(self, gradients: Gradients, leases: Leases) -> None:
        region, state = gradients.region, self._store.states[gradients.region]
        if state.gradients is not None or not state.has_room_on_disk:
            for _, lease in leases:
                lease.done_writing(self._sum(gradients, lease.planes["gradients"], lease.users)[2])
            return
        total, fence, ticket = self._sum(gradients, None)
        for span, lease in leases:
            work = partial(lease.planes["gradients"].copy_, total[span])
            copied = self._store.network_lane.submit(work, reads=(ticket,), users=lease.users, name=region.name)
            fence.record_reader(copied)
            lease.done_writing(copied)
            self.tickets.append(copied)

    def finish_sum(self, state: RegionState, total: torch.Tensor) -> None:
        assert state.gradients is not None
        measure = partial(self._measures.measure_shard, state.region, agrees=False)
        self._exchange(state.region, total, state.gradients, measure)

    def _sum(
        self, gradients: Gradients, into: torch.Tensor | None, users: Sequence[Ticket] = ()
    ) -> tuple[torch.Tensor, Fence, Ticket]:
        """Copy a shard's gradients [n] to the tier of the states and sum over replicas.

        `into`: memory for this rank's range in the gradient dtype, written after the `users` tickets; None: memory
        behind the copy; empty: the sum is not stored. Returns (sum, fence of the memory in between, ticket of the sum).
        """
        region, flat, source, reads, _, measure = gradients
        assert measure is not None
        own, plane = self._store.sharding.own(region), region.plane("gradients")
        num_bytes = 4 * len(flat)  # a shard in 16 bits leaves room for an fp32 piece
        room = num_bytes
        if into is None:
            room += plane.num_bytes(own.stop - own.start)
        stretch = self._ring.take_planned(room)
        terms = stretch.flat[: flat.nbytes].view(flat.dtype)
        if into is None:
            into = stretch.flat[num_bytes:].view(plane.dtype)
        copy = partial(self._device.copy, terms, flat)
        copied = self._store.d2h_lane.submit(
            copy, reads=reads, users=stretch.users, name=region.name, num_bytes=terms.nbytes
        )
        source.record_reader(copied)
        if self._store.is_below_device:
            self._store.counters.count("d2h_bytes", terms.nbytes)
        stretch.fence.record_writer(copied)
        piece = None
        if flat.dtype != torch.float32:
            piece = stretch.flat[terms.nbytes : num_bytes]
        ticket = self._exchange(region, terms, into, measure, (copied,), users, piece)
        stretch.fence.record_writer(ticket)
        stretch.close()
        return into, stretch.fence, ticket

    def _exchange(
        self,
        region: Region,
        terms: torch.Tensor,
        into: torch.Tensor,
        measure: Measure,
        reads: Sequence[Ticket] = (),
        users: Sequence[Ticket] = (),
        piece: torch.Tensor | None = None,
    ) -> Ticket:
        """Sum `terms`, a shard's gradients on the tier of the states, over replicas.

        `into`: memory for this rank's range in the gradient dtype, possibly `terms`, written after the `users` tickets;
        empty: the sum is not stored. `piece`: memory for an fp32 piece if `terms` is not fp32.
        """
        store, sharding = self._store, self._store.sharding
        number, between = sharding.replica, store.between
        step = len(terms) // sharding.num_replicas
        own_sum = terms[number * step : (number + 1) * step]
        if piece is not None:
            own_sum = piece.view(torch.float32)[:step]
        shard, own = sharding.shard(region), sharding.own(region)
        own_range = slice(max(shard.start, own.start) - own.start, min(shard.stop, own.stop) - own.start)
        target = into[own_range]  # empty, if the sum is not stored
        work = partial(self._sums.run, store.states[region], terms, own_sum, target, measure)
        sent = self._sums.sent_bytes(terms, into)
        self._counters.count("network_bytes", sent * between.num_far)
        ticket = store.network_lane.submit(
            work, reads=reads, users=users, name=f"sum {region.name}", num_bytes=sent * (between.size - 1)
        )
        if len(target) < len(into):  # every rank in the replica stores the whole sum
            ticket = store.gather(region, into, target, _gathering(region), (ticket,))
        self.tickets.append(ticket)
        return ticket


EXCHANGES: Door[Callable[..., Exchange]] = Door("exchange", {"reduce-scatter": ReduceScatter})
"""Sums over the ranks of a replica, by name."""
