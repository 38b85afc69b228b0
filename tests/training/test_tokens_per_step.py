"""`train.tokens_per_step` gives the bits that its rows, micro-batches and passes give when set."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload import train
from offload.app.config.config import Config
from tests.run_folder import SHAPE, assert_same_tensors, losses, write_shape, write_text


@pytest.mark.slow
def test_tokens_have_the_bits_that_their_rows_have_also_after_a_resume(
    with_plan: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Break: decide the rows again at a resume."""
    write_shape(tmp_path / "shape", **SHAPE)
    write_text(tmp_path)
    monkeypatch.chdir(tmp_path)
    words = ["--model.path", "shape/config.json", "--data.source", "text.txt", "--data.sequence_length", "32"]
    words += ["--optimizer.schedule", "constant", "--data.eval_share", "0", "--checkpoint.every", "2"]
    tokens = ["--train.tokens_per_step", "270", "--train.passes", "2"]
    train.main([*words, *tokens, "--train.steps", "2", "--run.dir", "tokens"])
    out = capsys.readouterr().out
    assert "270: 8 rows of 32 tokens, 256 together: --train.micro_batch_size 4 --train.passes 2" in out
    train.main([*words, *tokens, "--train.steps", "4", "--run.dir", "tokens"])
    found = Config.load(tmp_path / "tokens" / "config.yaml").train
    assert (found.batch_size, found.micro_batch_size, found.passes, found.tokens_per_step) == (8, 4, 2, 270)
    rows = ["--train.batch_size", "8", "--train.micro_batch_size", "4", "--train.passes", "2"]
    train.main([*words, *rows, "--train.steps", "4", "--run.dir", "rows"])
    assert losses(tmp_path / "tokens") == losses(tmp_path / "rows")
    assert_same_tensors(tmp_path / "tokens" / "hf", tmp_path / "rows" / "hf")
