"""The placement chosen by the search against all possible placements, measured on three throttled machines.

python -m benchmarks.placement_search > benchmarks/results/placement_search.json     # five minutes

A machine is a throttle with budgets. Every placement that fits runs as a separate engine. Placements differ in the
tiers of parameters, optimizer states and unit inputs, in saved graphs, and in the place of updates. All engines of a
machine are open at once, and blocks of steps alternate; the fastest block counts. The search knows the throttle, the
budgets, and the compute measured in one engine without throttle.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace

import torch

from benchmarks.step_times import Case, block_seconds, compute_of, work_of
from offload import AdamW, Engine, Placement
from offload.errors import OffloadError
from offload.extras.plan.search import PlacementCandidate, PlacementSearch, placements, search
from offload.extras.plan.workload import Workload
from offload.extras.tools.benches.report import BenchmarkOutput, Result
from offload.machine.hardware import Hardware, Rates
from offload.native import kernels
from offload.planning.machines import ThisMachine
from offload.planning.settings import Settings
from tests.forecast.planned import LENGTH, ROWS, batches, loss_of, planned

MOST_OVER_BEST = 1.05
WARM_STEPS, BLOCK_STEPS = 4, 3
CASE = Case("placement", width=96, depth=5)
KEPT_BYTES = 9 * CASE.width * ROWS * LENGTH * 4
"""The graph of a block without the input: tensors saved by the norm, the hidden layer and the activation function."""
MiB = 1 << 20


@dataclass(frozen=True)
class Machine:
    """Link bandwidths in bytes per second, and budgets."""

    name: str
    throttle: Mapping[str, float]
    budgets: Mapping[str, str]
    has_disk: bool = False


MACHINES = (
    Machine("slow link", {"h2d": 25e6, "d2h": 25e6, "update": 400e6}, {"device_memory": "5MiB"}),
    Machine("slow host memory", {"h2d": 200e6, "d2h": 200e6, "update": 60e6}, {"device_memory": "5MiB"}),
    Machine(
        "slow disk, little memory",
        {"h2d": 100e6, "d2h": 100e6, "update": 400e6, "nvme_read": 60e6, "nvme_write": 40e6},
        {"device_memory": "4MiB", "host_memory": "4MiB"},
        has_disk=True,
    ),
)


def wanted(machine: Machine, folder: str) -> Settings:
    """Return settings with an open placement."""
    placement = Placement(
        parameters="auto",
        optimizer="auto",
        activations="auto",
        nvme_dir=folder if machine.has_disk else None,
        **machine.budgets,
    )
    throttle = dict(machine.throttle)
    return Settings(optimizer=AdamW(lr=1e-8), placement=placement, recompute="auto", clip="deferred", throttle=throttle)


def hardware(machine: Machine) -> Hardware:
    """Return the machine for the search; unthrottled rates are about those of this machine."""
    rate = {"nvme_read": None, "nvme_write": None, **machine.throttle}
    rates = Rates(
        h2d_bytes_per_s=rate["h2d"],
        d2h_bytes_per_s=rate["d2h"],
        both_ways_bytes_per_s=rate["h2d"] + rate["d2h"],
        flops_per_s={"fp32": 1.0},
        device_bytes_per_s=5e9,
        host_bytes_per_s=rate["update"],
        launch_s=0.0,
        nvme_read_bytes_per_s=rate["nvme_read"],
        nvme_write_bytes_per_s=rate["nvme_write"],
    )
    return Hardware(machine.name, "cpu", 1, None, 1 << 34, 1 << 34, None, False, rates)


def work() -> Workload:
    """Return the work of a step, measured in an engine without throttle."""
    found = work_of(CASE, compute_of(CASE))
    calls = [replace(call, saved_bytes=KEPT_BYTES if call.saved_bytes else 0) for call in found.calls]
    return replace(found, calls=tuple(calls))


def measured(estimates: list[PlacementCandidate], num_rounds: int) -> list[float | None]:
    """Return the step seconds of each; None where an engine does not fit after all."""
    steps = itertools.cycle(batches(2))
    seconds: list[float | None] = [None] * len(estimates)
    with ExitStack() as opened:
        engines: list[tuple[int, Engine]] = []
        for number, estimate in enumerate(estimates):
            try:
                engine = opened.enter_context(closing(Engine(CASE.model(), settings=estimate.settings)))
                for _ in range(WARM_STEPS):
                    engine.step(next(steps), loss_of)
            except OffloadError as error:
                print(f"  {shown(estimate.settings)}: {str(error)[:150]}", file=sys.stderr, flush=True)
                continue
            engines.append((number, engine))
        for _ in range(num_rounds):
            for number, engine in engines:
                engine.step(next(steps), loss_of)  # refill the caches after other engines
                taken = block_seconds(engine, steps, BLOCK_STEPS)
                engine.finish()
                before = seconds[number]
                seconds[number] = taken if before is None else min(before, taken)
    return seconds


def shown(settings: Settings) -> str:
    """Return the chosen settings in words."""
    its = settings.placement
    tiers = f"parameters {its.parameters}, optimizer {its.optimizer}, inputs {its.activations}"
    return f"{tiers}, recompute {settings.recompute}, update {settings.update}"


def run(machine: Machine, folder: str, num_rounds: int) -> Result:
    """Measure a machine."""
    settings, its = wanted(machine, folder), planned(CASE.model(), Settings())

    placer = PlacementSearch(its, work(), hardware(machine), ThisMachine(None))
    every = [PlacementCandidate(each, placer) for each in placements(settings)]
    chosen = search(every)
    assert chosen is not None, "nothing fits"
    # Different settings may mean the same (saved graphs need no place for inputs): only one of them runs.
    different = {id(each.timing): each for each in reversed(every) if each.fits}
    different.pop(id(chosen.timing), None)
    fitting = [*different.values(), chosen]
    seconds = measured(fitting, num_rounds)
    rows = sorted(
        (
            {"placement": shown(each.settings), "seconds": taken, "foretold_seconds": each.step_seconds}
            for each, taken in zip(fitting, seconds, strict=True)
            if taken is not None
        ),
        key=lambda row: row["seconds"],
    )
    choice_s = seconds[-1]
    assert choice_s is not None, "what was chosen fits"
    over = choice_s / rows[0]["seconds"]
    print(
        f"{machine.name}: {shown(chosen.settings)}: {over:.3f} of the best of {len(rows)}", file=sys.stderr, flush=True
    )
    for row in rows:
        told = f"forecast {row['foretold_seconds']:.3f}: {row['placement']}"
        print(f"  {row['seconds']:.3f} s, {told}", file=sys.stderr, flush=True)
    details = {
        "choice": shown(chosen.settings),
        "over_best": over,
        "within": over <= MOST_OVER_BEST,
        "placements": rows,
        "throttle": dict(machine.throttle),
        "budgets": dict(machine.budgets),
        "load": os.getloadavg()[0],
    }
    return Result(machine.name, choice_s * 1e3, "ms", "best placement measured", 1 / over, details)


def main() -> None:
    """Measure all machines, and print them."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.placement_search", description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each placement (default %(default)s)")
    parser.add_argument("--machines", nargs="+", help="of those whose name contains one of these")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kernels.set_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        chosen = [m for m in MACHINES if not arguments.machines or any(p in m.name for p in arguments.machines)]
        print(BenchmarkOutput([run(machine, folder, arguments.rounds) for machine in chosen]).document())


if __name__ == "__main__":
    main()
