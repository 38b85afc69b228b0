"""Command lines and YAML: parsed, refused in one paragraph, or equal after a round trip. Some commands really run."""

from __future__ import annotations

import contextlib
import io
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from offload.app.config.at_resume import resumed
from offload.app.config.command_line import parse_config
from offload.app.config.config import Config, all_keys
from offload.app.training.decisions import resolve
from offload.errors import ConfigError
from tests.distributed.ranks import ROOT
from tests.fuzz.cases import Case
from tests.fuzz.oracles import Wrong

_YAML = "YAML "
"""Prefix of YAML lines. Other words belong to the command line. A tab separates key and value."""
_LONGEST_MESSAGE = 2000
_RUN_S = 120

_SENSIBLE: dict[str, list[str]] = {
    "run.seed": ["0", "7"],
    "run.debug": ["true", "false"],
    "model.init": ["auto", "random"],
    "data.sequence_length": ["16", "32", "none"],
    "data.packing": ["true", "false"],
    "data.eval_share": ["0", "0.1"],
    "train.steps": ["1", "2", "3"],
    "train.batch_size": ["1", "2", "5"],
    "train.micro_batch_size": ["1", "2", "none"],
    "train.precision": ["auto", "bf16", "fp32"],
    "train.recompute": ["auto", "always", "never", "products"],
    "train.matmul": ["precision", "fp8_rowwise", "fp8_tensorwise"],
    "train.max_grad_norm": ["1.0", "1e-3", "none"],
    "train.clip": ["auto", "speculative", "deferred"],
    "train.on_nonfinite": ["stop", "skip"],
    "train.eval_every": ["0", "1"],
    "train.log_every": ["1", "10"],
    "train.head_chunk_bytes": ["none", "4KiB", "1MiB"],
    "optimizer.lr": ["1e-3", "0", "none"],
    "optimizer.betas": ["[0.9, 0.95]", "0.9,0.99"],
    "optimizer.weight_decay": ["0", "0.1"],
    "optimizer.groups": ["{norm: {weight_decay: 0}}", "none"],
    "optimizer.schedule": ["auto", "constant", "linear", "cosine", "wsd"],
    "optimizer.warmup_steps": ["0", "1", "none"],
    "offload.parameters": ["auto", "device", "cpu", "nvme"],
    "offload.optimizer": ["auto", "device", "cpu", "nvme"],
    "offload.gradients": ["auto", "device", "cpu", "nvme"],
    "offload.activations": ["auto", "device", "cpu", "nvme"],
    "offload.optimizer_memory": ["none", "0", "64KiB"],
    "offload.device_memory": ["none", "256KiB", "8MiB", "1000"],
    "offload.host_memory": ["none", "1GiB", "1MiB"],
    "offload.prefetch": ["auto", "0", "3"],
    "offload.zero_stage": ["0", "1", "2", "3"],
    "offload.update": ["auto", "cpu", "device", "both"],
    "offload.throttle": ["none", "{h2d: 100MiB}", "{update: {latency_seconds: 1e-4}}"],
    "checkpoint.every": ["1", "none"],
    "checkpoint.keep": ["1", "none"],
    "checkpoint.resume": ["auto", "never"],
    "checkpoint.export": ["true", "false"],
}
_ODD = [
    *("", " ", "none", "null", "~", "true", "yes", "-1", "0", "1e999", "nan", ".inf", "-.inf", "1_000", "0x10", "1.5"),
    *(
        "[]",
        "{}",
        "[1]",
        "{a: 1}",
        "[[[]]]",
        "{a: {b: {c: 1}}}",
        "&a [*a]",
        "!!python/none",
        "- x",
        "\u00e9\u4e2d",
        "\x7f",
        "'",
    ),
    *("auto ", "AUTO", "99999999999999999999999", "1e-400", "6 gigs", "3KiB", "x" * 5000, "--", "a=b", "\\", "{", "%s"),
]


def draw_words(dice: random.Random) -> list[str]:
    """Sample a command line with YAML lines."""
    words = []
    for _ in range(dice.choice([0, 1, 2, 3, 5, 8])):
        key, value = _draw_setting(dice)
        if dice.random() < 0.4:
            words.append(f"{_YAML}{key}\t{value}")
        else:
            name = key.replace("_", "-") if dice.random() < 0.3 else key
            words.append(f"--{name}={value}" if dice.random() < 0.4 else f"--{name}\t{value}")
    if dice.random() < 0.3:
        words.append(
            _YAML + dice.choice([*_ODD, "train: [1]", "train: 3", "- a", "[" * 3000, "{a: " * 500, "a: b: c", "\t"])
        )
    if dice.random() < 0.1:
        words.append(
            dice.choice([*_ODD, "--help-me", "train", "--train", "--run", "--config=missing.yaml", "--gpus=x"])
        )
    if dice.random() < 0.03:
        words.append("RUN")
    return words


def _draw_setting(dice: random.Random) -> tuple[str, str]:
    roll = dice.random()
    if roll < 0.7:
        key = dice.choice(list(_SENSIBLE))
        return key, dice.choice(_SENSIBLE[key])
    key = dice.choice(all_keys())
    if roll < 0.8:  # misspelt
        place = dice.randrange(len(key))
        key = key[:place] + dice.choice(["", "x", key[place] * 2, "."]) + key[place + 1 :]
    return key, dice.choice(_ODD)


def run_words(case: Case) -> Any:
    """Check a command line. Return the Outcome."""
    from tests.fuzz.runner import Outcome

    outcome = Outcome()
    words = [word for word in case.words if word]
    with tempfile.TemporaryDirectory(prefix="offload-fuzz-") as name, contextlib.chdir(name):
        argv = _argv(words, Path(name))
        try:
            config = _parsed(argv, outcome)
            if config is not None:
                _check_config(config)
                outcome.notes["configurations"] += 1
            if config is not None and "RUN" in words:
                outcome.notes["real runs"] += 1
                _really_run(argv, Path(name))
        except Wrong as wrong:
            outcome.wrong = str(wrong)
    return outcome


def _argv(words: list[str], folder: Path) -> list[str]:
    """Return the command line. YAML lines go to a file named in the command line."""
    argv: list[str] = []
    sections: dict[str, list[str]] = {}
    rest: list[str] = []
    for word in words:
        if word == "RUN":
            continue
        if not word.startswith(_YAML):
            argv += word.split("\t", 1)
            continue
        key, tab, value = word.removeprefix(_YAML).partition("\t")
        section, dot, field = key.partition(".")
        if tab and dot:
            sections.setdefault(section, []).append(f"  {field}: {value}")
        else:
            rest.append(word.removeprefix(_YAML))
    if sections or rest:
        lines = [line for section, fields in sections.items() for line in (f"{section}:", *fields)]
        (folder / "config.yaml").write_text("\n".join([*lines, *rest]) + "\n")
        argv = ["--config", "config.yaml", *argv]
    return argv


def _parsed(argv: list[str], outcome: Any) -> Config | None:
    """Return the configuration. None: refused correctly."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            return parse_config(argv, prog="train", description="")
    except ConfigError as error:
        message = str(error)
        if len(message) > _LONGEST_MESSAGE:
            raise Wrong(f"a refusal of {len(message)} characters:\n{message[:80]}") from None
        if not message.strip():
            raise Wrong("a refusal without a word") from None
        outcome.notes["refused words"] += 1
    except SystemExit as left:
        if left.code not in (0, 2):
            raise Wrong(f"left with {left.code}: {said.getvalue()[-300:]}") from None
        outcome.notes["refused words"] += 1
    return None


def _check_config(config: Config) -> None:
    """Check that a configuration is equal after YAML, resolve and resume round trips."""
    for where, one in (("as given", config), ("resolved", resolve(config, has_accelerator=False, max_positions=64))):
        Path("written.yaml").write_text(one.to_yaml())
        try:
            again = Config.load("written.yaml")
        except ConfigError as error:
            raise Wrong(f"{where}, written down, it is refused: {error}") from error
        _compare(one, again, f"{where}, written down")
        json.dumps(one.to_dict())
        _compare(one, resumed(one, json.loads(json.dumps(one.to_dict())), "here"), f"{where}, gone on with")


def _compare(one: Config, other: Config, how: str) -> None:
    different = [(key, a, b) for (key, a), (_, b) in zip(one.items(), other.items(), strict=True) if a != b]
    if different:
        raise Wrong(f"{how}: {different[:3]}")


def _really_run(argv: list[str], folder: Path) -> None:
    """Run the command on a tiny model. Training succeeds or fails with one paragraph, and no tier files remain."""
    sizes = {
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "vocab_size": 384,
    }
    (folder / "tiny.json").write_text(json.dumps({"model_type": "llama", "max_position_embeddings": 64} | sizes))
    (folder / "text.txt").write_text(
        "\n".join(f"{number} a block is fetched, used and given back" for number in range(90))
    )
    (folder / "nvme").mkdir()
    more = ["--model.path", "tiny.json", "--data.source", "text.txt", "--train.steps", "2", "--run.dir", "run"]
    more += ["--train.max_seconds", "60", "--offload.nvme_dir", "nvme"]
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "XDG_CACHE_HOME": str(folder / "cache"),
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        environment.pop(name, None)
    result = subprocess.run(
        [sys.executable, "-m", "offload.train", *argv, *more],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=_RUN_S,
        check=False,
    )
    if result.returncode not in (0, 2, 3):
        raise Wrong(f"the run left with {result.returncode}: {result.stderr[-500:]}")
    if result.returncode and not result.stderr.startswith("offload:"):
        raise Wrong(f"the run was refused in other words than a paragraph: {result.stderr[-500:]}")
    left = sorted(path.name for path in (folder / "nvme").iterdir())
    if left:
        raise Wrong(f"the run left {left} on the nvme tier")
    if not result.returncode and len((folder / "run" / "metrics.jsonl").read_text().splitlines()) < 1:
        raise Wrong("the run has no step in metrics.jsonl")
