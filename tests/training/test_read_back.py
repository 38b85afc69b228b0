"""Saved folders, loaded as a reader loads them: in another process and working folder, by the names in the files alone.

Each file is compared, key by key, with the file of transformers' Trainer (or PEFT) for the same model and tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, Trainer, TrainingArguments

import offload
from offload import export
from offload.errors import ConfigError
from offload.extras.data.tokenizer import train_bpe
from tests import forks
from tests.integrations.plain import needs
from tests.run_folder import write_text
from tests.training.conftest import SHAPES

needs("peft", "accelerate")

from peft import LoraConfig, PeftModel, get_peft_model  # noqa: E402

ADAPTER = {"r": 4, "target_modules": ["q_proj", "down_proj"], "task_type": "CAUSAL_LM"}
EXPORTS = {"whole/export": ["whole"], "lora/export": ["lora"], "lora/merged": ["lora", "--merge"]}
FOLDERS = ("whole/hf", "lora/hf", *EXPORTS)
IDS = torch.arange(1, 9)[None]
READER = """
import sys, torch
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
for folder in sys.argv[1:]:
    classes = [AutoModelForCausalLM, *([AutoPeftModelForCausalLM] if folder in ("lora/hf", "lora/export") else [])]
    logits = [each.from_pretrained(folder).eval()(torch.arange(1, 9)[None]).logits.detach() for each in classes]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = tokenizer.apply_chat_template([{"role": "user", "content": "1 2"}], tokenize=False)
    ends = None if classes[1:] else GenerationConfig.from_pretrained(folder).eos_token_id
    torch.save((logits, text, ends), f"{folder}.pt")
"""
LEFT_OUT = {
    ("config.json", "use_cache"): "the Trainer turns the cache off while it trains, and saves that: slow generation",
    ("files", "training_args.bin"): "the arguments of the Trainer",
    ("files", "chat_template.jinja"): "several templates are in tokenizer_config.json: checkpoints have no subfolders",
    ("files", "additional_chat_templates"): "the same",
    ("tokenizer_config.json", "chat_template"): "the same",
}
"""Differences to the files of the Trainer, each with the reason."""


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a model in `base`, of end 0, and a tokenizer with another end in `tokenizer`."""
    folder = tmp_path_factory.mktemp("made")
    torch.manual_seed(3)
    shape = {**SHAPES["llama"], "eos_token_id": 0, "bos_token_id": None, "pad_token_id": None}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", vocab_size=384, **shape))
    model.generation_config = GenerationConfig(eos_token_id=0, do_sample=True, temperature=0.7, max_new_tokens=9)
    model.save_pretrained(folder / "base")
    tokenizer = train_bpe(["a number, the next one, 1 2 3 4 5 6 7 8 9 0 is"] * 20, vocab_size=300)
    tokenizer.add_special_tokens({"eos_token": "<|end|>", "pad_token": "<|pad|>"})
    turn = "{% for m in messages %}{{ m.role + ': ' + m.content + eos_token }}{% endfor %}"
    tokenizer.chat_template = {"default": turn, "tool_use": "tools: " + turn}
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder


@pytest.fixture(scope="module")
def saved(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the exports of a whole run and of an adapter's, from a relative path of the base."""
    folder = tmp_path_factory.mktemp("saved")
    write_text(base, 200)
    own = {"model.path": "base", "data.tokenizer": "tokenizer", "data.source": "text.txt", "data.sequence_length": 32}
    own |= {"train.steps": 1, "train.batch_size": 4, "train.precision": "fp32", "checkpoint.every": 1}
    kinds: dict[str, Any] = {"whole": {}, "lora": {"lora.rank": 4, "lora.target_modules": ADAPTER["target_modules"]}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(base / "cache"))
        patch.chdir(base)
        for name, more in kinds.items():
            offload.Trainer({**own, **more, "run.dir": str(folder / name)}).run()
        patch.chdir(folder)
        for name, words in EXPORTS.items():
            export.main([words[0], name, *words[1:]])
    return folder


def plain(base: Path, folder: Path, *, adapted: bool) -> Path:
    """Return the folder that the Trainer writes, after a step of the same base with the same tokenizer."""
    model: Any = AutoModelForCausalLM.from_pretrained(base / "base")
    if adapted:
        model = get_peft_model(model, LoraConfig(**ADAPTER))
    arguments = TrainingArguments(
        str(folder), max_steps=1, report_to=[], save_strategy="no", use_cpu=True, disable_tqdm=True
    )
    rows = [{"input_ids": [5, 6], "labels": [5, 6]}] * 8
    tokenizer = AutoTokenizer.from_pretrained(base / "tokenizer")
    trainer = Trainer(model, arguments, train_dataset=rows, processing_class=tokenizer)
    trainer.train()
    trainer.save_model(str(folder))
    return folder


def contents(folder: Path) -> dict[str, Any]:
    """Return everything but the values of weights: files, JSON by key, templates, headers of weight files."""
    templates = AutoTokenizer.from_pretrained(folder).chat_template
    found: dict[str, Any] = {"files": dict.fromkeys(each.name for each in folder.iterdir()), "templates": templates}
    for path in folder.glob("*.json"):
        found[path.name] = json.loads(path.read_text(encoding="utf-8"))
    if modules := found.get("adapter_config.json", {}).get("target_modules"):
        # PEFT writes a set: the order is another one in each process.
        modules.sort()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found[path.name] = {name: str(file.get_slice(name).get_dtype()) for name in file.keys()}  # noqa: SIM118
            found[path.name]["metadata"] = file.metadata()
    return found


def test_repeated_layers_are_not_merged(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The copies share one weight of the base, so a merged folder cannot hold their different changes."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(base / "cache"))
    (tmp_path / "text.txt").write_text("1 2 3 4 5 6 7 8 9\n" * 100)
    (tmp_path / "lora.json").write_text(
        json.dumps({"peft_type": "LORA", **ADAPTER, "layer_replication": [[0, 2], [1, 2]]})
    )
    own = {"model.path": str(base / "base"), "data.tokenizer": str(base / "tokenizer"), "train.steps": 1}
    own |= {"data.source": str(tmp_path / "text.txt"), "data.sequence_length": 32, "train.batch_size": 2}
    own |= {"lora.config": str(tmp_path / "lora.json"), "checkpoint.every": 1, "run.dir": str(tmp_path / "run")}
    offload.Trainer(own).run()
    with pytest.raises(ConfigError, match="repeats layers"):
        export.main([str(tmp_path / "run"), str(tmp_path / "out"), "--merge"])


def test_what_a_run_saves_is_what_its_reader_loads(saved: Path, base: Path) -> None:
    done = forks.run(["-c", READER, *FOLDERS], cwd=saved)
    assert not done.returncode, done.stderr
    read = {folder: torch.load(saved / f"{folder}.pt") for folder in FOLDERS}
    by_hand: Any = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base / "base"), saved / "lora" / "hf")
    with torch.no_grad():
        adapted = by_hand.eval()(IDS).logits
    for folder in ("lora/hf", "lora/export"):
        assert all(torch.equal(logits, adapted) for logits in read[folder][0]), folder
    assert torch.equal(read["whole/hf"][0][0], read["whole/export"][0][0])
    assert torch.allclose(read["lora/merged"][0][0], adapted, atol=1e-5)
    end = AutoTokenizer.from_pretrained(base / "tokenizer").eos_token_id
    assert {text for _, text, _ in read.values()} == {"user: 1 2<|end|>"}
    assert [read[each][2] for each in ("whole/hf", "whole/export", "lora/merged")] == [[end, 0]] * 3


@pytest.mark.parametrize("adapted", [False, True])
def test_every_key_is_as_the_trainer_writes_it(saved: Path, base: Path, tmp_path: Path, adapted: bool) -> None:
    theirs = contents(plain(base, tmp_path / "plain", adapted=adapted))
    kind = ("lora/hf", "lora/export") if adapted else ("whole/hf", "whole/export", "lora/merged")
    for folder in kind:
        ours = contents(saved / folder)
        differing = {
            (file, key)
            for file in ours.keys() | theirs.keys()
            for key in ours.get(file, {}).keys() | theirs.get(file, {}).keys()
            if ours.get(file, {}).get(key, ...) != theirs.get(file, {}).get(key, ...)
        }
        assert differing <= LEFT_OUT.keys(), folder
