"""Launches, copies, and waits within operations of a first and of a later step, on the simulated accelerator.

Models have the layers of large ones: Llama-3.1-8B in bf16 (32 layers), the same with nf4 weights and LoRA, and
Qwen3-30B-A3B (48 layers, 128 experts, 8 for each token) with streamed experts. Widths are small: counts depend on the
number of tensors, not on their sizes.

OMP_NUM_THREADS=1 python -m benchmarks.launches > benchmarks/results/launches.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from offload import AdamW, Engine, Placement
from tests import accelerator

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "vocab_size": 128, "use_cache": False,
}  # fmt: skip
NUM_STEPS = 8


def dense() -> nn.Module:
    return LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=32))


def adapters() -> nn.Module:
    from peft import LoraConfig, get_peft_model

    return get_peft_model(dense().bfloat16(), LoraConfig(r=4, target_modules="all-linear"))


def experts() -> nn.Module:
    more = {"moe_intermediate_size": 32, "num_experts": 128, "num_experts_per_tok": 8}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(**SIZES, **more, num_hidden_layers=48))


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "8B": (dense, {}),
    "8B, nf4 and LoRA": (adapters, {"frozen_weights": "nf4"}),
    "30B-A3B, experts streamed": (experts, {"placement": Placement(experts="streamed")}),
}


def counts(sim: Any, case: str) -> dict[str, dict[str, int]]:
    """Return the counts of the first step and of a later step: of three, the one with the fewest launches."""
    make, settings = CASES[case]
    torch.manual_seed(0)
    ids = torch.randint(128, (4, 16))
    found: list[dict[str, int]] = []
    with Engine(make().train(), AdamW(lr=1e-4), precision="bf16", recompute="always", **settings) as engine:
        for _ in range(NUM_STEPS):
            torch.accelerator.synchronize()
            sim.reset_counters()
            engine.step({"input_ids": ids, "labels": ids})
            torch.accelerator.synchronize()
            all_counts = sim.counters()
            found.append(
                {
                    "launches": all_counts["launches"],
                    "copies": all_counts["copies"],
                    "waits within operations": all_counts["operation_waits"],
                }
            )
            print(case, found[-1], file=sys.stderr, flush=True)
    return {"first step": found[0], "later step": min(found[-3:], key=lambda each: each["launches"])}


def main() -> None:
    """Print one JSON."""
    from offload.extras.large import cut_experts

    cut_experts.RECORD_BYTES = 1  # an expert of the large model fills a record
    sim = accelerator.load(num_devices=1, memory_bytes=4 << 30)
    sim.enter(0)
    print(json.dumps({case: counts(sim, case) for case in CASES}, indent=2))


if __name__ == "__main__":
    main()
