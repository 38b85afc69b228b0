"""Runs and plans in this process, by their command, and the figures that they leave."""

from __future__ import annotations

import errno
import gc
import io
import json
import os
import pkgutil
import re
import shutil
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
import xxhash
from peft import LoraConfig, get_peft_model
from transformers import AutoConfig, AutoModelForCausalLM

from offload import plan, train
from offload.app.training import records
from offload.errors import OffloadError
from offload.extras.data.tokenizer import train_bpe
from offload.extras.plan import alternatives
from offload.machine.hardware import Hardware, Rates
from tests.cases.features import limits_of
from tests.run_folder import write_rows
from tests.settings_alive.table import BASES

Figures = Mapping[str, Any]
"""Figures of a run by name:

- losses (with norms), tokens (with targets), rates, evaluations, fields, moved bytes, peak: by step.
- num_steps: steps in metrics.jsonl.
- held: bytes by tier and name. files: names. weights: hash of the export.
- lines: printed lines without times. notes: of these, the notes.
- refusal: error, or empty. outcome: losses and refusal.

A plan has the keys of its JSON object, with a refusal.
"""
_LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 384,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
_MIXTRAL = {**_LLAMA, "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_local_experts": 4}
_MOVED = ("h2d_bytes", "d2h_bytes", "nvme_read_bytes", "nvme_write_bytes")
_TIME = re.compile(r"\d[\d,.e-]* (s|tok/s)\b|\d+:\d\d")
_NUMBER = re.compile(r"\d{6,}.*")
"""In a name of a file: a time and the machine."""
MACHINE = Hardware(
    "made up", "cpu", 1, None, 1 << 34, None, None, False,
    Rates(1e10, 1e10, 2e10, {"fp32": 1e11, "bf16": 1e11}, 1e10, 1e10, 1e-5, 1e9, 1e9),
)  # fmt: skip
"""In place of measurements, which take seconds and differ from run to run."""
EARLIER = "earlier"
"""Folder of a run to resume."""


# -- files -------------------------------------------------------------------------------------------------------------


def write_files(folder: Path) -> None:
    """Write models, texts and rows of a few kilobytes, and run `earlier` for two steps."""
    configs = {"llama": _LLAMA, "deeper": {**_LLAMA, "num_hidden_layers": 3}, "mixtral": _MIXTRAL}
    for name, config in configs.items():
        (folder / f"{name}.json").write_text(json.dumps(config))
    counted = [f"{number} is a number, and {number + 1} is the next one.\n" for number in range(40)]
    (folder / "text.txt").write_text("".join(counted))
    (folder / "other.txt").write_text("".join(f"not {line}" for line in reversed(counted)))
    (folder / "short.txt").write_text("".join(counted[:8]))
    write_rows(folder / "rows.jsonl", map(_row, range(40)))
    (folder / "bad.jsonl").write_text("{\n" + "".join(json.dumps({"text": line}) + "\n" for line in counted))
    pairs = [{"prompt": f"{n} and ", "chosen": f"{n + 1}" + "!" * (n % 3), "rejected": "no"} for n in range(24)]
    write_rows(folder / "pairs.jsonl", pairs)
    queries = [{"query": f"after {n}?", "positive": f"{n + 1}!", "negatives": [f"{n} no"]} for n in range(24)]
    write_rows(folder / "queries.jsonl", queries)
    torch.manual_seed(3)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**_LLAMA))
    model.save_pretrained(folder / "model")
    AutoModelForCausalLM.from_config(AutoConfig.for_model(**configs["deeper"])).save_pretrained(folder / "deeper")
    for name, size in (("model", 384), ("tokenizer", 300)):
        train_bpe(counted, vocab_size=size).save_pretrained(folder / name)
    adapted = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    adapted.save_pretrained(str(folder / "adapter"))
    shutil.copy(folder / "adapter/adapter_config.json", folder / "lora.json")
    (folder / "disk").mkdir()


def _row(number: int) -> dict[str, Any]:
    """Return a row with the keys of each format."""
    question, answer = f"What comes after {number}?", f"{number + 1} comes next" + "!" * (number % 9)
    asked = {"role": "user", "content": question}
    return {
        "text": f"{number} is a number" + ", and so on" * (number % 3),
        "other": f"{number} is another number",
        "messages": [asked, {"role": "assistant", "content": answer}],
        "conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": f"it is {answer}"}],
        "instruction": f"count on from {number}",
        "output": answer,
        "prompt": question,
        "completion": f" {answer}",
        "chosen": answer,
        "rejected": "no",
        "input_ids": list(range(number, number + 8)),
    }


# -- functions in place of the engine's --------------------------------------------------------------------------------


def defect(*_: Any) -> None:
    """Raise an error in the forecast of a run."""
    raise RuntimeError("no forecast")


async def full_disk(*_: Any) -> str:
    """Write no part of a checkpoint."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class SpokenWorker(AbstractContextManager[Any]):
    """A worker of the tokenizer in this process, with a line on the screen."""

    def __init__(self, encoder: Any) -> None:
        print("note: a worker begins")
        self.encode_batch = encoder.encode_batch

    def __exit__(self, *_: object) -> None:
        pass


# -- figures -----------------------------------------------------------------------------------------------------------


class Looks:
    """Figures of runs, each in a folder of its own with links to the common files. Equal runs are made once."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: dict[str, Figures] = {}
        self._common = folder / "common"
        self._common.mkdir()
        write_files(self._common)

    def see(self, words: Mapping[str, str], limits: Mapping[str, Any]) -> Figures:
        """Return the figures of a run."""
        key = repr((sorted(words.items()), sorted(limits.items())))
        if key not in self._seen:
            self._seen[key] = self.see_anew(words, limits)
        return self._seen[key]

    def see_anew(self, words: Mapping[str, str], limits: Mapping[str, Any]) -> Figures:
        """Return the figures of a run, made now."""
        gc.freeze()  # a run collects garbage at its end, and would look at all imports
        with ExitStack() as stack:
            here = Path(stack.enter_context(TemporaryDirectory(dir=self._folder)))
            for path in self._common.iterdir():
                (here / path.name).symlink_to(path)
            if words.get("run.dir") == EARLIER:
                self._put_earlier_run(here)
            patch = stack.enter_context(pytest.MonkeyPatch.context())
            patch.chdir(here)
            # A new cache: the data of another run must not hide the effect of a setting.
            patch.setenv("XDG_CACHE_HOME", str(here / "cache"))
            patch.setattr(alternatives, "probe", lambda *_, **__: MACHINE)
            # Neither has a setting, and both take seconds over all rows.
            patch.setattr(alternatives, "alternatives", lambda *_: iter(()))
            patch.setattr(records, "REPORTS", {})
            for owner, name, value in limits_of(limits):
                patch.setattr(owner, name, pkgutil.resolve_name(value) if isinstance(value, str) else value)
            if "hardware" in words:
                return _plan(words)
            return _train(words, here)

    def _put_earlier_run(self, here: Path) -> None:
        """Copy a run of two steps with a checkpoint into a folder, as `earlier`."""
        run = self._folder / EARLIER
        if not run.exists():
            begun = {**BASES["run"], "run.dir": str(run), "train.steps": "2", "checkpoint.every": "1"}
            self.see({key: str(value) for key, value in begun.items()}, {})
        shutil.copytree(run, here / EARLIER)


def _run(main: Callable[[list[str]], int], words: Mapping[str, str]) -> tuple[str, str]:
    """Run a command. Return the screen and the error; the error is empty without one."""
    screen = io.StringIO()
    refusal = ""
    with redirect_stdout(screen), redirect_stderr(io.StringIO()):
        try:
            main([f"--{key}={value}" for key, value in words.items()])
        except OffloadError as error:
            refusal = f"{type(error).__name__}: {error}"
    return screen.getvalue(), refusal


def _plan(words: Mapping[str, str]) -> Figures:
    screen, refusal = _run(plan.main, {**words, "json": "true"})
    if refusal:
        return {"refusal": refusal}
    return json.loads(screen)


def _train(words: Mapping[str, str], here: Path) -> Figures:
    screen, refusal = _run(train.main, words)
    files = [path for path in sorted(here.rglob("*")) if path.is_file() and not path.is_relative_to(here / "cache")]
    printed = [_TIME.sub("T", line) for line in screen.splitlines()]
    found: dict[str, Any] = {
        "files": [_NUMBER.sub("N", str(path.relative_to(here))) for path in files],
        "lines": printed,
        "notes": [line for line in printed if line.startswith("note: ")],
        "weights": [xxhash.xxh3_64_hexdigest(path.read_bytes()) for path in files if path.suffix == ".safetensors"],
        "refusal": refusal,
    }
    lines: list[dict[str, Any]] = []
    for path in files:
        if path.name == "metrics.jsonl":
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            found["held"] = json.loads(path.with_name("plan.json").read_text())["held"]
    losses = [(line["loss"], line["grad_norm"]) for line in lines]
    return found | {
        "losses": losses,
        "outcome": (losses, refusal),
        "num_steps": len(lines),
        "tokens": [(line["tokens"], line["targets"]) for line in lines],
        "rates": [line["lr"] for line in lines],
        "evaluations": [(line["step"], line["eval_loss"]) for line in lines if "eval_loss" in line],
        "fields": [sorted(line) for line in lines],
        "moved": [[line[name] for name in _MOVED] for line in lines],
        "peak": [line["peak_device_bytes"] for line in lines],
    }
