"""The sum of a region's gradients over ranks, on the device, before they come down."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload.engine.gradients.norms import Measures
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.layout.regions import Region
from offload.planning.memory import BUFFER
from offload.telemetry.counters import Counters
from offload.tiers.ring import Ring
from offload.tiers.store import Store


class Reduction:
    """Reduce-scatters gradients: each rank gets the sum over its own range, in fp32, and measures it there. In stage 0
    the sums are then gathered, so that all have all of it.
    """

    def __init__(
        self,
        store: Store,
        measures: Measures,
        lanes: Lanes,
        counters: Counters,
        *,
        shards: torch.Tensor,
        scratch: torch.Tensor,
        debug: bool,
    ) -> None:
        """`shards`: device memory for the sums of bf16 gradients; those of fp32 are made in place. `scratch`: for what
        comes from the other ranks.
        """
        self._store, self._measures, self._lanes, self._counters = store, measures, lanes, counters
        self._shards, self._scratch, self._debug = Ring(shards, "gradient shards"), scratch, debug

    def begin_step(self) -> None:
        """Take back what an interrupted step has left open."""
        self._shards.reset()

    def free(self) -> None:
        """Let go of the memory."""
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
        """Sum `flat`, a region's gradients of this rank, behind `source`, over all ranks. Return the sum over this
        rank's shard, in fp32, or with `whole` all of it in `flat`; the fence of that memory, and the ticket after which
        it is there. `measure` is called with the shard, before it is rounded.
        """
        store, part = self._store, self._store.sharding.shard(region)
        for position, has in enumerate(self._measures.touched[region.index]):
            if not has:  # on this rank: it may have one on another
                flat[store[region].span(position)].zero_()
        shard, fence = flat[part], source
        fills: Sequence[Ticket] = ()
        if flat.dtype != torch.float32:
            stretch = self._shards.take(4 * (part.stop - part.start))
            assert stretch is not None, "there is room for the largest shard"
            shard, fence, fills = stretch.flat.view(torch.float32), stretch.fence, stretch.fills
            stretch.close()  # nobody takes another before this one's reader is known

        def work() -> None:
            store.comm.reduce_scatter(shard, flat, f"reduce-scatter of {region.name}", scratch=self._scratch)
            if measure is not None:
                measure(shard)
            if whole:
                if fence is not source:
                    flat[part].copy_(shard)
                store.comm.all_gather(flat, flat[part], f"all-gather of the gradients of {region.name}")
            elif self._debug and source.kind == BUFFER:
                for rest in (flat[: part.start], flat[part.stop :]) if fence is source else (flat,):
                    rest.fill_(float("nan"))

        ticket = store.exchanges.submit(
            work,
            reads=self._lanes.mark(),
            fills=fills,
            name=f"reduce {region.name}",
            num_bytes=(2 if whole else 1) * shard.nbytes,
        )
        source.read(ticket)
        self._counters.count("reduce_scatter_elements", region.numel)
        if whole:
            self._counters.count("all_gather_elements", region.numel)
            fence.read(ticket)
            return flat, source, ticket
        if fence is not source:
            fence.fill(ticket)
        return shard, fence, ticket
