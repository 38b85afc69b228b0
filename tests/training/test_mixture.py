"""Whole runs over several data sources."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.run_folder import cut

KEYS = ("step", "loss", "grad_norm", "eval_loss", "eval_sources")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["all_exhausted", "first_exhausted"])
def test_a_mixture_resumes_at_the_row_and_evaluates_by_name(
    run: Callable[..., Any], tmp_path: Path, strategy: str
) -> None:
    """One process stops in the second epoch. The resumed process has the same losses as an uninterrupted run."""
    rows = [{"body": f"Row {i} of a table, which is no number."} for i in range(12)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    (tmp_path / "more.csv").write_text("text\n" + "".join(f"{i} is more of it\n" for i in range(9)))
    (tmp_path / "judge.jsonl").write_text('{"text": "What is judged by, and no more than that."}\n')
    sources = [
        {"path": str(tmp_path / "rows.parquet"), "weight": 3, "columns": {"text": "body"}},
        {"path": str(tmp_path / "more.csv"), "weight": 1},
    ]
    settings = {
        "data__sources": sources,
        "data__stopping_strategy": strategy,
        "data__eval_source": str(tmp_path / "judge.jsonl"),
        "data__eval_share": 0.1,
        "data__packing": False,
        "train__steps": 8,
        "train__eval_every": 4,
        "checkpoint__every": 5,
        "checkpoint__export": False,
    }
    result, lines, said = run("whole", without=("data__source",), **settings)
    assert f"data: text in parquet of {tmp_path}/rows.parquet: 12 documents" in said
    assert f"data: text in csv of {tmp_path}/more.csv: 9 documents" in said
    assert f"{'25' if strategy == 'all_exhausted' else '21.4'}% of the rows of an epoch" in said
    assert "those of a batch of about one length" in said
    assert all(0 < line["tokens"] <= 4 * 32 for line in lines)
    assert {line["tokens"] for line in lines} != {4 * 32}, "without padding"
    assert f"eval: jsonl of {tmp_path}/judge.jsonl: 1 document" in said
    assert "rows of judge" in said
    assert list(lines[3]["eval_sources"]) == ["judge"]
    assert result.eval_loss == lines[-1]["eval_loss"] != lines[-1]["eval_sources"]["judge"]["loss"]
    cut(tmp_path / "whole", "again", 8)
    _, again, _ = run("again", without=("data__source",), **settings)
    assert [[line.get(key) for key in KEYS] for line in again] == [[line.get(key) for key in KEYS] for line in lines]
