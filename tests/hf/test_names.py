"""Folder properties remembered by a model, for another process."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

from offload.app.hf.names import CannotStream, apply_conversions, describe_conversions
from offload.app.hf.write import write_model
from tests.checkpoint.folders import fill_by_parts, llama, read
from tests.hf.test_write import contents, rest
from tests.zoo.families import families


def rename(folder: Path, old: str, new: str) -> None:
    path = folder / "model.safetensors"
    save_file({k.replace(old, new): v for k, v in load_file(path).items()}, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("name", "old", "new"),
    [
        ("llama", "", ""),
        ("mixtral", "", ""),
        ("olmo_hybrid", "", ""),
        ("bert", "LayerNorm.weight", "LayerNorm.gamma"),  # old name, before 2019
    ],
)
def test_a_fresh_model_is_written_as_the_one_that_was_read(name: str, old: str, new: str, tmp_path: Path) -> None:
    """Break: skip `apply_conversions` for a fresh model; this loses the old names."""
    model = families()[name].build()
    model.save_pretrained(tmp_path / "given")
    rename(tmp_path / "given", old, new)
    found, weights = read(type(model), tmp_path / "given")
    fill_by_parts(found, weights)
    used = json.loads(json.dumps(describe_conversions(found)))
    assert used["untied"] == []
    fresh = families()[name].build()  # equal weights, from a seed
    assert describe_conversions(fresh) == {"rules": None, "untied": []}
    fresh.generation_config = found.generation_config
    apply_conversions(fresh, used)
    write_model(found, rest(found), tmp_path / "read")
    write_model(fresh, rest(fresh), tmp_path / "fresh")
    read_again, written = contents(tmp_path / "read"), contents(tmp_path / "fresh")
    assert read_again["model.safetensors"] == written["model.safetensors"]
    given, again = (load_file(tmp_path / each / "model.safetensors") for each in ("given", "fresh"))
    assert given.keys() == again.keys()


def test_weights_that_were_read_untied_are_untied_again(tmp_path: Path) -> None:
    model = LlamaForCausalLM(llama(tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    save_file(load_file(path) | {"lm_head.weight": torch.ones(40, 32)}, path, metadata={"format": "pt"})
    found, _ = read(LlamaForCausalLM, tmp_path)
    used = json.loads(json.dumps(describe_conversions(found)))
    assert used["untied"] == ["lm_head.weight"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    apply_conversions(model, used)
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in found.named_parameters()]
    assert describe_conversions(model)["untied"] == ["lm_head.weight"]


def test_other_modules_remember_nothing_and_rules_of_another_version_are_an_error() -> None:
    assert describe_conversions(nn.Linear(2, 2)) == {}
    apply_conversions(nn.Linear(2, 2), {})
    with pytest.raises(CannotStream, match=r"does not have: .*no such name"):
        apply_conversions(LlamaForCausalLM(llama()), {"rules": [["WeightRenaming", ["no such name"], ["x"], None]]})
