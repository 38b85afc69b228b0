"""Adapter initialization from the quantization error in the base (LoftQ, arXiv:2310.08659, algorithm 1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from offload.app.hf.models import BuiltModel
from offload.app.hf.sources import RemovedProduct
from offload.errors import ConfigError
from offload.extras.adapters.adapters import outermost_modules
from offload.layout.codecs import Codec, decoded


def initialize_loftq(
    adapted: BuiltModel,
    names: Mapping[nn.Parameter, str],
    codecs: Mapping[nn.Parameter, tuple[Codec, torch.dtype]],
    num_rounds: int,
) -> None:
    """Initialize the LoRA matrices by `num_rounds` LoftQ rounds, one weight at a time.

    Each round quantizes the weight minus the last product, and computes the rank-r product nearest to the weight minus
    this quantized value. The base later lacks the next-to-last product, which is added to `adapted.removed`.

    - names: base parameter names.
    - codecs: codec and compute dtype for each quantized base parameter.

    Raises ConfigError if no adapted weight is quantized.
    """
    from peft.tuners.lora.layer import LoraLayer

    model: Any = adapted.model
    parameter_names, num_adapted = {parameter: name for name, parameter in model.named_parameters()}, 0
    for _, layer in outermost_modules(model):
        weight = layer.get_base_layer()._parameters.get("weight") if isinstance(layer, LoraLayer) else None
        source = adapted.source(parameter_names[weight]) if weight in codecs else None
        if weight is None or source is None or weight.dim() != 2:
            continue
        num_adapted += 1
        adapter, transposed = model.active_adapter, bool(getattr(layer, "fan_in_fan_out", False))
        values, removed = source.read(0, weight.numel()).view(weight.shape), None
        for number in range(num_rounds):
            left, right = _nearest_factors(values, removed, *codecs[weight], layer.r[adapter], transposed)
            if number + 1 < num_rounds:
                removed = RemovedProduct(left, right, transposed)
        with torch.no_grad():
            layer.lora_A[adapter].weight.copy_(right)
            layer.lora_B[adapter].weight.copy_(left / layer.scaling[adapter])
        if removed is not None:
            adapted.removed[names[weight]] = removed  # type: ignore[index]
    if not num_adapted:
        raise ConfigError(
            "lora.init is loftq, but none of the adapted weights is quantized by this run, so there is no quantization "
            "error to compensate: set --offload.frozen_weights nf4 or int8, with a pretrained model, or --lora.init "
            "default."
        )


def _nearest_factors(
    values: torch.Tensor, removed: RemovedProduct | None, codec: Codec, dtype: torch.dtype, rank: int, transposed: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return fp32 factors [out, rank] and [rank, in], whose product is nearest to W - Q(W - removed) (truncated SVD).

    W: `values`; Q: quantize and dequantize with `codec`.
    """
    reduced = values if removed is None else removed.subtract_from(values)
    error = values.float() - decoded(codec, reduced.reshape(-1), dtype).view(values.shape).float()
    u, singular_values, v = torch.linalg.svd(error.T if transposed else error, full_matrices=False)
    roots = singular_values[:rank].sqrt()
    return (u[:, :rank] * roots).contiguous(), (roots[:, None] * v[:rank]).contiguous()
