"""A step on several ranks with throttled links: blocks dispatched over the ranks, and ZeRO's stages, in turns.

A block computes for a known time: its forward waits `--forward` seconds and its backward twice as long. So several
ranks can share few cores, and the ideal is known: in each pass the larger time, compute (one forward, or three in the
backward) or a link with an Nth share of all blocks. With throttles, all weights twice, as a card copies them in
a step with gathers, take `--load` times the compute on each link; gradients are copied at the same rate. Exchanges in
host memory have no throttle: activations and gradients with dispatch, new weights, and (in favour of stage 2) its sums.
Gathers and sums at stage 3 pass the links between cards, at the same rate again. The first and last N - 1 ticks in a
pass, without work for some ranks, are in the measured step and not in the ideal.

    python -m benchmarks.dispatch --forward 0.1 --rounds 2 --steps 3 > benchmarks/results/dispatch.json  # 20 minutes
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from typing import Any

import torch
from torch import nn

from offload.extras.tools.benches.report import BenchmarkOutput, Result

WIDTH, ROWS = 512, 32
WARM_STEPS, WEIGHT_BYTES = 2, 4


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
        self.linear, self.seconds = nn.Linear(WIDTH, WIDTH), seconds

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return Wait.apply(values + torch.tanh(self.linear(values)), self.seconds * len(values) / ROWS)


class Model(nn.Module):
    """Blocks in a row: fp32 [rows, WIDTH] to fp32 [rows, WIDTH]."""

    def __init__(self, num_blocks: int, seconds: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(seconds) for _ in range(num_blocks))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            values = block(values)
        return values


def main() -> None:
    """Start the ranks; rank 0 prints the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--blocks", type=int, default=32)
    parser.add_argument("--forward", type=float, default=0.05, help="seconds of a forward (default %(default)s)")
    parser.add_argument("--load", type=float, default=1.5, help="seconds of a link over those of compute, with gathers")
    parser.add_argument("--steps", type=int, default=4, help="in a block of steps (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="such blocks of each contender (default %(default)s)")
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        measure(arguments)
        return
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(arguments.ranks)]
    command = [sys.executable, *launch, "-m", "benchmarks.dispatch", *sys.argv[1:]]
    subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})


def measure(arguments: argparse.Namespace) -> None:
    """Time the contenders in turns on this rank."""
    from offload.distributed.joining import open_comm

    forward_s, link_s = arguments.blocks * arguments.forward, 2 * arguments.load * arguments.blocks * arguments.forward
    link = round(arguments.blocks * WIDTH * (WIDTH + 1) * WEIGHT_BYTES / link_s)  # all weights in `link_s`
    ideal_s = max(forward_s, link_s / arguments.ranks) + max(3 * forward_s, link_s / arguments.ranks)
    throttle = dict.fromkeys(("update", "collective"), 10**15) | {"h2d": link, "d2h": link}
    contenders: dict[str, dict[str, Any]] = {
        "dispatch": {"zero_stage": 2, "dispatch": "always", "throttle": throttle},
        "gathers, stage 2": {"zero_stage": 2, "throttle": throttle},
        "gathers, stage 3": {"zero_stage": 3, "throttle": throttle | {"collective": link}},
    }
    seconds, moved = defaultdict[str, list[float]](list), defaultdict[str, list[int]](list)
    with open_comm() as comm:
        for _ in range(arguments.rounds):
            for name, settings in contenders.items():
                taken, counted = timed(arguments, comm, settings)
                seconds[name].append(max(comm.gather_objects(taken, "seconds")))
                moved[name] = [sum(each) for each in zip(*comm.gather_objects(counted, "bytes"), strict=True)]
                if comm.rank == 0:
                    print(f"{name}: {seconds[name][-1]:.3f} s, ideal {ideal_s:.3f} s", file=sys.stderr, flush=True)
        if comm.rank == 0:
            print(BenchmarkOutput(results(arguments, contenders, ideal_s, seconds, moved)).document())


def results(
    arguments: argparse.Namespace,
    settings: dict[str, dict[str, Any]],
    ideal_s: float,
    seconds: dict[str, list[float]],
    moved: dict[str, list[int]],
) -> list[Result]:
    """Return each contender's median step, with ratios to the ideal, the forecast and, by round, to dispatch."""
    found = []
    for name, taken in seconds.items():
        ratio = statistics.median(a / b for a, b in zip(seconds["dispatch"], taken, strict=True))
        more: dict[str, Any] = {"over_ideal": statistics.median(taken) / ideal_s}
        more |= {"over_ideal_by_round": [each / ideal_s for each in taken], "ideal_seconds": ideal_s}
        names = ("h2d_bytes", "all_gather_elements", "activation_bytes")
        more |= {f"{each}_of_all_ranks": number for each, number in zip(names, moved[name], strict=True)}
        more |= {"forecast_seconds": (told := forecast_s(arguments, settings[name]))}
        more |= {"over_forecast": statistics.median(taken) / told}
        found.append(Result(name, statistics.median(taken), "s", "dispatch", ratio, {**more, **vars(arguments)}))
    return found


def forecast_s(arguments: argparse.Namespace, settings: dict[str, Any]) -> float:
    """Return the step time of the plan."""
    from offload.engine.assemble import prepare
    from offload.extras.plan.simulated_ranks import SimulatedRanks
    from offload.extras.plan.timing import PlannedStep
    from offload.extras.plan.workload import NO_WORK, Cost, Workload
    from offload.machine.hardware import Hardware, Rates
    from offload.optim.adamw import AdamW
    from offload.planning.settings import Settings

    chosen = Settings(optimizer=AdamW(lr=1e-8), **common_settings(), **settings)
    prepared = prepare(Model(arguments.blocks, arguments.forward), chosen, SimulatedRanks(arguments.ranks))
    num_bytes = ROWS * WIDTH * WEIGHT_BYTES
    block = dataclasses.replace(
        NO_WORK,
        forward=Cost(arguments.forward, 0, 0),  # on a machine with one FLOP/s
        backward=Cost(2 * arguments.forward, 0, 0),
        **dict.fromkeys(("input_bytes", "result_bytes", "gradient_bytes"), num_bytes),
        saved_bytes=num_bytes,
        is_block=True,
    )
    calls = tuple(dataclasses.replace(block, name=f"blocks.{number}") for number in range(arguments.blocks))
    rates = Rates(*(1e15,) * 3, {"fp32": 1.0}, *(1e15,) * 2, 0.0, collective_bytes_per_s=1e15)
    machine = Hardware("known times", "cpu", 1, None, 1 << 40, None, None, False, rates)
    return PlannedStep(prepared, Workload(calls, 1, ROWS), machine).simulate().step_seconds


def common_settings() -> dict[str, Any]:
    from offload import Placement

    placement = Placement(parameters="cpu", optimizer="cpu")
    return {"recompute": "always", "max_grad_norm": None, "prefetch": 2, "placement": placement}


def timed(arguments: argparse.Namespace, comm: Any, settings: dict[str, Any]) -> tuple[float, list[int]]:
    """Return (seconds in a step, from rest to rest over several, and bytes moved by this rank in the last one)."""
    from offload.engine.engine import Engine
    from offload.optim.adamw import AdamW

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Model(arguments.blocks, arguments.forward)
    engine = Engine(model, AdamW(lr=1e-8), comm=comm, **common_settings(), **settings)
    # As on a card that holds a few blocks: no spare memory keeps others there.
    engine._state.spare_memory.end_step = lambda _: None
    batch = {"values": torch.randn(ROWS, WIDTH)}

    def step() -> None:
        engine.step(batch, loss_fn=lambda outputs, _: outputs.square().mean())

    for _ in range(WARM_STEPS):
        step()
    engine.finish()
    comm.barrier("start of a block of steps")
    begin = time.perf_counter()
    for _ in range(arguments.steps):
        step()
    engine.finish()
    comm.barrier("end of a block of steps")
    seconds = (time.perf_counter() - begin) / arguments.steps
    dispatch = getattr(engine._state.router.target, "__self__", None)
    activations = getattr(dispatch, "sent_bytes", 0) // (WARM_STEPS + arguments.steps)
    counted = [engine.counters.h2d_bytes, engine.counters.all_gather_elements, activations]
    engine.close()
    return seconds, counted


if __name__ == "__main__":
    main()
