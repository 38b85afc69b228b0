"""Forecast steps over several ranks move the same bytes and exchange the same elements as an engine."""

from __future__ import annotations

import os
from contextlib import closing
from typing import Any

import pytest
import torch

from benchmarks.plan_memory import watched
from offload import Engine, Placement
from offload.distributed.joining import open_comm
from offload.extras.plan.memory import INPUTS
from offload.extras.plan.simulated_step import simulate
from offload.extras.plan.timing import PlannedStep
from offload.machine.hardware import Hardware, Rates
from offload.planning.settings import Settings
from tests.engine.device import cpu_only
from tests.engine.ranks import run
from tests.forecast.planned import Stack, batches, loss_of, planned, workload

pytestmark = cpu_only("what is forecast here is a CPU's step")

WIDTH, DEPTH = 16, 4
RATES = Rates(1e9, 1e9, 2e9, {"fp32": 1.0, "bf16": 1.0}, 1e9, 1e9, 0.0, collective_bytes_per_s=1e9)
MACHINE = Hardware("made up", "cpu", 1, None, 1 << 40, None, None, False, RATES)


def told_and_made(
    placement: dict[str, Any], num_machines: int = 1, **settings: Any
) -> tuple[dict[str, float], dict[str, int]]:
    """Return (forecast bytes per link in a step, bytes and elements counted by an engine)."""
    size, rank = int(os.environ["WORLD_SIZE"]), int(os.environ["RANK"])
    local = size // num_machines
    os.environ.update(LOCAL_WORLD_SIZE=str(local), LOCAL_RANK=str(rank % local))
    with open_comm() as comm:
        torch.manual_seed(0)
        chosen = Settings(placement=Placement(**placement), clip="deferred", throttle={"h2d": 1e12}, **settings)
        model = Stack(WIDTH, DEPTH)
        its = planned(model, chosen, comm)
        work = workload(WIDTH, DEPTH, chosen)
        step = PlannedStep(its, work, MACHINE.with_(num_machines=num_machines))
        links = ("h2d", "d2h", "collective", "network")
        seconds = {link: float if link in links else lambda _: 0.0 for link in step.seconds()}
        played = simulate(step.calls, step.simulated_plan(), seconds)
        inputs = sum(each.num_bytes for each in step.memory.allocations if each.name == INPUTS)
        told = {**played.busy_s, "sent": played.moved_bytes["network"], "inputs": inputs}
        peaks = dict[tuple[str, str], int]()
        with watched(peaks), closing(Engine(model, settings=chosen, comm=comm)) as engine:
            for batch in batches(6):
                engine.step(batch, loss_of)
            counters = engine.counters
            made = {
                "h2d": counters.h2d_bytes,
                "d2h": counters.d2h_bytes,
                "reduced": counters.reduce_scatter_elements,
                "gathered": counters.all_gather_elements,
                "sent": counters.network_bytes,
                "inputs": peaks["device", INPUTS],
            }
        return {link: told[link] for link in (*links, "sent", "inputs")}, made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "placement", "settings"),
    [
        (0, {}, {}),
        (1, {"device_memory": "160KiB"}, {}),
        (2, {"device_memory": "160KiB"}, {"passes": 2}),
        (3, {}, {"max_grad_norm": None, "prefetch": 1}),
        (3, {}, {"passes": 4}),
    ],
)
def test_ranks_move_and_exchange_what_is_foretold(
    stage: int, placement: dict[str, Any], settings: dict[str, Any]
) -> None:
    for told, made in run(2, told_and_made, placement=placement, zero_stage=stage, **settings):
        assert (told["h2d"], told["d2h"]) == (made["h2d"], made["d2h"])
        # each rank's own bytes in the shared result
        assert told["collective"] * 2 / 4 == made["reduced"] + made["gathered"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "settings"),
    [(2, {}), (3, {}), (4, {"max_grad_norm": None}), (2, {"micro_batch_size": 4}), (2, {"passes": 2})],
)
def test_dispatched_blocks_move_and_hold_what_is_foretold(size: int, settings: dict[str, Any]) -> None:
    """Three ranks share four blocks unevenly: the forecast is rank 0's.

    Break: fetch a block for the rows of each rank; leave the gradients of other owners on the way; count the inputs of
    as many rows as blocks.
    """
    found = run(size, told_and_made, placement={}, zero_stage=2, dispatch="always", prefetch=1, **settings)
    for told, made in found[: 1 if DEPTH % size else size]:
        assert (told["h2d"], told["d2h"]) == (made["h2d"], made["d2h"])
        assert 0 <= made["inputs"] - told["inputs"] < 0.1 * told["inputs"], "a message has a head"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {"precision": "bf16", "link_gradients": "int8"}),
        (4, {"zero_stage": 0, "max_grad_norm": None}),
        (4, {"precision": "bf16", "replica_states": "shared"}),
        (4, {"replicas": 1, "zero_stage": 1}),
    ],
)
def test_machines_send_what_is_foretold(size: int, settings: dict[str, Any]) -> None:
    """Break: count exchanges between replicas on one machine; add received bytes to the lane."""
    for told, made in run(size, told_and_made, placement={}, num_machines=2, **settings):
        assert told["sent"] == made["sent"] > 0
        assert told["d2h"] == made["d2h"]
        if settings.get("replicas") != 1:
            assert told["network"] == made["sent"]
