"""Distillation from stored probabilities: equal to the teacher beside the model, measured once, and resumed alone."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from offload.app.config.config import Config
from offload.app.stored_model import TEACHER_VALUES
from offload.errors import ConfigError, DoesNotFitError
from offload.extras.distill.stored import TeacherClasses
from offload.extras.frozen import measurement
from offload.extras.plan.forecast import Forecaster
from offload.extras.plan.machine_files import read_machine
from tests.run_folder import SHAPE, write_rows
from tests.training.conftest import HOST, interrupted_measurement, lines_of
from tests.training.test_adapters import train_over_ranks
from tests.training.test_distill import other_tokens
from tests.training.test_resume import make_folder

CHUNKS = {"train__head_chunk_bytes": 16 * 384 * 4}
TURNS = [
    {"messages": [{"role": "user", "content": "count " * (1 + n % 3)}, {"role": "assistant", "content": f"{n}, {n}"}]}
    for n in range(24)
]
PAIRS = [{"prompt": f"the number after {number} is", "completion": f" {number + 1}."} for number in range(24)]

OTHER_ROWS = {"as many": PAIRS[8::-1], "more": PAIRS[:13]}


@pytest.fixture
def num_lines() -> int:
    """The teacher computes each row: eleven batches."""
    return 90


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A teacher that finds some tokens much more probable than others."""
    make_folder("llama", tmp_path / "base", dtype=torch.float32, num_hidden_layers=2, initializer_range=0.3)
    return tmp_path / "base"


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """The folder with stored probabilities."""
    return tmp_path / "cache" / "offload" / "teacher"


def asked(folder: Path, way: str = "stored", **more: Any) -> dict[str, Any]:
    own = {"data__tokenizer": str(folder), "train__method": "distill", "distill__teacher": str(folder)}
    own |= {"distill__way": way, "distill__top_k": 7, "distill__beta": 0.3, "distill__temperature": 2.0}
    return own | {"train__steps": 4, "train__eval_every": 2, "optimizer__lr": 3e-3, **HOST} | more


def values_of(lines: list[dict[str, Any]]) -> list[float]:
    return [line[key] for line in lines for key in ("loss", "grad_norm", "eval_loss") if key in line]


def source(tmp_path: Path, rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {"data__source": str(write_rows(tmp_path / "rows.jsonl", rows)), "data__sequence_length": 48}


@pytest.mark.slow
@pytest.mark.parametrize("data", ["text", "chats", "documents", "pairs", "whole vocabulary"])
def test_stored_is_beside(run: Any, folder: Path, tmp_path: Path, cache: Path, data: str) -> None:
    """Answers alone have records. Break: take the places of the labels, not of the tokens before them; use the rows of
    a batch in their order on disk; store a class of no tokens.
    """
    more: dict[str, Any] = {}
    if data == "pairs":
        more = source(tmp_path, PAIRS)
    elif data in ("chats", "documents"):
        more = source(tmp_path, TURNS)
    if data == "documents":
        more |= {"data__packing": True, "data__packing_isolated": True}
    classes, of_beside, num_bytes = {}, {}, 8 * 7 + 4
    if data == "whole vocabulary":
        classes, of_beside, num_bytes = {"distill__top_k": 384, **CHUNKS}, {"distill__top_k": None, **CHUNKS}, 4 * 384
    _, wanted, _ = run("beside", **asked(folder, "beside", **more, **of_beside))
    _, lines, out = run("stored", **asked(folder, **more, **classes))
    assert values_of(lines) == pytest.approx(values_of(wanted), rel=1e-6)
    (stored,) = cache.glob("*.bin")
    num_tokens, rest = divmod(stored.stat().st_size, num_bytes)
    assert not rest
    assert f"teacher: log-probabilities of {num_tokens:,} tokens; " in out


def test_a_resumed_run_needs_no_teacher(run: Any, folder: Path, tmp_path: Path, cache: Path) -> None:
    """Unless somebody has emptied the cache. Break: look for the teacher at a resume; leave the name of the file out of
    checkpoints.
    """
    own = asked(folder, data__tokenizer=str(tmp_path / "tokens"), checkpoint__every=2, checkpoint__keep=4)
    shutil.copytree(folder, tmp_path / "tokens")
    _, lines, _ = run("run", **own)
    saved = {"checkpoint__resume": str(tmp_path / "run" / "checkpoints" / "step-2")}
    assert not (tmp_path / "run" / "hf" / TEACHER_VALUES).exists()
    moved = folder.rename(tmp_path / "moved")
    _, more, out = run("more", **own, **saved)
    assert values_of(more) == values_of(lines[2:])
    assert "log-probabilities of" not in out
    shutil.rmtree(cache)
    with pytest.raises(ConfigError, match=r"base, which does not exist"):
        run("without", **own, **saved)
    _, again, out = run("again", **own | {"distill__teacher": str(moved)}, **saved)
    assert values_of(again) == values_of(lines[2:])
    assert "log-probabilities of" in out
    file = moved / "model.safetensors"
    save_file({name: each + 1 for name, each in load_file(file).items()}, file, {"format": "pt"})
    with pytest.raises(ConfigError, match=r"step-2 is of a run with another distill\.teacher than .*moved"):
        run("other", **own | {"distill__teacher": str(moved)}, **saved)


@pytest.mark.slow
@pytest.mark.parametrize("rows", OTHER_ROWS)
def test_other_evaluation_rows_are_measured(run: Any, folder: Path, tmp_path: Path, rows: str) -> None:
    """With equally many targets. Break: take the stored values by their number; call the file of other rows damaged."""
    own = asked(folder, **source(tmp_path, PAIRS), data__eval_share=0.0, checkpoint__every=2, checkpoint__keep=4)
    own |= {"data__eval_source": str(write_rows(tmp_path / "evaluated.jsonl", PAIRS[:9])), "data__packing": False}
    run("run", **own)
    saved = {"checkpoint__resume": str(tmp_path / "run" / "checkpoints" / "step-2")}
    write_rows(tmp_path / "evaluated.jsonl", OTHER_ROWS[rows])
    _, lines, _ = run("more", **own, **saved)
    _, wanted, _ = run("beside", **own | {"distill__way": "beside"})
    assert values_of(lines) == pytest.approx(values_of(wanted[2:]), rel=1e-6)


@pytest.mark.slow
def test_a_damaged_file_is_not_trained_on(run: Any, folder: Path, tmp_path: Path, cache: Path) -> None:
    """Neither by a new run nor by a resumed one. Break: compare the first batch alone."""
    own = asked(folder, checkpoint__every=2, checkpoint__keep=4)
    run("run", **own)
    (stored,) = cache.glob("*.bin")
    values = stored.read_bytes()
    stored.write_bytes(values[: len(values) // 4].ljust(len(values), b"\0"))
    for more in {}, {"checkpoint__resume": str(tmp_path / "run" / "checkpoints" / "step-2")}:
        with pytest.raises(
            ConfigError, match=r"\.bin, with .* is damaged: the probabilities of a token do not sum to 1"
        ):
            run(f"damaged-{len(more)}", **own, **more)
    stored.write_bytes(values[:-7])
    with pytest.raises(ConfigError, match=r"is damaged: .*Remove it, to measure the teacher again"):
        run("cut", **own, **more)


def test_a_plan_refuses_the_teachers_that_a_run_refuses(run: Any, folder: Path, tmp_path: Path) -> None:
    """Break: look at the teacher in the run alone."""
    LlamaConfig(**SHAPE, vocab_size=400).save_pretrained(tmp_path / "big")
    own = asked(folder, model__path=str(tmp_path / "big" / "config.json"), data__sequence_length=32)
    config = Config.load(overrides={key.replace("__", "."): value for key, value in own.items()})
    refused = r"distill\.teacher is .*base, which has probabilities for 384 tokens, but the model has 400"
    with pytest.raises(ConfigError, match=refused):
        Forecaster(config, 1).predict(config, read_machine("rtx-4090"), times=False)
    with pytest.raises(ConfigError, match=refused):
        run("run", **own)


def test_rounding_is_no_other_teacher() -> None:
    """The logarithm of a probability near 1 is the rounding of a sum. Break: allow a share of it alone."""
    wanted = TeacherClasses(1.0, 7, 384)
    stored = np.zeros(2, wanted.dtype)
    stored["teacher_log_probs"] = [-1e-7, *[-18.0] * 7]
    found = stored.copy()
    found["teacher_log_probs"][:, 0] = -4e-6
    assert wanted.is_same(found, stored)
    found["teacher_log_probs"][:, 0] = -0.01
    assert not wanted.is_same(found, stored)


@pytest.mark.slow
def test_a_second_run_waits_and_measures_nothing(
    run: Any, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break: leave the weights out of the key; count an adapter, which the teacher has not; count the seed; wait for
    the lock without a word; do not wait.
    """
    run("first", **asked(folder, train__steps=1))
    own: dict[str, Any] = {"run__seed": 5, "train__steps": 1} | {
        "distill__labels": 0.5,
        "distill__beta": 0.0,
        "lora__rank": 2,
        "optimizer__name": "lion",
    }
    (lock,) = cache.glob("*.lock")
    flock, waited = fcntl.flock, []
    with lock.open("w") as other:
        flock(other, fcntl.LOCK_EX)

        def until_the_other_ends(stream: Any, operation: int) -> None:
            if operation == fcntl.LOCK_EX:
                waited.append(stream)
                other.close()
            flock(stream, operation)

        monkeypatch.setattr(measurement.fcntl, "flock", until_the_other_ends)
        _, _, out = run("second", **asked(folder, model__path=str(folder), **own))
    assert waited
    assert "teacher: another process measures the same; this one waits for it" in out
    assert "log-probabilities of" not in out
    file = folder / "model.safetensors"
    save_file({name: 1.1 * each for name, each in load_file(file).items()}, file, {"format": "pt"})
    _, _, out = run("third", **asked(folder, train__steps=1))
    assert "log-probabilities of" in out


@pytest.mark.slow
def test_a_measurement_that_was_killed_is_finished(
    run: Any, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last batch in the file is measured again. Break: give the file its name before all records are in it; keep
    part of a batch; keep the last batch, of which a power cut may leave zeros.
    """
    _, wanted, _ = run("whole", **asked(folder))
    (whole,) = cache.glob("*.bin")
    values = whole.read_bytes()
    shutil.rmtree(cache)
    with interrupted_measurement(monkeypatch, 3):
        run("first", **asked(folder))
    (part,) = cache.glob("*.part")
    assert not list(cache.glob("*.bin"))
    size = part.stat().st_size
    assert part.read_bytes() == values[:size]
    part.write_bytes(values[: 2 * size // 3].ljust(size + 100, b"\0"))
    _, lines, out = run("second", **asked(folder))
    assert f", of which {2 * 4 * 31} are already computed" in out
    assert values_of(lines) == values_of(wanted)
    assert whole.read_bytes() == values
    assert not list(cache.glob("*.part"))


@pytest.mark.slow
def test_a_measurement_tells_what_it_is_for(
    run: Any, folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It removes abandoned parts. Break: say nothing of rows that no step reads; count the rows of one step; leave out
    the time; remove a part that is new, or in use.
    """
    cache.mkdir(parents=True)
    for name, age_s in ("old", 40 * 86400), ("new", 86400), ("used", 40 * 86400):
        part = cache / f"{name}.part"
        part.touch()
        os.utime(part, (time.time() - age_s,) * 2)
    monkeypatch.setattr(measurement, "_PRINT_INTERVAL_S", 0.0)
    with (cache / "used.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        _, _, out = run("few", **asked(folder, train__steps=2))
    assert {part.stem for part in cache.glob("*.part")} == {"new", "used"}
    assert re.search(r"note: .* by the teacher, and the run uses 8 of the \d+ training rows", out)
    lines = re.findall(r"teacher: ([\d,]+) of ([\d,]+) tokens, eta [\d:]+\n", out)
    assert lines[0][0] != lines[0][1]
    assert lines[-1][0] == lines[-1][1]
    all_rows = asked(folder, train__steps=3, train__batch_size=32, distill__temperature=1.0)
    _, _, out = run("all", **all_rows)
    assert "log-probabilities of" in out
    assert "by the teacher" not in out


@pytest.mark.slow
def test_two_ranks_measure_as_one(run: Any, folder: Path, tmp_path: Path, cache: Path) -> None:
    """Break: keep the records of rank 0 alone; let each rank look for its own key."""
    own = asked(folder, train__micro_batch_size=1, **CHUNKS)
    _, lines, _ = run("one", **own)
    (alone,) = cache.glob("*.bin")
    wanted = alone.read_bytes()
    shutil.rmtree(cache)
    shape = str(tmp_path / "llama-shape" / "config.json")
    ranks = lines_of(train_over_ranks(tmp_path, "two", **own, model__path=shape))
    assert values_of(ranks) == pytest.approx(values_of(lines), rel=1e-4)
    (found,) = cache.glob("*.bin")
    assert found.read_bytes() == wanted


def test_a_disk_that_is_too_small(run: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break: write until the disk is full."""
    monkeypatch.setattr("offload.extras.frozen.measurement.free_bytes", lambda _path: 1000)
    with pytest.raises(DoesNotFitError, match=r"take .* more in .*teacher, on a disk with 1000 B \(1000 bytes\) free"):
        run("run", **asked(folder))


def test_refusals(run: Any, folder: Path, tmp_path: Path) -> None:
    """Break: leave out a check of the teacher before it runs; read the records of other rows."""
    with pytest.raises(ConfigError, match=r"other numbers for \d+ tokens of 384, such as"):
        run("run", **asked(folder, data__tokenizer=str(other_tokens(tmp_path))))
    with pytest.raises(ConfigError, match=r"distill\.teacher is .*config\.json, which has no weights"):
        run("run", **asked(folder, distill__teacher=str(folder / "config.json")))
    with pytest.raises(ConfigError, match=r"the model cannot keep the documents of a row apart"):
        run("run", "mamba", **asked(folder, **source(tmp_path, TURNS)))
