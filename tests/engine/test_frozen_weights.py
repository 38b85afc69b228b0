"""Quantized frozen weights: training equals plain PyTorch over dequantized weights, bit for bit, and all tiers, links
and plans count quantized bytes.

tests/layout/test_codecs.py checks the dequantized values themselves.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import AdamW, Engine, Placement
from offload.app.training.resident import ResidentTrainer
from offload.engine.units.find import describe_parameters
from offload.errors import ConfigError
from offload.extras.plan.machine_files import read_machine
from offload.extras.plan.simulated_step import SimulatedCall, SimulatedPlan, SimulatedStep, simulate
from offload.layout import codecs, regions
from offload.layout.build_regions import build_regions
from offload.layout.codecs import CODECS, decoded
from offload.layout.regions import ParameterInfo
from offload.layout.residence import Residence
from offload.planning.device_updates import weight_seconds
from offload.planning.machines import Speeds
from offload.planning.settings import Settings, parse_throttle
from tests.cases.models import MATRICES, adapted, build, freeze, llama, tokens
from tests.engine.compare import assert_same, same_bits, weights
from tests.engine.device import LEDGER
from tests.engine.inside import LATE_BYTES, leave_spare_memory, parts_of, planned_bytes, run_example
from tests.engine.sizes import tier_bytes, up


def dequantised(model: nn.Module, codec: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a copy with the values that an engine decodes."""
    plain = copy.deepcopy(model)
    infos = describe_parameters(model, AdamW(), "fp32", codec)
    for info, parameter in zip(infos, plain.parameters(), strict=True):
        if info.is_quantized:
            parameter.data.copy_(decoded(info.codec, parameter.detach().flatten(), dtype).view(parameter.shape))
    return plain


def coded(model: nn.Module) -> dict[str, nn.Parameter]:
    named = model.named_parameters()
    return {name: p for name, p in named if ".layers." in name and p.dim() > 1 and not p.requires_grad}


def base_bytes(model: nn.Module, codec: str) -> list[int]:
    """Return the stored bytes of the quantized parameters per block."""
    block, record = {"int8": (128, 132), "nf4": (16384, 8456)}[codec]
    sizes: dict[str, int] = {}
    for name, parameter in coded(model).items():
        layer = name.split(".")[2]
        sizes[layer] = sizes.get(layer, 0) + up(parameter.numel(), block)
    return [up(size, max(2048, block)) // block * record for size in sizes.values()]


@pytest.mark.slow
def test_tiers_and_links_have_the_bytes_of_codes() -> None:
    """Quantized weights are copied to the device twice per step, for any number of micro-batches."""
    codec, found = "nf4", {}
    for width in ("exact", codec):
        engine = Engine(build(adapted), max_grad_norm=None, frozen_weights=width, micro_batch_size=1, prefetch=0)
        leave_spare_memory(engine)
        for seed in range(2):
            engine.step(tokens(seed))
        found[width] = tier_bytes(engine, "cpu")["weights"], engine.counters.h2d_bytes, engine.counters.d2h_bytes
        if width == codec:
            planned = planned_bytes(engine)
            assert all(planned["cpu", name] == size for name, size in tier_bytes(engine, "cpu").items())
    model = build(adapted)
    exact = sum(
        up(sum(p.numel() for n, p in coded(model).items() if f".{layer}." in n), 2048) * 4 for layer in range(3)
    )
    saved = exact - sum(base_bytes(model, codec))
    (rests, up_bytes, down), (rests_coded, up_coded, down_coded) = found["exact"], found[codec]
    assert rests - rests_coded == saved, "on the host"
    assert up_coded <= up_bytes - 2 * saved, "over the link; a slot that is larger may keep another unit"
    assert down == down_coded


def test_codes_have_no_low_half_and_the_link_is_estimated_by_their_bytes() -> None:
    """With fp32 weights used in bf16, a frozen matrix has a low half only while not quantized."""
    engines = {c: Engine(build(adapted), precision="bf16", frozen_weights=c) for c in ("exact", "int8", "nf4")}
    low = {codec: tier_bytes(engine, "cpu")["low"] for codec, engine in engines.items()}
    assert low["exact"] - low["int8"] == 2 * sum(base_bytes(build(adapted), "int8")) // 132 * 128

    def seconds(codec: str) -> float:
        parts, throttles = parts_of(engines[codec]), parse_throttle({"h2d": "1MB"})
        return weight_seconds(parts.regions, parts.plan.residence.sharding, throttles, Speeds(read_machine("rtx-4090")))

    saved = sum(base_bytes(build(adapted), "int8")) - sum(base_bytes(build(adapted), "nf4"))
    assert seconds("int8") - seconds("nf4") == pytest.approx(2 * saved / 1e6, abs=1e-3)


@pytest.mark.slow
@LEDGER
def test_a_budget_of_what_is_planned_is_kept() -> None:
    """The device holds two units and the decoding buffers."""
    batch, settings = tokens(), {"frozen_weights": "nf4", "prefetch": 1}
    free = Engine(build(adapted), **settings)
    free.step(batch)
    peak = free.counters.peak_device_bytes
    engine = Engine(build(adapted), placement=Placement(device_memory=peak + LATE_BYTES), **settings)
    for _ in range(3):
        engine.step(batch)
        assert engine.counters.peak_device_bytes <= peak + LATE_BYTES
    block = max(sum(p.numel() for n, p in coded(build(adapted)).items() if f".{i}." in n) for i in range(3))
    assert tier_bytes(engine, "device")["decoding"] <= 3072 + 6.125 * up(block, 16384) + 5 * 6.125 * 16384


def foretold(codec: str, fetch_s: float, decode_s: float, **kwargs: Any) -> SimulatedStep:
    """Simulate a steady step with six units. Each unit computes for 1 s and 2 s (forward, backward), takes `fetch_s`
    for the H2D copy and `decode_s` for decoding.

    Units are fetched for the forward and the backward; two are still in slots at the turn.
    """
    depth, numel = 6, 1 << 16
    infos = [ParameterInfo(n, f"w{n}", (numel,), False, "bf16", False, codec=CODECS[codec]) for n in range(depth)]
    regions = build_regions(infos, {f"unit {n}": [n] for n in range(depth)}, [()])
    plan = SimulatedPlan(regions, Settings(), Residence(), 0, 2 * 2 * numel, 1, 2, **kwargs)
    moved = regions[0].travelling_bytes + regions[0].weight_bytes
    seconds = {
        "h2d": lambda num_bytes: fetch_s * num_bytes / regions[0].travelling_bytes,
        "decoding": lambda num_bytes: decode_s * num_bytes / moved,
    }
    return simulate([SimulatedCall((region,), 1.0, 2.0) for region in regions], plan, seconds, num_steps=8)


@pytest.mark.parametrize("codec", ["int8", "nf4"])
def test_a_step_is_foretold_with_what_decoding_takes(codec: str) -> None:
    """A device decodes in the compute stream, beside the link. A CPU decodes in the copy thread (`inline`) or in a
    separate thread.
    """
    num_fetches, free = 2 * 6 - 4, {"h2d": pytest.approx(8 * 0.5), "compute": pytest.approx(18)}
    for how in ({"in_stream": True}, {}):
        assert {name: foretold(codec, 0.5, 0.0, **how).busy_s[name] for name in free} == free
    on_device = foretold(codec, 0.5, 0.25, in_stream=True)
    assert on_device.busy_s["h2d"] == free["h2d"]
    assert on_device.busy_s["compute"] == on_device.seconds == pytest.approx(18 + num_fetches * 0.25)
    bound = foretold(codec, 8.0, 0.25, in_stream=True)
    assert bound.busy_s["compute"] == pytest.approx(20)
    assert bound.seconds == pytest.approx(foretold(codec, 8.0, 0.0, in_stream=True).seconds, rel=0.01)
    beside, inline = foretold(codec, 0.5, 0.25), foretold(codec, 0.5, 0.25, inline=True)
    assert (beside.seconds, beside.busy_s["h2d"]) == (pytest.approx(18), pytest.approx(8 * 0.75))
    assert inline.seconds == pytest.approx(18 + num_fetches * 0.75)


@pytest.mark.slow
def test_weights_are_what_an_export_and_a_restored_model_have(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    model = build(adapted)
    plain = dequantised(model, "nf4")
    engine = Engine(model, frozen_weights="nf4")
    engine.step(tokens())
    found = weights(engine)
    engine.export(tmp_path / "hf")
    exported = load_file(tmp_path / "hf" / "model.safetensors")
    assert_same({name: exported[name] for name in found}, found)
    reads = model.model.layers[2].mlp.up_proj.weight
    assert same_bits(reads.detach().clone().cpu(), found["model.layers.2.mlp.up_proj.weight"])
    engine.close(restore=True)
    assert_same({name: p.detach().cpu() for name, p in model.named_parameters()}, found)
    assert all(same_bits(found[name], p.detach()) for name, p in coded(plain).items())


def test_what_is_not_in_codes_is_named_and_what_cannot_be_is_refused() -> None:
    engine = Engine(freeze(build(adapted), *MATRICES, "_tokens", "lm_head", "norm.weight"), frozen_weights="int8")
    assert engine.told_frozen_weights == (
        "18 frozen parameters are stored in int8, 86.6 KiB, and take 336 KiB on the device; others unquantized: "
        "model.embed_tokens.weight, lm_head.weight, 7 vectors and small matrices"
    )
    assert Engine(build(adapted)).told_frozen_weights == ""
    with pytest.raises(ConfigError, match="offload.frozen_weights is 'int4'.*exact, int8, fp8, nf4"):
        Engine(build(adapted), frozen_weights="int4")
    with pytest.raises(ConfigError, match="frozen_weights is nf4, but the model has no frozen weights"):
        Engine(build(llama), frozen_weights="nf4")
    with pytest.raises(ConfigError, match="frozen_weights is fp8, .*: linear layers in blocks with 1024 inputs and"):
        Engine(build(adapted), frozen_weights="fp8")
    with pytest.raises(ConfigError, match=r"cannot change model.layers.0.mlp.up_proj.weight: .*frozen_weights exact"):
        engine.edit(["model.layers.0.mlp.up_proj.weight"])
    for _, value in engine.edit(["model.layers.0.mlp.up_proj.bias"]):
        value.mul_(2)


@pytest.mark.slow
def test_a_checkpoint_has_what_is_trained_and_belongs_to_its_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Engine(build(adapted), frozen_weights="nf4")
    engine.step(tokens(0))
    with pytest.raises(ConfigError, match="frozen_weights is nf4.*trained_only=True"):
        engine.save_checkpoint(tmp_path / "whole")
    with engine.begin_checkpoint(tmp_path / "trained", trained_only=True) as saving:
        saving.finish()
    for width in ("exact", "int8"):
        with pytest.raises(
            ConfigError, match=f"stored as nf4, but offload.frozen_weights is {width}.*--offload.frozen_weights nf4"
        ):
            Engine(build(adapted), frozen_weights=width).load_checkpoint(tmp_path / "trained")
    with monkeypatch.context() as patched:
        patched.setattr(regions, "LEAST_NUMEL", 4097)
        other = Engine(build(adapted), frozen_weights="nf4")
    words = (
        r"was trained on model.layers.0.self_attn.k_proj.weight stored as nf4, and this version .* as exact.*--merge"
    )
    with pytest.raises(ConfigError, match=words):
        other.load_checkpoint(tmp_path / "trained")


def test_the_resident_side_of_parity_has_the_decoded_weights() -> None:
    model = build(adapted)
    plain = dequantised(model, "nf4")
    devices = dict.fromkeys((name for name, _ in model.named_parameters()), torch.device("cpu"))
    settings: dict[str, Any] = {"precision": "fp32", "device": torch.device("cpu"), "max_grad_norm": 1.0, "seed": 0}
    resident = ResidentTrainer(model, AdamW(), update_devices=devices, frozen_weights="nf4", **settings)
    assert_same(dict(resident.weights()), {name: p.detach() for name, p in plain.named_parameters()})


def test_the_example_of_a_codec_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example in the docstring of `Codec`: training equals training over the dequantized weights."""
    monkeypatch.setattr(CODECS, "_objects", {**CODECS})
    run_example(codecs, codecs.Codec, Engine=Engine, model=build(adapted))
    engine = Engine(build(adapted), frozen_weights="float8")
    plain = Engine(dequantised(build(adapted), "float8"))
    assert engine.step(tokens()).loss == plain.step(tokens()).loss
    assert "frozen parameters are stored in float8" in engine.told_frozen_weights
    assert_same(weights(engine), weights(plain))
