"""Gradients of several replicas of a model, summed between them (hybrid sharding: arXiv:2304.11277, section 3.2.2)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import Region
from offload.native import kernels
from offload.planning.memory import BETWEEN
from offload.telemetry.counters import Counters
from offload.tiers.device import Device
from offload.tiers.ring import Ring
from offload.tiers.store import Store

Measure = Callable[[torch.Tensor], None]
"""Is shown this rank's piece of the sum of a region's gradients, in fp32, before it is rounded."""


class ReplicaSums:
    """Sums what a replica has summed over the ranks in the same place of all replicas: from host to host, on the lane
    `network`, where states rest on the host.

    Each of these ranks adds up one piece, in the order of the replicas and in fp32, rounds it once and gives it to the
    others: every bit is the same on all, at the volume of a ring (Rabenseifner's all-reduce).
    """

    def __init__(self, store: Store, device: Device, counters: Counters, sizes: tuple[int, int]) -> None:
        """`sizes`: as of `between_bytes`."""
        self._store, self._device, self._counters = store, device, counters
        memory = store.stage(BETWEEN, sum(sizes))
        self._ring, self._scratch = Ring(memory[: sizes[0]], BETWEEN), memory[sizes[0] :]

    def begin_step(self) -> None:
        """Take back what an interrupted step has left open."""
        self._ring.reset()

    def free(self) -> None:
        """Let go of the memory."""
        self._ring, self._scratch = Ring(torch.empty(0, dtype=torch.uint8), ""), torch.empty(0, dtype=torch.uint8)

    def sum(
        self,
        region: Region,
        flat: torch.Tensor,
        source: Fence,
        reads: Sequence[Ticket],
        measure: Measure,
        into: torch.Tensor | None,
        fills: Sequence[Ticket] = (),
    ) -> tuple[torch.Tensor, Fence, Ticket]:
        """Bring down `flat`, the gradients of a shard [n] in bf16 or fp32, and sum them over replicas `into` what this
        rank updates, in the dtype in which gradients wait, once `fills` are over; or, with None, into memory beside
        what came down. An `into` without elements is left alone. Return the sum, the fence of the memory in between,
        and the ticket after which the sum is there.
        """
        own, plane = self._store.sharding.own(region), region.plane("gradients")
        beside = plane.num_bytes(own.stop - own.start) if into is None else 0
        num_bytes = 4 * len(flat)  # a piece in fp32 has room behind a shard in bf16
        stretch = self._ring.take(num_bytes + beside)
        assert stretch is not None, "there is room for the largest shard"
        held = stretch.flat[: flat.nbytes].view(flat.dtype)
        if into is None:
            into = stretch.flat[num_bytes:].view(plane.dtype)
        name = region.name
        copied = self._store.down.submit(
            partial(self._device.copy, held, flat), reads=reads, fills=stretch.fills, name=name, num_bytes=held.nbytes
        )
        source.read(copied)
        self._store.came_down(held.nbytes)
        stretch.fence.fill(copied)
        piece = stretch.flat[held.nbytes : num_bytes] if flat.dtype == torch.bfloat16 else None
        ticket = self.exchange(region, held, into, measure, reads=(copied,), fills=fills, piece=piece)
        stretch.fence.fill(ticket)
        stretch.close()
        return into, stretch.fence, ticket

    def exchange(
        self,
        region: Region,
        held: torch.Tensor,
        into: torch.Tensor,
        measure: Measure,
        *,
        reads: Sequence[Ticket] = (),
        fills: Sequence[Ticket] = (),
        piece: torch.Tensor | None = None,
    ) -> Ticket:
        """Sum `held`, which lies beside the states, as of `sum`. `piece`: memory for a piece in fp32, where `held` is
        not; `into` may be `held`.
        """
        store, sharding = self._store, self._store.sharding
        number, between, step = sharding.replica, store.between, len(held) // sharding.num_replicas
        found = held[number * step : (number + 1) * step] if piece is None else piece.view(torch.float32)[:step]
        shard, start = sharding.shard(region), sharding.own(region).start
        target = into[shard.start - start : shard.stop - start] if len(into) else into

        def work() -> None:
            what = f"sum over replicas of {region.name}"
            between.reduce_scatter(found, held, what, scratch=self._scratch)
            measure(found)
            if len(target):
                mine = target[number * step : (number + 1) * step]
                if mine.data_ptr() != found.data_ptr():
                    self._device.copy(mine, found)
                if region.is_bf16 and mine.dtype == torch.float32:
                    kernels.round_bf16_(mine)
                between.all_gather(target, mine, what)

        sent = step * (held.itemsize + (into.itemsize if len(into) else 0))
        self._counters.count("network_bytes", sent * between.num_far)
        ticket = store.network.submit(
            work, reads=reads, fills=fills, name=f"sum {region.name}", num_bytes=sent * (between.size - 1)
        )
        if len(target) == len(into):
            return ticket
        # Every rank of the replica has all of it.
        gather = partial(store.within.all_gather, into, target, f"all-gather of the gradients of {region.name}")
        self._counters.count("all_gather_elements", region.numel)
        self._counters.count("network_bytes", target.nbytes * store.within.num_far)
        return store.exchanges.submit(gather, reads=(ticket,), name=f"gather {region.name}", num_bytes=target.nbytes)
