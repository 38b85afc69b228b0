"""Saved autograd graphs on the host, against recomputation and graphs on the device, with d2h otherwise idle.

python -m benchmarks.graphs > benchmarks/results/graphs.json     # about two minutes
"""

from __future__ import annotations

import os
import statistics
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offload import Engine, Placement
from offload.extras.tools.benches.blocks import rotate
from offload.extras.tools.benches.report import BenchmarkOutput, Result

ROUNDS, WARM_STEPS = 15, 3
LINK = {name: {"bandwidth": 2e9} for name in ("h2d", "d2h")}
WAYS = {
    "recompute": ("always", "device"),
    "graphs on the device": ("never", "device"),
    "graphs on the host": ("never", "cpu"),
}


def engine(recompute: str, graphs: str) -> Engine:
    """Return an engine with links throttled far below memory speed, idle for most of a step."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=8,
        num_attention_heads=4,
        vocab_size=512,
        max_position_embeddings=512,
    )
    return Engine(LlamaForCausalLM(config), placement=Placement(graphs=graphs), recompute=recompute, throttle=LINK)


def main() -> None:
    """Alternate steps of the three engines, and print ratios to graphs on the device."""
    torch.set_num_threads(1)
    batch = {"input_ids": torch.randint(0, 512, (8, 256))}
    batch["labels"] = batch["input_ids"]
    engines = {name: engine(*way) for name, way in WAYS.items()}
    seconds: dict[str, list[float]] = {name: [] for name in WAYS}
    for number in range(WARM_STEPS + ROUNDS):
        for name in rotate([*WAYS], number):
            begin = time.perf_counter()
            engines[name].step(batch)
            engines[name].finish()
            if number >= WARM_STEPS:
                seconds[name].append(time.perf_counter() - begin)
    plain = seconds["graphs on the device"]
    found = [Result(f"{name}, seconds", statistics.median(each), "s") for name, each in seconds.items()]
    for name, each in seconds.items():
        ratio = statistics.median(mine / its for mine, its in zip(each, plain, strict=True))
        found.append(Result(f"{name}, over graphs on the device", ratio, ""))
    found.append(Result("bytes of graphs on the host", engines["graphs on the host"].graphs_on_host_bytes, "B"))
    print(BenchmarkOutput(found).document())


if __name__ == "__main__":
    main()
