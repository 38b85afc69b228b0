"""Forecasts of dispatched blocks: ticks of a pass, messages, and the choice beside gathers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from offload.app.config.config import Config
from offload.errors import ConfigError
from offload.extras.plan.alternatives import Tries, alternatives, place
from offload.extras.plan.forecast import Forecaster
from offload.extras.plan.machine_files import read_machine
from offload.extras.plan.simulated_ranks import SimulatedRanks
from offload.extras.plan.timing import PlannedStep
from offload.machine.hardware import Hardware, Rates
from offload.planning.settings import Settings
from tests.engine.device import cpu_only
from tests.forecast.planned import Stack, planned, workload

pytestmark = cpu_only("plans here are a CPU's")

WIDTH, SECONDS = 16, 1.0
FAST = Rates(1e15, 1e15, 1e15, {"fp32": 1.0, "bf16": 1.0}, 1e15, 1e15, 0.0, collective_bytes_per_s=1e15)
MACHINE = Hardware("made up", "cpu", 1, None, 1 << 40, None, None, False, FAST)


def step_of(depth: int, num_ranks: int, **settings: Any) -> PlannedStep:
    chosen = Settings(zero_stage=2, clip="deferred", throttle={"h2d": 1e15, "d2h": 1e15, "update": 1e15}, **settings)
    prepared = planned(Stack(WIDTH, depth), chosen, SimulatedRanks(num_ranks))
    return PlannedStep(prepared, workload(WIDTH, depth, chosen, SECONDS), MACHINE)


@pytest.mark.parametrize(("depth", "num_ranks"), [(4, 2), (5, 2), (5, 4), (2, 3), (40, 4)])
def test_a_pass_takes_as_many_ticks_as_blocks_and_ranks_but_one(depth: int, num_ranks: int) -> None:
    """Without times of links and messages. The backward of a block has a recomputation.

    Break: count the ticks of all blocks; leave out those without an own block.
    """
    ends = 2 * (1 + 1)  # embedding and head: their graphs need no memory, and are kept
    ticks = (depth + num_ranks - 1) * (1 + 3)
    dispatched = step_of(depth, num_ranks, dispatch="always").simulate()
    assert dispatched.step_seconds == pytest.approx((ends + ticks) * SECONDS, rel=0.01)
    gathered = step_of(depth, num_ranks).simulate()
    assert gathered.step_seconds == pytest.approx((ends + 4 * depth) * SECONDS, rel=0.01)


def test_messages_take_their_bytes_through_host_memory_and_over_the_links() -> None:
    """Two ranks, each of them for itself every other tick. Hidden states go there and back in both passes.

    Break: count the backward alone; leave out the copies of a device.
    """
    depth, rate = 4, 1e3
    step = step_of(depth, 2, dispatch="always")
    hidden = step.workload.calls[1].input_bytes
    work = replace(
        step.workload, calls=tuple(replace(c, result_bytes=hidden, gradient_bytes=hidden) for c in step.workload.calls)
    )
    slow = replace(FAST, host_bytes_per_s=rate, h2d_bytes_per_s=rate, d2h_bytes_per_s=rate)
    for device, num_copies in (("cpu", 1), ("cuda", 3)):
        without, with_messages = (
            sum(
                call.forward_s + call.backward_s
                for call in PlannedStep(step.prepared, work, MACHINE.with_(rates=rates, device=device)).calls
            )
            for rates in (FAST, slow)
        )
        expected = (depth + 1) * 4 * hidden / 2 * num_copies / rate
        assert with_messages - without == pytest.approx(expected, rel=0.01)


GPU = read_machine("rtx-4090")


@pytest.mark.slow
@pytest.mark.parametrize(("collective", "is_chosen"), [(1e6, True), (1e8, False)])
def test_the_plan_chooses_dispatch_where_exchanges_are_slow(collective: float, is_chosen: bool) -> None:
    """Break: keep the stage of gathers; choose without `auto`."""
    slow = replace(GPU.rates, h2d_bytes_per_s=3e7, d2h_bytes_per_s=3e7, collective_bytes_per_s=collective)
    flags, others = {}, {}
    for dispatch in ("never", "auto"):
        values = {f"offload.{key}": "cpu" for key in ("parameters", "optimizer", "update")}
        values |= {"offload.activations": "device", "offload.graphs": "device", "offload.dispatch": dispatch}
        values |= {"model.preset": "tiny", "data.sequence_length": "64", "train.batch_size": "2"}
        config = Config.load(None, {**values, "train.recompute": "always", "offload.device_memory": "12MiB"})
        forecaster = Forecaster(config, 2)
        initial = forecaster.predict(config, GPU.with_(rates=slow))
        placed = place(forecaster, initial)
        flags[dispatch] = placed.placement_flags
        found = alternatives(forecaster, initial, placed, Tries(forecaster, math.inf))
        others[dispatch] = {each.change: each.tokens_per_second for each in found}
    change = "--offload.dispatch always --offload.zero_stage 2"
    assert (change in flags["auto"], change in flags["never"]) == (is_chosen, False)
    assert others["never"][change], "listed with its throughput"
    assert change not in others["auto"] or not is_chosen


def test_several_machines_are_refused() -> None:
    config = Config.load(None, {"model.preset": "tiny", "offload.dispatch": "always"})
    with pytest.raises(ConfigError, match="the ranks are on several machines .* set --offload.dispatch never"):
        Forecaster(config, 2).predict(config, GPU.with_(num_machines=2))
