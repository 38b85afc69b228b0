"""How far long work is: the amounts that the engine and the application give to displays."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from torch import nn

from offload.amounts import Amount, Measure
from offload.app.training.parts import MeasuredFill, stages
from offload.engine.engine import Engine
from tests.cases.models import llama, tokens


@pytest.mark.parametrize(
    ("amount", "seconds", "text"),
    [
        (Amount(), 5.0, ""),
        (Amount(2**20), 5.0, "1 MiB so far"),
        (Amount(0, 2**30), 5.0, "0 B of 1 GiB"),
        (Amount(2**29, 2**30), 0.5, "512 MiB of 1 GiB"),
        (Amount(2**29, 2**30), 8.0, "512 MiB of 1 GiB, 64 MiB/s, 0:08 left"),
        (Amount(50, 40, "rows"), 100.0, "50 of 40 rows, 0.5 rows/s, 0:00 left"),
        (Amount(1, place="layers.3"), 5.0, "layers.3, 1 B so far"),
    ],
)
def test_an_amount_is_described(amount: Amount, seconds: float, text: str) -> None:
    assert amount.describe(seconds) == text


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_fill_counts_the_weights_that_the_engine_has_taken(num_ranks: int) -> None:
    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False))
    fill = MeasuredFill(SimpleNamespace(model=model, fill=lambda *_: None), num_ranks)
    found = [fill.amount()]
    for name in ("0", "1", ""):
        fill(name, model.get_submodule(name))
        found.append(fill.amount())
    done = [each * num_ranks for each in (0, 0, 64)]
    assert [each.done for each in found] == [*done, 192]
    assert {each.total for each in found} == {192}
    assert [each.place for each in found] == ["", "0", "1", ""]


def test_the_preparation_of_data_counts_in_percent() -> None:
    told: list[tuple[str, Measure]] = []
    progress = stages(lambda *stage: told.append(stage), lambda: None)
    for fraction in (0.0, 0.25):
        progress("tokenizing", fraction)
    ((text, measure),) = told
    assert f"{text}: {measure().describe(5.0)}" == "data: tokenizing: 25 of 100 %, 5 %/s, 0:15 left"


def test_the_engine_tells_its_stages_with_their_amounts(tmp_path: Path) -> None:
    told: dict[str, Measure] = {}
    engine = Engine(llama())
    engine.tell_stages(told.__setitem__)
    assert engine.amount() == Amount()
    engine.step(tokens())
    assert list(told) == [
        "recording the model on a few rows",
        "comparing the engine with plain PyTorch",
        "running the first pass",
    ]
    amount = told["running the first pass"]()
    assert amount.place.startswith("backward ")
    assert amount.done > 0
    engine.export(tmp_path / "model")
    for text in ("writing the weights", "checking the written weights"):
        assert told[text]().done == told[text]().total > 0
    engine.save_checkpoint(tmp_path / "states")
    engine.load_checkpoint(tmp_path / "states")
    for text in ("saving the states", "writing the states to disk", "reading the checkpoint"):
        assert told[text]().done == told[text]().total > 0
    engine.close()
