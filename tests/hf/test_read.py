"""Weights read in parts equal the weights from `from_pretrained`."""

from __future__ import annotations

import gc
import json
import math
import weakref
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM, MixtralForCausalLM, core_model_loading

from offload import Engine
from offload.app.config.sections import ModelSection
from offload.app.hf.deferred_init import DeferredInit
from offload.app.hf.models import build_model
from offload.app.hf.names import CannotStream
from offload.app.hf.read import FolderWeights, weight_files
from offload.app.hf.sources import StackedSource
from offload.errors import ConfigError, DiskError
from offload.extras.tools.folder_check import verify_folder
from tests.checkpoint.folders import differences, fill, fill_by_parts, llama, read
from tests.engine.compare import same_bits
from tests.hf.peaks import make_large, peak_of
from tests.zoo.families import families


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A small untied llama in bf16."""
    torch.manual_seed(0)
    LlamaForCausalLM(llama()).bfloat16().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def edit(folder: Path, change) -> None:
    """Change the stored weights in a folder."""
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors) or tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "olmo_hybrid", "hrm_text"])
def test_any_range_of_a_parameter_is_read_alone(name: str, tmp_path: Path) -> None:
    model = families()[name].build(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    _, weights = read(type(model), tmp_path)
    for parameter, value in model.named_parameters(remove_duplicate=False):
        source, flat = weights.source(parameter), value.detach().reshape(-1)
        assert source.shape == value.shape
        numel = len(flat)
        for begin, end in ((0, numel), (0, 1), (numel - 1, numel), (numel // 3, numel // 3 * 2 + 1), (5, 5)):
            assert same_bits(source.read(begin, end), flat[begin:end]), (parameter, begin, end)


def test_a_range_of_a_stack_reads_only_its_experts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = families()["mixtral"].build()
    model.save_pretrained(tmp_path)
    _, weights = read(type(model), tmp_path)
    source = weights.source("model.layers.1.mlp.experts.gate_up_proj")
    taken = []
    file = next(iter(weights._files.values()))
    monkeypatch.setattr(file, "read", lambda name, *a, real=file.read: taken.append(name) or real(name, *a))
    width = math.prod(source.shape[1:])
    source.read(2 * width + 3, 3 * width)
    experts = {name.rpartition("experts.")[2] for name in taken}
    assert experts == {"2.w1.weight", "2.w3.weight"}


def test_a_parameter_over_unfilled_memory_is_refused_by_name(folder: Path) -> None:
    """A change of the model can put a new parameter over memory that no value was written to."""
    model, weights = read(LlamaForCausalLM, folder)
    layer = model.model.layers[1].mlp
    layer.up_proj.weight = torch.nn.Parameter(layer.up_proj.weight.detach())
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.up_proj\.weight has no values"):
        fill(weights, "model.layers.1", model.model.layers[1])


def test_nothing_is_read_before_it_is_asked_for_and_nothing_twice(folder: Path, monkeypatch) -> None:
    model, weights = read(LlamaForCausalLM, folder)
    file = next(iter(weights._files.values()))
    taken = []
    monkeypatch.setattr(file, "read", lambda name, *a, real=file.read: taken.append(name) or real(name, *a))
    fill(weights, "model.layers.1", model.model.layers[1])
    assert len(taken) == 9
    assert all(name.startswith("model.layers.1.") for name in taken)
    fill(weights, "model.layers.1", model.model.layers[1])
    assert len(taken) == 9
    # the placeholder of an offloaded unit
    model.model.layers[1].mlp.up_proj.weight = torch.nn.Parameter(torch.zeros(()).expand(48, 32))
    fill(weights, "model", model.model)
    assert len(taken) == len(set(taken)) == 9 * 2 + 2
    assert not model.model.layers[1].mlp.up_proj.weight.any()


def test_filled_parameters_are_held_by_the_model_alone(folder: Path) -> None:
    model, weights = read(LlamaForCausalLM, folder)
    fill(weights, "lm_head", model.lm_head)
    values = weakref.ref(model.lm_head.weight)
    model.lm_head.weight = torch.nn.Parameter(torch.zeros(()).expand(40, 32))
    gc.collect()
    assert values() is None


def test_one_of_two_tied_names_is_enough(tmp_path: Path) -> None:
    config = llama(tie_word_embeddings=True)
    model = LlamaForCausalLM(config)
    model.save_pretrained(tmp_path)
    edit(tmp_path, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    found, weights = read(LlamaForCausalLM, tmp_path)
    fill(weights, "model.embed_tokens", found.model.embed_tokens)
    assert found.lm_head.weight is found.model.embed_tokens.weight
    assert same_bits(found.lm_head.weight, model.lm_head.weight)
    assert weights.report.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert weights.report.missing == {}


@pytest.mark.parametrize("equal", [True, False])
def test_both_of_two_tied_names_are_tied_only_if_they_are_equal(tmp_path: Path, equal: bool) -> None:
    LlamaForCausalLM(llama(tie_word_embeddings=True)).save_pretrained(tmp_path)

    edit(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"] + (0 if equal else 1)}))
    wanted = LlamaForCausalLM.from_pretrained(tmp_path)
    found, weights = read(LlamaForCausalLM, tmp_path)
    fill_by_parts(found, weights)
    assert differences(wanted, found) == []
    assert (found.lm_head.weight is found.model.embed_tokens.weight) == equal
    assert weights.report.untied == ([] if equal else ["lm_head.weight"])


def test_missing_parameters_are_initialised_as_a_random_model_is(folder: Path) -> None:
    edit(folder, lambda t: [t.pop(f"model.layers.0.mlp.{n}_proj.weight") for n in ("up", "down")] and t)
    found, weights = read(LlamaForCausalLM, folder, seed=5)
    with DeferredInit(5) as deferred:
        random = LlamaForCausalLM._from_config(llama(), dtype=torch.bfloat16)
    deferred.bind(random)("", random)
    fill_by_parts(found, weights)
    missing = ["model.layers.0.mlp.down_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    assert weights.report.missing == dict(zip(missing, [(32, 48), (48, 32)], strict=True))
    for name in missing:
        assert same_bits(found.get_parameter(name), random.get_parameter(name))
    again, weights = read(LlamaForCausalLM, folder)
    with pytest.raises(ConfigError, match=r"lack model\.layers\.0\.mlp\.down_proj\.weight"):
        FolderWeights(again, folder)


def test_unexpected_tensors_are_listed_and_old_buffers_are_not(folder: Path) -> None:
    extra = {"more.weight": torch.zeros(3, 2), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    edit(folder, lambda t: t.update(extra))
    _, weights = read(LlamaForCausalLM, folder)
    assert weights.report.unexpected == {"more.weight": (3, 2)}


def test_old_names_and_a_base_models_names_are_understood(folder: Path) -> None:
    wanted, weights = read(LlamaForCausalLM, folder)
    fill_by_parts(wanted, weights)
    edit(folder, lambda t: {name.removeprefix("model."): value for name, value in t.items()})
    found, weights = read(LlamaForCausalLM, folder)
    fill_by_parts(found, weights)
    assert differences(wanted, found) == []
    assert not weights.report.unexpected


def test_a_lost_expert_is_refused(tmp_path: Path) -> None:
    families()["mixtral"].build().save_pretrained(tmp_path)
    lost = [f"model.layers.0.block_sparse_moe.experts.3.w{n}.weight" for n in (1, 2, 3)]
    edit(tmp_path, lambda t: [t.pop(name) for name in lost] and t)
    with pytest.raises(ConfigError, match=r"is \[3, .* in the files and \[4, "):
        read(MixtralForCausalLM, tmp_path)
    families()["mixtral"].build().save_pretrained(tmp_path)
    edit(tmp_path, lambda t: t.pop(lost[0]) is not None and t)
    with pytest.raises(ConfigError, match=r"cannot become model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        read(MixtralForCausalLM, tmp_path)


@pytest.mark.parametrize("tied", [True, False])
def test_added_tokens_get_the_mean_row_if_asked_for(tmp_path: Path, tied: bool) -> None:
    model = LlamaForCausalLM(llama(tie_word_embeddings=tied)).bfloat16()
    model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "vocab_size": 43}))
    with pytest.raises(ConfigError, match=r"\[40, 32\] in the files and \[43, 32\]"):
        read(LlamaForCausalLM, tmp_path)
    found, weights = read(LlamaForCausalLM, tmp_path, grow=True)
    fill_by_parts(found, weights)
    grown = {"model.embed_tokens.weight"} | (set() if tied else {"lm_head.weight"})
    assert weights.report.grown == dict.fromkeys(grown, ((40, 32), (43, 32)))
    for name in grown:
        old, new = model.get_parameter(name), found.get_parameter(name)
        mean = old.double().mean(0).float().bfloat16()
        assert same_bits(new[:40], old)
        assert same_bits(new[40:], mean.expand(3, 32))
        begin, end = 39 * 32 + 7, 41 * 32 + 9
        assert same_bits(weights.source(name).read(begin, end), new.reshape(-1)[begin:end])
    # The resize in transformers samples from a normal distribution so narrow that bf16 rounds to the mean.
    torch.manual_seed(0)
    model.resize_token_embeddings(43)
    torch.testing.assert_close(found.model.embed_tokens.weight, model.model.embed_tokens.weight, atol=1e-3, rtol=1e-2)


def test_the_files_of_an_index_are_read(tmp_path: Path) -> None:
    model = families()["mixtral"].build(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(weight_files(tmp_path)) > 3
    found, weights = read(type(model), tmp_path)
    fill_by_parts(found, weights)
    assert differences(model, found) == []
    lost = weight_files(tmp_path)[1]
    lost.unlink()
    with pytest.raises(ConfigError, match=lost.name):
        read(type(model), tmp_path)


def test_the_dtype_is_the_configurations_and_else_the_files(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    for named, wanted in (("float32", torch.float32), ("float16", torch.float16), (None, torch.bfloat16)):
        (folder / "config.json").write_text(json.dumps({**config, "dtype": named}))
        loaded = LlamaForCausalLM.from_pretrained(folder, dtype="auto")
        found, weights = read(LlamaForCausalLM, folder)
        fill_by_parts(found, weights)
        assert found.dtype == wanted
        assert differences(loaded, found) == []
        for begin, end in ((100, 1280), (7, 9)):  # a partial tensor, in a dtype other than the file dtype
            part = weights.source("lm_head.weight").read(begin, end)
            assert same_bits(part, loaded.lm_head.weight.detach().reshape(-1)[begin:end])


def test_quantized_weights_without_a_configuration_are_refused(folder: Path) -> None:
    edit(folder, lambda t: t.update({"lm_head.weight": t["lm_head.weight"].to(torch.float8_e4m3fn)}))
    with pytest.raises(ConfigError, match=r"lm_head\.weight in .*float8_e4m3fn: the model is quantized"):
        read(LlamaForCausalLM, folder)


def test_other_rules_of_transformers_are_noticed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(core_model_loading, "rename_source_key", lambda name, rules: (name, None))
    with pytest.raises(CannotStream, match="read the weights of LlamaForCausalLM one parameter at a time: TypeError"):
        read(LlamaForCausalLM, folder)
    monkeypatch.delattr(core_model_loading, "rename_source_key")
    with pytest.raises(CannotStream, match="has another interface"):
        read(LlamaForCausalLM, folder)


def test_bin_files_are_refused_with_the_command_that_converts_them(folder: Path) -> None:
    wanted = LlamaForCausalLM.from_pretrained(folder, dtype="auto")
    torch.save(wanted.state_dict(), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match="pytorch_model.bin") as refused:
        read(LlamaForCausalLM, folder)
    command = str(refused.value).split('python -c "')[1].split('"')[0]
    # the folder has no tokenizer
    code = command.replace("t.AutoTokenizer.from_pretrained(a).save_pretrained(b)", "pass")
    assert code != command
    exec(code, {})
    found, weights = read(LlamaForCausalLM, Path(f"{folder}-safetensors"))
    fill_by_parts(found, weights)
    assert differences(wanted, found) == []


def test_a_folder_without_weights_is_refused(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "adapter.safetensors")
    with pytest.raises(ConfigError, match=r"no weights.*only adapter\.safetensors"):
        read(LlamaForCausalLM, folder)
    (folder / "model.safetensors.index.json").write_text("{")
    with pytest.raises(ConfigError, match=r"model\.safetensors\.index\.json is not a valid index"):
        read(LlamaForCausalLM, folder)


def test_a_truncated_file_is_refused_by_name(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    for length in (0, 7, 8, 8 + header // 2, 8 + header, 8 + header + 100, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
            read(LlamaForCausalLM, folder)
    path.write_bytes(whole + b"\0")
    with pytest.raises(ConfigError, match=r"model\.safetensors is damaged"):
        read(LlamaForCausalLM, folder)


def test_a_value_that_is_nan_is_refused_by_name(folder: Path) -> None:
    """`verify` and the first read of the weights report NaN, before any step."""
    name = "model.layers.1.mlp.up_proj.weight"

    verify_folder(folder)
    edit(folder, lambda t: t[name][3, 5].fill_(float("nan")) and t)
    words = rf"model\.safetensors has NaN in {name} \(first at element 101 of \[48, 32\]\)"
    with pytest.raises(ConfigError, match=words):
        verify_folder(folder)
    built = build_model(ModelSection(path=str(folder)), seed=0)
    with pytest.raises(ConfigError, match=words):
        Engine(built.model, fill=built.fill)


def test_a_flipped_bit_in_a_header_is_never_read_in_silence(folder: Path) -> None:
    """Safetensors files have no checksum: detection needs a contradiction in the file, configuration or names."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    header = int.from_bytes(whole[:8], "little")
    generator = torch.Generator().manual_seed(0)
    end_of_metadata = whole.index(b"}") + 1
    for _ in range(60):
        position = int(torch.randint(0, 8 + header, (), generator=generator))
        changed = bytearray(whole)
        changed[position] ^= 1 << int(torch.randint(0, 8, (), generator=generator))
        path.write_bytes(changed)
        try:
            _, weights = read(LlamaForCausalLM, folder)
        except ConfigError as error:
            named = str(error)
        else:
            named = str(folder) if weights.report.missing or weights.report.unexpected else "nothing"
        is_idle = position < end_of_metadata or whole[position : position + 1] == b" "
        assert str(folder) in named or is_idle, (position, named)


def test_a_file_that_is_cut_while_it_is_read_is_an_error(folder: Path) -> None:
    model, weights = read(LlamaForCausalLM, folder)
    path = folder / "model.safetensors"
    with path.open("rb+") as file:
        file.truncate(path.stat().st_size - 2000)
    with pytest.raises(DiskError, match=r"model\.safetensors ends at byte"):
        fill_by_parts(model, weights)


_READ = """
import torch, transformers
from offload.app.hf.read import read_model
folder = Path(sys.argv[1])
config = transformers.AutoConfig.from_pretrained(folder)
transformers.AutoModelForCausalLM._model_mapping[type(config)]
before = begin()
model, weights = read_model(transformers.AutoModelForCausalLM, folder, config)
largest, total = 0, 0
units = [(f"model.layers.{i}", m) for i, m in enumerate(model.model.layers)]
for name, module in [("e", model.model.embed_tokens), *units, ("n", model.model.norm), ("h", model.lm_head)]:
    for p, source in weights.fill(name, module).items():
        p.data = source.read(0, p.numel()).view(p.shape)
    size = sum(p.nbytes for p in module.parameters())
    largest, total = max(largest, size), total + size
    for owner in module.modules():
        for key, p in owner._parameters.items():
            if p is not None:
                owner._parameters[key] = torch.nn.Parameter(torch.full((), float("nan"), dtype=p.dtype).expand(p.shape))
    del p
print(status("VmHWM") - before, largest, total)
"""


@pytest.mark.slow
def test_the_peak_of_reading_is_one_unit(tmp_path: Path) -> None:
    make_large(tmp_path / "model")
    peak, largest, total = peak_of(_READ, tmp_path / "model")
    assert total > 550 << 20
    assert peak < largest + (100 << 20)


def test_a_row_of_a_stack_is_made_once_for_all_its_pieces() -> None:
    made = list[int]()

    class Conversion:
        def row_sources(self, row: int) -> tuple[str, ...]:
            return ()

        def make_row(self, row: int, tensors: Any) -> torch.Tensor:
            made.append(row)
            return torch.arange(10.0).view(2, 5) + 10 * row

    stack = StackedSource({}, cast(Any, Conversion()), (3, 2, 5), torch.float32)
    for _ in range(2):
        pieces = [stack.read(begin, min(begin + 4, 30)) for begin in range(0, 30, 4)]
        assert torch.equal(torch.cat(pieces), torch.arange(30.0))
        assert not stack._partial_rows
    assert made == [0, 1, 2] * 2
