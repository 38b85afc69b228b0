"""Adapters over a frozen base of 1.2 G parameters, from the command line: what memory and disk a run takes.

python -m benchmarks.frozen_base --dir FOLDER > benchmarks/results/frozen_base.json     # minutes; 3 GiB of the disk

A Llama of random bf16 weights is written, a shard for each block, and `python -m offload.train` trains a LoRA over it
on the sources of the standard library, with the device memory of two blocks: once with the base in nf4 in the host's
memory, of which there are the base's bytes and a tenth (0.516 a weight of the blocks, and 2 of the embeddings, which
stay as they are); once with the base in its own files, with 256 MiB of the host's memory. On a CPU the device is memory
of the process too. What Python, torch and transformers take is the most that the same command has resident with a model
of 0.6 M parameters.
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

from offload.benches.report import Measured, Result

MIB = 1 << 20
SHAPE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 23, "num_attention_heads": 32}
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
VOCABULARY, RANK, SEQUENCE = 8192, 8, 64
FILES_HOST_BYTES = 256 * MIB


@dataclass
class Held:
    """What a run took."""

    command: str
    """The command."""
    resident_bytes: int = 0
    """The memory that was resident at most."""
    nameless_bytes: int = 0
    """What open files have on disk that are in no folder, at most."""
    written_bytes: int = 0
    """What all that the run has left takes on disk, as du counts it."""
    said: list[str] = field(default_factory=list)
    """The lines that the run has printed."""
    steps: list[dict[str, Any]] = field(default_factory=list)
    """The lines of its metrics."""


def main() -> None:
    """Make both models, and run each of the two ways over either."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, help="a folder on a disk with room for the model")
    parser.add_argument("--steps", type=int, default=3)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.dir) as made:
        results = measure(Path(made), SHAPE, FILES_HOST_BYTES, arguments.steps)
    print(Measured(results).document())


def measure(folder: Path, shape: Mapping[str, int], files_host_bytes: int, steps: int) -> list[Result]:
    """Return what each way takes over a model of a shape, beside one of the same over next to nothing."""
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
    """Return the bytes of a block's weights in bf16, with its adapters."""
    return 2 * (_matrix_weights(shape) + (2 + 4 * RANK) * shape["hidden_size"])


def nf4_bytes(shape: Mapping[str, int]) -> int:
    """Return what the base takes with the matrices of its blocks in nf4: records of 16,384 weights."""
    num_records, others = _matrix_weights(shape) // 16384, 2 * shape["hidden_size"]
    return shape["num_hidden_layers"] * (8456 * num_records + 2 * others) + 2 * VOCABULARY * shape["hidden_size"]


def _matrix_weights(shape: Mapping[str, int]) -> int:
    width, inner = shape["hidden_size"], shape["intermediate_size"]
    return 4 * width * width + 3 * width * inner


def make_model(folder: Path, shape: Mapping[str, int]) -> Path:
    """Write a Llama of random bf16 weights, of which one shard at a time is in memory, and a tokenizer."""
    import torch
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    from offload.data.tokenizer import train_bpe

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


def train(model: Path, flags: Sequence[str], run: Path, steps: int) -> Held:
    """Train a LoRA over a model in a process of its own, and watch it."""
    words = ["--model.path", str(model), "--data.source", "builtin:stdlib", "--lora.rank", str(RANK)]
    words += ["--train.precision", "bf16", "--train.steps", str(steps), "--train.batch_size", "2", *flags]
    words += ["--data.sequence_length", str(SEQUENCE), "--data.eval_fraction", "0", "--run.dir", str(run)]
    found = Held(f"python -m offload.train {' '.join(words)}")
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
    """Return the most that a process had resident so far; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), 0)


def _nameless_bytes(pid: int) -> int:
    """Return what files take on disk that a process has open and that are in no folder."""
    found = 0
    for link in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            if str(link.readlink()).endswith(" (deleted)"):
                found += 512 * link.stat().st_blocks
        except OSError:  # it is closed just now
            continue
    return found


if __name__ == "__main__":
    main()
