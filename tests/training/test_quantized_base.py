"""Runs with an adapter over a base in a quantized file format, and the commands for quantized bases."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from offload import Engine, Placement
from offload.app.config.config import Config
from offload.app.config.sections import LoraSection, ModelSection
from offload.app.hf.models import build_model
from offload.errors import ConfigError
from offload.export import main as export_command
from offload.extras.adapters.adapters import Adaptation
from offload.extras.data.tokenizer import train_bpe
from offload.extras.plan.forecast import Forecaster
from offload.extras.plan.machine_files import read_machine
from offload.generate import main as generate_command
from offload.parity import main as parity_command
from offload.plan import main as plan_command
from offload.verify import main as verify_command
from tests.hf.quantized import quantized
from tests.integrations.plain import needs
from tests.run_folder import assert_same_tensors, cut, losses

needs("peft")

from peft import PeftModel  # noqa: E402

ADAPTER_FILE = "adapter_model.safetensors"
ADAPTER = {"lora__rank": 4, "lora__target_modules": ["q_proj", "o_proj"]}
KINDS = ["fp8", "mxfp4", "nf4", "int4"]


def base_of(folder: Path, kind: str) -> Path:
    """Write a quantized model folder and a dequantized copy beside it, both with a tokenizer."""
    quantized(folder, kind)
    for each in (folder, folder.with_name(f"{folder.name}-plain")):
        train_bpe(["a number, the next one, 1 2 3 4 5 6 7 8 9 0 is"] * 20, vocab_size=300).save_pretrained(each)
    return folder


@pytest.fixture
def run_both(run: Any, tmp_path: Path) -> Any:
    """Return a function that trains over a quantized base and over its dequantized copy, to the same losses and export.

    Returns (result, result over the copy, stdout).
    """

    def train(kind: str, file: str = ADAPTER_FILE, **settings: Any) -> tuple[Any, Any, str]:
        base = base_of(tmp_path / "base", kind)
        settings |= ADAPTER
        result, _, said = run("run", model__path=str(base), **settings)
        wanted, *_ = run("plain", model__path=str(base.with_name("base-plain")), **settings)
        assert losses(result.dir) == losses(wanted.dir)
        assert_same_tensors(result.export, wanted.export, file)
        return result, wanted, said

    return train


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_run_is_that_over_the_dequantised_base(run: Any, run_both: Any, tmp_path: Path, kind: str) -> None:
    base = tmp_path / "base"
    plain = base.with_name("base-plain")
    settings = {"train__steps": 4, "checkpoint__every": 2}
    result, _, said = run_both(kind, **settings)
    name = {"fp8": "block fp8", "int4": "int4 (compressed-tensors)"}.get(kind, kind)
    assert f"{4 if kind == 'mxfp4' else 14} frozen parameters are stored in {name}, " in said
    assert f"frozen: {base}" in said
    assert f"reloaded: by peft, from {result.export}: logits bit-equal" in said

    cut(result.dir, "half", 4)
    half, *_ = run("half", model__path=str(base), **settings, **ADAPTER)
    assert losses(half.dir)[-2:] == losses(result.dir)[-2:]

    merged = tmp_path / "merged"
    assert export_command([str(result.dir), str(merged), "--merge"]) == verify_command([str(merged)]) == 0
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    over: Any = AutoModelForCausalLM.from_pretrained(plain, dtype="auto")
    peft = PeftModel.from_pretrained(over, result.export).merge_and_unload().state_dict()
    values = load_file(merged / "model.safetensors")
    assert all(torch.equal(values[name], peft[name]) for name in values)
    with pytest.raises(ConfigError, match=f"--onto is original, but the weights in {base} are quantized .*{kind}"):
        export_command([str(result.dir), str(tmp_path / "no"), "--merge", "--onto", "original"])


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_commands_take_such_a_base(run: Any, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    base = base_of(tmp_path / "base", kind)
    result, *_ = run("run", model__path=str(base), train__steps=2, **ADAPTER)
    files, _, said = run("files", model__path=str(base), train__steps=2, offload__parameters="files", **ADAPTER)
    assert losses(files.dir) == losses(result.dir)
    assert "read from the model's own files" in said
    words = [
        *("--model.path", str(base), "--data.source", str(tmp_path / "text.txt"), "--lora.rank", "4"),
        *("--data.sequence_length", "32", "--lora.target_modules", "q_proj", "--offload.device", "cpu"),
    ]
    assert parity_command([*words, "--steps", "2"]) == 0
    assert "equal bit for bit over 2 steps" in capsys.readouterr().out
    words += ["--offload.parameters", "cpu", "--offload.optimizer", "cpu", "--hardware", "rtx-4090", "--json"]
    assert plan_command(words) == 0
    found = json.loads(capsys.readouterr().out)["tiers"]["pinned"]["allocations"]
    planned = {each["name"]: each["bytes"] for each in found}["weights"]
    section = LoraSection(rank=4, target_modules=["q_proj"])
    built = Adaptation.of(section, "causal").apply_to(build_model(ModelSection(path=str(base)), seed=0), seed=0)
    place = Placement(parameters="cpu", optimizer="cpu")
    engine = Engine(built.model, fill=built.fill, quantized=built.quantized, precision="bf16", placement=place)
    assert planned == {name: size for _, name, size in engine.allocations}["weights"]
    engine.close()
    texts = []
    for path in (base, base.with_name("base-plain")):
        more = ["--prompt", "1 is", "--max-new-tokens", "6", "--temperature", "0", "--device", "cpu"]
        assert generate_command([str(path), "--adapter", str(result.export), *more]) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1]
    with pytest.raises(ConfigError, match=r"which is quantized in the model's folder .*lora.rank 16"):
        run("whole", model__path=str(base), train__steps=2)


@pytest.mark.slow
def test_what_is_taken_out_of_weights_in_few_bits_is_taken_out(run_both: Any, tmp_path: Path) -> None:
    """PiSSA: the residual weight is not quantized, in a run and in the plan."""
    base = tmp_path / "base"
    result, wanted, said = run_both("int4", lora__init="pissa", train__steps=2, checkpoint__every=2)
    assert "10 frozen parameters are stored in int4" in said
    merged = [tmp_path / "merged", tmp_path / "wanted"]
    for each, out in zip((result, wanted), merged, strict=True):
        assert export_command([str(each.dir), str(out), "--merge"]) == 0
    assert_same_tensors(*merged)

    for over in {"target_modules": ["q_proj", "o_proj"]}, {"target_parameters": ["q_proj.weight", "o_proj.weight"]}:
        section = {"rank": 4, "init": "pissa", **over}
        config = Config.load(None, {"model.path": str(base), "lora": section, "offload.parameters": "cpu"})
        told = Forecaster(config, 1).predict(config, read_machine("rtx-4090"), times=False)
        assert sum(info.codec.name.startswith("int4") for info in told.prepared.structure.infos) == 10


@pytest.mark.slow
def test_what_restarts_is_in_no_codes(run_both: Any) -> None:
    """With restarts, only weights outside the adapter may stay quantized."""
    settings = {"train__steps": 3, "lora__restart_every": 2}
    with pytest.raises(ConfigError, match=r"restart_every is 2, but .*q_proj.*weight is quantized .*\(block fp8\)"):
        run_both("fp8", **settings)
    *_, said = run_both("mxfp4", "model.safetensors", **settings)
    assert "4 frozen parameters are stored in mxfp4" in said
