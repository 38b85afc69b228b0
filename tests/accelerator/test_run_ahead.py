"""Launches ahead of the device: memory held for running streams does not grow with the launch distance."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import cross_entropy

from offload import AdamW, Engine, Placement
from offload.engine.units import runner as runners
from tests.accelerator.control import H200
from tests.engine.handmade import WIDTH, WORDS, Stack

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("sim")]

DEPTH, ROWS, LENGTH, BUDGET = 24, 64, 32, 8 << 20
SLOW = replace(H200, kernel_latency_s=4e-4)
"""A kernel takes ten times as long as the launch."""


def loss(outputs, batch):
    return cross_entropy(outputs.flatten(0, -2), batch["x"].flatten())


@pytest.mark.parametrize("queue", [128, 1024, 0], ids=["short queue", "CUDA's queue", "no end"])
def test_what_streams_still_use_does_not_grow_with_the_launches_under_way(sim, queue):
    """Without any wait for the device, 0.7, 3.1 and 6.3 MB (8 in total) are freed but still in use."""
    torch.manual_seed(0)
    batch = {"x": torch.randint(0, WORDS, (ROWS, LENGTH))}
    placement = Placement(activations="cpu", device_memory=BUDGET)
    with closing(Engine(Stack(depth=DEPTH), AdamW(), placement=placement, recompute="always")) as engine:
        for _ in range(2):
            engine.step(batch, loss)
        torch.accelerator.synchronize()
        sim.set_launch_queue(queue)
        sim.set_cost(SLOW)
        torch.sim.reset_peak_memory_stats()
        engine.step(batch, loss)
        torch.accelerator.synchronize()
        peaks = torch.sim.memory_stats()
        sim.set_cost(None)
    unit_input = 4 * ROWS * LENGTH * WIDTH
    waited = peaks["active_bytes.all.peak"] - peaks["allocated_bytes.all.peak"]
    assert waited <= runners._SHARE_OF_BUDGET * BUDGET + 2 * unit_input


def test_a_launch_blocks_where_the_queue_is_full(sim):
    """The queue length limits the launch distance, so earlier marks are complete."""
    data, most = torch.zeros(8, device="sim"), 4
    torch.accelerator.synchronize()
    sim.set_cost(replace(H200, kernel_latency_s=0.01))
    sim.set_launch_queue(most)
    marks = []
    for number in range(12):
        data.add_(1)
        marks.append(torch.accelerator.current_stream().record_event())
        assert all(mark.query() for mark in marks[: max(0, number - most - 1)])
    torch.accelerator.synchronize()
    sim.set_cost(None)
    assert data.tolist() == [12] * 8
