"""An export from a checkpoint equals the engine export, and a damaged checkpoint is never exported."""

from __future__ import annotations

from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from offload import Engine
from offload.app import stored_model
from offload.app.stored_model import export_stored, read_stored
from offload.errors import ConfigError, DiskError
from tests.cases.models import t5, tokens
from tests.checkpoint.trained import tensors_of, train
from tests.disks import mounted
from tests.engine.compare import same_bits
from tests.hf.test_write import contents
from tests.zoo.families import families

FAMILIES = ("llama", "mixtral", "gemma2", "gpt2", "bart", "deepseek_v3", "t5")
"""In order: plain, fused experts, tied, Conv1D, encoder, fp32 parameters and buffers, sequence-to-sequence."""


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored_model, "_BLOCK_NUMEL", 1000)


def made(name: str, folder: Path, precision: str):
    if name == "t5":
        torch.manual_seed(0)
        return train(t5(), tokens(), folder, precision=precision)
    family = families()[name]
    model = family.build(calm=True)
    if name == "deepseek_v3":  # saved buffers that differ from those of a new model
        for number, (buffer, value) in enumerate(model.named_buffers()):
            value.add_((number + 0.5) * (buffer in model.state_dict()))
    return train(model, family.batch(), folder, precision=precision)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), list(zip(FAMILIES, cycle(["fp32", "bf16"]), strict=False)))
def test_an_export_is_that_of_the_engine_byte_for_byte(name: str, precision: str, tmp_path: Path) -> None:
    trained = made(name, tmp_path, precision)
    export_stored(trained.checkpoint, tmp_path / "ours")
    tokenizer = contents(tmp_path / "tokenizer")
    assert len(tokenizer) >= 2
    assert contents(tmp_path / "ours") == contents(trained.export) | tokenizer


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision"), [("llama", "fp32"), ("mixtral", "bf16"), ("gpt2", "fp32")])
def test_a_dtype_may_be_chosen_and_fp32_are_the_master_weights(name: str, precision: str, tmp_path: Path) -> None:
    trained = made(name, tmp_path, precision)
    for dtype in (torch.float32, torch.bfloat16):
        out = tmp_path / str(dtype)
        export_stored(trained.checkpoint, out, dtype)
        model = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
        found = dict(model.named_parameters())
        assert model.config.dtype == dtype
        assert found.keys() == trained.masters.keys()
        rounded = tensors_of(trained.export)
        for parameter, master in trained.masters.items():
            if dtype == torch.float32:
                assert same_bits(found[parameter].detach(), master), parameter
            elif precision == "bf16" and parameter in rounded:  # the rounded weights on the device
                assert same_bits(found[parameter].detach(), rounded[parameter]), parameter
            elif precision == "fp32":
                assert same_bits(found[parameter].detach(), master.bfloat16()), parameter


def test_what_the_configuration_ties_but_the_training_had_apart_stays_apart(tmp_path: Path) -> None:
    family = families()["gemma2"]
    model = family.build(calm=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach() + 1)
    model.all_tied_weights_keys.pop("lm_head.weight")
    trained = train(model, family.batch(), tmp_path)
    export_stored(trained.checkpoint, tmp_path / "ours")
    found = tensors_of(tmp_path / "ours")
    for name in ("lm_head.weight", "model.embed_tokens.weight"):
        assert same_bits(found[name], trained.masters[name])
    assert not same_bits(found["lm_head.weight"], found["model.embed_tokens.weight"])


def test_buffers_that_are_in_no_file_are_those_of_from_pretrained(tmp_path: Path) -> None:
    """Position tables in codegen depend on the dtype of construction."""
    trained = made("codegen", tmp_path, "bf16")
    expected = dict(AutoModelForCausalLM.from_pretrained(trained.export, dtype="auto").named_buffers())
    found, weights = read_stored(trained.checkpoint)
    weights.close()
    assert expected.keys() == dict(found.named_buffers()).keys()
    assert all(same_bits(value, expected[name]) for name, value in found.named_buffers())


def test_a_full_disk_is_one_error_and_leaves_nothing(tmp_path: Path) -> None:
    trained = made("llama", tmp_path, "fp32")
    with mounted(tmp_path, 1 << 20) as disk:
        (disk / "ballast").write_bytes(bytes(600_000))
        before = sorted(path.name for path in disk.iterdir())
        with pytest.raises(DiskError, match=r"cannot be written: No space left on device"):
            export_stored(trained.checkpoint, disk / "out")
        assert sorted(path.name for path in disk.iterdir()) == before


def test_a_model_that_is_not_transformers_is_refused(tmp_path: Path) -> None:
    engine = Engine(nn.Linear(3, 4))
    engine.step({"input": torch.ones(2, 3)}, loss_fn=lambda outputs, batch: outputs.sum())
    engine.save_checkpoint(tmp_path / "step-1")
    engine.close()
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        export_stored(tmp_path / "step-1", tmp_path / "out")


def test_a_model_of_another_shape_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another transformers version can build another shape from the same configuration."""
    trained = made("llama", tmp_path, "fp32")
    read = stored_model.folder_config

    def other(folder: Path):
        config = read(folder)
        config.intermediate_size, config.num_hidden_layers = 8, 1
        return config

    monkeypatch.setattr(stored_model, "folder_config", other)
    with pytest.raises(
        ConfigError, match=r"does not fit the model that transformers .* builds from its config\.json.* in the model"
    ):
        read_stored(trained.checkpoint)
