"""Quantized model folders: any read parts equal the transformers dequantization, and unknown formats are refused."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from offload.app.config.sections import ModelSection
from offload.app.hf.models import BuiltModel, build_model, fill_all
from offload.app.hf.sources import QuantizedStackedSource
from offload.errors import ConfigError
from tests.hf.quantized import FORMATS, deepseek, quantized


def load(folder: Path) -> BuiltModel:
    return build_model(ModelSection(path=str(folder)), seed=0)


def edit(folder: Path, change: Callable[[dict[str, torch.Tensor], dict[str, Any]], None]) -> None:
    """Change the tensors and the quantization_config in a folder."""
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    change(tensors, config["quantization_config"])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", FORMATS)
def test_weights_are_what_they_are_dequantised_to(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = quantized(tmp_path / "base", kind, dtype=dtype)
    wanted = load_file(tmp_path / "base-plain" / "model.safetensors")
    built = load(folder)
    assert len(built.quantized) == (4 if kind == "mxfp4" else 14)
    assert not built.notes
    assert not hasattr(built.model.config, "quantization_config")
    for name, parameter in built.model.named_parameters():
        source = built.source(name)
        assert source is not None
        assert parameter.dtype == source.dtype
        ends = [(begin, min(begin + 1000, parameter.numel())) for begin in range(0, parameter.numel(), 1000)]
        pieces = [source.read(*each) for each in ends]
        assert torch.equal(torch.cat(pieces).view(parameter.shape), wanted[name].to(parameter.dtype)), name
        if parameter in built.quantized:
            codec, numel = built.quantized[parameter], parameter.numel()
            records = source.records(0, numel)  # type: ignore[attr-defined]
            assert len(records) == -(-numel // codec.block) * codec.record_bytes
            for used in (torch.float32, dtype):
                found = codec.read(records, slice(0, numel), used)
                assert torch.equal(found.view(parameter.shape), wanted[name].to(used)), name
    built.close()


def test_a_scale_for_a_whole_tensor_may_have_no_axis(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "base", "float8")
    wanted = fill_all(load(folder)).state_dict()
    edit(folder, lambda its, _: its.update({k: v.view(()) for k, v in its.items() if k.endswith("_scale")}))
    found = fill_all(load(folder)).state_dict()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_experts_that_are_stacked_stay_in_codes(tmp_path: Path) -> None:
    """DeepSeek files have a tensor per projection and expert, and partial blocks."""
    folder = quantized(tmp_path / "base", "fp8", deepseek)
    built, plain = load(folder), fill_all(load(tmp_path / "base-plain"))
    assert not built.notes
    names = {id(parameter): name for name, parameter in built.model.named_parameters()}
    stacked = []
    for parameter, codec in built.quantized.items():
        name = names[id(parameter)]
        source: Any = built.source(name)
        stacked += [name] if isinstance(source, QuantizedStackedSource) else []
        step = 3 * codec.block  # does not divide a row
        ends = [(begin, min(begin + step, parameter.numel())) for begin in range(0, parameter.numel(), step)]
        records = torch.cat([source.records(*each) for each in ends])
        found = codec.read(records, slice(0, parameter.numel()), torch.bfloat16)
        assert torch.equal(found.view(parameter.shape), plain.get_parameter(name)), name
    assert stacked == [f"model.layers.1.mlp.experts.{name}_proj" for name in ("down", "gate_up")]
    left = {name for name, p in built.model.named_parameters() if p.dim() > 1 and p not in built.quantized}
    assert left == {"model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.gate.weight"}
    built.close()


def test_what_stands_in_no_codes_of_its_own_is_read_as_it_is_decoded(tmp_path: Path) -> None:
    """A row of an expert is no whole number of records, so the projections are assembled from dequantized weights."""
    folder = quantized(tmp_path / "base", "fp8", lambda: deepseek(moe_intermediate_size=24))
    built, plain = load(folder), fill_all(load(tmp_path / "base-plain"))
    experts = built.model.get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    assert experts not in built.quantized
    found = fill_all(built).get_parameter("model.layers.1.mlp.experts.gate_up_proj")
    assert torch.equal(found, plain.get_parameter("model.layers.1.mlp.experts.gate_up_proj"))


def _group(said: dict[str, Any]) -> dict[str, Any]:
    weights: dict[str, Any] = said["config_groups"]["group_0"]["weights"]
    return weights


UNKNOWN: dict[str, tuple[str, Callable[[dict[str, torch.Tensor], dict[str, Any]], None], str]] = {
    "gptq": ("int4", lambda _, said: said.update(quant_method="gptq"), r"quantized \(gptq\) in an unknown format"),
    "fp4": ("nf4", lambda _, said: said.update(bnb_4bit_quant_type="fp4"), "as fp4 of bitsandbytes"),
    "int8": ("nf4", lambda _, said: said.update(load_in_4bit=False), "as int8 of bitsandbytes"),
    "zero points": ("int4", lambda _, said: _group(said).update(symmetric=False), "with zero points"),
    "two bits": ("int4", lambda _, said: _group(said).update(num_bits=2), "with 2 bits"),
    "order": ("int4", lambda _, said: _group(said).update(actorder="group"), "with actorder"),
    "nvfp4": (
        "int4",
        lambda _, said: said["config_groups"]["group_0"].update(format="nvfp4-pack-quantized"),
        "as nvfp4-pack-quantized of compressed-tensors",
    ),
    "table": (
        "nf4",
        lambda its, _: its["model.layers.0.mlp.up_proj.weight.quant_map"].neg_(),
        r"up_proj.weight in .*blocks of 64 and 256",
    ),
    "no scales": (
        "fp8",
        lambda its, _: its.__delitem__("model.layers.0.mlp.up_proj.weight_scale_inv"),
        "up_proj.weight in .*float8_e4m3fn: the model is quantized, but no scales belong to this tensor",
    ),
    "no codes": (
        "int4",
        lambda its, _: its.__delitem__("model.layers.0.mlp.up_proj.weight_packed"),
        "up_proj.weight_scale but no .*up_proj.weight: download the folder",
    ),
    "exponents": (
        "fp8",
        lambda its, _: its.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(3, 2, dtype=torch.uint8)}),
        "has dtype torch.uint8, where only floating-point scales",
    ),
    "grid": (
        "fp8",
        lambda its, _: its.update({"model.layers.0.mlp.up_proj.weight_scale_inv": torch.ones(5, 2)}),
        r"has shape \[5, 2\] for a weight of shape \[96, 64\], not one for each",
    ),
}


@pytest.mark.parametrize("case", UNKNOWN)
def test_what_is_not_known_is_refused_by_name(case: str, tmp_path: Path) -> None:
    kind, change, said = UNKNOWN[case]
    folder = quantized(tmp_path / "base", kind)
    edit(folder, change)
    with pytest.raises(ConfigError, match=f"{said}.*[Gg]ive the folder|download the folder"):
        load(folder)


def test_records_are_the_bytes_of_the_files(tmp_path: Path) -> None:
    """The offloaded records have as many bytes as the stored tensors, except for padding in the last record."""
    for kind in ("fp8", "mxfp4", "int4", "int8"):
        folder = quantized(tmp_path / kind, kind)
        built = load(folder)
        its = load_file(folder / "model.safetensors")
        shapes = (name for name in its if name.endswith(".weight_shape"))
        coded = sum(value.nbytes for name, value in its.items()) - sum(its[name].nbytes for name in shapes)
        plain = sum(2 * p.numel() for p in built.model.parameters() if p not in built.quantized)
        rests = sum(
            math.ceil(parameter.numel() / codec.block) * codec.record_bytes
            for parameter, codec in built.quantized.items()
        )
        assert rests == coded - plain, kind
        built.close()
