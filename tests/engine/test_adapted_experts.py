"""Streamed experts under LoRA on parameters, over quantized bases, compared with PEFT over the dequantized model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import Engine
from offload.app.config.sections import LoraSection, ModelSection
from offload.app.hf.models import BuiltModel, build_model, fill_all
from offload.errors import ConfigError
from offload.extras.adapters.adapters import Adaptation
from offload.extras.large import cut_experts
from offload.extras.large.adapted_experts import unsupported_reason
from tests.cases.models import batches, build, lora, tokens
from tests.engine.compare import assert_same, placed, train_both, weights
from tests.engine.inside import parts_of, planned_bytes
from tests.engine.sizes import tier_bytes, up
from tests.engine.test_frozen_weights import dequantised
from tests.engine.test_streamed_experts import RULE, mixture, streamed
from tests.hf.quantized import deepseek, gpt_oss, quantized
from tests.integrations.plain import needs

needs("peft")

STACKS = ["experts.gate_up_proj", "experts.down_proj"]
SIZES = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128}
"""An expert of each stack is a multiple of 16,384 elements, the block of nf4."""
ODD = dict.fromkeys(SIZES, 136)
"""No expert is a whole number of blocks, of nf4 or, for a bias, of int8."""


@pytest.fixture(autouse=True)
def one_expert_a_record(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cut_experts, "RECORD_BYTES", 1)


def adapted(family: str, targets: list[str] = STACKS, dimensions: Mapping[str, int] = SIZES, **more: Any) -> nn.Module:
    """Return a mixture with a LoRA on attention and experts."""
    attention = "kv_b_proj" if family == "deepseek_v3" else "q_proj"
    sizes = {"head_dim": 32} if family == "olmoe" else {}
    base = mixture(family, **dimensions, **sizes)
    return build(lora(base, target_modules=[attention], target_parameters=targets, **more))


def beside(plain: nn.Module) -> dict[str, Any]:
    """Return keywords of `train_both` for a reference over `plain`."""
    in_fp32 = tuple(getattr(plain, "_keep_in_fp32_modules", None) or ())  # parts of names
    return {"plain": plain, "kept": lambda name: any(part in name for part in in_fp32)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "codec", "place", "dimensions", "experts", "settings"),
    [
        ("qwen3_moe", "nf4", "cpu", SIZES, "streamed", {}),
        ("qwen3_moe", "nf4", "nvme", SIZES, "streamed", {"precision": "bf16"}),
        ("qwen3_moe", "exact", "device", SIZES, "streamed", {"recompute": "never"}),
        ("qwen3_moe", "int8", "cpu", ODD, "streamed", {"precision": "bf16"}),
        ("qwen3_moe", "int8", "cpu", ODD, "whole", {"precision": "bf16"}),
        ("mixtral", "int8", "nvme", SIZES, "streamed", {}),
        ("mixtral", "nf4", "cpu", SIZES, "streamed", {"precision": "bf16", "recompute": "always"}),
        ("mixtral", "nf4", "nvme", ODD, "streamed", {}),
        ("olmoe", "nf4", "device", SIZES, "streamed", {}),
        ("olmoe", "int8", "cpu", SIZES, "streamed", {}),
        ("deepseek_v3", "nf4", "cpu", SIZES, "streamed", {"recompute": "never"}),
        ("deepseek_v3", "int8", "nvme", SIZES, "streamed", {}),
        ("gpt_oss", "nf4", "nvme", SIZES, "streamed", {}),
        ("gpt_oss", "nf4", "cpu", ODD, "whole", {"precision": "bf16"}),
        ("gpt_oss", "int8", "cpu", SIZES, "streamed", {"recompute": "always"}),
        ("gpt_oss", "int8", "nvme", ODD, "streamed", {}),
        ("glm4_moe", "nf4", "cpu", SIZES, "streamed", {}),
    ],
)
def test_families_have_the_bits_of_peft_over_the_dequantized_weights(
    family: str,
    codec: str,
    place: str,
    dimensions: dict[str, int],
    experts: str,
    settings: dict[str, Any],
    tmp_path: Path,
) -> None:
    """Break: add the product of another expert; leave out the gradient of one factor; encode experts one by one;
    quantize biases of whole experts.
    """
    model, told = adapted(family, dimensions=dimensions), settings | {"optimizer": RULE}
    dtype = torch.bfloat16 if told.get("precision") == "bf16" else torch.float32
    plain = dequantised(model, codec, dtype) if codec != "exact" else copy.deepcopy(model)
    where = placed(place, tmp_path, experts=experts)
    engine, _ = train_both(model, batches(2), placement=where, frozen_weights=codec, **beside(plain), **told)
    cut = [unit for unit in parts_of(engine).units if unit.in_records]
    assert len(cut) == (2 if experts == "streamed" else 0)
    assert not cut or {region.codec.name for unit in cut for region in unit.regions} >= {codec}
    assert engine.counters.experts_fetched > 0 or place == "device" or not cut
    before = set(dict(engine.named_parameters()))
    engine.close(restore=True)
    assert set(dict(model.named_parameters())) == before
    assert not any("_activate_lora" in vars(module) for module in model.modules())


@pytest.mark.parametrize(("codec", "block", "record"), [("nf4", 16384, 8456), ("int8", 128, 132)])
def test_a_quantized_expert_of_any_size_is_stored_with_the_blocks_at_its_borders(
    codec: str, block: int, record: int
) -> None:
    """Break: let an expert begin at a block of its own; write a block over a border to one of both experts."""
    model = adapted("gpt_oss", dimensions=ODD)
    plain = dequantised(model, codec)
    with Engine(model, RULE, streamed(), frozen_weights=codec) as engine:
        assert "4 stacks of expert vectors" in engine.told_frozen_weights
        assert_same(weights(engine), {name: p.detach() for name, p in plain.named_parameters()})
        experts = next(unit for unit in parts_of(engine).units if unit.in_records)
        coded = [region for region in experts.regions if region.codec.decodes]
        names = {parts_of(engine).infos[index].name for region in coded for index in region.parameters}
        assert {name.rpartition(".")[2] for name in names} == {"gate_up_proj", "down_proj"}
        for region in coded:
            num_blocks = sum(piece.end // -block * -1 - piece.begin // block for piece in region.pieces)
            assert region.travelling_bytes == up(num_blocks * block, 2048) // block * record
        planned = planned_bytes(engine)
        assert all(planned["cpu", name] == size for name, size in tier_bytes(engine, "cpu").items())


@pytest.mark.slow
def test_only_codes_of_chosen_experts_come_up_and_only_gradients_of_factors_go_down() -> None:
    """Break: copy decoded weights; send gradients of frozen experts."""
    model = adapted("qwen3_moe")
    with Engine(model, RULE, streamed(), frozen_weights="nf4", recompute="always") as engine:
        engine.step(tokens(0))
        engine.step(tokens(1))
        units = parts_of(engine).units
        (region,) = next(unit for unit in units if unit.in_records).regions[:1]
        assert region.travelling_bytes == 3 * (8192 + 256 + 8)
        others = [each for unit in units if not (unit.in_records or unit.resident) for each in unit.regions]
        shared = engine.counters.h2d_bytes - engine.counters.experts_fetched * region.travelling_bytes
        assert 0 < shared <= 2 * sum(each.travelling_bytes for each in others) + (64 << 10)
        trained = sum(each.weight_bytes for unit in units for each in unit.regions if each.trainable)
        assert engine.counters.d2h_bytes == trained


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "make", "place"), [("mxfp4", gpt_oss, "cpu"), ("mxfp4", gpt_oss, "files"), ("fp8", deepseek, "cpu")]
)
def test_codes_of_a_folder_are_those_that_stream(
    kind: str, make: Callable[[], Any], place: str, tmp_path: Path
) -> None:
    """fp8 of single experts and mxfp4 of a stack are cut between experts, in the bytes of the files."""
    folder = quantized(tmp_path / "base", kind, make)

    def built_from(path: Path) -> BuiltModel:
        base = build_model(ModelSection(path=str(path)), seed=0)
        return Adaptation.of(LoraSection(rank=4, target_parameters=STACKS), "causal").apply_to(base, seed=7)

    built = built_from(folder)
    plain: Any = fill_all(built_from(folder.with_name("base-plain")))
    plain.set_experts_implementation("eager")
    settings: dict[str, Any] = {"fill": built.fill, "quantized": built.quantized}
    where = streamed(parameters=place)
    engine, _ = train_both(built.model, batches(2), placement=where, **beside(plain), **settings)
    coded = [
        r.codec.name for unit in parts_of(engine).units if unit.in_records for r in unit.regions if r.codec.decodes
    ]
    assert coded
    assert all(kind in name for name in coded)
    engine.close()
    built.close()


@pytest.mark.slow
def test_without_the_adapter_the_base_answers() -> None:
    """Break: add the factors while PEFT has the adapter disabled."""
    model: Any = adapted("mixtral")
    with torch.no_grad(), model.disable_adapter():
        wanted = model(**tokens(3)).loss
    with Engine(model, RULE, streamed()) as engine:
        engine.step(tokens(0))
        with torch.no_grad():
            adapted_loss = model(**tokens(3)).loss
            with model.disable_adapter():
                assert torch.equal(model(**tokens(3)).loss, wanted)
            assert not torch.equal(adapted_loss, wanted)


@pytest.mark.parametrize("trained", ["factors", "experts"])
def test_sums_over_micro_batches_are_planned_where_experts_train(trained: str) -> None:
    """Break: sum the gradients of all factors on the host; leave the sums out of the plan."""
    model = adapted("gpt_oss", dimensions=ODD) if trained == "factors" else build(mixture("gpt_oss"))
    with Engine(model, RULE, streamed(), precision="bf16", micro_batch_size=2, prefetch=0) as engine:
        engine.step(tokens(0))
        planned = {each.name: each.num_bytes for each in parts_of(engine).plan.allocations if each.tier == "cpu"}
        assert planned == tier_bytes(engine, "cpu")
        elements = sum(region.numel for region in parts_of(engine).regions if region.trainable)
        assert planned["gradients"] == elements * (2 if trained == "factors" else 4)


def adapted_twice() -> Any:
    """Return a mixture with two adapters on experts."""
    model: Any = adapted("mixtral")
    model.add_adapter("second", copy.deepcopy(model.peft_config["default"]))
    return model


REFUSED: list[tuple[Callable[[], nn.Module], str]] = [
    (
        lambda: adapted("gpt_oss", ["experts.down_proj_bias"]),
        r"cannot be split by expert: the adapter of down_proj_bias does not consist of matrices by expert",
    ),
    (adapted_twice, r"cannot be split by expert: (down|gate_up)_proj has 2 adapters, and only one can be"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_what_cannot_be_streamed_is_refused(make: Callable[[], nn.Module], words: str) -> None:
    assert unsupported_reason([nn.Identity()], ["down_proj"]) == "Identity changes its parameters as a whole"
    with pytest.raises(ConfigError, match=words):
        Engine(make(), RULE, streamed())
