"""Compiled blocks against eager and plain PyTorch: number of graphs, saved bytes and step time.

python -m benchmarks.compiled > benchmarks/results/compiled.json     # about ten minutes
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from torch import nn
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from offload import Engine
from offload.extras.large.compiled_forwards import compile_modules
from offload.extras.tools.benches.blocks import rotate
from offload.extras.tools.benches.report import BenchmarkOutput, Result

ROUNDS, WARM_STEPS, ROWS, LENGTH, WORDS = 9, 3, 4, 256, 512
SIZES = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 4, "num_attention_heads": 4}
TEXT = {**SIZES, "vocab_size": WORDS, "num_key_value_heads": 2, "max_position_embeddings": LENGTH}
NO_DROPOUT = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
FAMILIES: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**TEXT)),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**TEXT, head_dim=64)),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**TEXT, head_dim=64, layer_types=["sliding_attention", "full_attention"] * 2)
    ),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**TEXT, num_local_experts=4)),
    "gpt2": lambda: GPT2LMHeadModel(
        GPT2Config(n_embd=256, n_layer=4, n_head=4, vocab_size=WORDS, n_positions=LENGTH, **NO_DROPOUT)
    ),
    "vit": lambda: ViTForImageClassification(ViTConfig(**SIZES, image_size=128, patch_size=8, num_labels=10)),
}


def batch(family: str, seed: int) -> dict[str, torch.Tensor]:
    """Return rows of tokens or images."""
    source = torch.Generator().manual_seed(seed)
    if family == "vit":
        labels = torch.randint(0, 10, (ROWS,), generator=source)
        return {"pixel_values": torch.randn(ROWS, 3, 128, 128, generator=source), "labels": labels}
    ids = torch.randint(0, WORDS, (ROWS, LENGTH), generator=source)
    return {"input_ids": ids, "labels": ids}


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the modules in the longest list."""
    return list(max((each for each in model.modules() if isinstance(each, nn.ModuleList)), key=len))


def saved_bytes(model: nn.Module, family: str) -> int:
    """Return the bytes autograd saves in a forward, without weights, each storage once."""
    known = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: dict[int, Any] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            found[storage.data_ptr()] = storage  # kept alive, so no address repeats
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(**batch(family, 0))
    return sum(storage.nbytes() for storage in found.values())


def measured(family: str) -> list[Result]:
    """Return the results for a family."""
    torch.manual_seed(0)
    model = FAMILIES[family]().train()
    plain, compiled = copy.deepcopy(model), copy.deepcopy(model)
    compile_modules(blocks(compiled))
    shares = saved_bytes(compiled, family) / saved_bytes(plain, family)
    engines = {
        how: Engine(copy.deepcopy(model), compile=how, recompute="never", max_grad_norm=None)
        for how in ("never", "always")
    }
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=engines["always"].lr)

    def step_plainly(rows: dict[str, torch.Tensor]) -> None:
        optimizer.zero_grad()
        compiled(**rows).loss.backward()
        optimizer.step()

    def step(how: str) -> Callable[[dict[str, torch.Tensor]], None]:
        def run(rows: dict[str, torch.Tensor]) -> None:
            engines[how].step(rows)
            engines[how].finish()

        return run

    ways = {"eager": step("never"), "compiled": step("always"), "plain compiled": step_plainly}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    graphs = []
    for number in range(WARM_STEPS + ROUNDS):
        for name in rotate([*ways], number):
            rows, begin = batch(family, number), time.perf_counter()
            ways[name](rows)
            if number >= WARM_STEPS:
                seconds[name].append(time.perf_counter() - begin)
        graphs.append(engines["always"].compiled_graphs)

    def over(name: str) -> float:
        return statistics.median(a / b for a, b in zip(seconds["compiled"], seconds[name], strict=True))

    for each in engines.values():
        each.close()
    return [
        Result(f"{family}, graphs after two steps", graphs[1], ""),
        Result(f"{family}, graphs after all steps", graphs[-1], ""),
        Result(f"{family}, saved bytes over eager", shares, ""),
        Result(f"{family}, step over eager", over("eager"), ""),
        Result(f"{family}, step over plain compiled", over("plain compiled"), ""),
    ]


def main() -> None:
    """Measure all families and print the results."""
    torch.set_num_threads(1)
    print(BenchmarkOutput([result for family in FAMILIES for result in measured(family)]).document())


if __name__ == "__main__":
    main()
