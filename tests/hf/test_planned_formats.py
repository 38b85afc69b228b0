"""A plan of a quantized configuration alone equals the plan of a folder with its weights."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as t
from transformers import FineGrainedFP8Config
from transformers.integrations.finegrained_fp8 import FP8Experts, FP8Linear
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from offload.app.config.config import Config
from offload.app.config.presets import PRESETS
from offload.app.config.sections import ModelSection
from offload.app.hf.models import empty_model, load_model_config
from offload.app.hf.quantized import PlannedWeight, quantization_settings
from offload.app.hf.read import planned_parameters, quantized_parameters
from offload.extras.plan.forecast import Forecast, Forecaster
from offload.extras.plan.machine_files import read_machine
from offload.extras.quant.formats import BlockFp8
from offload.layout.codecs import Codec
from offload.layout.regions import ParameterInfo
from offload.planning.plan import describe_frozen_weights
from tests.hf.quantized import FORMATS, SIZES, SPECIAL, deepseek, gpt_oss, llama, quantized

LORA = {"lora.rank": 4, "lora.target_modules": ["q_proj", "o_proj"]}
SMALL = {"data.sequence_length": 16, "train.batch_size": 1, "train.compile": "never"}


def qwen3_moe() -> Any:
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "head_dim": 16}
    return t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**SIZES, **SPECIAL, **experts))


def tied() -> Any:
    return t.LlamaForCausalLM(t.LlamaConfig(**SIZES, **SPECIAL, tie_word_embeddings=True))


MODELS: dict[str, Callable[[], Any] | None] = {
    "": None, "deepseek": deepseek, "qwen3_moe": qwen3_moe, "tied": tied, "gpt_oss": gpt_oss,
}  # fmt: skip
CASES = [(kind, name) for kind in FORMATS for name in list(MODELS)[:4] if kind != "mxfp4" or not name]


def codecs(path: Path, find: Callable[[Any, Any], dict[Any, Codec]]) -> dict[str, Codec]:
    section = ModelSection(path=str(path))
    config = load_model_config(section)
    model = empty_model(section, config)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return {names[id(parameter)]: codec for parameter, codec in find(model, quantization_settings(config)).items()}


def by_files(folder: Path) -> dict[str, Codec]:
    return codecs(folder, lambda model, told: quantized_parameters(model, folder, told))


def by_configuration(folder: Path) -> dict[str, Codec]:
    file = folder / "config.json"
    return codecs(file, lambda model, told: planned_parameters(model, model, file, told, torch.bfloat16))


def plan(path: Path) -> Forecast:
    config = Config.load(None, {"model.path": str(path), **LORA, **SMALL})
    return Forecaster(config, 1, plans_downloads=True).predict(config, read_machine("rtx-4090"), times=False)


@pytest.mark.parametrize(("kind", "model"), CASES)
def test_a_configuration_stores_the_same_weights_as_its_folder(kind: str, model: str, tmp_path: Path) -> None:
    """Experts in one parameter are no linear layers: transformers leaves them out of nf4."""
    folder = quantized(tmp_path / "base", kind, MODELS[model], leave=r"mlp\.experts" if "nf4" in kind else "(?!)")
    found = by_configuration(folder)
    assert found
    assert found == by_files(folder)


_PUBLISHED = PRESETS["gpt-oss-20b"]["quantization_config"]["modules_to_not_convert"]
_INT8 = FORMATS["int8"][1]["config_groups"]["group_0"]
LEFT: list[tuple[str, str, str, dict[str, Any]]] = [
    ("fp8", "", r"layers\.0\.|down_proj", {"modules_to_not_convert": ["lm_head", "model.layers.0", "down_proj"]}),
    ("fp8", "deepseek", r"mlp\.experts", {"modules_to_not_convert": ["lm_head", "model.layers.*.mlp.experts"]}),
    ("fp8", "deepseek", r"1\.mlp", {"ignored_layers": ["lm_head", "model.layers.1.mlp"]}),
    ("nf4", "", "down_proj|k_proj", {"llm_int8_skip_modules": ["lm_head", "down_proj", "k_proj"]}),
    ("mxfp4", "", "(?!)", {"modules_to_not_convert": _PUBLISHED}),
    ("mxfp4", "", r"layers\.1\.", {"modules_to_not_convert": [*_PUBLISHED, "model.layers.1.mlp.experts"]}),
    ("int4", "", "self_attn", {"ignore": ["lm_head", "re:.*self_attn.*"]}),
    ("int4", "", r"0\.mlp\.up_proj", {"ignore": ["lm_head", "model.layers.0.mlp.up_proj"]}),
    ("int4", "qwen3_moe", "self_attn", {"ignore": ["lm_head", "re:.*self_attn"]}),
    ("int8", "", "self_attn", {"config_groups": {"one": {**_INT8, "targets": ["re:.*mlp.*"]}}}),
    ("int8", "", "up_proj", {"config_groups": {"none": {"targets": ["re:.*up_proj"]}, "one": _INT8}}),
]
"""Format, model, names of weights left out, and the configuration for them."""


@pytest.mark.parametrize(("kind", "model", "leave", "settings"), LEFT)
def test_weights_left_out_by_the_configuration_are_unquantized(
    kind: str, model: str, leave: str, settings: dict[str, Any], tmp_path: Path
) -> None:
    folder = quantized(tmp_path / "base", kind, MODELS[model], leave=leave, settings=settings)
    found = by_configuration(folder)
    assert found == by_files(folder)
    assert not [name for name in found if re.search(leave, name)]


@pytest.mark.parametrize("model", ["", "deepseek", "qwen3_moe"])
@pytest.mark.parametrize("skipped", [None, [], ["lm_head", "model.layers.1", "o_proj"], ["model.layers.*.mlp"]])
def test_fp8_selects_the_modules_that_transformers_replaces(model: str, skipped: list[str] | None) -> None:
    told = {**FORMATS["fp8"][1], "modules_to_not_convert": skipped}
    with torch.device("meta"):
        plain, replaced = ((MODELS[model] or llama)() for _ in range(2))
    quantizer = FineGrainedFP8HfQuantizer(FineGrainedFP8Config(**told))
    quantizer._process_model_before_weight_loading(replaced)
    wanted = {name for name, each in replaced.named_modules() if isinstance(each, FP8Linear | FP8Experts)}
    select, found = BlockFp8(told).selector(plain), set()
    for name, parameter in plain.named_parameters():
        owner, _, key = name.rpartition(".")
        if select(PlannedWeight(name, tuple(parameter.shape), owner, plain.get_submodule(owner), key)):
            found.add(owner)
    assert found == wanted


@pytest.mark.parametrize(("kind", "dtype"), [("mxfp4", torch.bfloat16), ("nf4", torch.float16)])
def test_the_plan_of_a_configuration_is_the_plan_of_its_folder(kind: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = quantized(tmp_path / "base", kind, dtype=dtype)
    found, wanted = plan(folder / "config.json"), plan(folder)
    assert found.memory == wanted.memory
    assert found.notes == wanted.notes
    parts = found.prepared
    told = describe_frozen_weights(parts.structure.infos, parts.structure.regions, parts.plan.residence)
    assert told.count("self_attn.q_proj") == (1 if kind == "mxfp4" else 0), "one name for all layers"


def test_loading_takes_no_fp32_copy_of_quantized_weights(tmp_path: Path) -> None:
    """Their files are read in pieces. Break: count them; gpt-oss-120b then does not fit 64 GiB and a disk."""
    folder = quantized(tmp_path / "base", "mxfp4")
    planned, in_codes = plan(folder), by_files(folder)

    def exact(info: ParameterInfo) -> int:
        name = info.name.removeprefix("base_model.model.").replace(".base_layer", "")
        return 0 if name in in_codes else info.numel

    structure = planned.prepared.structure
    units = [[structure.infos[index] for index in unit.parameters] for unit in structure.candidates]
    assert planned.memory.loading_bytes == 4 * max(sum(map(exact, infos)) for infos in units)
    assert planned.memory.loading_bytes < 4 * max(sum(info.numel for info in infos) for infos in units)


def _weights(**values: Any) -> dict[str, Any]:
    return {"config_groups": {"one": {**_INT8, "weights": {**_INT8["weights"], **values}}}}


def test_a_folder_without_its_weights_yet_is_planned_like_its_configuration(tmp_path: Path) -> None:
    folder = quantized(tmp_path / "base", "int8")
    wanted = by_files(folder)
    (folder / "model.safetensors").unlink()
    forecaster = Forecaster(Config.load(None, {"model.path": str(folder), **LORA}), 1, plans_downloads=True)
    assert list(forecaster._built.quantized.values()) == list(wanted.values())


@pytest.mark.parametrize("name", ["base", "base-plain"])
def test_a_folder_whose_configuration_names_no_dtype_is_planned_as_stored(name: str, tmp_path: Path) -> None:
    quantized(tmp_path / "base", "int8")
    file, dtypes = tmp_path / name / "config.json", []
    for removed in ("nothing", "dtype"):
        config = json.loads(file.read_text())
        config.pop(removed, None)
        file.write_text(json.dumps(config))
        forecaster = Forecaster(Config.load(None, {"model.path": str(tmp_path / name), **LORA}), 1)
        dtypes.append([parameter.dtype for parameter in forecaster._built.model.parameters()])
    assert dtypes[0] == dtypes[1]
    assert torch.bfloat16 in dtypes[0]


def test_a_reward_model_has_a_head_that_is_not_in_the_files(tmp_path: Path) -> None:
    folder, sizes = quantized(tmp_path / "base", "int8"), []
    for path in (folder, folder / "config.json"):
        config = Config.load(None, {"model.path": str(path), "train.method": "reward", **LORA})
        built = Forecaster(config, 1, plans_downloads=True)._built
        names = {id(parameter): name for name, parameter in built.model.named_parameters()}
        sizes.append({names[id(parameter)]: codec for parameter, codec in built.quantized.items()})
    assert sizes[0] == sizes[1]
    assert len(sizes[0]) == 14


UNPLANNED: list[tuple[str, str, dict[str, Any], str]] = [
    (
        "fp8",
        "",
        {"quant_method": "gptq"},
        r"\(gptq\) in an unknown format, which is not supported. Supported: block-wise",
    ),
    ("fp8", "", {"modules_to_convert": ["embed_tokens"]}, "with quantized embeddings"),
    ("fp8", "gpt_oss", {}, "with model.layers.0.mlp.experts.gate_up_proj in one tensor"),
    ("mxfp4", "odd", {}, "with model.layers.0.mlp.experts.down_proj of 48 rows, not a multiple of 32"),
    ("mxfp4", "llama", {}, "this format has no place for a weight of LlamaForCausalLM"),
    ("nf4", "gpt2", {}, "in layers of class Conv1D"),
    ("nf4", "", {"load_in_4bit": False}, "as int8 of bitsandbytes"),
    ("int8", "", _weights(strategy="token"), "with a scale by token"),
    ("int4", "", {"format": "nvfp4-pack-quantized", "config_groups": {}}, "as nvfp4-pack-quantized"),
    ("int4", "narrow", _weights(num_bits=4, strategy="group", group_size=32), "Supported: .*Give the folder"),
]
"""Format, model, changes of the configuration, and words of the note."""
SHAPES: dict[str, Callable[[], Any]] = {
    "llama": llama,
    "odd": lambda: gpt_oss(intermediate_size=48),
    "gpt2": lambda: t.GPT2LMHeadModel(t.GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=64, n_positions=64)),
    "narrow": lambda: t.LlamaForCausalLM(t.LlamaConfig(**SIZES | {"intermediate_size": 92}, **SPECIAL)),
}


@pytest.mark.parametrize(("kind", "model", "changes", "words"), UNPLANNED)
def test_a_configuration_that_cannot_be_planned_is_told(
    kind: str, model: str, changes: dict[str, Any], words: str, tmp_path: Path
) -> None:
    with torch.device("meta"):
        config = (SHAPES.get(model) or MODELS[model] or llama)().config
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**config.to_dict(), "quantization_config": {**FORMATS[kind][1], **changes}}))
    section = ModelSection(path=str(file))
    forecaster = Forecaster(Config.load(None, {"model.path": str(file), "lora.rank": 4}), 1, plans_downloads=True)
    model_ = empty_model(section, load_model_config(section))
    assert forecaster._find_quantized(model_, is_loaded=False, is_stand_in=True) == {}
    assert re.search(rf"is not planned, the plan is for unquantized weights: .*{words}", forecaster._unplanned)


@pytest.mark.parametrize(
    ("settings", "plans_downloads", "words"),
    [
        ({}, True, "only an adapter trains over quantized weights. Set --lora.rank"),
        ({"lora.rank": 4}, False, "config.json has no weight files, so the run begins with random weights"),
        ({"lora.rank": 4, "model.init": "random"}, True, "so the run begins with random weights"),
    ],
)
def test_a_quantization_that_a_run_does_not_have_is_told(
    settings: dict[str, Any], plans_downloads: bool, words: str, tmp_path: Path
) -> None:
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**t.LlamaConfig(**SIZES).to_dict(), "quantization_config": FORMATS["int8"][1]}))
    config = Config.load(None, {"model.path": str(file), **settings})
    forecaster = Forecaster(config, 1, plans_downloads=plans_downloads)
    assert not forecaster._built.quantized
    assert words in forecaster._unplanned
