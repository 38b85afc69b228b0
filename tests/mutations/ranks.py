"""Mutations in sums over ranks, shards, and gathers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.distributed import comm, ranks
from offload.distributed.ranks import Ranks
from offload.engine.loss.chunked_head import ChunkedHead
from tests.mutations import mutation

_EXCHANGES = "tests/distributed/test_comm.py::test_exchanges_give_the_bits_of_a_plain_loop_and_differences_are_named"


@mutation(_EXCHANGES)
def sums_over_ranks_averaged(patch: pytest.MonkeyPatch) -> None:
    add_up = ranks._Chunks.add_up

    def averaged(self: Any, out: torch.Tensor, terms: Any) -> None:
        add_up(self, out, terms)
        out.div_(len(terms))

    patch.setattr(ranks._Chunks, "add_up", averaged)


@mutation(_EXCHANGES)
def ranks_added_up_in_the_other_order(patch: pytest.MonkeyPatch) -> None:
    add_up = ranks._Chunks.add_up
    patch.setattr(ranks._Chunks, "add_up", lambda self, out, terms: add_up(self, out, list(terms)[::-1]))


@mutation("tests/contracts/test_contracts.py")
def weights_of_other_ranks_stale(patch: pytest.MonkeyPatch) -> None:
    """Each rank sends the shard from the previous gather."""
    all_gather, given = Ranks.all_gather, dict[Any, torch.Tensor]()

    def stale(self: Ranks, full: torch.Tensor, shard: torch.Tensor, what: str) -> None:
        own = shard.clone()
        all_gather(self, full, given.get((what, len(shard)), own), what)
        given[what, len(shard)] = own
        comm.pieces_of(full, self.size)[self.rank].copy_(own)

    patch.setattr(Ranks, "all_gather", stale)


@mutation("tests/contracts/test_contracts.py")
def norm_of_this_ranks_shard_alone(patch: pytest.MonkeyPatch) -> None:
    """Each rank clips by the local shard's norm."""
    sum_in_order = Ranks.sum_in_order

    def own(self: Ranks, values: Any, what: str) -> Any:
        return list(values) if what == "norm of the gradients" else sum_in_order(self, values, what)

    patch.setattr(Ranks, "sum_in_order", own)


@mutation("tests/contracts/test_contracts.py")
def gradients_of_other_ranks_left_out(patch: pytest.MonkeyPatch) -> None:
    def alone(self: Ranks, shard: torch.Tensor, full: torch.Tensor, what: str, *how: Any, **more: Any) -> None:
        shard.copy_(comm.pieces_of(full, self.size)[self.rank])

    patch.setattr(Ranks, "reduce_scatter", alone)


@mutation("tests/contracts/test_contracts.py")
def loss_of_a_head_in_chunks_divided_by_own_labels(patch: pytest.MonkeyPatch) -> None:
    mean_loss = ChunkedHead.mean_loss

    def own(self: ChunkedHead, host: Any, inputs: Any, tokens: int) -> torch.Tensor:
        return mean_loss(self, host, inputs, int((inputs.batch["labels"][:, 1:] >= 0).sum()))

    patch.setattr(ChunkedHead, "mean_loss", own)
