"""Child process of test_memory: trains and prints the peak memory as one JSON object.

    python -m tests.engine.memory_child MODE FOLDER

Modes: `filled` builds weights unit by unit. `loaded` hands a whole fp32 model to the engine, then runs 60 steps of a
small model. `disk` offloads all states to NVMe in FOLDER. `coded` quantizes a frozen base to nf4 unit by unit. `made`
saves a bf16 model to FOLDER, and `files` trains it with the frozen weights read from there.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn

from offload import Engine, Placement
from offload.app.config.sections import ModelSection
from offload.app.hf.models import build_model
from offload.tiers.host import trim_heap
from tests.engine.sizes import Elements, tier_bytes

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 64,
}
WIDE = SHAPE | {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16}
DEEP = WIDE | {"num_hidden_layers": 24}
SMALL = SHAPE | {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "vocab_size": 256}
DEVICE_BYTES, HOST_BYTES = 96 << 20, 64 << 20


def llama(shape: dict[str, int]) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))


def resident_bytes(field: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def batch(rows: int = 1, length: int = 16, words: int = 100) -> dict[str, torch.Tensor]:
    ids = torch.randint(3, words, (rows, length))
    return {"input_ids": ids, "labels": ids}


def sizes_of(model: nn.Module) -> dict[str, int]:
    """Return the elements of the largest unit, and of all units together."""
    sizes = Elements(model)
    units = [sum(each) for each in zip(sizes.trained, sizes.frozen, strict=True)]
    return {"largest": max(units), "total": sum(units) + sizes.norm}


def trained(path: Path, init: str, num_steps: int, is_base: bool = False, **settings: Any) -> dict[str, Any]:
    """Train a model of a folder or a configuration. is_base: norms alone train."""
    built = build_model(ModelSection(path=str(path), init=init), seed=0)
    before = resident_bytes("VmRSS")
    for name, parameter in built.model.named_parameters():
        parameter.requires_grad_(not is_base or "norm" in name)
    found: dict[str, Any] = sizes_of(built.model)
    engine = Engine(built.model, precision="bf16", fill=built.fill, **settings)
    found["losses"] = [float(engine.step(batch()).loss) for _ in range(num_steps)]
    for tier in ("cpu", "nvme", "device"):
        found[tier] = sum(tier_bytes(engine, tier).values())
    found |= {"host": engine.counters.peak_host_bytes, "read": engine.counters.nvme_read_bytes}
    found["peak"] = resident_bytes("VmHWM") - before
    engine.close()
    return found


def configured(folder: Path, shape: dict[str, int]) -> Path:
    """Write the configuration of a model."""
    path = folder / "config.json"
    path.write_text(json.dumps({"model_type": "llama", **shape}))
    return path


def filled(folder: Path) -> dict[str, Any]:
    return trained(configured(folder, SHAPE), "random", 2)


def disk(folder: Path) -> dict[str, Any]:
    tiers = dict.fromkeys(("parameters", "optimizer", "activations"), "nvme")
    placement = Placement(**tiers, nvme_dir=folder, device_memory=DEVICE_BYTES, host_memory=HOST_BYTES)
    return trained(configured(folder, WIDE), "random", 3, placement=placement) | {"device": DEVICE_BYTES}


def coded(folder: Path) -> dict[str, Any]:
    return trained(configured(folder, DEEP), "random", 2, is_base=True, frozen_weights="nf4")


def made(folder: Path) -> dict[str, Any]:
    llama(DEEP).bfloat16().save_pretrained(folder)
    return {}


def files(folder: Path) -> dict[str, Any]:
    placement = Placement(parameters="files", device_memory=2 * DEVICE_BYTES, host_memory=4 * HOST_BYTES)
    return trained(folder, "pretrained", 2, is_base=True, placement=placement) | {"device": 2 * DEVICE_BYTES}


def loaded(folder: Path) -> dict[str, Any]:
    llama(SMALL)  # imports
    gc.collect()
    before = resident_bytes("VmRSS")
    model = llama(SHAPE)
    found, built = sizes_of(model), resident_bytes("VmRSS") - before
    engine = Engine(model, precision="bf16")
    engine.step(batch())
    peak = resident_bytes("VmHWM") - before
    engine.close()
    return {**found, "built": built, "peak": peak, "grown": growth()}


def growth() -> int:
    """Return the process growth in bytes over 50 small-model steps, after a warm-up."""
    engine, rows = Engine(llama(SMALL)), batch(8, 64, 256)
    gc.collect()
    gc.disable()  # a reference cycle counts as a leak: the collector frees it too late
    measured = []
    for number in range(60):
        engine.step(rows)
        if number in (9, 59):
            trim_heap()
            measured.append(resident_bytes("VmRSS"))
    return measured[1] - measured[0]


if __name__ == "__main__":
    torch.set_num_threads(1)
    modes = {mode.__name__: mode for mode in (filled, loaded, disk, coded, made, files)}
    print(json.dumps(modes[sys.argv[1]](Path(sys.argv[2]))))
