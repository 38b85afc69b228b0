"""Folders in which training commands run: models and texts of a few kilobytes, and the files of a run."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from offload.extras.plan import probe
from offload.sizes import parse_size
from tests.forks import ROOT

SHAPE = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
LLAMA = {"model_type": "llama", "vocab_size": 384, **SHAPE, "max_position_embeddings": 64}
"""About ten thousand parameters without dropout, with steps in milliseconds."""


def numbers(count: int = 400) -> list[str]:
    """Return `count` lines of text."""
    return [f"{number} is a number, {number + 1} is the next one." for number in range(count)]


def write_text(folder: Path, count: int = 400) -> Path:
    """Write text.txt with `count` lines. Returns the path."""
    path = folder / "text.txt"
    path.write_text("\n".join(numbers(count)))
    return path


def write_rows(path: Path, rows: Iterable[Any]) -> Path:
    """Write rows to a file of JSON lines. Returns the path."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_shape(folder: Path, family: str = "llama", **shape: Any) -> Path:
    """Write the configuration of a model with 384 tokens to a folder. Returns the path of the file."""
    from transformers import AutoConfig

    AutoConfig.for_model(family, vocab_size=384, **shape).save_pretrained(folder)
    return folder / "config.json"


def environment(cache: Path) -> dict[str, str]:
    """Return the environment of a command with a cache of its own, with made-up rates of this machine.

    A measurement takes seconds, and differs from run to run.
    """
    rates = dict.fromkeys(probe._CPU_RATES, 1e10) | {"launch_s": 1e-5}
    rates |= {name: dict.fromkeys(probe._precisions(None), 1e11) for name in probe._FLOPS}
    with patch.object(probe, "_machine_rates", lambda *_: rates):
        probe.probe("cpu", cache_dir=cache / "offload")
    own = {"PYTHONPATH": str(ROOT), "XDG_CACHE_HOME": str(cache), "OMP_NUM_THREADS": "1", "TERM": "dumb"}
    return {**os.environ, **own}


def lines_of(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's metrics.jsonl."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]


def assert_as_planned(run: Path) -> dict[str, Any]:
    """Check that the last step of a run moved the bytes of its plan over each link. Returns the plan."""
    plan: dict[str, Any] = json.loads((run / "plan.json").read_text())
    last = lines_of(run)[-1]
    assert {link: last[f"{link}_bytes"] for link in plan["lane_bytes"]} == plan["lane_bytes"]
    return plan


def learnt(lines: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    """Return the values of each line that do not depend on time."""
    return [tuple(line[key] for key in ("step", "loss", "grad_norm", "lr", "targets")) for line in lines]


def losses(run: Path) -> list[float]:
    """Return the loss of each step."""
    return [line["loss"] for line in lines_of(run)]


def assert_same_tensors(one: Path, other: Path, file: str = "model.safetensors") -> None:
    """Check that a file of two folders has the same tensors, bit for bit."""
    from safetensors.torch import load_file

    mine, its = (load_file(folder / file) for folder in (one, other))
    assert mine.keys() == its.keys()
    assert [name for name in its if not mine[name].equal(its[name])] == []


def contents(folder: Path) -> dict[str, bytes]:
    """Return the bytes of all files below a folder, by relative path."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def cut(run: Path, name: str, *steps: int) -> Path:
    """Copy a run to a folder beside it, without the checkpoints of these steps: as it was before them."""
    copy = Path(shutil.copytree(run, run.with_name(name)))
    for step in steps:
        shutil.rmtree(copy / "checkpoints" / f"step-{step}")
    return copy


def flip(path: Path, bit: int | None = None) -> None:
    """Flip one bit of a file, by default in the middle byte. A second call restores the file."""
    data = bytearray(path.read_bytes())
    bit = len(data) // 2 * 8 if bit is None else bit
    data[bit // 8] ^= 1 << bit % 8
    path.write_bytes(data)


def fill(disk: Path) -> Path:
    """Use all free space on a disk, by a file. Another call fills what has become free."""
    path = disk / "other"
    with path.open("ab", buffering=0) as stream, contextlib.suppress(OSError):
        while True:
            stream.write(b"1" * 4096)
    return path


def assert_said_as_saved(checkpoint: Path, said: str) -> None:
    """Assert that a line before the save has the size of the checkpoint's data."""
    about = parse_size(re.findall(r"  saving about (.*) \.\.\.", said)[0])
    assert about == pytest.approx(sum(path.stat().st_size for path in checkpoint.glob("*.bin")), rel=0.02)
