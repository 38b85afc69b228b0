"""Adapters over a frozen 1.2 G parameter base, from the command line: memory and disk use of a run.

python -m benchmarks.frozen_base --dir FOLDER > benchmarks/results/frozen_base.json     # minutes; 3 GiB of the disk

The benchmark writes a Llama with random bf16 weights, one shard for each block. `python -m offload.train` trains a LoRA
over this model on the sources of the standard library, with device memory for two blocks:

- with the nf4 base in host memory, in 1.1 times the base bytes (0.516 a block weight, 2 an embedding weight)
- with the base in the model's own files, in 256 MiB of host memory

On a CPU the device is process memory too. The memory of Python, torch and transformers is the resident peak of the same
command with a model of 0.6 M parameters.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from offload.extras.tools.benches.report import BenchmarkOutput, Result

MIB = 1 << 20
SHAPE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 23, "num_attention_heads": 32}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
VOCABULARY, RANK, SEQUENCE = 8192, 8, 64
FILES_HOST_BYTES = 256 * MIB


@dataclass
class MemorySource:
    """Memory and disk use of a run."""

    command: str
    """The command."""
    resident_bytes: int = 0
    """Peak resident memory."""
    nameless_bytes: int = 0
    """Peak disk space of open files without a name."""
    written_bytes: int = 0
    """Disk space of all files left by the run, as du counts it."""
    said: list[str] = field(default_factory=list)
    """Lines printed by the run."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """Lines of the run's metrics."""


def main() -> None:
    """Make both models, and run both variants on each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, help="a folder on a disk with room for the model")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as made:
        results = measure(Path(made), SHAPE, FILES_HOST_BYTES, arguments.steps)
    print(BenchmarkOutput(results).document())


def measure(folder: Path, shape: Mapping[str, int], files_host_bytes: int, steps: int) -> list[Result]:
    """Return the results of both variants over a model of this shape, beside runs over a tiny model."""
    model, tiny = make_model(folder / "model", shape), make_model(folder / "tiny", TINY)
    width = shape["hidden_size"]
    num_weights = shape["num_hidden_layers"] * (_matrix_weights(shape) + 2 * width) + (VOCABULARY + 1) * width
    device_bytes, base_bytes = 2 * unit_bytes(shape), nf4_bytes(shape)
    ways = {
        "nf4": (["--offload.frozen_weights", "nf4"], base_bytes * 11 // 10),
        "files": (["--offload.parameters", "files"], files_host_bytes),
    }
    results = []
    for name, (flags, host) in ways.items():
        flags += ["--offload.device_memory", str(device_bytes), "--offload.host_memory", str(host)]
        least = train(tiny, flags, folder / f"{name}-tiny", steps)
        before = shutil.disk_usage(folder).used
        found = train(model, flags, folder / name, steps)
        after, last = shutil.disk_usage(folder).used, found.steps[-1]
        details = {
            "parameters": num_weights,
            "base_in_nf4_bytes": base_bytes,
            "resident_bytes": found.resident_bytes,
            "resident_of_a_tiny_model_bytes": least.resident_bytes,
            "device_budget_bytes": device_bytes,
            "device_peak_bytes": last["peak_device_bytes"],
            "host_budget_bytes": host,
            "host_peak_bytes": last["peak_host_bytes"],
            "disk_written_bytes": found.written_bytes,
            "disk_nameless_bytes": found.nameless_bytes,
            "disk_used_before_and_after_bytes": [before, after],
            "losses": [step["loss"] for step in found.steps],
            "command": found.command,
            "said": [line for line in found.said if line.startswith(("plan:", "tiers:", "the export"))],
        }
        own = found.resident_bytes - least.resident_bytes - device_bytes
        results.append(Result(f"{name}: host memory", own / MIB, "MiB", "what there may be", host / own, details))
        print(f"{name}: {own / MIB:.0f} MiB of {host / MIB:.0f}", file=sys.stderr)
    return results


def unit_bytes(shape: Mapping[str, int]) -> int:
    """Return the bytes of a block with adapters in bf16."""
    return 2 * (_matrix_weights(shape) + (2 + 4 * RANK) * shape["hidden_size"])


def nf4_bytes(shape: Mapping[str, int]) -> int:
    """Return the base bytes with block matrices in nf4: records of 16,384 weights."""
    num_records, others = _matrix_weights(shape) // 16384, 2 * shape["hidden_size"]
    return shape["num_hidden_layers"] * (8456 * num_records + 2 * others) + 2 * VOCABULARY * shape["hidden_size"]


def _matrix_weights(shape: Mapping[str, int]) -> int:
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    return 4 * width * width + 3 * width * inner


def make_model(folder: Path, shape: Mapping[str, int]) -> Path:
    """Write a Llama with random bf16 weights, with one shard in memory at a time, and a tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from offload.extras.data.tokenizer import train_bpe

    folder.mkdir()
    config = LlamaConfig(**shape, vocab_size=VOCABULARY, tie_word_embeddings=True, dtype="bfloat16")
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(folder)
    with torch.device("meta"):
        sizes = {name: tuple(value.shape) for name, value in LlamaForCausalLM(config).named_parameters()}
    shards: dict[str, list[str]] = {}
    for name in sizes:
        shards.setdefault(name.split(".")[2] if ".layers." in name else "", []).append(name)
    generator, index = torch.Generator().manual_seed(0), dict[str, str]()
    for number, names in enumerate(shards.values(), 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        values = {
            name: (torch.randn(sizes[name], generator=generator) * 0.02 + ("norm" in name)).bfloat16() for name in names
        }
        save_file(values, folder / file, {"format": "pt"})
        index |= dict.fromkeys(names, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    texts = (path.read_text(errors="ignore") for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")))
    train_bpe(texts, VOCABULARY).save_pretrained(folder)
    return folder


def train(model: Path, flags: Sequence[str], run: Path, steps: int) -> MemorySource:
    """Train a LoRA over a model in a separate process, and watch the process."""
    words = ["--model.path", str(model), "--data.source", "builtin:stdlib", "--lora.rank", str(RANK)]
    words += ["--train.precision", "bf16", "--train.steps", str(steps), "--train.batch_size", "2", *flags]
    words += ["--data.sequence_length", str(SEQUENCE), "--data.eval_fraction", "0", "--run.dir", str(run)]
    found = MemorySource(f"python -m offload.train {' '.join(words)}")
    log = run.with_suffix(".log")
    with log.open("w") as said:
        child = subprocess.Popen([sys.executable, "-m", "offload.train", *words], stdout=said, stderr=said)
        while child.poll() is None:
            found.resident_bytes = max(found.resident_bytes, _resident_bytes(child.pid))
            found.nameless_bytes = max(found.nameless_bytes, _nameless_bytes(child.pid))
            time.sleep(0.02)
    found.said = log.read_text().splitlines()
    if child.returncode:
        raise SystemExit("\n".join((found.command, *found.said)))
    found.written_bytes = 512 * sum(path.lstat().st_blocks for path in (run, *run.rglob("*")))
    found.steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return found


def _resident_bytes(pid: int) -> int:
    """Return the peak resident memory of a process so far; 0 after its end."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def _nameless_bytes(pid: int) -> int:
    """Return the disk space of open files without a name."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            if str(link.readlink()).endswith(" (deleted)"):
                found += 512 * link.stat().st_blocks
        except OSError:  # just closed
            continue
    return found


if __name__ == "__main__":
    main()
