"""The length of a run in steps and passes over the data, as a run prints it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offload.app.config.config import Config
from offload.app.training.parts import describe_length


@pytest.mark.parametrize(
    ("steps", "source", "group", "lines"),
    [
        (
            400,
            "x.txt",
            1,
            ["steps: 400 of 8 rows: 640 epochs", "note: the run makes 640 epochs: each row comes as many"],
        ),
        (1, "x.txt", 1, ["steps: 1 of 8 rows: 1.6 epochs"]),
        (5, "x.txt", 2, ["steps: 5 of 4 pairs: 8 epochs"]),
        (None, "x.txt", 1, []),
        (400, "builtin:stdlib", 1, ["steps: 400 of 8 rows: 640 epochs"]),
    ],
)
def test_a_run_prints_its_passes(steps: int | None, source: str, group: int, lines: list[str]) -> None:
    config = Config.load(None, {"data.source": [source], "model.preset": "tiny"}).with_resolved(train__steps=steps)
    data: Any = SimpleNamespace(batch_size=8, num_train_rows=5, group=group)
    said = list(describe_length(config, data))
    assert len(said) == len(lines)
    assert all(text.startswith(line) for text, line in zip(said, lines, strict=True))
    data.num_train_rows = 1000
    if steps == 1:
        assert said != (fewer := list(describe_length(config, data)))
        assert fewer[1].startswith("note: the run makes 0.008 epochs: most rows are left out")
