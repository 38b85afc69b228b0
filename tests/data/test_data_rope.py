"""Rotary frequencies that depend on the longest row of a batch: a loss does not depend on other rows or parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, Phi3Config, Phi3ForCausalLM

from offload import Trainer
from offload.app.config.config import Config
from offload.app.hf.companion import KEYS
from offload.app.hf.models import rope_limit
from offload.app.training.build import RunSetup
from offload.app.training.resume import ResumePoint
from offload.errors import ConfigError
from tests.data.asked import source_of
from tests.run_folder import write_rows

LIMIT, LENGTH = 9, 48
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "factor": 8.0,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}


def phi3() -> Phi3ForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 40, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 72}
    heads["original_max_position_embeddings"] = LIMIT
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.5}
    return Phi3ForCausalLM(Phi3Config(**sizes, **heads, **ids, rope_parameters=LONGROPE))


def padded_loss(model: Phi3ForCausalLM, rows: list[list[int]], width: int) -> float:
    """Return the loss of transformers for rows padded to `width`, as a data collator pads them."""
    ids, labels = torch.zeros(len(rows), width, dtype=torch.int64), torch.full((len(rows), width), -100)
    for index, row in enumerate(rows):
        ids[index, : len(row)] = labels[index, : len(row)] = torch.tensor(row)
    with torch.no_grad():
        return float(model(input_ids=ids, labels=labels, attention_mask=(labels >= 0).long(), use_cache=False).loss)


@pytest.fixture
def first_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that trains one step over rows of token ids, and returns the loss."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    phi3().save_pretrained(tmp_path / "model")

    def train(rows: list[list[int]], size: int, **data: Any) -> float:
        source = write_rows(tmp_path / "rows.jsonl", ({"input_ids": row} for row in rows))
        folder = tmp_path / f"run-{size}-{len(list(tmp_path.iterdir()))}"
        config = {
            "run": {"dir": str(folder)},
            "model": {"path": str(tmp_path / "model")},
            "data": {"source": str(source), "sequence_length": LENGTH, "eval_share": 0, **data},
            "train": {"steps": 1, "batch_size": len(rows), "micro_batch_size": size, "precision": "fp32"},
            "checkpoint": {"export": False, "every": "none"},
        }
        Trainer(config).run()
        return float(json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"])

    return train


@pytest.mark.slow
@pytest.mark.parametrize(("longest", "width"), [(LIMIT, LIMIT), (LIMIT + 1, LENGTH)])
def test_the_loss_of_a_step_is_that_of_transformers_in_parts_of_any_size(
    first_loss: Any, capsys: pytest.CaptureFixture[str], longest: int, width: int
) -> None:
    """Break: return the width of the batching in `_width`."""
    rows = [[3 + (5 * index + token * token) % 37 for token in range(2 + index)] for index in range(3)]
    rows.append([3 + (token * token * 3) % 37 for token in range(longest)])
    wanted = padded_loss(phi3(), rows, width)
    for by_length, size in ((True, 1), (False, 4)):
        found = first_loss(rows, size, packing=False, group_by_length=by_length)
        assert found == pytest.approx(wanted, rel=1e-6), (by_length, size)
    assert ("every batch is padded to 48 tokens" in capsys.readouterr().out) == (longest > LIMIT)


def test_all_batches_have_one_width_if_a_row_is_beyond_the_limit(dataset_of: Any, tmp_path: Path) -> None:
    """A row set within the limit is not padded beyond. Break: return the width of the batching in `_width`."""
    files = tmp_path / "long.jsonl", tmp_path / "short.jsonl"
    for file, most in zip(files, (LIMIT + 1, LIMIT), strict=True):
        rows = [[3] * (2 + number * (most - 2) // 23) for number in range(24)]
        write_rows(file, ({"input_ids": row} for row in rows))
    for by_length in (False, True):
        data = dataset_of(
            files[0], eval_sources=[source_of(str(files[1]))], rope_limit=LIMIT, group_by_length=by_length
        )
        assert {data.batch(step)["input_ids"].shape[1] for step in range(4)} == {16}
        widths = {batch["input_ids"].shape[1] for batch in data.eval_batches(6)}
        assert max(widths) == LIMIT
        assert (len(widths) > 1) == by_length
        assert data.longest == LIMIT + 1


def test_documents_beyond_the_limit_are_not_packed_apart(first_loss: Any) -> None:
    """Break: leave out the limit in `isolate`: documents then have the frequencies of the longest one in a part."""
    rows = [[3, 4, 5, 6], [*range(3, 3 + LIMIT + 1)]]
    with pytest.raises(ConfigError, match=r"beyond 9 tokens a model has other .* and the longest document has 10"):
        first_loss(rows, 1, packing_isolated=True)


@pytest.mark.parametrize("key", ["distill.teacher", "prefs.reference"])
def test_the_limit_of_a_run_is_that_of_any_of_its_models(key: str, tmp_path: Path) -> None:
    """A teacher or a reference judges short rows by the frequencies of the longest one, with its padding.

    Break: look at the trained model alone.
    """
    phi3().save_pretrained(tmp_path)
    method = {"distill.teacher": "distill", "prefs.reference": "dpo"}[key]
    config = Config.load(overrides={key: str(tmp_path), "train.method": method})
    setup = RunSetup.read(ResumePoint(config), accelerator=None, num_ranks=1)
    assert rope_limit(setup.architecture) is None
    assert setup.rope_limit == LIMIT
    assert key in KEYS


def test_the_limit_is_that_of_the_rope_with_the_fewest_positions() -> None:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "max_position_embeddings": 64}
    assert rope_limit(phi3().config) == LIMIT
    assert rope_limit(LlamaConfig(**sizes)) is None
    dynamic = {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}
    assert rope_limit(LlamaConfig(**sizes, rope_parameters=dynamic)) == 64
