"""Steps on one row of 1,048,576 tokens (2**20) within a budget, with MLPs and norms in sequence tiles; and the saving
on a row of an eighth of the length, against a step without tiles.

python benchmarks/long_sequences.py > benchmarks/results/long_sequences.json

The model is a Mistral with two blocks and an attention window of 128 tokens; full attention over a million tokens takes
days on a CPU. Only the attention function, registered with transformers, is special. The peak is the total of all
operations (`Alive` in plan_memory) and the device part of the engine ledger.
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
from torch.nn import functional
from transformers import AttentionInterface, MistralConfig, MistralForCausalLM

from benchmarks.plan_memory import Alive
from offload import AdamW, Engine, Placement
from offload.extras.tools.benches.report import BenchmarkOutput, Result

BUDGET_BYTES = 6 << 30
TILE, WINDOW = 4096, 128


def attend(
    _module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _mask: Any, scaling: float, **_: Any
) -> tuple[torch.Tensor, None]:
    """Attend from [rows, heads, tokens, size] to the last `WINDOW` tokens, in blocks."""
    rows, heads, tokens, size = query.shape
    shared = heads != key.shape[1]
    if tokens <= WINDOW:
        made = functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scaling, enable_gqa=shared
        )
        return made.transpose(1, 2), None
    blocks = -(-tokens // WINDOW)
    more = blocks * WINDOW - tokens

    def own(tensor: torch.Tensor, before: int = 0) -> torch.Tensor:
        padded = functional.pad(tensor, (0, 0, before, more))
        return padded.view(rows, tensor.shape[1], -1, WINDOW, size).transpose(1, 2)

    def with_before(tensor: torch.Tensor) -> torch.Tensor:
        padded = own(tensor, WINDOW)
        return torch.cat([padded[:, :-1], padded[:, 1:]], 3).flatten(0, 1)

    ours, theirs = torch.arange(WINDOW)[:, None], torch.arange(2 * WINDOW)[None] - WINDOW
    seen = (theirs <= ours) & (theirs > ours - WINDOW)
    is_there = (torch.arange(rows * blocks) % blocks > 0).view(-1, 1, 1, 1) | (theirs >= 0)
    made = functional.scaled_dot_product_attention(
        own(query).flatten(0, 1),
        with_before(key),
        with_before(value),
        seen & is_there,
        scale=scaling,
        enable_gqa=shared,
    )
    made = made.view(rows, blocks, heads, WINDOW, size).transpose(2, 3).reshape(rows, -1, heads, size)
    return made[:, :tokens], None


AttentionInterface.register("windows", attend)


def model(tokens: int) -> MistralForCausalLM:
    """Return a model with 120,000 weights in the blocks."""
    torch.manual_seed(0)
    config = MistralConfig(
        hidden_size=64,
        intermediate_size=224,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        vocab_size=512,
        max_position_embeddings=tokens,
        attn_implementation="windows",
    )
    return MistralForCausalLM(config).train()


def batch(tokens: int) -> dict[str, torch.Tensor]:
    """Return a row in which each token follows from the previous token."""
    ids = torch.zeros(1, tokens, dtype=torch.int64)
    noise = torch.randint(0, 4, (tokens,), generator=torch.Generator().manual_seed(0))
    ids[0] = (noise.cumsum(0) * 7) % 512
    return {"input_ids": ids, "labels": ids}


def train(tokens: int, tile: int | str, steps: int, budget_bytes: int | None) -> dict[str, Any]:
    """Train `steps` steps; return losses, norms, the seconds of the last step, and peak memory."""
    placement = Placement(parameters="cpu", optimizer="cpu", device_memory=budget_bytes)
    options = {"recompute": "always", "head_chunk_bytes": 16 << 20, "sequence_tile": tile}
    row = batch(tokens)
    with Engine(model(tokens), AdamW(lr=2e-3), placement, **options) as engine, Alive() as alive:
        losses, norms, seconds = [], [], 0.0
        for _ in range(steps):
            begin = time.perf_counter()
            result = engine.step(row)
            seconds = time.perf_counter() - begin
            losses.append(result.loss.item())
            norms.append(result.grad_norm)
        planned = sum(num_bytes for tier, _, num_bytes in engine.allocations if tier == "device")
        found = {"losses": losses, "norms": norms, "seconds": seconds, "peak": alive.peak_bytes + planned}
    gc.collect()
    return found | {"tiles": engine.told_tiles}


def main(words: Sequence[str] | None = None) -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--steps", type=int, default=2)
    arguments = parser.parse_args(words)
    short = arguments.tokens // 8
    whole, tiled = (train(short, tile, 2, None) for tile in ("none", min(TILE, short // 32)))
    found = train(arguments.tokens, min(TILE, arguments.tokens // 32), arguments.steps, BUDGET_BYTES)
    if found["peak"] > BUDGET_BYTES:
        raise SystemExit(f"{found['peak']} bytes were held at once, and the budget is {BUDGET_BYTES}.")
    of_tiles = {"reference": "whole sequences", "ratio": whole["peak"] / tiled["peak"]}
    results = [
        Result("tokens of a row", arguments.tokens, ""),
        Result("budget", BUDGET_BYTES, "B"),
        Result("most that was held at once", found["peak"], "B", details={"tiles": found["tiles"]}),
        Result("loss of the first step", found["losses"][0], ""),
        Result(f"loss of step {arguments.steps}", found["losses"][-1], ""),
        Result("a step", found["seconds"], "s"),
        Result(f"most held at once, {short} tokens", tiled["peak"], "B", **of_tiles),
        Result(f"loss, {short} tokens, less that of whole sequences", tiled["losses"][0] - whole["losses"][0], ""),
        Result("gradient norm, by that of whole sequences, less 1", tiled["norms"][0] / whole["norms"][0] - 1, ""),
    ]
    print(BenchmarkOutput(results).document())


if __name__ == "__main__":
    main()
