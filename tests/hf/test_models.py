"""Models from configurations and folders: initial weights by family, lazy filling, and refused models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING

from offload.app.config.presets import PRESETS
from offload.app.config.sections import ModelSection
from offload.app.hf import models
from offload.app.hf.deferred_init import DeferredInit
from offload.app.hf.models import (
    BuiltModel,
    build_model,
    check_sequence_length,
    empty_model,
    fill_all,
    load_model_config,
    max_positions,
    model_kind,
)
from offload.app.hf.names import CannotStream
from offload.errors import ConfigError, DiskError
from tests import forks
from tests.checkpoint.folders import names
from tests.engine.compare import same_bits
from tests.matrix import quick
from tests.zoo.families import families, shrink

FAMILIES = ("llama", "gpt2", "gemma2", "mamba", "opt", "t5", "bert", "gpt_neox", "mixtral", "modernbert")


def config_of(family: str, **changes: Any) -> Any:
    return shrink(CONFIG_MAPPING[family], changes)


def folder_of(path: Path, family: str, **changes: Any) -> Path:
    config_of(family, **changes).save_pretrained(path)
    return path


def same_distribution(mine: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Compare mean, deviation and the share of zeros, to six standard errors."""
    if theirs.numel() == 1 or theirs.std() == 0:
        return torch.equal(mine, theirs)
    error = 6 * theirs.std() / theirs.numel() ** 0.5
    return bool(
        (mine.mean() - theirs.mean()).abs() < error
        and (mine.std() - theirs.std()).abs() < error
        and ((mine == 0).float().mean() - (theirs == 0).float().mean()).abs() < 1e-3
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_filled_weights_are_distributed_as_transformers_makes_them(family: str, tmp_path: Path) -> None:
    section = ModelSection(path=str(folder_of(tmp_path, family)), init="random")
    config = load_model_config(section)
    torch.manual_seed(1)
    theirs = model_kind(config).auto.from_config(copy.deepcopy(config), dtype=torch.float32)
    built = build_model(section, seed=5)
    fill_all(built)
    pairs = list(zip(built.model.named_parameters(), theirs.named_parameters(), strict=True))
    assert [a[0] for a, _ in pairs] == [b[0] for _, b in pairs]  # both have the same ties
    assert not [a[0] for a, b in pairs if not same_distribution(a[1].detach(), b[1].detach())]
    for (_, mine), (name, buffer) in zip(built.model.named_buffers(), theirs.named_buffers(), strict=True):
        assert torch.equal(mine, buffer), name


def test_padding_rows_are_zero_and_constructor_values_stay(tmp_path: Path) -> None:
    built = build_model(ModelSection(path=str(folder_of(tmp_path, "llama", pad_token_id=3)), init="random"), seed=0)
    fill_all(built)
    embedding = built.model.get_input_embeddings().weight
    assert embedding[3].abs().sum() == 0
    assert embedding[2].abs().sum() > 0

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((8,), 3.0))
            self.linear = nn.Linear(8, 8)
            with torch.no_grad():
                self.linear.bias.fill_(2.0)
                self.linear.bias *= 4  # recorded in order
            self.norm = self.linear.weight.norm().item()  # a read runs the recorded operations first

    with DeferredInit(0) as deferred:
        model = Scaled()
    deferred.bind(model)("", model)
    assert torch.equal(model.scale, torch.full((8,), 3.0))
    assert torch.equal(model.linear.bias, torch.full((8,), 8.0))
    assert model.linear.weight.norm().item() == model.norm > 0


def test_values_depend_on_the_seed_and_the_name_alone() -> None:
    """Building draws nothing from the caller's generator, and a second fill changes nothing."""

    def parameters(seed: int, backwards: bool) -> dict[str, torch.Tensor]:
        built = build_model(ModelSection(preset="tiny"), seed=seed)
        modules = list(built.model.named_modules())[1:]
        for name, module in reversed(modules) if backwards else modules:
            built.fill(name, module)
        with torch.no_grad():
            built.model.get_input_embeddings().weight[0] = 7.0
        fill_all(built)
        return {name: parameter.detach().clone() for name, parameter in built.model.named_parameters()}

    torch.manual_seed(3)
    before = torch.get_rng_state()
    first, second, other = parameters(0, False), parameters(0, True), parameters(1, False)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], second[name]) for name in first)
    table = next(iter(first))
    assert not torch.equal(first[table], other[table])
    assert (first[table][0] == 7.0).all()


def test_an_unfilled_model_takes_no_memory() -> None:
    program = (
        "import resource, torch\nfrom offload.app.hf.models import build_model\n"
        "from offload.app.config.sections import ModelSection\n"
        "build_model(ModelSection(preset='tiny'), seed=0)\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "model = build_model(ModelSection(preset='125m'), seed=0).model\n"
        "size = sum(p.nbytes for p in model.parameters()) // 1024\n"
        "print(size, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    )
    ended = forks.run(["-c", program])
    assert ended.returncode == 0, ended.stderr
    size, grown = map(int, ended.stdout.split())
    assert size > 400_000  # KiB
    assert grown < size / 10


def saved(path: Path) -> Path:
    built = build_model(ModelSection(preset="tiny"), seed=0)
    fill_all(built)
    built.model.save_pretrained(path)
    return path


def test_pretrained_weights_are_those_of_the_folder(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    built = build_model(ModelSection(path=str(folder)), seed=9)
    fill_all(built)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    for (name, mine), other in zip(built.model.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other), name
    random = build_model(ModelSection(path=str(folder), init="random"), seed=9)
    fill_all(random)
    assert not torch.equal(next(random.model.parameters()), next(theirs.parameters()))


@pytest.mark.parametrize("files", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("name", names(quick=["gemma3_text"]))
def test_what_hangs_on_the_dtype_of_loading_is_as_from_pretrained_makes_it(
    name: str, files: torch.dtype, tmp_path: Path
) -> None:
    """Buffers and other tensors have the compute dtype, and parameters have the file dtype."""
    family, auto = families()[name], transformers.AutoModelForCausalLM
    if auto._model_mapping.get(family.model_class.config_class, None) is not family.model_class:
        pytest.skip("a part of a larger model, or a family that shares its configuration")
    family.build(dtype=files).save_pretrained(tmp_path)
    own = {key: value.dtype for key, value in auto.from_pretrained(tmp_path, dtype="auto").named_parameters()}
    for dtype in (torch.float32, torch.bfloat16):
        built = build_model(ModelSection(path=str(tmp_path)), seed=0, dtype=dtype)
        mine, theirs = tensors_beside(built.model), tensors_beside(auto.from_pretrained(tmp_path, dtype=dtype))
        assert mine.keys() == theirs.keys()
        assert [key for key in mine if not same_bits(mine[key], theirs[key])] == []
        assert {key: value.dtype for key, value in built.model.named_parameters()} == own


def tensors_beside(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all tensors of a model except parameters: buffers and plain attributes."""
    plain = {
        f"{name}.{key}": value
        for name, module in model.named_modules()
        for key, value in vars(module).items()
        if isinstance(value, torch.Tensor)
    }
    return plain | dict(model.named_buffers())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not a JSON file"),
        ("[]", "no model_type"),
        ('{"model_type": "no-such-family"}', "no-such-family"),
        ('{"model_type": "vit"}', "no language model"),
        ('{"model_type": "llama", "hidden_size": "wide"}', "hidden_size"),
        ('{"model_type": "llama", "hidden_size": 60, "num_attention_heads": 7}', "60"),
    ],
)
def test_a_bad_config_is_one_error(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=words):
        build_model(ModelSection(path=str(tmp_path / "config.json")), seed=0)


def test_missing_weights_are_errors(tmp_path: Path) -> None:
    folder_of(tmp_path / "bare", "llama")
    for name, words in (("bare", "no weights"), ("bare/config.json", "without weights")):
        init = "pretrained" if name.endswith(".json") else "auto"
        with pytest.raises(ConfigError, match=words):
            build_model(ModelSection(path=str(tmp_path / name), init=init), seed=0)


def resaved(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> BuiltModel:
    """Change the tensors in a folder. Return the filled model."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})
    built = build_model(ModelSection(path=str(folder)), seed=0)
    fill_all(built)
    return built


def test_a_head_that_no_file_has_is_initialised_with_a_note(tmp_path: Path) -> None:
    """Covers folders with the base model alone."""
    model = model_kind(config := config_of("llama")).auto.from_config(config)
    model.model.save_pretrained(tmp_path)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    built = resaved(tmp_path, lambda tensors: tensors.update({f"of.no.use.{n}": torch.zeros(2) for n in range(5)}))
    assert built.notes == (
        "1 of the weights are not in the files, and initialised at random (lm_head.weight).",
        "5 of the weights are not read: the model has no place for them (of.no.use.0, of.no.use.1, of.no.use.2, ...).",
    )
    assert torch.equal(built.model.model.norm.weight, model.model.norm.weight)
    assert 0 < built.model.lm_head.weight.std() < 0.1


def test_weights_that_are_tied_by_the_configuration_alone_stay_apart_with_a_note(tmp_path: Path) -> None:
    config = config_of("llama", tie_word_embeddings=True)
    model_kind(config).auto.from_config(config).save_pretrained(tmp_path)
    head = torch.ones(config.vocab_size, config.hidden_size)
    built = resaved(tmp_path, lambda tensors: tensors.update({"lm_head.weight": head}))
    (note,) = built.notes
    assert note.startswith("1 of the weights are not tied, although the configuration ties them")
    assert note.endswith("(lm_head.weight).")
    assert torch.equal(built.model.lm_head.weight, head)
    assert build_model(ModelSection(path=str(saved(tmp_path / "plain"))), seed=0).notes == ()


def test_what_cannot_be_read_by_parts_is_read_whole_with_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = saved(tmp_path)
    wanted = build_model(ModelSection(path=str(folder)), seed=0)
    fill_all(wanted)
    monkeypatch.setattr(models, "read_model", Mock(side_effect=CannotStream("other rules.")))
    with pytest.warns(UserWarning, match=r"whole into memory \(4\.\d+ MiB\): other rules"):
        built = build_model(ModelSection(path=str(folder)), seed=0)
    fill_all(built)
    for (name, mine), other in zip(built.model.named_parameters(), wanted.model.parameters(), strict=True):
        assert torch.equal(mine, other), name


def test_errors_of_our_own_come_through_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path)
    monkeypatch.setattr(models, "read_model", Mock(side_effect=DiskError("a bad sector", 5, folder)))
    with pytest.raises(DiskError, match="^a bad sector$"):
        build_model(ModelSection(path=str(folder)), seed=0)


def test_weights_of_torch_alone_on_the_hub_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """test_read.py has those in a folder, with the command that converts them."""
    folder = folder_of(tmp_path, "llama")  # hub models are downloaded only as safetensors
    monkeypatch.setattr(models, "locate", lambda section: folder)
    with pytest.raises(ConfigError, match=r"the hub's model some/one has no weights as safetensors.*--model.path one"):
        build_model(ModelSection(path="some/one"), seed=0)


def test_a_model_of_shapes_leaves_its_configuration_as_it_is() -> None:
    """The same configuration can build the real model later, in the file dtype."""
    config = config_of("llama", dtype="bfloat16")
    empty_model(ModelSection(), config)
    assert config.dtype == torch.bfloat16


def test_sequences_longer_than_the_positions_are_refused(tmp_path: Path) -> None:
    config = load_model_config(ModelSection(path=str(folder_of(tmp_path / "a", "gpt2", n_positions=64)), init="random"))
    check_sequence_length(max_positions(config), 64)
    with pytest.raises(ConfigError, match="65.*64"):
        check_sequence_length(max_positions(config), 65)
    roberta = folder_of(tmp_path / "b", "roberta", max_position_embeddings=66, pad_token_id=1)
    section = ModelSection(path=str(roberta), init="random")
    build_model(section, seed=0, sequence_length=64)
    with pytest.raises(ConfigError, match="65.*64"):  # two rows in the position table are no positions
        build_model(section, seed=0, sequence_length=65)


BILLIONS = """
tiny 0.00105  small 0.0337  125m 0.134  1b 1.24  3b 3.21  8b 8.03  70b 70.6
smollm2-135m 0.1345  smollm2-1.7b 1.71  llama-3.2-1b 1.24  llama-3.2-3b 3.21  llama-3.1-8b 8.03  llama-3.1-70b 70.6
qwen3-0.6b 0.596  qwen3-1.7b 1.72  qwen3-4b 4.02  qwen3-8b 8.19  qwen3-14b 14.8  qwen3-32b 32.8  qwen3-30b-a3b 30.5
mistral-7b 7.25  mistral-nemo-12b 12.2  mistral-small-24b 23.6  mixtral-8x7b 46.7  gemma-2-9b 9.24  gemma-3-4b 3.88
phi-4 14.7  gpt-oss-20b 20.9  gpt-oss-120b 117
"""
"""Parameters as the model cards give them (gemma-3-4b: the text part)."""
NUM_PARAMETERS = dict(zip(BILLIONS.split()[::2], (1e9 * float(each) for each in BILLIONS.split()[1::2]), strict=True))


@pytest.mark.parametrize("preset", quick(PRESETS, list(PRESETS)[::4]))
def test_presets_have_the_parameters_they_claim(preset: str) -> None:
    with torch.device("meta"):
        config = load_model_config(ModelSection(preset=preset))
        model = transformers.AutoModelForCausalLM.from_config(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    assert num_parameters == pytest.approx(NUM_PARAMETERS[preset], rel=0.01)
