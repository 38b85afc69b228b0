"""A base minus the initial product of an adapter, W - B0 A0, computed on each read of W from the files.

PiSSA (arXiv:2404.02948, equation 4); OLoRA (arXiv:2406.01775, algorithm 1).
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import safetensors.torch
import torch
from torch import nn

from offload.app.hf.models import BuiltModel
from offload.app.hf.sources import RemovedProduct, ResidualSource
from offload.errors import ConfigError
from offload.files.sources import Source

_MATRIX = re.compile(r"base_model\.model\.(?P<module>.*)\.lora_(embedding_)?(?P<key>[AB])(\.weight)?")
"""LoRA matrix names in PEFT's files."""


def subtract_products(built: BuiltModel, removed: Mapping[str, RemovedProduct]) -> BuiltModel:
    """Return an unfilled model with the products in `removed` subtracted from its weights.

    Products added to `removed` later are subtracted too.
    """
    names = {id(parameter): name for name, parameter in built.model.named_parameters()}

    def source(name: str) -> Source | None:
        original = built.source(name)
        return ResidualSource(original, removed[name]) if original is not None and name in removed else original

    def fill(name: str, module: nn.Module) -> Mapping[nn.Parameter, Source]:
        sources = dict(built.fill(name, module) or {})
        for parameter in module.parameters():
            reduced = source(key) if (key := names.get(id(parameter))) in removed else None  # type: ignore[arg-type]
            if reduced is not None:
                sources[parameter] = reduced
        return sources

    return replace(built, fill=fill, source=source)


def to_bytes(removed: Mapping[str, RemovedProduct]) -> bytes:
    """Return the removed products as safetensors bytes."""
    tensors = {f"{name}.{key}": getattr(each, key) for name, each in removed.items() for key in ("left", "right")}
    tensors |= {f"{name}.transposed": torch.tensor(each.transposed) for name, each in removed.items()}
    return safetensors.torch.save(tensors)


def from_bytes(data: bytes) -> dict[str, RemovedProduct]:
    """Return the products from `to_bytes`.

    Each tensor gets separate memory: alignment can change the last bits of a product.
    """
    tensors = {key: value.clone() for key, value in safetensors.torch.load(data).items()}
    names = [key.removesuffix(".left") for key in tensors if key.endswith(".left")]
    return {
        name: RemovedProduct(tensors[f"{name}.left"], tensors[f"{name}.right"], bool(tensors[f"{name}.transposed"]))
        for name in names
    }


def to_plain_lora(
    model: Any, config: Any, values: Mapping[str, torch.Tensor], removed: Mapping[str, RemovedProduct]
) -> tuple[Any, dict[str, torch.Tensor]]:
    """Return configuration and values for a LoRA with twice the rank over the original base.

    The result equals the adapter over the reduced base: B A - B0 A0 = [B, -B0] [A; A0], as PEFT converts
    (`path_initial_model_for_weight_conversion`). `values`: by PEFT's names in an adapter file. Raises ConfigError.
    """
    if config.use_rslora and (config.rank_pattern or config.alpha_pattern):
        raise ConfigError(
            "the adapter cannot be converted for the original base weights: PEFT does not convert use_rslora with "
            "rank_pattern or alpha_pattern. Merge it (offload export RUN OUT --merge)."
        )
    converted, base = dict(values), model.get_base_model()
    for name, value in values.items():
        match = _MATRIX.fullmatch(name)
        if match is not None:
            product, is_b = removed.get(f"{match['module']}.weight"), match["key"] == "B"
            extra = torch.zeros_like(value)
            if product is not None:
                scale = base.get_submodule(match["module"]).scaling[model.active_adapter]
                extra = (product.left / -scale if is_b else product.right).to(value.dtype)
            converted[name] = torch.cat([value, extra], dim=int(is_b))
    plain = copy.deepcopy(config)
    plain.init_lora_weights, plain.inference_mode = True, True
    plain.r, plain.lora_alpha = 2 * config.r, (2**0.5 if config.use_rslora else 2) * config.lora_alpha
    plain.rank_pattern = {key: 2 * value for key, value in (config.rank_pattern or {}).items()}
    plain.alpha_pattern = {key: 2 * value for key, value in (config.alpha_pattern or {}).items()}
    return plain, converted
