"""Quantized model folders from small random models, with independently dequantized weights.

The reference is transformers code where this runs on a CPU, and numpy otherwise.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
import transformers as t
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from offload.extras.quant.codecs import Nf4Codec, dynamic_map, nf4_levels

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 384,
    "max_position_embeddings": 64,
}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_EXPERTS = {"moe_intermediate_size": 32, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
_LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16}

Members = dict[str, Tensor]
"""The stored tensors for a weight, by name suffix."""


def llama() -> Any:
    return t.LlamaForCausalLM(t.LlamaConfig(**SIZES, **SPECIAL))


def deepseek(**settings: Any) -> Any:
    sizes = SIZES | {"num_key_value_heads": 4}
    experts = {**_EXPERTS, "n_shared_experts": 1, "first_k_dense_replace": 1, **settings}
    return t.DeepseekV3ForCausalLM(t.DeepseekV3Config(**sizes, **SPECIAL, **experts, **_LATENT))


def gpt_oss(**settings: Any) -> Any:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16, "sliding_window": 16}
    return t.GptOssForCausalLM(t.GptOssConfig(**SIZES | settings, **SPECIAL, **experts))


def fp8(weight: Tensor, dtype: torch.dtype) -> tuple[Members, Tensor]:
    """Blocks with 32 x 32 elements. Edge blocks may be smaller; transformers dequantizes only whole blocks."""
    rows, width = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -width % 32, 0, -rows % 32))
    scale = padded.unflatten(0, (-1, 32)).unflatten(2, (-1, 32)).abs().amax((1, 3)).clamp(min=1e-6) / 448
    scales = scale.repeat_interleave(32, 0).repeat_interleave(32, 1)[:rows, :width]
    codes = (weight / scales).to(torch.float8_e4m3fn)
    decoded = (codes.float() * scales).to(dtype)
    if padded.shape == weight.shape:
        decoded = Fp8Dequantize(None)._dequantize_one(codes, scale, dtype)
    return {".weight": codes, ".weight_scale_inv": scale}, decoded


def mxfp4(weight: Tensor, dtype: torch.dtype) -> tuple[Members, Tensor]:
    """Experts [n, rows, columns]: a block has 32 neighbours in a column."""
    num, rows, columns = weight.shape
    blocks = weight.transpose(1, 2).reshape(num, columns, rows // 32, 32)
    exponent = torch.floor(torch.log2(blocks.abs().amax(-1).clamp(min=1e-20))) - 2
    levels = torch.tensor(FP4_VALUES)
    codes = ((blocks / torch.exp2(exponent)[..., None])[..., None] - levels).abs().argmin(-1).to(torch.uint8)
    members = {"_blocks": codes[..., 0::2] | codes[..., 1::2] << 4, "_scales": (exponent + 127).to(torch.uint8)}
    return members, convert_moe_packed_tensors(members["_blocks"], members["_scales"], dtype=dtype)


def nf4(weight: Tensor, dtype: torch.dtype) -> tuple[Members, Tensor]:
    """Return tensors in bitsandbytes layout, taken from `Nf4` records, and the values dequantized with numpy."""
    flat, codec = weight.reshape(-1), Nf4Codec()
    records = torch.cat([stretch for *_, stretch in codec.encoded([flat])]).view(-1, codec.record_bytes)
    numel = flat.numel()
    codes, sizes = records[:, :8192].reshape(-1)[: numel // 2], records[:, 8192:8448].reshape(-1)[: numel // 64]
    most, mean = records[:, 8448:8452].view(torch.float32).view(-1), records[0, 8452:].view(torch.float32)
    members = nf4_members(codes, sizes, most, mean.item(), weight.shape, dtype)
    levels, places = nf4_levels().numpy(), np.stack([codes.numpy() >> 4, codes.numpy() & 15], 1).reshape(-1)
    of_blocks = dynamic_map().numpy()[sizes.numpy()] * np.repeat(most.numpy(), 256)[: len(sizes)] + mean.numpy()
    decoded = levels[places] * np.repeat(of_blocks, 64)
    return members, torch.from_numpy(decoded).view(weight.shape).to(dtype)


def nf4_members(
    codes: Tensor, sizes: Tensor, most: Tensor, mean: float, shape: Sequence[int], dtype: torch.dtype
) -> Members:
    """Return what bitsandbytes stores for a matrix with double quantization.

    codes: uint8, two elements each. sizes: uint8 scales of 64 elements. most, mean: fp32 scales of 256 scales, and
    their offset.
    """
    state = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": str(dtype).removeprefix("torch."),
        "shape": list(shape),
        "nested_blocksize": 256,
        "nested_dtype": "float32",
        "nested_offset": mean,
    }
    return {
        ".weight": codes.view(-1, 1),
        ".weight.absmax": sizes,
        ".weight.quant_map": nf4_levels(),
        ".weight.nested_absmax": most,
        ".weight.nested_quant_map": dynamic_map(),
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }


def nf4_single(weight: Tensor, dtype: torch.dtype) -> tuple[Members, Tensor]:
    """Return tensors without double quantization."""
    members, _ = nf4(weight, dtype)
    codes = members[".weight"].view(-1).numpy()
    sizes = weight.reshape(-1, 64).abs().amax(1).float()
    state = json.loads(bytes(members.pop(".weight.quant_state.bitsandbytes__nf4").tolist()))
    state = {key: value for key, value in state.items() if not key.startswith("nested")}
    del members[".weight.nested_absmax"], members[".weight.nested_quant_map"]
    members |= {
        ".weight.absmax": sizes,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    places = np.stack([codes >> 4, codes & 15], 1).reshape(-1)
    decoded = nf4_levels().numpy()[places] * np.repeat(sizes.numpy(), 64)
    return members, torch.from_numpy(decoded).view(weight.shape).to(dtype)


def _grouped(weight: Tensor, group: int, most: float) -> tuple[Tensor, Tensor]:
    """Return weights divided by group scales, and the scales, bf16 [rows, groups]."""
    blocks = weight.view(weight.shape[0], -1, group)
    scale = (blocks.abs().amax(-1) / most).clamp(min=1e-6).bfloat16()
    return (blocks / scale[..., None].float()).view(weight.shape), scale


def _times(codes: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Multiply in the dtype of the scales, like compressed-tensors."""
    group = codes.shape[1] // scale.shape[1]
    numbers = codes.numpy().astype(np.float64) * np.repeat(scale.double().numpy(), group, 1)  # exact
    return torch.from_numpy(numbers).to(torch.float32).to(scale.dtype).to(dtype)


def int4(weight: Tensor, dtype: torch.dtype) -> tuple[Members, Tensor]:
    """Eight elements packed in a word, with a scale for 32 neighbours in a row."""
    scaled, scale = _grouped(weight, 32, 7.5)
    codes = scaled.round().clamp(-8, 7).to(torch.int8)
    words = (codes.numpy().astype(np.int64) + 8).reshape(len(codes), -1, 8) << np.arange(0, 32, 4)
    packed = torch.from_numpy(words.sum(-1).astype(np.uint32).view(np.int32))
    shape = torch.tensor(weight.shape)
    members = {".weight_packed": packed, ".weight_scale": scale, ".weight_shape": shape}
    return members, _times(codes, scale, dtype)


def int8(weight: Tensor, dtype: torch.dtype) -> tuple[Members, Tensor]:
    """One scale per row."""
    scaled, scale = _grouped(weight, weight.shape[1], 127)
    codes = scaled.round().clamp(-128, 127).to(torch.int8)
    return {".weight": codes, ".weight_scale": scale}, _times(codes, scale, dtype)


def float8(weight: Tensor, dtype: torch.dtype) -> tuple[Members, Tensor]:
    """One scale per tensor."""
    scale = (weight.abs().amax() / 448).bfloat16().view(1)
    codes = (weight / scale.float()).to(torch.float8_e4m3fn)
    members = {".weight": codes, ".weight_scale": scale}
    return members, _times(codes.float(), scale.view(1, 1).expand(len(codes), 1), dtype)


def _compressed(kind: str, **weights: Any) -> dict[str, Any]:
    weights = {"symmetric": True, **weights}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "format": kind}}
    return {"quant_method": "compressed-tensors", "format": kind, "config_groups": groups, "ignore": ["lm_head"]}


_BITSANDBYTES = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
DOUBLE = {**_BITSANDBYTES, "bnb_4bit_use_double_quant": True}
"""Configuration entry of a model in nf4 with double quantization."""
FORMATS: dict[str, tuple[Callable[..., tuple[Members, Tensor]], dict[str, Any]]] = {
    "fp8": (fp8, {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}),
    "mxfp4": (mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": ["self_attn", "lm_head"]}),
    "nf4": (nf4, DOUBLE),
    "nf4 single": (nf4_single, _BITSANDBYTES),
    "int4": (int4, _compressed("pack-quantized", num_bits=4, type="int", strategy="group", group_size=32)),
    "int8": (int8, _compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "float8": (float8, _compressed("float-quantized", num_bits=8, type="float", strategy="tensor")),
}
"""Encoder and configuration entry by format name."""


def quantized(
    folder: Path,
    kind: str,
    make: Callable[[], Any] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    *,
    leave: str = "(?!)",
    settings: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """Write a random model with quantized block matrices to `folder`, and the dequantized model to `folder`-plain.

    `leave`: expression for names of unquantized weights. `settings`: changes of the configuration entry. Returns
    `folder`.
    """
    plain, (encode, quantization) = folder.with_name(f"{folder.name}-plain"), FORMATS[kind]
    torch.manual_seed(3)
    model = (make or (gpt_oss if kind == "mxfp4" else llama))()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    for each in (folder, plain):
        model.to(dtype).save_pretrained(each)
    values = load_file(plain / "model.safetensors")
    coded: dict[str, Tensor] = {}
    for name, value in list(values.items()):
        stem = name.removesuffix(".weight")
        experts = kind == "mxfp4" and value.dim() == 3
        is_matrix = value.dim() == 2 and ".layers." in name and not name.endswith(("gate.weight", "router.weight"))
        if (experts or (kind != "mxfp4" and is_matrix)) and not re.search(leave, name):
            members, values[name] = encode(value.float(), dtype)
            coded |= {f"{name if experts else stem}{end}": tensor.clone() for end, tensor in members.items()}
        else:
            coded[name] = value
    save_file(coded, folder / "model.safetensors", {"format": "pt"})
    save_file(
        {name: value.contiguous() for name, value in values.items()}, plain / "model.safetensors", {"format": "pt"}
    )
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": {**quantization, **settings}}))
    return folder
