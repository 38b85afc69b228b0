"""Model replicas over ranks equal one process, with equal bits for all placements.

"Break:" in a docstring names the code mutations the test must detect.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from offload import Muon
from offload.distributed.joining import open_comm
from offload.errors import ConfigError
from tests.cases.models import build
from tests.engine.device import cpu_only, own_device
from tests.engine.ranks import run
from tests.engine.ranks_child import CASES, JOB, WITHIN, Found, opened, own_loop, refusal, train
from tests.engine.sizes import Elements
from tests.engine.test_ranks import (
    MODES,
    PLACEMENTS,
    ROWS,
    TIMINGS,
    assert_equal,
    assert_near,
    plain,
    plain_own_loop,
    settings_of,
)
from tests.engine.test_ranks import train as train_on_ranks
from tests.matrix import cover

REPLICAS = ("2 of 2", "2 of 2, shared", "2 of 1", "3 of 1")
AXES = {
    "case": ("plain", "tied", "frozen in bf16", "experts", "two dtypes"),
    "rows": tuple(ROWS),
    "replicas": (*REPLICAS, "1 of 2", "1 of 3", "1 of 4"),
    "stage": ("0", "1", "2", "3"),
    "placement": tuple(PLACEMENTS),
    "timing": tuple(TIMINGS),
    "mode": tuple(MODES),
}
COVER = [one for seed in range(3) for one in cover(AXES, 1, seed)]
"""Each value occurs three times among others."""


def in_replicas(replicas: str, stage: str) -> tuple[int, int, dict[str, Any]]:
    """Return the number of replicas, the ranks per replica, and the settings."""
    sizes, _, states = replicas.partition(", ")
    num, each = map(int, sizes.split(" of "))
    shared = {"zero_stage": 3, "replica_states": "shared"} if states else {}
    return num, each, {"replicas": num, "zero_stage": int(stage), **shared}


@pytest.mark.slow
@pytest.mark.parametrize(tuple(AXES), [pytest.param(*one.values(), id=", ".join(one.values())) for one in COVER])
def test_tiers_stages_and_timing_change_no_bit(
    case: str, rows: str, replicas: str, stage: str, placement: str, timing: str, mode: str, tmp_path: Path
) -> None:
    """The second run is stage 0 in memory, without overlap. Both runs are near plain PyTorch.

    Break: fetch a shard at the neighbour's disk offset; skip the update of an expert unused on this rank; round
    gradients before the sum; add tied weight gradients per rank after the reduction in one stage; let the collective
    order follow the number of micro-batches; leave other ranks' gradients in the buffer; use the shard instead of the
    piece for the norm; start the sum at another replica; send new weights to other replicas before the update; fetch
    the update piece instead of the shard.
    """
    num, each, how = in_replicas(replicas, stage)
    if PLACEMENTS[placement].get("optimizer") == "device" and mode == "speculative":
        mode = "deferred"  # no overlap to hide an update there
    shares = ROWS[rows][: num * each]
    common = {"case": case, "rows": shares, "num_steps": 3, "evaluate": 1, "replicas": num, **settings_of(rows, mode)}
    variant = {"placement": PLACEMENTS[placement], "folder": str(tmp_path), **how}
    # An accelerator's own update differs in bits.
    where = PLACEMENTS["device"] if placement == "device" and own_device().type != "cpu" else {}
    serial, found = train_on_ranks(
        num * each, {**common, "zero_stage": 0, "prefetch": 0, "placement": where}, common | variant | TIMINGS[timing]
    )
    assert_equal(found, serial)
    within = WITHIN[CASES[case].precision] * (20 if mode == "speculative" else 2 if rows == "micro-batches" else 1)
    assert_near(found, plain(case, sum(shares), 3, mode), within)
    assert not [path for path in tmp_path.rglob("*") if path.is_file()], "every file was removed"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "size", "replicas"),
    [("tied", 2, 1), ("two dtypes", 2, 1), ("experts", 3, 1), ("tied", 4, 2), ("two dtypes", 2, 2)],
)
def test_own_loops_sum_gradients_as_they_are_and_once(case: str, size: int, replicas: int, tmp_path: Path) -> None:
    """Break: divide by the number of ranks; return this rank's mean loss; reduce at every backward, with several
    roundings, or reduce over replicas again at the end.
    """
    ways: list[tuple[int, str, Mapping[str, Any]]] = [(0, "whole", {}), (3, "whole", {}), (3, "shared", {})]
    if replicas == 1:
        ways = [(0, "whole", {}), (1, "whole", PLACEMENTS["all on nvme"])]
        ways += [(3, "whole", PLACEMENTS["activations on the cpu"])]
    first, wanted = None, plain_own_loop(case, size, 3)
    for stage, states, placement in ways[: 3 if size > replicas else 2]:
        settings = {"zero_stage": stage, "replicas": replicas, "replica_states": states, "placement": placement}
        found = run(size, own_loop, case=case, num_steps=3, folder=str(tmp_path), delays=stage, **settings)
        first = found[0] if first is None or replicas > 1 else first
        for one in found:
            assert_equal(one, first, f"stage {stage}")
        assert_near(first, wanted, 2 * WITHIN[CASES[case].precision])


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "states"), [(0, "whole"), (3, "whole"), (3, "shared")])
def test_a_rule_by_matrix_has_its_matrices_whole(stage: int, states: str) -> None:
    """Break: cut updates into ranges over all ranks; with shared states, over one replica."""
    common = {"case": "plain", "num_steps": 3, "optimizer": Muon(lr=0.01), "zero_stage": stage}
    (found,) = train_on_ranks(4, {**common, "rows": (2, 2, 2, 2), "replicas": 2, "replica_states": states})
    (wanted,) = train_on_ranks(1, {**common, "rows": (8,)})
    assert_near(found, wanted, 2e-2)  # the step depends on a matrix product in bf16


def test_states_are_shared_out_where_a_replica_is_cut() -> None:
    """The error names an alternative with the same effect."""
    for said in run(2, refusal, replica_states="shared", replicas=2):
        assert "each of 2 replicas is a single rank" in said
        assert "--offload.replicas 1, --offload.zero_stage 2 and --offload.replica_states whole" in said


# -- machines --------------------------------------------------------------------------------------------------------


def trained_on_machines(num_machines: int, runs: Sequence[Mapping[str, Any]]) -> list[Found]:
    """Run `trained` on ranks grouped into `num_machines` equal machines."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    local = size // num_machines
    os.environ.update(LOCAL_WORLD_SIZE=str(local), LOCAL_RANK=str(rank % local))
    with open_comm(times=JOB) as comm:
        assert (comm.num_machines, comm.num_far) == (num_machines, size - local)
        within, between = comm.split(num_machines)
        assert (within.size, within.num_far) == (local, 0)
        assert (between.size, between.num_far) == (num_machines, num_machines - 1)
        assert comm.split(num_machines)[0] is within, "made once"
        if size == 4:
            with pytest.raises(ConfigError, match="offload.replicas is 3, but 4 ranks.* 1, 2, 4, or to auto"):
                opened(comm, CASES["plain"], replicas=3)
        return [train(comm, **run) for run in runs]


@pytest.mark.slow
@cpu_only("ranks of one machine compute on GPUs of their own, whatever machines the test tells of")
def test_auto_is_a_replica_a_machine_and_sends_less_than_states_over_all_ranks() -> None:
    """`auto` means one replica per machine.

    One rank per piece sends each gradient once and each sum once: 2 of the 3 volumes of ZeRO stage 3 (arXiv:1910.02054,
    section 7). Without replicas every rank sends to every remote rank.
    Break: count traffic within a machine; treat auto as one replica.
    """
    common = {"case": "plain", "rows": (1, 1, 1, 1), "num_steps": 2, "is_counted": True}
    runs = [common, {**common, "replicas": 2}, common, {**common, "replicas": 1}]
    for by_auto, by_two, again, over_all in run(4, trained_on_machines, num_machines=2, runs=runs):
        assert_equal(by_auto, by_two)
        assert_equal(by_auto, again)
        numel = Elements(build(CASES["plain"].make), 4).all_trained
        moved, others = by_auto.moved[1], over_all.moved[1]
        assert moved["network_bytes"] == 2 * numel / 4 * 4
        assert (
            others["network_bytes"] == 2 * (others["reduce_scatter_elements"] + others["all_gather_elements"]) / 4 * 4
        )
        assert others["network_bytes"] > 2 * moved["network_bytes"]
        assert_near(by_auto, over_all, 1e-6)


def refused_on_unequal_machines() -> str:
    """Return the error for a budget too small for the two ranks of the first machine, and enough for one rank."""
    rank = int(os.environ["RANK"])
    os.environ.update(LOCAL_WORLD_SIZE=str((2, 2, 1)[rank]), LOCAL_RANK=str((0, 1, 0)[rank]))
    numel = Elements(build(CASES["plain"].make), 3).all_trained
    return refusal(zero_stage=0, placement={"host_memory": 24 * numel})


@pytest.mark.slow
@cpu_only("ranks of one machine compute on GPUs of their own, whatever machines the test tells of")
def test_the_machine_with_most_ranks_decides_the_budgets_of_all() -> None:
    """Break: divide budgets by the ranks of the own machine, so that one rank waits for refused ones."""
    first, *others = run(3, refused_on_unequal_machines)
    assert "for each of the 2 ranks that share it" in first
    assert others == [first] * 2


def test_budgets_that_differ_by_rank_are_refused_on_all() -> None:
    """Break: leave the budgets out of the comparison, so that one rank waits for refused ones."""
    first, second = run(2, refusal, by_rank={1: {"placement": {"host_memory": 4096}}})
    assert first == second
    assert "the engine's settings must be the same on all ranks" in first
    assert "rank 1: placement.host_memory '4096' instead of 'None'" in first
