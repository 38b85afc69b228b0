"""Model folders of real sizes with random codes, in the layouts of published quantized folders, written in pieces."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from offload.extras.data.tokenizer import train_bpe
from tests.hf.quantized import DOUBLE, nf4_members

SHARD_BYTES = 4 << 30
_MIDDLE_EXPONENT, _EXPONENTS = 119, 4
"""Scales of mxfp4 blocks are 2 ** (e - 127), for e from 119 to 122: weights of 0.004 to 0.2."""

Members = Iterator[tuple[str, torch.Tensor]]
"""Stored tensors, by name."""
Encoder = Callable[[str, tuple[int, ...]], Members]


BITSANDBYTES = DOUBLE | {"bnb_4bit_compute_dtype": "bfloat16"}
MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}


def write_mxfp4(folder: Path, shape: Mapping[str, Any]) -> None:
    """Write a gpt-oss model with experts in mxfp4, as published."""
    write(folder, shape, MXFP4, lambda name: mxfp4 if name.endswith(("gate_up_proj", "down_proj")) else plain)


def write_nf4(folder: Path, shape: Mapping[str, Any]) -> None:
    """Write a model with the matrices of blocks in nf4 of bitsandbytes, with double quantization."""

    def encoder_of(name: str) -> Encoder:
        return nf4 if ".layers." in name and name.endswith("proj.weight") else plain

    write(folder, shape, BITSANDBYTES, encoder_of)


def write(
    folder: Path, shape: Mapping[str, Any], quantization: Mapping[str, Any], encoder_of: Callable[[str], Encoder]
) -> None:
    """Write random weights, each by the encoder for the name, in shards of 4 GiB, the index, and a tokenizer."""
    torch.manual_seed(0)
    folder.mkdir(parents=True, exist_ok=True)
    shape = {**shape, "dtype": "bfloat16"}
    shape.pop("quantization_config", None)
    config = AutoConfig.for_model(**shape)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    tensors = (each for name, size in per_expert(shapes) for each in encoder_of(name)(name, size))
    index: dict[str, str] = {}
    for number, shard in enumerate(shards(tensors)):
        file = f"model-{number:05}.safetensors"
        save_file(shard, folder / file, {"format": "pt"})
        index |= dict.fromkeys(shard, file)
        print(f"  {folder.name}: wrote {file}", file=sys.stderr, flush=True)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    train_bpe([f"{number} of the numbers" for number in range(999)], vocab_size=512).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(shape | {"quantization_config": quantization}, indent=1))


def per_expert(shapes: dict[str, tuple[int, ...]]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes as files have them: Qwen's experts, which transformers stacks, one by one."""
    for name, shape in shapes.items():
        stem, _, last = name.rpartition(".experts.")
        if not stem or f"{name}_bias" in shapes or last.endswith("_bias"):
            yield name, shape
            continue
        num, rows, width = shape
        parts = ("gate_proj", "up_proj") if last == "gate_up_proj" else ("down_proj",)
        for expert in range(num):
            for part in parts:
                yield f"{stem}.experts.{expert}.{part}.weight", (rows // len(parts), width)


def shards(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Group tensors to files of some 4 GiB."""
    shard: dict[str, torch.Tensor] = {}
    for name, tensor in tensors:
        shard[name] = tensor
        if sum(each.nbytes for each in shard.values()) >= SHARD_BYTES:
            yield shard
            shard = {}
    if shard:
        yield shard


def plain(name: str, shape: tuple[int, ...]) -> Members:
    """Yield a weight in bf16: ones for norms, zeros for biases, else small random numbers.

    Embeddings have unit variance. With smaller ones all tokens are alike in later layers, and go to the same experts.
    """
    if "embed_tokens" in name:
        yield name, torch.empty(shape, dtype=torch.bfloat16).normal_()
    elif len(shape) == 1 or name.endswith("bias"):
        yield name, torch.full(shape, float("norm" in name), dtype=torch.bfloat16)
    else:
        yield name, torch.empty(shape, dtype=torch.bfloat16).normal_(std=0.02)


def mxfp4(name: str, shape: tuple[int, ...]) -> Members:
    """Yield experts [n, rows, columns] as codes, 32 neighbours of a column in a block, and exponents."""
    num, rows, columns = shape
    blocks = (num, columns, rows // 32)
    yield f"{name}_blocks", torch.randint(256, (*blocks, 16), dtype=torch.uint8)
    yield f"{name}_scales", torch.randint(_MIDDLE_EXPONENT, _MIDDLE_EXPONENT + _EXPONENTS, blocks, dtype=torch.uint8)


def nf4(name: str, shape: tuple[int, ...]) -> Members:
    """Yield a matrix as bitsandbytes stores it: codes, coded scales and their scales."""
    numel = shape[0] * shape[1]
    num_scales = numel // 64
    codes, sizes = (torch.randint(256, (count,), dtype=torch.uint8) for count in (numel // 2, num_scales))
    most = torch.full((-(-num_scales // 256),), 0.01)
    members = nf4_members(codes, sizes, most, 0.05, shape, torch.bfloat16)
    for ending, stored in members.items():
        yield name.removesuffix(".weight") + ending, stored.clone()
