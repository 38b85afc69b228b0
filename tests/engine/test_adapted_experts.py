"""Streamed experts under LoRA on parameters, over quantized bases, compared with PEFT over the dequantized model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import Engine, Placement
from offload.app.config.sections import LoraSection, ModelSection
from offload.app.hf.models import BuiltModel, build_model, fill_all
from offload.distributed.joining import open_comm
from offload.engine.units.find import describe_parameters
from offload.errors import ConfigError
from offload.extras.adapters.adapters import Adaptation
from offload.extras.large import cut_experts
from offload.extras.large.adapted_experts import unsupported_reason
from offload.layout.codecs import decoded
from tests.cases.models import batches, build, share, tokens
from tests.engine.compare import assert_same, assert_weights, placed, step_of, weights
from tests.engine.inside import parts_of, planned_bytes
from tests.engine.ranks import run
from tests.engine.reference import Reference
from tests.engine.sizes import tier_bytes, up
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
    import peft

    attention = "kv_b_proj" if family == "deepseek_v3" else "q_proj"
    lora = {"r": 4, "init_lora_weights": False, "target_modules": [attention], "target_parameters": targets, **more}
    sizes = {"head_dim": 32} if family == "olmoe" else {}
    return build(lambda: peft.get_peft_model(mixture(family, **dimensions, **sizes)(), peft.LoraConfig(**lora)))


def dequantized(model: nn.Module, codec: str, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Return a copy of the model with the weights that an engine decodes."""
    infos, plain = describe_parameters(model, RULE, "fp32", codec), copy.deepcopy(model)
    for info, parameter in zip(infos, plain.parameters(), strict=True):
        if info.is_quantized:
            parameter.data = decoded(info.codec, parameter.detach().flatten(), dtype).view(parameter.shape)
    return plain


def train(model: nn.Module, plain: nn.Module, **settings: Any) -> Engine:
    """Train next to the reference over `plain`, with equal bits of all weights after every step."""
    told = ("optimizer", "precision", "micro_batch_size")
    in_fp32 = tuple(getattr(plain, "_keep_in_fp32_modules", None) or ())  # parts of names

    def kept(name: str) -> bool:
        return any(part in name for part in in_fp32)

    reference = Reference(plain, kept=kept, **{key: settings[key] for key in told if key in settings})
    engine = Engine(model, **settings)
    for batch in batches(2):
        (loss, norm), wanted = step_of(engine, batch), step_of(reference, batch)
        assert_weights(engine, reference)
        # The losses of micro-batches are added in another order.
        assert loss == pytest.approx(wanted[0], rel=1e-6 if "micro_batch_size" in settings else 0, abs=0)
        assert norm == wanted[1]
    return engine


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "codec", "place", "settings"),
    [
        ("qwen3_moe", "nf4", "cpu", {}),
        ("qwen3_moe", "nf4", "nvme", {"precision": "bf16"}),
        ("qwen3_moe", "exact", "device", {"recompute": "never"}),
        ("mixtral", "int8", "nvme", {"micro_batch_size": 2}),
        ("mixtral", "nf4", "cpu", {"precision": "bf16", "micro_batch_size": 1, "recompute": "always"}),
        ("olmoe", "nf4", "device", {"micro_batch_size": 1}),
        ("olmoe", "int8", "cpu", {}),
        ("deepseek_v3", "nf4", "cpu", {"recompute": "never"}),
        ("deepseek_v3", "int8", "nvme", {}),
        ("gpt_oss", "nf4", "nvme", {"micro_batch_size": 2}),
        ("gpt_oss", "int8", "cpu", {"recompute": "always"}),
        ("glm4_moe", "nf4", "cpu", {}),
    ],
)
def test_families_have_the_bits_of_peft_over_the_dequantized_weights(
    family: str, codec: str, place: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    """Break: add the product of another expert; leave out the gradient of one factor; encode experts one by one."""
    model, told = adapted(family), settings | {"optimizer": RULE}
    dtype = torch.bfloat16 if told.get("precision") == "bf16" else torch.float32
    plain = dequantized(model, codec, dtype) if codec != "exact" else None
    engine = train(
        model, plain or model, placement=placed(place, tmp_path, experts="streamed"), frozen_weights=codec, **told
    )
    experts = [unit for unit in parts_of(engine).units if unit.in_records]
    assert len(experts) == 2
    assert {region.codec.name for unit in experts for region in unit.regions} >= {codec}
    assert engine.counters.experts_fetched > 0 or place == "device"
    before = set(dict(engine.named_parameters()))
    engine.close(restore=True)
    assert set(dict(model.named_parameters())) == before
    assert not any("_activate_lora" in vars(module) for module in model.modules())


@pytest.mark.slow
@pytest.mark.parametrize("experts", ["streamed", "whole"])
@pytest.mark.parametrize(
    ("family", "codec", "place", "settings"),
    [
        ("gpt_oss", "nf4", "cpu", {"precision": "bf16"}),
        ("gpt_oss", "int8", "nvme", {}),
        ("mixtral", "nf4", "nvme", {}),
        ("qwen3_moe", "int8", "cpu", {"precision": "bf16", "micro_batch_size": 1}),
    ],
)
def test_experts_of_any_size_have_the_bits_of_peft(
    family: str, codec: str, place: str, settings: dict[str, Any], experts: str, tmp_path: Path
) -> None:
    """Break: see the next test; quantize biases of whole experts."""
    model, told = adapted(family, dimensions=ODD), settings | {"optimizer": RULE}
    plain = dequantized(model, codec, torch.bfloat16 if "precision" in told else torch.float32)
    train(model, plain, placement=placed(place, tmp_path, experts=experts), frozen_weights=codec, **told).close()


@pytest.mark.parametrize(("codec", "block", "record"), [("nf4", 16384, 8456), ("int8", 128, 132)])
def test_a_quantized_expert_of_any_size_is_stored_with_the_blocks_at_its_borders(
    codec: str, block: int, record: int
) -> None:
    """Break: let an expert begin at a block of its own; write a block over a border to one of both experts."""
    model = adapted("gpt_oss", dimensions=ODD)
    plain = dequantized(model, codec)
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
def test_a_resumed_run_on_another_tier_has_the_bits_of_one_run(tmp_path: Path) -> None:
    places = [placed(name, tmp_path, experts="streamed") for name in ("cpu", "nvme")]
    whole, resumed = (Engine(adapted("mixtral"), RULE, place, frozen_weights="nf4") for place in places)
    whole.step(tokens(0))
    whole.save_checkpoint(tmp_path / "states", trained_only=True)
    resumed.load_checkpoint(tmp_path / "states")
    assert step_of(whole, tokens(1)) == step_of(resumed, tokens(1))
    assert_same(weights(resumed), weights(whole))
    whole.close()
    resumed.close()


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
    engine = train(built.model, plain, placement=streamed(parameters=place), **settings)
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


def of_ranks(experts: str, rows: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Train on this rank's rows of two batches, in micro-batches of one row. Return the weights."""
    cut_experts.RECORD_BYTES = 1
    place = Placement(experts=experts)
    settings: dict[str, Any] = {"zero_stage": 3, "frozen_weights": "nf4", "micro_batch_size": 1}
    with open_comm() as comm, Engine(adapted("gpt_oss", dimensions=ODD), RULE, place, comm=comm, **settings) as engine:
        for seed in range(2):
            engine.step(share(tokens(seed, sum(rows)), rows, comm.rank))
        return weights(engine)


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


def test_two_ranks_train_as_with_whole_experts() -> None:
    """Quantization blocks lie over borders of experts, and experts over borders of ranks.

    Break: gather the codes of an expert only where a rank has tokens for it.
    """
    (whole, _), (found, other) = (run(2, of_ranks, experts=each, rows=(3, 1)) for each in ("whole", "streamed"))
    assert_same(found, other)
    for name, value in whole.items():  # the summation order of micro-batches differs
        torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-4)


def adapted_twice() -> Any:
    """Return a mixture with two adapters on experts."""
    import peft

    lora = peft.LoraConfig(r=2, target_modules=[], target_parameters=STACKS)
    model = peft.get_peft_model(mixture("mixtral")(), lora)  # type: ignore[arg-type]
    model.add_adapter("second", copy.deepcopy(lora))
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
