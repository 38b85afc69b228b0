"""Steps with updates one step late, with AdamW twice as long as the passes, against the larger lane.

python -m benchmarks.delay > benchmarks/results/delay.json     # a minute

The throttled update lane takes twice the time of the unthrottled passes. A normal step takes the sum of both, a delayed
step the larger lane. Engines alternate in blocks of steps. A block starts after the first updates have begun, because
each step overlaps the updates of the previous step.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offload import AdamW, Engine, Placement
from offload.extras.tools.benches.report import BenchmarkOutput, Result
from offload.layout.sharding import Sharding
from offload.planning.device_updates import update_bytes
from tests.engine.inside import parts_of

LAYERS, WIDTH, ROWS, LENGTH = 16, 256, 4, 128
STEPS, WARM, BLOCKS = 6, 3, 3
UPDATE_SHARE = 2.0


def make(**settings: Any) -> Engine:
    torch.manual_seed(0)
    sizes = {"hidden_size": WIDTH, "intermediate_size": 3 * WIDTH, "vocab_size": 512}
    config = LlamaConfig(num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=4, **sizes)
    place = Placement(parameters="cpu", optimizer="cpu")
    return Engine(LlamaForCausalLM(config), AdamW(lr=1e-8), place, **settings)


def seconds(engine: Engine, batch: dict[str, torch.Tensor], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        engine.step(batch)
    return (time.perf_counter() - begin) / count


def main() -> None:
    torch.set_num_threads(1)
    ids = torch.randint(512, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    free = make(throttle={"update": 10**15})
    seconds(free, batch, WARM)
    passes = min(seconds(free, batch, STEPS) for _ in range(BLOCKS))
    throttle = {"update": update_bytes(parts_of(free).regions, Sharding()) / (UPDATE_SHARE * passes)}
    engines = {"in time": make(throttle=throttle), "one step late": make(throttle=throttle, delay=1)}
    for engine in engines.values():
        seconds(engine, batch, WARM)
    taken: dict[str, list[float]] = {name: [] for name in engines}
    computed = []
    for _ in range(BLOCKS):
        computed.append(seconds(free, batch, STEPS))
        for name, engine in engines.items():
            engine.step(batch)  # so that regular updates are in flight
            taken[name].append(seconds(engine, batch, STEPS))
            engine.finish()
    largest = max(UPDATE_SHARE * passes, statistics.median(computed))
    results = [
        Result(
            name,
            1e3 * statistics.median(found),
            "ms a step",
            "the larger lane",
            largest / statistics.median(found),
            {"over_largest_lane": statistics.median(found) / largest, "blocks_ms": [1e3 * each for each in found]},
        )
        for name, found in taken.items()
    ]
    print(BenchmarkOutput(results).document())
    for result in results:
        print(f"{result.name}: {result.details['over_largest_lane']:.3f} of the larger lane", file=sys.stderr)


if __name__ == "__main__":
    main()
