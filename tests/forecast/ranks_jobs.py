"""What a rank does in the tests of forecasts: a step told, and a step made."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import torch

from offload import Engine, Placement
from offload.distributed.joining import open_comm
from offload.forecast.played_step import simulate
from offload.forecast.timing import PlannedStep
from offload.machine.hardware import Hardware, Rates
from offload.planning.settings import Settings
from tests.forecast.planned import Stack, batches, loss_of, planned, workload

WIDTH, DEPTH = 16, 4
RATES = Rates(1e9, 1e9, 2e9, {"fp32": 1.0, "bf16": 1.0}, 1e9, 1e9, 0.0, collective_bytes_per_s=1e9)
MACHINE = Hardware("made up", "cpu", 1, None, 1 << 40, None, None, False, RATES)


def told_and_made(placement: dict[str, Any], **settings: Any) -> tuple[dict[str, float], dict[str, int]]:
    """Return the bytes of each link in a step as they are forecast, and what an engine counts."""
    with open_comm() as comm:
        torch.manual_seed(0)
        chosen = Settings(placement=Placement(**placement), clip="deferred", throttle={"h2d": 1e12}, **settings)
        model = Stack(WIDTH, DEPTH)
        its = planned(model, chosen, comm)
        work = workload(WIDTH, DEPTH, chosen)
        step = PlannedStep(its, work, MACHINE)
        links = ("h2d", "d2h", "collective")
        seconds = {link: float if link in links else lambda _: 0.0 for link in step.seconds()}
        told = simulate(step.calls, step.played(), seconds).busy_s
        with closing(Engine(model, settings=chosen, comm=comm)) as engine:
            for batch in batches(6):
                engine.step(batch, loss_of)
            counters = engine.counters
            made = {
                "h2d": counters.h2d_bytes,
                "d2h": counters.d2h_bytes,
                "reduced": counters.reduce_scatter_elements,
                "gathered": counters.all_gather_elements,
            }
        return {link: told[link] for link in links}, made
