"""Layers four times as large as the device budget, in row blocks: a vocabulary of 1,048,576 (2**20) tokens by 1,024,
shared by embedding and head, and a linear layer of 8,192 by 65,536.

python -m benchmarks.huge_layers > benchmarks/results/huge_layers.json

The engine ledger holds weights, gradients and inputs within the budget. The results also have the additional peak of
operations (`Alive` in plan_memory). Trials before the first step make all logits of 48 tokens.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Sequence
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import nn
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.plan_memory import Alive
from offload import SGD, Engine, Placement
from offload.extras.tools.benches.report import BenchmarkOutput, Result

CHUNK_BYTES = 32 << 20


def vocabulary(tokens: int, width: int) -> nn.Module:
    """Return a model of one small block, with an embedding and a head that share one weight."""
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width,
        num_hidden_layers=1,
        num_attention_heads=8,
        vocab_size=tokens,
        max_position_embeddings=128,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config).train()


class Wide(nn.Module):
    """A linear layer of `rows` by `width` over embeddings of 256 tokens, with a mean as loss."""

    def __init__(self, rows: int, width: int) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(256, width), nn.LayerNorm(width)
        self.layers = nn.ModuleList([nn.Linear(width, rows)])

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the loss."""
        scores = self.layers[0](self.norm(self.table(input_ids)))
        return {"loss": functional.cross_entropy(scores.flatten(0, 1), labels.flatten())}


def train(model: nn.Module, size: int, steps: int, layer_bytes: int) -> dict[str, Any]:
    """Train `steps` steps on one batch of tokens below `size`, with a device of a quarter of the layer."""
    placement = Placement(parameters="cpu", optimizer="cpu", device_memory=layer_bytes // 4)
    ids = torch.randint(0, size, (2, 32), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids}
    rule = SGD(lr=0.5, momentum=0.0, weight_decay=0.0)
    settings: dict[str, Any] = {"max_grad_norm": None, "head_chunk_bytes": CHUNK_BYTES}
    with Engine(model, rule, placement, **settings) as engine, Alive() as alive:
        losses, peaks, seconds = [], [], 0.0
        for _ in range(steps):
            begin, alive.peak_bytes = time.perf_counter(), alive.live_bytes
            losses.append(engine.step(batch).loss.item())
            engine.finish()
            seconds = time.perf_counter() - begin
            peaks.append(alive.peak_bytes)
        found = {"losses": losses, "seconds": seconds, "operations": peaks, "told": engine.told_tiles}
        found["held"] = engine.counters.peak_device_bytes
    gc.collect()
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--share", type=int, default=1, help="of the sizes, one in so many, for a quick look")
    parser.add_argument("--layers", nargs="+", choices=("vocabulary", "linear"), default=("vocabulary", "linear"))
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args(words)
    torch.manual_seed(0)
    results = []
    for name, make, rows, width, size in (
        ("vocabulary", vocabulary, (1 << 20) // arguments.share, 1024, (1 << 20) // arguments.share),
        ("linear", Wide, (1 << 16) // arguments.share, 8192, 256),
    ):
        if name not in arguments.layers:
            continue
        layer_bytes = 4 * rows * width
        found = train(make(rows, width), size, arguments.steps, layer_bytes)
        results += [
            Result(f"{name}: weight", layer_bytes, "B", details={"blocks": found["told"]}),
            Result(f"{name}: budget", layer_bytes // 4, "B"),
            Result(f"{name}: most of weights, gradients and inputs at once", found["held"], "B"),
            Result(f"{name}: most that operations held beside, first step", found["operations"][0], "B"),
            Result(f"{name}: most that operations held beside, last step", found["operations"][-1], "B"),
            Result(f"{name}: loss of the first step", found["losses"][0], ""),
            Result(f"{name}: loss of step {arguments.steps}", found["losses"][-1], ""),
            Result(f"{name}: a step", found["seconds"], "s"),
        ]
    print(BenchmarkOutput(results).document())


if __name__ == "__main__":
    main()
