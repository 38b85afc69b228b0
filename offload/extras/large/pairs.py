"""Messages from rank to rank, beside the collectives of all ranks."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping
from typing import Any

import torch
import torch.distributed as dist

from offload.distributed.comm import Comm
from offload.distributed.ranks import Ranks


class Pairs:
    """Messages between the ranks of a communicator: flat uint8 host tensors with any number of bytes.

    Broadcasts in gloo groups of two, one for each direction: unlike a gloo receive, their wait can end early without
    breaking the group.
    """

    def __init__(self, comm: Comm) -> None:
        """Open the groups. Collective over all ranks of the run."""
        assert isinstance(comm, Ranks), "one rank alone sends no messages"
        self._comm = comm
        for pair in itertools.permutations(range(comm.size), 2):
            comm.subgroup(pair)

    def swap(
        self, sent: Mapping[int, torch.Tensor], sources: Collection[int], operation: str
    ) -> dict[int, torch.Tensor]:
        """Send a message to some ranks, and return those from the ranks in `sources`. Collective, also without any.

        Raises RankLostError.
        """
        own = self._comm.rank

        def start(tensor: torch.Tensor, source: int, to: int) -> Any:
            group = self._comm.subgroup((source, to))
            return dist.broadcast(tensor, group=group, async_op=True, group_src=int(source > to))

        with self._comm.exchange(operation) as wait:
            # All sends begin before the first wait, so ranks in a circle do not wait for each other.
            sizes = {rank: torch.tensor([data.numel()], device="cpu") for rank, data in sent.items()}
            works = [start(data[rank], own, rank) for rank in sent for data in (sizes, sent)]
            coming = {rank: torch.empty(1, dtype=torch.int64, device="cpu") for rank in sources}
            wait([start(size, rank, own) for rank, size in coming.items()])
            received = {rank: torch.empty(int(size), dtype=torch.uint8, device="cpu") for rank, size in coming.items()}
            wait([*works, *(start(data, rank, own) for rank, data in received.items())])
        return received
