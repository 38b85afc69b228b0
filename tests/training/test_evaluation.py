"""Evaluations in whole runs: losses against plain PyTorch, early stopping and the best checkpoint."""

from __future__ import annotations

import json
import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from offload.app.checkpoint_folder import Checkpoints
from offload.app.training.checkpoints import Saves
from offload.app.training.finish import Export
from offload.app.training.progress import Best
from offload.engine.engine import Engine
from offload.errors import DiskError, InterruptedRun
from offload.export import main as export_command
from offload.files.atomic_folder import remove
from tests.run_folder import write_rows

LOSSES = (5.0, 4.0, 4.5, 3.9, 4.2, 4.1)
"""Evaluation losses from the fixture `judged`. The fourth is the lowest."""


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Patch the evaluation after step 2 n to return LOSSES[n - 1] for any weights."""
    monkeypatch.setattr(
        Engine, "evaluate", lambda engine, *_: torch.tensor(LOSSES[min(engine.num_steps // 2, len(LOSSES)) - 1])
    )


def documents(path: Path) -> Path:
    """Write documents with one-byte to four-byte letters and a blank line at the end."""
    rows = [f"Nr. {number}: Ünïcödé, 漢字 and 🙂 cost {number % 7} bytes more.\n\n" for number in range(60)]
    write_rows(path, ({"text": row} for row in rows))
    return path


def test_loss_perplexity_and_bits_a_byte_are_those_of_plain_pytorch(run: Any, tmp_path: Path) -> None:
    """One whole document per row: every token except the first is a target, and the end token has no bytes."""
    data = documents(tmp_path / "rows.jsonl")
    held = documents(tmp_path / "held.jsonl")
    held.write_text("\n".join(held.read_text().splitlines()[:9]))
    settings = {"data__packing": False, "data__sequence_length": 64, "data__eval_source": [{"path": str(held)}]}
    result, lines, said = run(
        "run", data__source=str(data), data__eval_share=0.2, train__eval_batches="all", **settings
    )
    tokenizer = AutoTokenizer.from_pretrained(result.export)
    model = AutoModelForCausalLM.from_pretrained(result.export)
    nats, num_tokens, num_bytes = 0.0, 0, 0
    for line in held.read_text().splitlines():
        text = json.loads(line)["text"]
        encoded = tokenizer(text, return_offsets_mapping=True)
        ids = torch.tensor([[*encoded["input_ids"], tokenizer.eos_token_id]])
        assert ids.shape[1] <= 64
        nats += model(input_ids=ids, labels=ids).loss.item() * (ids.shape[1] - 1)
        num_tokens += ids.shape[1] - 1
        num_bytes += len(text[encoded["offset_mapping"][0][1] :].encode())
    found = lines[-1]["eval_sources"]["held"]
    assert found["loss"] == pytest.approx(nats / num_tokens, rel=1e-5)
    assert found["perplexity"] == math.exp(found["loss"])
    assert found["bits_per_byte"] * num_bytes * math.log(2) == pytest.approx(found["loss"] * num_tokens, rel=1e-12)
    assert f"{num_tokens:,} tokens in 9 of 9 rows of held" in said
    assert lines[-1]["eval_perplexity"] == math.exp(lines[-1]["eval_loss"])
    assert lines[-1]["eval_bits_per_byte"] > 0


def test_what_is_no_number_is_never_better() -> None:
    best = Best()
    for step, loss in enumerate([math.nan, 2.0, math.nan, math.inf], start=1):
        best.record(loss, step, 0.0)
    assert best == Best(2.0, 2, 2.0, 2)


@pytest.mark.slow
def test_the_best_checkpoint_stays_beside_the_newest_and_is_exported(run: Any, judged: None, tmp_path: Path) -> None:
    """Break: delete the best checkpoint in retention; export without a reload."""
    settings = {"train__steps": 12, "train__eval_every": 2, "checkpoint__keep_best": True}
    newest = {"checkpoint__every": 3, "checkpoint__keep": 1, "checkpoint__export_best": True}
    result, _, said = run("best", **settings, **newest)
    assert [path.name for path in Checkpoints(result.dir / "checkpoints").folders()] == ["step-12", "step-8"]
    assert "back to step 8, with the lowest eval loss (3.9000)" in said
    last, _, _ = run("all", **settings, checkpoint__export=True)
    assert [path.name for path in Checkpoints(last.dir / "checkpoints").folders()] == ["step-12", "step-8"]
    models = [AutoModelForCausalLM.from_pretrained(each.export) for each in (result, last)]
    assert not torch.equal(models[0].lm_head.weight, models[1].lm_head.weight)
    with_export = tmp_path / "from-checkpoint"
    assert export_command([str(result.dir / "checkpoints/step-8"), str(with_export)]) == 0
    exported = AutoModelForCausalLM.from_pretrained(with_export)
    for one, other in zip(models[0].parameters(), exported.parameters(), strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_the_best_is_exported_by_the_same_command_and_never_saved_as_the_last(
    run: Any, judged: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A finished run can export the best checkpoint later, in a second call with the same command.

    A failed export leaves no last-step checkpoint, because these states are gone by then. Without a best checkpoint the
    run exports the last weights.

    Break: accept a last-weights export as the best one; save after the reload; load a missing checkpoint.
    """
    settings = {"train__steps": 10, "train__eval_every": 2, "checkpoint__keep_best": True}
    run("run", **settings)
    settings["checkpoint__export_best"] = True
    result, _, said = run("run", **settings)
    assert "back to step 8" in said
    best = result.dir / "checkpoints/step-8"
    assert result.export is not None
    remove(result.dir / "checkpoints/step-10")
    begin = Saves._begin

    def full(self: Saves, engine: Engine, step: int, *args: Any) -> None:
        if step == 10:
            raise DiskError("the disk is full.", 28, result.dir)
        begin(self, engine, step, *args)

    with monkeypatch.context() as patch:
        patch.setattr(Saves, "_begin", full)
        patch.setattr(Export, "write", lambda *_: full(None, None, 10))  # type: ignore[arg-type]
        with pytest.raises(DiskError, match=rf"offload.export {best} OUT"):
            run("run", **settings)
    assert [path.name for path in Checkpoints(best.parent).folders()] == ["step-8"]
    run("run", **settings)
    remove(best)
    result, _, said = run("run", **settings)
    assert f"there is no {best} of step 8" in said
    assert result.export is not None


@pytest.mark.slow
@pytest.mark.parametrize("when", ["killed", "stopped"])
def test_a_resumed_run_stops_after_the_same_step(run: Any, judged: None, before_step: Any, when: str) -> None:
    """The first run is killed after a save, or stops in a step between the save and an evaluation.

    Break: leave the evaluation count out of checkpoints; skip the missed evaluation.
    """
    settings = {"train__steps": 20, "train__eval_every": 2, "train__early_stopping_patience": 1, "checkpoint__every": 1}
    settings |= {"checkpoint__export": False, "checkpoint__keep_best": True, "train__micro_batch_size": 2}
    whole, wanted, _ = run("whole", **settings)
    assert whole.steps == 6
    killed = when == "killed"
    act = KeyboardInterrupt() if killed else lambda: os.kill(os.getpid(), signal.SIGTERM)
    with before_step(6, act), pytest.raises(KeyboardInterrupt if killed else InterruptedRun):
        run("parts", **settings)
    found, lines, _ = run("parts", **settings)
    assert (found.steps, found.best, found.eval_loss) == (whole.steps, whole.best, whole.eval_loss)
    keys = ("step", "loss", "eval_loss", "tokens_seen")
    assert [[line.get(key) for key in keys] for line in lines] == [[line.get(key) for key in keys] for line in wanted]
    again, _, said = run("parts", **settings)
    assert again.steps == 6
    assert "so the run ends after step 6" in said
