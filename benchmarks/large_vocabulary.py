"""One step of 32,768 tokens over a 262,144-token vocabulary in a 1 GiB device budget; the logits would take 32 GiB.

python benchmarks/large_vocabulary.py > benchmarks/results/large_vocabulary.json
"""

from __future__ import annotations

import os
import resource
import time

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offload import Engine, Placement
from offload.extras.tools.benches.report import BenchmarkOutput, Result

VOCABULARY, ROWS, LENGTH = 262_144, 8, 4096


def main() -> None:
    """Train one step and print the peak memory."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=1,
            num_attention_heads=2,
            vocab_size=VOCABULARY,
            max_position_embeddings=LENGTH,
        )
    )
    engine = Engine(model, placement=Placement(device_memory="1GiB", activations="cpu"), micro_batch_size=1)
    ids = torch.randint(0, VOCABULARY, (ROWS, LENGTH))
    start = time.perf_counter()
    result = engine.step({"input_ids": ids, "labels": ids})
    engine.finish()
    found = [
        ("loss", result.loss.item(), ""),
        ("target tokens", result.tokens, ""),
        ("bytes of the whole logits in fp32", 4 * VOCABULARY * ROWS * LENGTH, "B"),
        ("peak device bytes", engine.counters.peak_device_bytes, "B"),
        ("peak resident memory of the process", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, "B"),
        ("first step, recording included", time.perf_counter() - start, "s"),
    ]
    print(BenchmarkOutput([Result(*each) for each in found]).document())


if __name__ == "__main__":
    main()
