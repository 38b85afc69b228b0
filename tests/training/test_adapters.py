"""Runs with an adapter over a frozen base: messages, checkpoints, resume and export."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from transformers.trainer_utils import align_special_tokens

from offload.app.config.config import Config
from offload.app.config.sections import LoraSection, ModelSection
from offload.app.training import checkpoints, trainable
from offload.checkpoint.reader import Reader
from offload.errors import ConfigError, DoesNotFitError
from offload.export import main as export_command
from offload.extras.adapters.adapters import Adaptation
from offload.extras.adapters.over_base import load_base_config
from offload.extras.data.tokenizer import train_bpe
from offload.extras.large import cut_experts
from offload.layout import regions
from offload.layout.codecs import CODECS, decoded
from offload.parity import main as parity_command
from offload.plan import main as plan_command
from offload.replay import main as replay_command
from offload.verify import main as verify_command
from tests import forks
from tests.integrations.plain import needs
from tests.run_folder import assert_said_as_saved, assert_same_tensors, cut, losses
from tests.training.conftest import HOST, SHAPES

needs("peft")

from peft import PeftModel, get_peft_model  # noqa: E402
from peft.tuners.lora.layer import LoraLayer  # noqa: E402

ADAPTER = {"lora__rank": 4, "lora__target_modules": ["q_proj", "down_proj"], "lora__dropout": 0.1}


@pytest.fixture
def base(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """Write a model folder with weights and a tokenizer. The default family is Llama; a test can pass another."""
    folder, family = tmp_path / "base", getattr(request, "param", "llama")
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, vocab_size=384, **SHAPES[family])).save_pretrained(
        folder
    )
    train_bpe(["a number, the next one, 1 2 3 4 5 6 7 8 9 0 is"] * 20, vocab_size=300).save_pretrained(folder)
    return folder


FILE = "adapter_model.safetensors"
assert_same = partial(assert_same_tensors, file=FILE)


def merged(base: Path, adapter: Path, decode: Callable[[str, torch.Tensor], torch.Tensor] = lambda _, v: v) -> Any:
    """Return a model with an adapter merged by PEFT. decode: returns the weight of the base for (name, weight)."""
    over: Any = AutoModelForCausalLM.from_pretrained(base, dtype="auto")
    for name, parameter in over.named_parameters():
        parameter.data = decode(name, parameter.detach())
    return PeftModel.from_pretrained(over, adapter).merge_and_unload()


def decoded_in(codec: str, weight: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return decoded(CODECS[codec], weight.reshape(-1), dtype).view(weight.shape).float()


def assert_holds(folder: Path, model: Any) -> None:
    """Check that the folder of a model has the weights of `model`."""
    wanted = model.state_dict()
    stored = load_file(folder / "model.safetensors")
    assert [name for name, value in stored.items() if not torch.equal(value, wanted[name])] == []


def words(tmp_path: Path, name: str, **settings: Any) -> list[str]:
    """Return the command line with the same settings as the fixture `run`."""
    data = {"data__source": tmp_path / "text.txt", "data__sequence_length": 32, "data__eval_fraction": 0.1}
    values = {"run__dir": tmp_path / name, **data, "train__batch_size": 4, "train__precision": "fp32", **settings}
    found = []
    for key, value in values.items():
        each = value if isinstance(value, list | tuple) else [value]
        found += [f"--{key.replace('__', '.')}", *map(str, each)]
    return found


def train_over_ranks(tmp_path: Path, name: str, **settings: Any) -> Path:
    """Train in two processes with the variables of torchrun. Return the run folder."""
    command = ["-m", "offload.train", *words(tmp_path, name, **settings)]
    done = forks.run_ranks(command, XDG_CACHE_HOME=str(tmp_path / "cache"))
    assert [each.returncode for each in done] == [0, 0], done
    return tmp_path / name


def gone_on(run: Any, whole: Any, last: int, **settings: Any) -> Any:
    """Return the result of a run that goes on before the checkpoint of the last step: as the whole one."""
    cut(whole.dir, "half", last)
    half, *_ = run("half", **settings)
    assert losses(half.dir) == losses(whole.dir)
    assert_same(half.export, whole.export)
    return half


@pytest.mark.slow
def test_a_run_stopped_halfway_goes_on_to_the_same_bits(
    run: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "LONG_BYTES", 0)
    more = {"model__path": str(base), "train__steps": 6, "checkpoint__every": 3, **ADAPTER, **HOST}
    whole, _, said = run("whole", **more)
    assert "adapter: lora, 1,920 of " in said
    assert "over 6 modules (3 q_proj, 3 down_proj)" in said
    assert f"frozen: {base}" in said
    assert f"reloaded: by peft, from {whole.export}: logits bit-equal" in said
    folder = whole.dir / "checkpoints" / "step-3"
    with Reader(folder) as reader:
        assert {name.rpartition(".lora_")[2] for name in reader.contents} == {"A.default.weight", "B.default.weight"}
        assert len(reader.contents) == 12
        assert reader.meta["meta"]["base"]["name"] == str(base)
    assert sum(path.stat().st_size for path in folder.glob("*.bin")) == 12 * 1920
    assert_said_as_saved(folder, said)
    half = gone_on(run, whole, 6, **more)
    assert verify_command([str(half.export)]) == verify_command([str(half.dir)]) == 0


@pytest.mark.slow
def test_an_export_is_what_peft_makes_of_it(run: Any, base: Path, tmp_path: Path) -> None:
    """The base files are bf16. A run in fp32 computes with the stored values."""
    AutoModelForCausalLM.from_pretrained(base, dtype=torch.bfloat16).save_pretrained(base)
    head = {"lora__modules_to_save": ["lm_head"]}
    result, _, said = run("run", model__path=str(base), checkpoint__every=3, **head, **ADAPTER, **HOST)
    assert "logits bit-equal" in said
    adapter_of, out, wanted = tmp_path / "adapter", tmp_path / "merged", tmp_path / "wanted"
    assert export_command([str(result.dir), str(adapter_of)]) == 0
    assert_same(adapter_of, result.export)
    assert (adapter_of / "tokenizer.json").read_bytes() == (base / "tokenizer.json").read_bytes()
    base.rename(tmp_path / "moved")
    with pytest.raises(ConfigError, match=f"trained over {base}, and its base is not at {base}; set --base to"):
        export_command([str(result.dir), str(out), "--merge"])
    assert export_command([str(result.dir), str(out), "--merge", "--base", str(tmp_path / "moved")]) == 0
    model = merged(tmp_path / "moved", adapter_of)
    align_special_tokens(model, AutoTokenizer.from_pretrained(adapter_of))  # as transformers' Trainer
    model.save_pretrained(wanted)
    for name in ("model.safetensors", "config.json"):
        assert (out / name).read_bytes() == (wanted / name).read_bytes(), name
    assert verify_command([str(out)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("init", "codec"), [("pissa_niter_4", "nf4"), ("olora", "exact")])
def test_a_base_lacks_what_its_adapter_begins_as(
    run: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, init: str, codec: str
) -> None:
    monkeypatch.setattr(regions, "LEAST_NUMEL", 64)
    adapts = {"rank": 4, "init": init, "target_modules": ["q_proj", "down_proj"]}
    more = {"model__path": str(base), "checkpoint__every": 2, "train__steps": 4, "offload__frozen_weights": codec}
    more |= {f"lora__{key}": value for key, value in adapts.items()} | HOST
    whole, _, said = run("whole", **more)
    assert f"reloaded: by peft, from {whole.export}: logits equal within" in said
    model: Any = AutoModelForCausalLM.from_pretrained(base)
    for parameter in model.parameters():
        parameter.data = parameter.detach().clone()  # memory alignment can change the last bits of a product
    torch.manual_seed(0)
    plain = get_peft_model(model, Adaptation.of(LoraSection(**adapts), "causal").config)
    plain.save_pretrained(tmp_path / "initial")
    for name in ("pissa_init", "olora_init"):
        monkeypatch.delattr(LoraLayer, name)  # a resumed run reads the changed base
    gone_on(run, whole, 4, **more)
    adapter = load_file(whole.export / FILE)
    trained = {name.replace(".weight", ".default.weight"): value for name, value in adapter.items()}
    for name, parameter in plain.named_parameters():
        if codec != "exact" and ".layers." in name and parameter.dim() > 1 and "lora" not in name:
            parameter.data = decoded_in(codec, parameter.detach())
        if name in trained:
            parameter.data = trained[name][:4].clone() if "lora_A" in name else trained[name][:, :4].clone()
    plain.save_pretrained(tmp_path / "wanted", path_initial_model_for_weight_conversion=str(tmp_path / "initial"))
    assert_same(whole.export, tmp_path / "wanted")
    config = json.loads((whole.export / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["init_lora_weights"]) == (8, 16, True)
    assert export_command([str(whole.dir), str(tmp_path / "adapter")]) == 0
    assert_same(tmp_path / "adapter", whole.export)
    assert export_command([str(whole.dir), str(tmp_path / "merged"), "--merge"]) == 0
    assert_holds(tmp_path / "merged", plain.merge_and_unload())


@pytest.mark.slow
def test_an_adapter_that_a_file_describes_is_resumed_and_exported(run: Any, base: Path, tmp_path: Path) -> None:
    """VeRA: all layers share two matrices."""
    config = tmp_path / "vera.json"
    config.write_text(json.dumps({"peft_type": "VERA", "r": 4, "target_modules": ["q_proj", "o_proj"]}))
    more = {"model__path": str(base), "checkpoint__every": 2, "lora__config": str(config), **HOST}
    whole, *_ = run("whole", train__steps=4, **more)
    gone_on(run, whole, 4, train__steps=4, **more)
    assert export_command([str(whole.dir), str(tmp_path / "adapter")]) == 0
    assert_same(tmp_path / "adapter", whole.export)
    assert Config.load(whole.dir / "config.yaml").lora.config == str(config)
    with pytest.raises(ConfigError, match="but lora.alpha is set too, beside this complete description of an adapter"):
        parity_command(["--lora.config", str(config), "--lora.alpha", "8"])


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"offload__parameters": "files", "lora__init": "pissa"},
            r"init pissa changes base weights.* set --offload.parameters cpu",
        ),
        (
            {"lora__init": "loftq_5", **HOST},
            "loftq_5, which is no longer computed: set --lora.init default, gaussian, orthogonal, olora",
        ),
    ],
)
def test_an_initialization_that_cannot_be_is_refused(
    run: Any, base: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], told: str
) -> None:
    monkeypatch.delattr(LoraLayer, "pissa_init")  # the refusal comes before any initialization
    with pytest.raises(ConfigError, match=told):
        run("run", model__path=str(base), **{**ADAPTER, **settings})
    if settings["lora__init"] == "pissa":
        words = ["--model.path", str(base), "--offload.parameters", "files", "--lora.init", "pissa", "--lora.rank", "4"]
        with pytest.raises(ConfigError, match=r"init pissa changes base weights"):
            plan_command([*words, "--hardware", "rtx-4090"])


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "precision"), [("nf4", "fp32"), ("int8", "bf16"), ("exact", "bf16")])
def test_it_is_loaded_and_merged_over_what_it_was_trained_on(
    run: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, codec: str, precision: str
) -> None:
    monkeypatch.setattr(regions, "LEAST_NUMEL", 64)
    codes = {"offload__frozen_weights": codec, "train__precision": precision}
    result, _, said = run("run", model__path=str(base), checkpoint__every=3, **codes, **ADAPTER)
    assert f"reloaded: by peft, from {result.export}: logits bit-equal" in said
    assert (f"21 frozen parameters are stored in {codec}" in said) == (codec != "exact")
    dtype = torch.float32 if precision == "fp32" else torch.bfloat16
    for onto in ("trained", "original"):
        assert export_command([str(result.dir), str(tmp_path / onto), "--merge", "--onto", onto]) == 0
        is_coded = codec != "exact" and onto == "trained"

        def decode(name: str, weight: torch.Tensor, is_coded: bool = is_coded) -> torch.Tensor:
            return decoded_in(codec, weight, dtype) if is_coded and ".layers." in name and weight.dim() > 1 else weight

        assert_holds(tmp_path / onto, merged(base, result.export, decode))
    for flags in (["--onto", "original"], *([["--merge", "--dtype", "bf16"]] if codec != "exact" else [])):
        with pytest.raises(ConfigError, match="leave"):
            export_command([str(result.dir), str(tmp_path / "wrong"), *flags])


@pytest.mark.slow
@pytest.mark.parametrize("base", ["gpt_oss"], indirect=True)
def test_experts_that_are_no_whole_blocks_are_resumed_and_merged(
    run: Any, base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cut_experts, "RECORD_BYTES", 1)
    experts = {"lora__target_modules": ["q_proj"], "lora__target_parameters": ["gate_up_proj", "down_proj"]}
    more = {"model__path": str(base), "checkpoint__every": 2, "lora__rank": 2, **experts, **HOST}
    more |= {"offload__frozen_weights": "nf4", "offload__experts": "streamed", "train__steps": 4}
    whole, _, said = run("whole", **more)
    assert "4 stacks of expert vectors" in said
    gone_on(run, whole, 4, **more)
    assert export_command([str(whole.dir), str(tmp_path / "merged"), "--merge"]) == 0

    def decode(name: str, weight: torch.Tensor) -> torch.Tensor:
        is_coded = ".layers." in name and not name.endswith("bias") and weight.dim() > 1 and weight.numel() >= 4096
        return decoded_in("nf4", weight) if is_coded else weight

    assert_holds(tmp_path / "merged", merged(base, whole.export, decode))
    with pytest.raises(ConfigError, match="no attribute 'weight' .only --lora.init default"):
        run("no", **more, lora__init="olora")


@pytest.mark.slow
def test_a_merge_that_changes_nothing_is_refused(run: Any, base: Path, tmp_path: Path) -> None:
    result, _, _ = run("run", model__path=str(base), optimizer__lr=0.0, checkpoint__every=3, lora__rank=2)
    with pytest.raises(ConfigError, match="changes no base weight: the adapter was not trained"):
        export_command([str(result.dir), str(tmp_path / "merged"), "--merge"])
    assert not (tmp_path / "merged").exists()
    with pytest.raises(ConfigError, match="without --merge"):
        export_command([str(result.dir), str(tmp_path / "merged"), "--base", str(base)])


def test_a_base_is_missing_at_the_path_that_was_given(tmp_path: Path) -> None:
    stored, given = {"name": "/models/base", "revision": None}, str(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=f"trained over /models/base, and its base is not at {given}; set --base to"):
        load_base_config(ModelSection(path=given), stored, Path("step-2"), "--base")


@pytest.mark.slow
def test_another_base_is_refused_and_a_missing_one_is_named(run: Any, base: Path, tmp_path: Path) -> None:
    more = {"checkpoint__every": 2, **ADAPTER}
    run("run", model__path=str(base), **more)
    moved = tmp_path / "elsewhere"
    base.rename(moved)
    with pytest.raises(ConfigError, match=f"only an adapter, trained over {base}, and its base is not at {base}"):
        run("run", model__path=str(base), train__steps=4, **more)
    result, _, _ = run("run", model__path=str(moved), train__steps=4, **more)
    assert result.steps == 4
    weights = load_file(moved / "model.safetensors")
    weights["model.norm.weight"][3] += 1
    save_file(weights, moved / "model.safetensors", {"format": "pt"})
    with pytest.raises(ConfigError, match=r"step-4 holds an adapter trained over .*elsewhere is another model"):
        run("run", model__path=str(moved), train__steps=6, **more)


@pytest.mark.slow
def test_random_weights_are_told_by_their_seed_and_shape(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result, _, said = run("run", checkpoint__every=3, **ADAPTER)
    assert "with random weights of run.seed 0" in said
    config = json.loads((result.dir / "checkpoints" / "step-3" / "adapter_config.json").read_text())
    assert (config["r"], config["task_type"]) == (4, "CAUSAL_LM")
    monkeypatch.setitem(SHAPES, "llama", {**SHAPES["llama"], "rms_norm_eps": 0.1})
    with pytest.raises(ConfigError, match="is another model"):
        run("run", train__steps=4, **ADAPTER)


@pytest.mark.slow
def test_it_begins_from_an_adapter(run: Any, base: Path) -> None:
    first, _, _ = run("first", model__path=str(base), **ADAPTER)
    again, _, _ = run("again", model__path=str(base), lora__adapter=str(first.export), optimizer__lr=0.0)
    assert_same(again.export, first.export)
    other, _, _ = run("other", model__path=str(base), lora__rank=2)
    shutil.copy(first.export / "adapter_config.json", other.export)
    with pytest.raises(ConfigError, match="so it is an adapter of another one"):
        run("bad", model__path=str(base), lora__adapter=str(other.export))


@pytest.mark.slow
def test_without_a_backward_its_log_makes_it_again(run: Any, base: Path, tmp_path: Path) -> None:
    """A MeZO run is replayed from the base model and from a checkpoint. Restarts cannot be replayed from a log."""
    mezo = {"model__path": str(base), "optimizer__name": "mezo", "optimizer__lr": 1e-3, "checkpoint__every": 2}
    result, lines, _ = run("run", **mezo, **ADAPTER, train__steps=3)
    assert "projected_grad" in lines[-1]
    for number, begin in enumerate((base, result.dir / "checkpoints" / "step-2")):
        assert replay_command([str(begin), str(result.dir), "--out", str(tmp_path / f"out-{number}")]) == 0
        assert_same(tmp_path / f"out-{number}", result.export)
    other = {"optimizer__lr": 0.0, "train__steps": 1}
    with pytest.raises(ConfigError, match="leave it out"):
        replay_command([str(base), str(result.dir), "--out", str(tmp_path / "out"), "--dtype", "bf16"])
    restarted, _, _ = run("restarted", **mezo | other, **ADAPTER, lora__restart_every=2)
    with pytest.raises(ConfigError, match="restarted after each 2 steps"):
        replay_command([str(base), str(restarted.dir), "--out", str(tmp_path / "out")])


@pytest.mark.slow
def test_the_disk_is_asked_for_what_is_written(run: Any, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An adapter is exported in fp32. With restarts the run exports the whole model in the compute dtype."""
    more = {"model__path": str(base), "train__precision": "bf16", **ADAPTER}
    result, _, _ = run("run", **more)
    written = sum(value.nbytes for value in load_file(result.export / FILE).values())
    assert written == 4 * 1920
    monkeypatch.setattr(trainable, "free_bytes", lambda _path: written - 1)
    with pytest.raises(DoesNotFitError, match=rf"takes 7.5 KiB \({written} bytes\), 1 bytes more"):
        run("again", **more)
    whole = 1920 + sum(value.numel() for value in AutoModelForCausalLM.from_pretrained(base).parameters())
    with pytest.raises(DoesNotFitError, match=rf"\({2 * whole} bytes\)"):
        run("restarted", **more, lora__restart_every=2)


def test_a_tokenizer_with_more_tokens_than_rows_is_refused(run: Any, base: Path, tmp_path: Path) -> None:
    tokenizer = train_bpe(["a number, the next one"] * 20, vocab_size=300)
    tokenizer.add_tokens([f"<{number}>" for number in range(400)])
    tokenizer.save_pretrained(tmp_path / "wider")
    with pytest.raises(ConfigError, match="frozen beneath the adapter"):
        run("run", model__path=str(base), data__tokenizer=str(tmp_path / "wider"), **ADAPTER)


@pytest.mark.slow
def test_a_run_of_an_earlier_version_with_loftq_resumes(run: Any, base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model__path": str(base), "checkpoint__every": 2, "train__steps": 4, **ADAPTER, **HOST}
    settings |= {"optimizer__schedule": "constant"}
    whole, *_ = run("whole", **settings)
    to_dict = Config.to_dict
    with monkeypatch.context() as patch:
        patch.setattr(Config, "to_dict", lambda self: {**to_dict(self), "lora.init": ("loftq", "command line")})
        run("parts", **{**settings, "train__steps": 2})
    parts, *_ = run("parts", **settings)
    assert_same(parts.export, whole.export)
