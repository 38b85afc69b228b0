"""A folder written in parts equals the `save_pretrained` folder, byte for byte where the format leaves no choice."""

from __future__ import annotations

import errno
import json
import os
import resource
import subprocess
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM, core_model_loading

from offload.app.hf.models import folder_config
from offload.app.hf.names import CannotStream
from offload.app.hf.tensor_writer import TensorFileWriter
from offload.app.hf.write import export_folder, write_model
from offload.errors import ConfigError, DiskError, OffloadError
from tests.checkpoint.folders import bits, differences, fill_by_parts, llama, names, names_and_dtypes, read
from tests.engine.compare import same_bits
from tests.hf.peaks import make_large, peak_of
from tests.zoo.families import families


def rest(model: nn.Module) -> Callable[[str, int, int], torch.Tensor]:
    """Replace each parameter by an expanded NaN, like an engine. Return a function that gives each value once."""
    values, resting = dict(model.named_parameters()), {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                nan = torch.full((), float("nan"), dtype=parameter.dtype).expand(parameter.shape)
                resting.setdefault(id(parameter), nn.Parameter(nan, parameter.requires_grad))
                module._parameters[key] = resting[id(parameter)]
    given = dict.fromkeys(values, 0)

    def get(name: str, begin: int, end: int) -> torch.Tensor:
        assert begin == given[name]
        given[name] = end
        return values[name].detach().reshape(-1)[begin:end]

    return get


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for path in folder.glob("*.safetensors") for name, value in load_file(path).items()}


def logits(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Run a model without a cache, because a small configuration can give a too short cache."""
    configs = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    used = [(config, config.use_cache) for config in configs.values() if hasattr(config, "use_cache")]
    try:
        for config, _ in used:
            config.use_cache = False
        torch.manual_seed(0)
        with torch.no_grad():
            return model.eval()(**batch).logits
    finally:
        for config, value in used:
            config.use_cache = value


@pytest.mark.parametrize(("name", "dtype"), names_and_dtypes())
def test_what_was_read_is_written_back_byte_for_byte(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Weights, configuration and generation files equal the `save_pretrained` files and the source files.

    The read model equals `from_pretrained`.
    """
    model = families()[name].build(dtype=dtype)
    model.save_pretrained(tmp_path / "given")
    loaded, info = type(model).from_pretrained(tmp_path / "given", dtype="auto", output_loading_info=True)
    found, weights = read(type(model), tmp_path / "given")
    assert [n for n, _ in found.named_parameters()] == [n for n, _ in loaded.named_parameters()]
    assert [p.dtype for p in found.parameters()] == [p.dtype for p in loaded.parameters()]
    fill_by_parts(found, weights)
    assert differences(loaded, found) == []
    assert sorted(weights.report.missing) == sorted(info["missing_keys"]) == []
    assert sorted(weights.report.unexpected) == sorted(info["unexpected_keys"]) == []
    assert found.training == loaded.training
    assert found.config.to_json_string() == loaded.config.to_json_string()
    loaded.save_pretrained(tmp_path / "theirs")
    done = write_model(found, rest(found), tmp_path / "ours")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    given, ours = tensors(tmp_path / "given"), tensors(tmp_path / "ours")
    assert given.keys() == ours.keys() == done.hashes.keys()
    assert all(same_bits(given[key], ours[key]) or given[key].dtype != ours[key].dtype for key in given)


@pytest.mark.parametrize("name", [one for one in names() if one.values[0] in list(families())[::4] or not one.marks])
def test_a_model_that_was_never_loaded_is_written_and_loads_with_equal_logits(name: str, tmp_path: Path) -> None:
    """tests/zoo/test_folders.py compares logits for all other families, after fp32 training in an engine."""
    family = families()[name]
    model = family.build(calm=True).eval()
    batch = {
        key: value for key, value in family.batch().items() if key != "labels" or "input_ids" not in family.batch()
    }
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    model.save_pretrained(tmp_path / "theirs")
    write_model(model, rest(model), tmp_path / "ours")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    auto = AutoModelForCausalLM
    loads = auto if auto._model_mapping.get(type(model.config), None) is type(model) else type(model)
    again, info = loads.from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    assert type(again) is type(model)
    state = again.state_dict()
    assert state.keys() == expected.keys()
    assert all(torch.equal(bits(state[key]), bits(expected[key])) for key in state)
    for parameter in again.parameters():
        # a mapped file is aligned to 8 bytes, and kernels then sum in another order
        parameter.data = parameter.data.clone()
    if not family.is_random:
        # a second model, because the first phimoe run in a process differs from all later runs
        assert same_bits(logits(again, batch), logits(family.build(), batch))


def test_old_names_that_were_read_are_written_again(tmp_path: Path) -> None:
    """Like `save_pretrained`: reverse the conversion rules used at load, and no others."""
    model = families()["bert"].build()
    model.save_pretrained(tmp_path / "given")
    path = tmp_path / "given" / "model.safetensors"
    old = {name.replace("LayerNorm.weight", "LayerNorm.gamma"): value for name, value in load_file(path).items()}
    save_file(old, path, metadata={"format": "pt"})
    theirs = type(model).from_pretrained(tmp_path / "given")
    theirs.save_pretrained(tmp_path / "theirs")
    found, weights = read(type(model), tmp_path / "given")
    fill_by_parts(found, weights)
    assert differences(model, found) == []
    write_model(found, rest(found), tmp_path / "ours")
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    assert tensors(tmp_path / "ours").keys() == old.keys()


@pytest.mark.parametrize("name", ["llama", "gemma2", "mixtral", "bloom"])
def test_shards_and_their_index_hold_the_same(name: str, tmp_path: Path) -> None:
    """Our export can put stacked experts in different files. transformers keeps a stack in one file, however large."""
    model = families()[name].build()
    model.save_pretrained(tmp_path / "theirs", max_shard_size=60_000)
    expected = {key: value.clone() for key, value in model.state_dict().items()}
    done = write_model(model, rest(model), tmp_path / "ours", shard_bytes=60_000)
    assert len(done.files) > 3
    largest = max(value.nbytes for value in tensors(tmp_path / "ours").values())
    assert all(path.stat().st_size < max(60_000, largest) + 20_000 for path in done.files)
    if name == "mixtral":
        theirs, ours = (
            json.loads((tmp_path / each / "model.safetensors.index.json").read_text()) for each in ("theirs", "ours")
        )
        assert theirs["metadata"] == ours["metadata"]
        assert theirs["weight_map"].keys() == ours["weight_map"].keys()
        theirs, ours = tensors(tmp_path / "theirs"), tensors(tmp_path / "ours")
        assert theirs.keys() == ours.keys()
        assert all(same_bits(theirs[key], ours[key]) for key in ours)
    else:
        assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    state = type(model).from_pretrained(tmp_path / "ours").state_dict()
    assert all(same_bits(state[key], expected[key]) for key in state)


def test_each_parameter_is_asked_for_once_in_the_models_order_and_tied_ones_by_the_first_name(tmp_path: Path) -> None:
    model = families()["gemma2"].build()
    order = [name for name, _ in model.named_parameters()]
    get, asked = rest(model), []
    write_model(model, lambda name, begin, end: asked.append(name) or get(name, begin, end), tmp_path / "out")
    assert list(dict.fromkeys(asked)) == order
    assert "lm_head.weight" not in asked


def test_any_other_module_is_written_under_its_own_names(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    model.add_module("tied", model[0])
    expected = {key: value.clone() for key, value in model.state_dict().items() if not key.startswith("tied")}
    write_model(model, rest(model), tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert all(same_bits(found[key], expected[key]) for key in found)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["model.safetensors"]


def test_a_generation_config_that_transformers_would_not_save_is_no_reason_to_lose_an_export(tmp_path: Path) -> None:
    model = LlamaForCausalLM(llama())
    model.generation_config.temperature = 0.5  # without do_sample
    with pytest.raises(ValueError):
        model.generation_config.save_pretrained(tmp_path)
    write_model(model, rest(model), tmp_path / "out")
    assert json.loads((tmp_path / "out" / "generation_config.json").read_text())["temperature"] == 0.5


def test_only_an_earlier_export_is_replaced_and_only_if_asked(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for seed in (0, 1):
        torch.manual_seed(seed)
        model = LlamaForCausalLM(llama())
        if seed:
            with pytest.raises(ConfigError, match="exists"):
                write_model(model, rest(model), out)
            model = LlamaForCausalLM(llama())
        head = model.lm_head.weight.detach().clone()
        write_model(model, rest(model), out, replace=bool(seed))
        assert same_bits(tensors(out)["lm_head.weight"], head)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (out / "README.md").write_text("precious")
    with pytest.warns(UserWarning, match=r"held README\.md, which no export has, and was renamed to"):
        write_model(model, rest(model), out, replace=True)
    (aside,) = tmp_path.glob("out.aside-*")
    assert (aside / "README.md").read_text() == "precious"
    assert not (out / "README.md").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other/notes").touch()
    with pytest.raises(ConfigError, match="not an earlier export"):
        write_model(LlamaForCausalLM(llama()), lambda name, begin, end: None, tmp_path / "other", replace=True)


def test_a_link_leads_to_where_the_export_is(tmp_path: Path) -> None:
    (tmp_path / "disk/out").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/out")
    model = LlamaForCausalLM(llama())
    for replace in (False, True):
        write_model(model, rest(model), tmp_path / "link", replace=replace)
        assert (tmp_path / "link").is_symlink()
        assert [path.name for path in (tmp_path / "disk").iterdir()] == ["out"]
        assert (tmp_path / "disk/out/model.safetensors").exists()


@pytest.mark.parametrize("call", ["posix_fallocate", "pwrite", "fsync"])
def test_a_full_disk_is_one_error_and_leaves_nothing(call: str, tmp_path: Path, monkeypatch) -> None:
    model = LlamaForCausalLM(llama())
    monkeypatch.setattr(os, call, Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")))
    with pytest.raises(DiskError, match=r"cannot be written: No space left on device \(ENOSPC\)"):
        write_model(model, rest(model), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_interruption_leaves_the_earlier_export_whole(tmp_path: Path) -> None:
    model = LlamaForCausalLM(llama())
    write_model(model, rest(model), tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(KeyboardInterrupt):
        write_model(model, Mock(side_effect=KeyboardInterrupt), tmp_path / "out", replace=True)
    assert contents(tmp_path / "out") == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_what_a_killed_export_has_left_is_removed(tmp_path: Path) -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    (tmp_path / f".out.part-{child.pid}").mkdir()
    (tmp_path / ".out.part-1").mkdir()  # from a live process
    model = LlamaForCausalLM(llama())
    write_model(model, rest(model), tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"out", ".out.part-1"}


@pytest.mark.parametrize("position", [20, 60, -1, -5000])
def test_a_bit_that_flips_on_the_way_to_the_disk_is_found(position: int, tmp_path: Path, monkeypatch) -> None:
    def finish_and_flip(writer, real=TensorFileWriter.finish):
        written = real(writer)
        data = bytearray(written.path.read_bytes())
        data[position] ^= 4
        written.path.write_bytes(data)
        return written

    monkeypatch.setattr(TensorFileWriter, "finish", finish_and_flip)
    model = LlamaForCausalLM(llama())
    with pytest.raises(OffloadError, match=r"model\.safetensors (differs from what was written|cannot be read back)"):
        write_model(model, rest(model), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_other_rules_of_transformers_are_noticed(tmp_path: Path, monkeypatch) -> None:
    """If a partial write changes a name or shape, no file is written."""
    model = families()["mixtral"].build()
    revert = core_model_loading.revert_weight_conversion

    def other(model, tensors, *args, **kwargs):
        return {name.replace("w1", "w2"): tensor for name, tensor in revert(model, tensors, *args, **kwargs).items()}

    monkeypatch.setattr(core_model_loading, "revert_weight_conversion", other)
    with pytest.raises(CannotStream, match=r"the weights of MixtralForCausalLM one parameter at a time"):
        write_model(model, rest(model), tmp_path / "out")
    monkeypatch.delattr(core_model_loading, "rename_source_key")
    with pytest.raises(CannotStream, match="has another interface"):
        write_model(model, rest(model), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


_WRITE = """
import torch, transformers
from torch import nn
from offload.app.hf.deferred_init import DeferredInit
from offload.app.hf.write import write_model
config = transformers.AutoConfig.from_pretrained(sys.argv[1])
with DeferredInit(0):
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
sizes = [sum(p.nbytes for p in m.parameters()) for m in (*model.model.layers, model.lm_head)]
shapes = {}
for prefix, module in list(model.named_modules()):
    for key, p in module._parameters.items():
        if p is not None:
            shapes[f"{prefix}.{key}"] = p.shape
            module._parameters[key] = nn.Parameter(torch.full((), float("nan"), dtype=p.dtype).expand(p.shape))
del p
before = begin()
done = write_model(model, lambda name, begin, end: torch.ones(end - begin), Path(sys.argv[2]), shard_bytes=200 << 20)
print(status("VmHWM") - before, max(sizes), done.num_bytes)
"""


@pytest.mark.slow
def test_the_peak_of_writing_is_one_unit(tmp_path: Path) -> None:
    """`get` returns fp32 and the files are bf16, so the largest parameter needs twice its unit size."""
    make_large(tmp_path / "model")
    peak, largest, total = peak_of(_WRITE, tmp_path / "model", tmp_path / "out")
    assert total > 550 << 20
    assert peak < largest + (150 << 20)


OWN = """
import json
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM
class OwnConfig(LlamaConfig):
    model_type = "own_llama"
class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig
    def save_pretrained(self, folder, **how):
        super().save_pretrained(folder, **how)
        (Path(folder) / "added.json").write_text(json.dumps({"rows": 3}))
"""


def test_a_model_with_code_of_its_own_is_written_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files added by a custom `save_pretrained` are included. Commands refuse custom code and name an alternative."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(tmp_path / "cache")
    given = tmp_path / "given"
    LlamaForCausalLM(llama()).save_pretrained(given)
    (given / "modeling_own.py").write_text(OWN)
    config = json.loads((given / "config.json").read_text())
    names = {"AutoConfig": "modeling_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    (given / "config.json").write_text(json.dumps({**config, "model_type": "own_llama", "auto_map": names}))
    model = AutoModelForCausalLM.from_pretrained(given, trust_remote_code=True)
    model.save_pretrained(tmp_path / "theirs")
    write_model(model, rest(model), tmp_path / "ours")
    assert (tmp_path / "ours/modeling_own.py").is_file()
    assert (tmp_path / "ours/added.json").is_file()
    assert contents(tmp_path / "ours") == contents(tmp_path / "theirs")
    with pytest.raises(
        ConfigError, match=r"its own Python code \(auto_map\), which commands never run.*OffloadTrainer"
    ):
        folder_config(given)


def test_a_full_disk_under_a_library_is_an_error_of_the_disk(tmp_path: Path) -> None:
    """PEFT writes adapters with safetensors, whose own error has the number in its text."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(DiskError, match=r"out cannot be written: File too large \(EFBIG\)"):  # noqa: SIM117
            with export_folder(tmp_path / "out", replace=False) as temporary:
                save_file({"weight": torch.ones(4000)}, temporary / "adapter_model.safetensors")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
