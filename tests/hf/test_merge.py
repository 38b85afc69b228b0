"""Adapters merged module by module into the base, against the PEFT merge of a resident model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from offload.app.config.sections import LoraSection, ModelSection
from offload.app.hf.models import build_model, fill_all
from offload.app.hf.write import write_model
from offload.errors import ConfigError
from offload.extras.adapters.adapters import Adaptation, write_adapter
from offload.extras.adapters.merge import MergedWeights
from tests.cases import models
from tests.integrations.plain import needs
from tests.matrix import matrix

needs("peft")

from peft import PeftModel, get_peft_model  # noqa: E402

CASES: dict[str, dict[str, Any]] = {
    "lora": {"rank": 4, "target_modules": "all-linear"},
    "dora": {"rank": 2, "use_dora": True},
    "vera": {"config": {"peft_type": "VERA", "r": 4, "task_type": "CAUSAL_LM"}},
    "tokens": {"rank": 4, "trainable_tokens": [3, 5, 7]},
    "head": {"rank": 4, "modules_to_save": ["lm_head"]},
    "biases": {"config": {"peft_type": "LORA", "r": 2, "bias": "all", "task_type": "CAUSAL_LM"}},
}


def adapted(base: Path, case: dict[str, Any], tmp_path: Path) -> Path:
    """Save an adapter over a base, with a random change in every trainable value."""
    if isinstance(case.get("config"), dict):
        (tmp_path / "adapter.json").write_text(json.dumps(case["config"]))
        case = {"config": str(tmp_path / "adapter.json")}
    config = Adaptation.of(LoraSection(**case), "causal").config
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), config)
    torch.manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(tmp_path / "adapter", save_embedding_layers=False)
    return tmp_path / "adapter"


def merge(base: Path, adapter: Path, out: Path) -> MergedWeights:
    section = ModelSection(path=str(base))
    plain, beneath = build_model(section, seed=0), build_model(section, seed=0)
    names = {id(parameter): name for name, parameter in beneath.model.named_parameters()}
    over: Any = Adaptation.from_folder(adapter, "adapter").apply_to(beneath, seed=0)
    own = {name: p.detach().clone() for name, p in over.model.named_parameters() if p.requires_grad and id(p) in names}
    trained = {names[id(p)]: own[name] for name, p in over.model.named_parameters() if name in own}
    merged = MergedWeights(plain, over.model, names, trained.get, {})
    assert merged.has_changes()
    write_model(plain.model, merged.read, out)
    plain.close()
    beneath.close()
    return merged


@matrix(
    strength=1,
    make=[models.llama, models.gemma2, models.gpt2, models.opt, models.qwen3],
    case=CASES,
    dtype=[torch.float32, torch.bfloat16],
)
def test_the_folder_is_what_peft_and_transformers_write(
    make: Any, case: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    base = tmp_path / "base"
    model: Any = models.build(make).to(dtype)
    model.save_pretrained(base)
    adapter = adapted(base, case, tmp_path)
    merge(base, adapter, tmp_path / "ours")
    theirs: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), adapter)
    theirs.merge_and_unload().save_pretrained(tmp_path / "theirs")
    for name in ("model.safetensors", "config.json"):
        assert (tmp_path / "ours" / name).read_bytes() == (tmp_path / "theirs" / name).read_bytes(), name


def test_a_merge_that_changes_nothing_is_known(tmp_path: Path) -> None:
    model: Any = models.build(models.llama)
    model.save_pretrained(tmp_path / "base")
    section = ModelSection(path=str(tmp_path / "base"))
    plain, beneath = build_model(section, seed=0), build_model(section, seed=0)
    names = {id(parameter): name for name, parameter in beneath.model.named_parameters()}
    over: Any = Adaptation.of(LoraSection(rank=4), "causal").apply_to(beneath, seed=0)
    merged = MergedWeights(plain, over.model, names, {}.get, {})
    assert not merged.has_changes()
    layer: nn.Module = over.model.get_submodule("base_model.model.model.layers.1.self_attn.v_proj.lora_B.default")
    layer.weight.data[0, 0] = 1.0
    assert merged.has_changes(), "what was merged is not merged again"


def test_a_delta_of_one_side_of_a_tie_is_not_merged_into_both(tmp_path: Path) -> None:
    """PEFT merges it into both."""
    base = tmp_path / "base"
    model: Any = models.build(models.gemma2)
    model.save_pretrained(base)
    folder = adapted(base, {"rank": 4, "target_modules": ["lm_head"]}, tmp_path)
    with pytest.raises(ConfigError, match=r"embed_tokens.weight and lm_head.weight share one weight.*without --merge"):
        merge(base, folder, tmp_path / "ours")


@pytest.mark.parametrize(
    "case",
    [
        {"peft_type": "VBLORA", "r": 2, "num_vectors": 8, "vector_length": 16, "topk": 2, "target_modules": ["q_proj"]},
        {"r": 4, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"], "ensure_weight_tying": True},
    ],
    ids=["a bank that all modules share", "a tie that is kept"],
)
def test_what_an_adapter_has_under_two_names_is_exported(case: dict[str, Any], tmp_path: Path) -> None:
    """The engine stores the tensor under the first name, and PEFT reads the second."""
    base, file = tmp_path / "base", tmp_path / "adapter.json"
    model: Any = models.build(models.gemma2)
    model.save_pretrained(base)
    file.write_text(json.dumps({"peft_type": "LORA", "task_type": "CAUSAL_LM", **case}))
    adaptation = Adaptation.of(LoraSection(config=str(file)), "causal")
    over: Any = fill_all(adaptation.apply_to(build_model(ModelSection(path=str(base)), seed=0), seed=0))
    values = {name: p.detach() + 0.1 if p.requires_grad else p.detach() for name, p in over.named_parameters()}
    own = {name: value for name, value in values.items() if over.get_parameter(name).requires_grad}
    buffers = {name: its for name, its in over.state_dict(keep_vars=True).items() if not isinstance(its, nn.Parameter)}
    write_adapter(over, {**buffers, **own}, tmp_path / "out", {}, {})
    found = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base, dtype="auto"), tmp_path / "out")
    for name, value in found.named_parameters():
        assert torch.equal(value, values[name]), name


def test_what_peft_cannot_merge_is_refused(tmp_path: Path) -> None:
    model: Any = models.build(models.llama)
    model.save_pretrained(tmp_path / "base")
    (tmp_path / "prefix.json").write_text(json.dumps({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3}))
    section = ModelSection(path=str(tmp_path / "base"))
    adaptation = Adaptation.of(LoraSection(config=str(tmp_path / "prefix.json")), "causal")
    with pytest.raises(ConfigError, match="asks for PREFIX_TUNING: adapters that learn a prompt"):
        adaptation.apply_to(build_model(section, seed=0), seed=0)
    over = adaptation.apply_to(build_model(section, seed=0), seed=0, trains=False)
    with pytest.raises(
        ConfigError, match="kind prefix_tuning has no weights to merge into the model. Export it without --merge"
    ):
        MergedWeights(build_model(section, seed=0), over.model, {}, {}.get, {})
