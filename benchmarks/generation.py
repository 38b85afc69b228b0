"""Tokens a second with weights streamed from files for each token, over throttled links.

python -m benchmarks.generation > benchmarks/results/generation.json     # a minute

Throttles on the disk and the device link make one read and copy of all weights take a given multiple of the unthrottled
compute time. A prompt pass, which makes one token, is compared with two times: the sum of reads, copies and compute,
and the longest of the three, the lower bound for every schedule.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from offload.app.hf.models import folder_config, model_kind
from offload.app.hf.read import read_model
from offload.extras.generate.streamed_model import StreamedModel
from offload.extras.tools.benches.report import BenchmarkOutput, Result
from offload.lanes.timeline import Throttle

LAYERS, WIDTH, PROMPT = 12, 512, 256
WARM, TOKENS = 2, 9
SHARES = {"all three alike": (1.0, 1.0), "a slow disk": (3.0, 1.0), "a slow link": (1.0, 3.0), "slow both": (2.0, 1.5)}
"""Seconds of the disk and the device link, as multiples of compute seconds."""


def main() -> None:
    """Print the results as JSON, and a line for each to stderr."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        torch.manual_seed(0)
        sizes = {"hidden_size": WIDTH, "intermediate_size": 1376, "num_attention_heads": 8, "num_key_value_heads": 8}
        LlamaForCausalLM(LlamaConfig(vocab_size=2000, num_hidden_layers=LAYERS, **sizes)).bfloat16().save_pretrained(
            folder
        )
        compute_s, num_bytes = token_seconds(folder, None, {})
        results = []
        for name, (disk, link) in SHARES.items():
            rates = {"nvme_read": num_bytes / (disk * compute_s), "h2d": num_bytes / (link * compute_s)}
            seconds, _ = token_seconds(folder, 0, {lane: Throttle(rate) for lane, rate in rates.items()})
            serial, longest = (1 + disk + link) * compute_s, max(1, disk, link) * compute_s
            details = {"over_longest": seconds / longest, "compute_ms": 1e3 * compute_s, "bytes": num_bytes}
            results.append(Result(name, 1 / seconds, "tokens/s", "one after the other", serial / seconds, details))
            print(f"{name}: {serial / seconds:.2f} times of one after the other", file=sys.stderr)
    print(BenchmarkOutput(results).document())


def token_seconds(folder: Path, memory_bytes: int | None, throttle: dict[str, Throttle]) -> tuple[float, int]:
    """Return the median seconds of a token, and the bytes of all weights."""
    config = folder_config(folder)
    model, weights = read_model(model_kind(config).auto, folder, config)
    stream = StreamedModel(model, weights.source, memory_bytes=memory_bytes, accelerator=None, throttle=throttle)
    ids, seconds = torch.arange(PROMPT).unsqueeze(0), []
    with torch.no_grad():
        for _ in range(WARM + TOKENS):
            begin = time.perf_counter()
            model(ids, use_cache=False)
            seconds.append(time.perf_counter() - begin)
    stream.close()
    return statistics.median(seconds[WARM:]), stream.total_bytes


if __name__ == "__main__":
    main()
