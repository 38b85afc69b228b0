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
from torch import nn

from offload import Engine, Placement
from offload.tiers.host import trim_heap
from tests.engine.sizes import elements

SHAPE = {
    "hidden_size": 512,
    "intermediate_size": 1376,
    "num_hidden_layers": 10,
    "num_attention_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 64,
}


def resident_bytes(field: str) -> int:
    """Return VmRSS or VmHWM of this process in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 100, (1, 16))
    return {"input_ids": ids, "labels": ids}


def largest_and_total(model: nn.Module) -> tuple[int, int]:
    units = [
        elements(model.model.embed_tokens),
        elements(model.lm_head),
        *(elements(layer) for layer in model.model.layers),
    ]
    return max(units), sum(units) + elements(model.model.norm)


def filled(folder: Path) -> dict[str, Any]:
    from offload.app.config.sections import ModelSection
    from offload.app.hf.models import build_model

    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **SHAPE}))
    section = ModelSection(path=str(folder / "config.json"), init="random")
    build_model(section, seed=0)  # imports, and objects that transformers caches for the whole process
    before = resident_bytes("VmRSS")
    built = build_model(section, seed=0)
    largest, total = largest_and_total(built.model)
    engine = Engine(built.model, precision="bf16", fill=built.fill)
    for _ in range(2):
        engine.step(batch())
    return {"largest": largest, "total": total, "peak": resident_bytes("VmHWM") - before}


DISK_SHAPE = SHAPE | {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6, "num_attention_heads": 16}
DEVICE_BYTES, HOST_BYTES = 96 << 20, 64 << 20


def disk(folder: Path) -> dict[str, Any]:
    from offload.app.config.sections import ModelSection
    from offload.app.hf.models import build_model

    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **DISK_SHAPE}))
    section = ModelSection(path=str(folder / "config.json"), init="random")
    built = build_model(section, seed=0)
    before = resident_bytes("VmRSS")
    tiers = dict.fromkeys(("parameters", "optimizer", "activations"), "nvme")
    placement = Placement(**tiers, nvme_dir=folder, device_memory=DEVICE_BYTES, host_memory=HOST_BYTES)
    engine = Engine(built.model, precision="bf16", placement=placement, fill=built.fill)
    losses = [float(engine.step(batch()).loss) for _ in range(3)]
    held = {tier: sum(size for where, _, size in engine.allocations if where == tier) for tier in ("cpu", "nvme")}
    found = {"losses": losses, **held, "host": engine.counters.peak_host_bytes, "device": DEVICE_BYTES}
    found["peak"] = resident_bytes("VmHWM") - before
    engine.close()
    return found


def coded(folder: Path) -> dict[str, Any]:
    from offload.app.config.sections import ModelSection
    from offload.app.hf.models import build_model

    (folder / "config.json").write_text(json.dumps({"model_type": "llama", **DISK_SHAPE | {"num_hidden_layers": 24}}))
    built = build_model(ModelSection(path=str(folder / "config.json"), init="random"), seed=0)
    for name, parameter in built.model.named_parameters():
        parameter.requires_grad_("norm" in name)
    largest, total = largest_and_total(built.model)
    before = resident_bytes("VmRSS")
    engine = Engine(built.model, precision="bf16", fill=built.fill, frozen_weights="nf4")
    for _ in range(2):
        engine.step(batch())
    held = {tier: sum(size for where, _, size in engine.allocations if where == tier) for tier in ("cpu", "device")}
    return {"largest": largest, "total": total, **held, "peak": resident_bytes("VmHWM") - before}


def made(folder: Path) -> dict[str, Any]:
    import transformers

    config = transformers.LlamaConfig(**DISK_SHAPE | {"num_hidden_layers": 24})
    transformers.LlamaForCausalLM(config).bfloat16().save_pretrained(folder)
    return {}


def files(folder: Path) -> dict[str, Any]:
    from offload.app.config.sections import ModelSection
    from offload.app.hf.models import build_model

    built = build_model(ModelSection(path=str(folder), init="pretrained"), seed=0)
    for name, parameter in built.model.named_parameters():
        parameter.requires_grad_("norm" in name)
    _, total = largest_and_total(built.model)
    before = resident_bytes("VmRSS")
    placement = Placement(parameters="files", device_memory=2 * DEVICE_BYTES, host_memory=4 * HOST_BYTES)
    engine = Engine(built.model, precision="bf16", fill=built.fill, placement=placement)
    for _ in range(2):
        engine.step(batch())
    held = {tier: sum(size for where, _, size in engine.allocations if where == tier) for tier in ("cpu", "nvme")}
    found = {"total": total, **held, "read": engine.counters.nvme_read_bytes, "device": 2 * DEVICE_BYTES}
    return found | {"peak": resident_bytes("VmHWM") - before}


def loaded(folder: Path) -> dict[str, Any]:
    import transformers

    transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE | {"num_hidden_layers": 1, "vocab_size": 64}))
    gc.collect()
    before = resident_bytes("VmRSS")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SHAPE))
    largest, total = largest_and_total(model)
    built = resident_bytes("VmRSS") - before
    engine = Engine(model, precision="bf16")
    engine.step(batch())
    found = {"largest": largest, "total": total, "built": built, "peak": resident_bytes("VmHWM") - before}
    engine.close()
    return found | {"grown": growth()}


def growth() -> int:
    """Return the process growth in bytes over 50 small-model steps, after a warm-up."""
    import transformers

    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "vocab_size": 256,
    }
    engine = Engine(transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape)))
    rows = {key: torch.randint(3, 256, (8, 64)) for key in ("input_ids", "labels")}
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
    modes = {"filled": filled, "loaded": loaded, "disk": disk, "coded": coded, "made": made, "files": files}
    print(json.dumps(modes[sys.argv[1]](Path(sys.argv[2]))))
