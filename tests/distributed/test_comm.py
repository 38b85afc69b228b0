"""Real exchanges over gloo: equal bits to a plain loop, ZeRO traffic, named disagreements."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from offload.distributed.comm import Comm, digest
from offload.distributed.joining import open_comm
from offload.distributed.outcomes import difference
from offload.distributed.ranks import _Chunks
from offload.errors import ConfigError
from tests.distributed.ranks import ranks
from tests.matrix import quick

DIFFERENCES = """\
the configuration must be the same on all ranks, but differs from ranks 0, 1 on rank 2: train.seed 0 \
instead of 1; train.clip True instead of nothing.
the schedule must be the same on all ranks, but differs from ranks 1, 2 on rank 0: 'abd' instead of 'abc'.
"""
ENDED_EARLY = (
    "The process group was destroyed (torch.distributed.destroy_process_group) while an engine still used it: "
    "close the engine first."
)


@pytest.mark.parametrize("size", quick([1, 2, 3, 4], [3]))
def test_exchanges_give_the_bits_of_a_plain_loop_and_differences_are_named(tmp_path: Path, size: int):
    with ranks(tmp_path, size, "exchanges") as started:
        for rank in started:
            assert rank.end() == 0, rank.output
            assert rank.output == (DIFFERENCES if size == 3 else "") + "done\n", "a warning, too"


def test_a_group_of_the_caller_is_used_and_kept(tmp_path: Path):
    with ranks(tmp_path, 2, "joined") as started:
        for rank in started:
            assert rank.end() == 0, rank.output


@pytest.mark.slow
def test_groups_may_be_made_again_and_ended_early(tmp_path: Path):
    """Under torchrun all groups share one store in the agent: a second group must not find old addresses."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agent = {"TORCHELASTIC_USE_AGENT_STORE": "True", "MASTER_PORT": str(store.port)}
    for start in range(2):  # torchrun also restarts ranks
        with ranks(tmp_path, 2, "again", **agent, TORCHELASTIC_RESTART_COUNT=str(start)) as started:
            for rank in started:
                assert rank.end() == 0, rank.output
                assert rank.output == f"{ENDED_EARLY}\ndone\n", "a traceback, too"


def test_ranks_that_were_interrupted_wait_for_no_exchange_on_their_way_out(tmp_path: Path):
    with ranks(tmp_path, 2, "interrupted") as started:
        for rank in started:
            assert rank.end() == 0, rank.output
            assert rank.output == "out\ndone\n"


def test_all_ranks_are_named_where_they_differ_in_many_ways():
    values = [{"a": 1}, {"a": 2}, {"a": 1}, {"b": {"c": "x" * 200}}, {"a": 2}]
    text = difference("it", [digest(value) for value in values], values)
    assert "from ranks 0, 2 on ranks 1, 4: a 2 instead of 1, and on rank 3: a nothing instead of 1; b.c 'xxx" in text
    assert len(text) < 400
    many = [{str(key): 0 for key in range(20)}, {str(key): 1 for key in range(20)}]
    assert "and 12 more" in difference("it", [0, 1], many)


def test_equal_values_have_equal_digests():
    assert digest({"a": 1, "b": [Path("x")]}) == digest({"b": [Path("x")], "a": 1}) != digest({"a": 1})
    assert -(1 << 63) <= digest(b"bytes") < 1 << 63


TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "x"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, "WORLD_SIZE is 2, and MASTER_PORT is not set"),
        ({"MASTER_ADDR": None}, "MASTER_ADDR and MASTER_PORT is not set"),
        ({"RANK": None}, "WORLD_SIZE is 2, and RANK is not set"),
        ({"WORLD_SIZE": None}, "RANK is 1, and WORLD_SIZE is not set"),
        ({"LOCAL_WORLD_SIZE": None}, "LOCAL_RANK is 1, and LOCAL_WORLD_SIZE is not set"),
        ({"RANK": None, "WORLD_SIZE": None}, "LOCAL_RANK is set, and RANK and WORLD_SIZE are not"),
        ({"RANK": "2"}, "RANK is '2' and WORLD_SIZE is '2'"),
        ({"RANK": "one"}, "RANK is 'one'"),
        ({"LOCAL_WORLD_SIZE": "3"}, "LOCAL_WORLD_SIZE 3 contradicts RANK 1 of WORLD_SIZE 2"),
    ],
)
def test_variables_that_are_missing_or_wrong_are_named(change: dict[str, str | None], message: str):
    environ = {name: value for name, value in {**TORCHRUN, **change}.items() if value is not None}
    with pytest.raises(ConfigError) as caught:
        open_comm(environ=environ)
    assert message in str(caught.value)


@pytest.mark.parametrize("environ", [{}, {"RANK": "0", "WORLD_SIZE": "1"}])
def test_one_rank_copies_nothing_where_shard_and_full_are_one(environ: dict[str, str]):
    with open_comm(environ=environ) as comm:
        assert type(comm) is Comm
        assert (comm.rank, comm.size, comm.local_rank, comm.local_size) == (0, 1, 0, 1)
        full = torch.arange(4.0)
        version = full._version
        comm.all_gather(full, full, "all-gather")
        comm.reduce_scatter(full, full, "reduce-scatter", full)
        assert full._version == version
        shard = torch.empty(4, dtype=torch.bfloat16)
        comm.reduce_scatter(shard, full, "reduce-scatter", full)
        assert shard.tolist() == full.tolist()


def test_scratch_is_used_up_to_its_size_and_no_further():
    scratch, pieces = torch.zeros(100_000, dtype=torch.uint8), [torch.zeros(1, dtype=torch.bfloat16)] * 3
    chunks = _Chunks(scratch, pieces, 0)
    assert chunks.numel == 100_000 // (2 * 3 * 2 + 2 * 4) // 256 * 256
    for slot in chunks._slots.flatten(0, 1):
        slot.fill_(1)
    assert scratch[chunks.numel * 20 :].eq(0).all()
    with pytest.raises(ValueError, match="3 ranks need 5120"):
        _Chunks(scratch[:5000], pieces, 0)
