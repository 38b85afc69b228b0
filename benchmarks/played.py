"""Steps of an engine on a simulated H200 and a simulated RTX 4090, against the ideal schedules.

chrt -r 1 python -m benchmarks.played --out benchmarks/results/played.json     # a quarter of an hour; --help for less

The simulated accelerator (`tests/accelerator/`) gives each kernel, copy and launch the time on a real device, from
FLOPs and bytes. Shapes are those of Llama 3.1 8B with fewer layers. All sizes, lengths and batches included, are
divided by SHRUNK, and the device rates are divided to match. Kernels and copies therefore take the seconds of the large
shapes. The main thread, Python and the engine threads run in real time. AdamW is simulated too, by the throttle of its
lane: 26 bytes a parameter at the host memory rate.

The simulation sleeps most of the time, and is late when other processes hold a core at wake-up. chrt gives it priority;
it needs a tenth of a core.

The device has room for four blocks, so most weights are copied twice in a step. The ideal schedule uses the fastest
measured times of copies, updates and unit uses; the sum of uses is the busy time of the device.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch

from benchmarks import harness, lanes
from offload import AdamW, Engine, Placement
from offload.app.config.command_line import say
from offload.extras.tools.benches.report import Result
from offload.native import kernels
from tests import accelerator
from tests.accelerator.control import H200, RTX_4090, Control, Cost

SUMMARY = "steps on a simulated H200 and RTX 4090, against ideal schedules"
SHRUNK = 64
HIDDEN, INNER, VOCABULARY, SEQUENCE, MICRO_ROWS = 4096, 14336, 128256, 4096, 4
HEAD_CHUNK_BYTES = 256 << 20
AHEAD = 3
MOST_OVER_IDEAL, LEAST_IDLE = 1.08, 0.5
MODES: dict[str, dict[str, Any]] = {
    "no clipping": {"max_grad_norm": None},
    "deferred": {"clip": "deferred"},
    "speculative": {"clip": "speculative"},
}


@dataclass(frozen=True)
class Played:
    """A device, the bytes per second that AdamW reaches in host memory, and the tier of unit inputs for large steps."""

    cost: Cost
    update_bytes_per_s: float
    activations: str


DEVICES = {
    "H200, PCIe 5": Played(H200, 300e9, "device"),  # twelve channels of DDR5-4800, two thirds of 460 GB/s
    "RTX 4090, PCIe 4": Played(RTX_4090, 60e9, "cpu"),  # two channels of DDR5-5600, two thirds of 90 GB/s
}


@dataclass
class Case:
    """A device, tokens in a step and a clipping mode, with the engine and the results."""

    device: str
    tokens: int
    mode: str
    engine: Engine
    batches: Iterator[dict[str, Any]]
    num_steps: int
    blocks: list[lanes.Block] = field(default_factory=list)
    launches: list[float] = field(default_factory=list)


QUICK = {"layers": 4, "rounds": 1, "steps": 1, "tokens": [4096], "devices": ["H200, PCIe 5"], "modes": ["deferred"]}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.add_argument("--layers", type=int, default=12, help="of the model (default %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="blocks of each case, in turns (default %(default)s)")
    parser.add_argument("--steps", type=int, default=4, help="in a block of 16k tokens a step; half for more")
    parser.add_argument("--tokens", type=int, nargs="+", default=(16384, 131072))
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=tuple(DEVICES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=tuple(MODES))


def run(arguments: argparse.Namespace) -> list[Result]:
    """Measure all cases in turns; return a result for each."""
    torch.set_num_threads(1)
    kernels.set_threads(1)
    control = accelerator.load(num_devices=1)
    control.enter(0)
    control.set_poison(False)
    cases = []
    for device, tokens, mode in itertools.product(arguments.devices, arguments.tokens, arguments.modes):
        num_steps = arguments.steps if tokens < 65536 else max(1, arguments.steps // 2)
        cases.append(opened(device, tokens, mode, arguments.layers, num_steps))
    for _, case in harness.turns(cases, arguments.rounds):
        run_block(control, case)
    results = [result(case, arguments.layers) for case in cases]
    for case in cases:
        case.engine.close()
    return results


def opened(device: str, tokens: int, mode: str, num_layers: int, num_steps: int) -> Case:
    """Return a case whose engine has run its first steps, on a device without delays."""
    played, rows = DEVICES[device], tokens // SEQUENCE
    placement = {"activations": played.activations if rows > MICRO_ROWS else "device"}
    throttle = {"update": {"bandwidth": played.update_bytes_per_s / SHRUNK**2}}
    settings = {"throttle": throttle, "micro_batch_size": MICRO_ROWS if rows > MICRO_ROWS else None, **MODES[mode]}
    generator = torch.Generator().manual_seed(1)
    shape = (rows, SEQUENCE // SHRUNK)
    ids = [torch.randint(0, VOCABULARY // SHRUNK, shape, generator=generator) for _ in range(2)]
    batches = itertools.cycle({"input_ids": each, "labels": each} for each in ids)

    def make(**more: Any) -> Engine:
        return Engine(
            model(num_layers),
            optimizer=AdamW(lr=1e-8),  # keeps the norm and the corrections constant
            placement=Placement(**placement, **more),
            precision="bf16",
            prefetch=AHEAD,
            head_chunk_bytes=HEAD_CHUNK_BYTES // SHRUNK**2,
            **settings,
        )

    with closing(make()) as probe:  # leftover memory is distributed after the third step
        norm = [probe.step(next(batches)).grad_norm for _ in range(2)][-1]
        device_bytes = probe.counters.peak_device_bytes
    if settings.get("clip") is not None:
        settings["max_grad_norm"] = norm / 2
    engine = make(device_memory=device_bytes)
    for _ in range(4):
        engine.step(next(batches))
    return Case(device, tokens, mode, engine, batches, num_steps)


def model(num_layers: int) -> Any:
    """Return the shrunk Llama."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=HIDDEN // SHRUNK,
        intermediate_size=INNER // SHRUNK,
        num_hidden_layers=num_layers,
        num_attention_heads=8,  # a quarter: division by SHRUNK would give none
        num_key_value_heads=2,
        vocab_size=VOCABULARY // SHRUNK,
        max_position_embeddings=SEQUENCE,
        use_cache=False,
    )
    return LlamaForCausalLM(config).train()


def run_block(control: Control, case: Case) -> None:
    """Run a block of a case."""
    case.engine.finish()
    control.set_cost(DEVICES[case.device].cost.scaled(flops=SHRUNK**3, num_bytes=SHRUNK**2))
    control.reset_counters()
    block = lanes.run_block(case.engine, case.batches, case.num_steps, lambda: control.busy_seconds()["compute"])
    case.launches.append(control.counters()["launches"] / case.num_steps)
    control.set_cost(None)
    case.blocks.append(block)
    say(
        f"{case.device}, {case.tokens} tokens, {case.mode}: {block.seconds:.3f} s a step, compute "
        f"{block.device_seconds:.3f}, launching {block.host_seconds:.3f}, load {os.getloadavg()[0]:.1f}"
    )


def result(case: Case, num_layers: int) -> Result:
    """Return the result of a case."""
    compute_s = statistics.median(block.device_seconds or 0.0 for block in case.blocks)
    best = lanes.best_schedule(case.engine, case.blocks, compute_s)
    seconds = [block.seconds for block in case.blocks]
    idle = [1 - block.host_seconds / block.seconds for block in case.blocks]
    over = statistics.median(seconds) / best.seconds
    largest = max(best.busy_s, key=lambda lane: best.busy_s[lane])
    middle = sorted(case.blocks, key=lambda block: block.seconds)[len(case.blocks) // 2]
    details = lanes.described(middle, best) | {
        "over_ideal": over,
        "over_ideal_least": min(seconds) / best.seconds,
        "over_ideal_most": max(seconds) / best.seconds,
        "main_thread_idle": statistics.median(idle),
        "main_thread_idle_least": min(idle),
        "within": over <= MOST_OVER_IDEAL and statistics.median(idle) >= LEAST_IDLE,
        "largest_lane": largest,
        "largest_lane_seconds": best.busy_s[largest],
        "compute_seconds": compute_s,
        "launches": statistics.median(case.launches),
        "layers": num_layers,
        "steps_in_a_block": case.num_steps,
        "load": os.getloadavg()[0],
    }
    name = f"{case.device}, {case.tokens} tokens, {case.mode}"
    milliseconds = [1e3 * each for each in seconds]
    ideal = "ideal schedule", [1e3 * best.seconds] * len(seconds)
    return harness.summary(name, milliseconds, "ms", ideal, **details)


if __name__ == "__main__":
    harness.begin(sys.modules[__name__])
