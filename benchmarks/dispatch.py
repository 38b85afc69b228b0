"""A step on several ranks with throttled links: blocks dispatched over the ranks, and ZeRO's stages, in turns.

python -m benchmarks.dispatch --forward 0.1 --rounds 2 --steps 3 --out benchmarks/results/dispatch.json  # 20 minutes

A block computes for a known time: its forward waits `--forward` seconds and its backward twice as long. So several
ranks can share few cores, and the ideal is known: in each pass the larger time, compute (one forward, or three in the
backward) or a link with an Nth share of all blocks. With throttles, all weights twice, as a card copies them in
a step with gathers, take `--load` times the compute on each link; gradients are copied at the same rate. Exchanges in
host memory have no throttle: activations and gradients with dispatch, new weights, and (in favour of stage 2) its sums.
Gathers and sums at stage 3 pass the links between cards, at the same rate again. The first and last N - 1 ticks in a
pass, without work for some ranks, are in the measured step and not in the ideal.
"""

from __future__ import annotations

import argparse
import dataclasses
import statistics
import sys
import time
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from benchmarks import harness
from benchmarks.step_times import MACHINE
from offload import AdamW, Engine, Placement
from offload.app.config.command_line import say
from offload.engine.prepare import prepare
from offload.extras.plan.simulated_ranks import SimulatedRanks
from offload.extras.plan.timing import PlannedStep
from offload.extras.plan.workload import NO_WORK, Cost, Workload
from offload.extras.tools.benches.report import Result
from offload.planning.settings import Settings

SUMMARY = "a step on several ranks with throttled links: dispatched blocks beside ZeRO's stages"
QUICK = {"blocks": 4, "forward": 0.01, "steps": 1, "rounds": 1}
WIDTH, ROWS = 512, 32
WARM_STEPS, WEIGHT_BYTES = 2, 4
MOVED = ("h2d_bytes_of_all_ranks", "all_gather_elements_of_all_ranks", "activation_bytes_of_all_ranks")


@dataclasses.dataclass(frozen=True)
class Setup:
    """The options of the command."""

    ranks: int
    blocks: int
    forward: float
    load: float
    steps: int
    rounds: int

    @property
    def forward_s(self) -> float:
        """Seconds of the forward of all blocks."""
        return self.blocks * self.forward

    @property
    def link_s(self) -> float:
        """Seconds of a link with the weights of all blocks."""
        return 2 * self.load * self.forward_s

    @property
    def ideal_s(self) -> float:
        """Seconds of an ideal step with dispatch."""
        share_s = self.link_s / self.ranks
        return max(self.forward_s, share_s) + max(3 * self.forward_s, share_s)

    @property
    def contenders(self) -> dict[str, dict[str, Any]]:
        """Engine settings by contender."""
        link = round(self.blocks * WIDTH * (WIDTH + 1) * WEIGHT_BYTES / self.link_s)
        throttle = dict.fromkeys(("update", "collective"), 10**15) | {"h2d": link, "d2h": link}
        return {
            "dispatch": {"zero_stage": 2, "dispatch": "always", "throttle": throttle},
            "gathers, stage 2": {"zero_stage": 2, "throttle": throttle},
            "gathers, stage 3": {"zero_stage": 3, "throttle": throttle | {"collective": link}},
        }


class Wait(torch.autograd.Function):
    """Identity with a known time: `seconds` in the forward, twice as long in the backward."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return values.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        time.sleep(2 * ctx.seconds)
        return gradients[0], None


class Block(nn.Module):
    """A layer with WIDTH x WIDTH weights that computes `seconds` for ROWS rows."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return Wait.apply(values + torch.tanh(self.linear(values)), self.seconds * len(values) / ROWS)


class Model(nn.Module):
    """Blocks in a row: fp32 [rows, WIDTH] to fp32 [rows, WIDTH]."""

    def __init__(self, setup: Setup) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(setup.forward) for _ in range(setup.blocks))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            values = block(values)
        return values


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--forward", type=float, default=0.05, help="seconds of a forward (default %(default)s)")
    parser.add_argument("--load", type=float, default=1.5, help="seconds of a link over those of compute, with gathers")
    parser.add_argument("--steps", type=int, default=4, help="in a block of steps (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="such blocks of each contender (default %(default)s)")


def run(arguments: argparse.Namespace) -> list[Result]:
    """Return each contender's median step, with ratios to the ideal, the forecast and, by round, to dispatch."""
    setup = Setup(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Setup)})
    seconds, moved = harness.over_ranks(setup.ranks, measure, setup)
    found = []
    for name, taken in seconds.items():
        told_s = forecast_s(setup, setup.contenders[name])
        details = {
            **dataclasses.asdict(setup),
            **dict(zip(MOVED, moved[name], strict=True)),
            "ideal_seconds": setup.ideal_s,
            "over_ideal": statistics.median(taken) / setup.ideal_s,
            "forecast_seconds": told_s,
            "over_forecast": statistics.median(taken) / told_s,
        }
        found.append(harness.summary(name, taken, "s", ("dispatch", seconds["dispatch"]), **details))
    return found


def measure(setup: Setup, comm: Any) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """Time the contenders in turns on this rank; return seconds by round, and bytes moved in a step by all ranks."""
    seconds, moved = defaultdict[str, list[float]](list), {}
    for _, (name, settings) in harness.turns(list(setup.contenders.items()), setup.rounds):
        taken, counted = timed(setup, settings, comm)
        seconds[name].append(max(comm.gather_objects(taken, "seconds")))
        moved[name] = [sum(each) for each in zip(*comm.gather_objects(counted, "bytes"), strict=True)]
        if comm.rank == 0:
            say(f"{name}: {seconds[name][-1]:.3f} s, ideal {setup.ideal_s:.3f} s")
    return dict(seconds), moved


def forecast_s(setup: Setup, settings: dict[str, Any]) -> float:
    """Return the step time of the plan."""
    chosen = Settings(optimizer=AdamW(lr=1e-8), **common_settings(), **settings)
    prepared = prepare(Model(setup), chosen, SimulatedRanks(setup.ranks))
    num_bytes = ROWS * WIDTH * WEIGHT_BYTES
    block = dataclasses.replace(
        NO_WORK,
        forward=Cost(setup.forward, 0, 0),  # `MACHINE` makes one operation a second
        backward=Cost(2 * setup.forward, 0, 0),
        **dict.fromkeys(("input_bytes", "result_bytes", "gradient_bytes"), num_bytes),
        saved_bytes=num_bytes,
        is_block=True,
    )
    calls = tuple(dataclasses.replace(block, name=f"blocks.{number}") for number in range(setup.blocks))
    return PlannedStep(prepared, Workload(calls, 1, ROWS), MACHINE).simulate().step_seconds


def common_settings() -> dict[str, Any]:
    """Return the settings of all contenders."""
    placement = Placement(parameters="cpu", optimizer="cpu")
    return {"recompute": "always", "max_grad_norm": None, "prefetch": 2, "placement": placement}


def timed(setup: Setup, settings: dict[str, Any], comm: Any) -> tuple[float, list[int]]:
    """Return (seconds in a step, from rest to rest over several, and bytes moved by this rank in the last one)."""
    torch.manual_seed(0)
    engine = Engine(Model(setup), AdamW(lr=1e-8), comm=comm, **common_settings(), **settings)
    # As on a card that holds a few blocks: no spare memory keeps others there.
    engine._flow.spare_memory.end_step = lambda _: None
    batch = {"values": torch.randn(ROWS, WIDTH)}

    def step() -> None:
        engine.step(batch, loss_fn=lambda outputs, _: outputs.square().mean())

    for _ in range(WARM_STEPS):
        step()
    engine.finish()
    comm.barrier("start of a block of steps")
    begin = time.perf_counter()
    for _ in range(setup.steps):
        step()
    engine.finish()
    comm.barrier("end of a block of steps")
    seconds = (time.perf_counter() - begin) / setup.steps
    dispatch = getattr(engine._flow.router.target, "__self__", None)
    activations = getattr(dispatch, "sent_bytes", 0) // (WARM_STEPS + setup.steps)
    counted = [engine.counters.h2d_bytes, engine.counters.all_gather_elements, activations]
    engine.close()
    return seconds, counted


if __name__ == "__main__":
    harness.begin(sys.modules[__name__])
