"""Runs over conversations: isolated documents in packed rows, and models without support for isolation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from offload.app.config.config import Config
from offload.app.training import planner
from offload.app.training.decisions import resolve
from offload.app.training.parts import make_settings
from offload.app.training.planner import PLANNERS, document_share
from offload.errors import ConfigError
from offload.extras.large import compiled_forwards, document_attention
from offload.planning import settings
from tests.engine.documents import positions_of
from tests.run_folder import write_rows


@pytest.fixture
def chats(tmp_path: Path) -> str:
    """Write conversations with different lengths."""
    rows = [
        {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": f"{n}. " * (n % 5 + 1)}]}
        for n in range(200)
    ]
    return str(write_rows(tmp_path / "chats.jsonl", rows))


@pytest.mark.slow
def test_a_run_of_an_earlier_version_goes_on_with_rows_as_they_were(
    run: Any, chats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Old checkpoints lack the setting `data.packing_isolated`."""
    whole_dict = Config.to_dict

    def without(self: Config) -> dict[str, Any]:
        return {key: value for key, value in whole_dict(self).items() if key != "data.packing_isolated"}

    more = {"data__source": chats, "checkpoint__every": 2}
    with monkeypatch.context() as earlier:
        earlier.setattr(Config, "to_dict", without)
        run("run", **more, train__steps=2, data__packing_isolated=False)
    _, lines, said = run("run", **more, train__steps=4, optimizer__warmup_steps=0)
    assert len(lines) == 4
    assert "its documents see each other" in said


@pytest.mark.slow
def test_a_model_that_mixes_documents_has_one_a_row(run: Any, chats: str) -> None:
    result, _, said = run("run", "mamba", data__source=chats)
    assert "note: a document's logits depend on" in said
    assert "keep a mask" not in said
    assert "a document a row" in said.split("note: a document's")[1]
    assert "packing: false" in (result.dir / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"packing_isolated is true, but a document's logits depend on"):
        run("other", "mamba", data__source=chats, data__packing_isolated=True)
    with pytest.raises(ConfigError, match=r"the model is a masked one"):
        run("third", "bert", data__source=chats, data__packing_isolated=True)


@pytest.mark.slow
def test_compiled_blocks_get_rows_of_one_length_instead(run: Any, chats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine is compiled already when documents turn out to be mixed."""
    monkeypatch.setattr(compiled_forwards, "BACKEND", "eager")
    monkeypatch.setattr(settings, "compiles_by_default", lambda *_: True)
    result, _, said = run("run", "mamba", data__source=chats, train__steps=1)
    assert "blocks are compiled" in said
    assert "group_by_length: false" in (result.dir / "config.yaml").read_text()


@pytest.mark.slow
def test_conversations_are_computed_and_planned_one_by_one_unless_a_mask_is_asked_for(
    run: Any, chats: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break: count the positions of one row into the next in `document_share`."""
    shares: list[float | None] = []
    forecast = PLANNERS["forecast"]
    monkeypatch.setattr(planner, "PLANNERS", {"forecast": lambda *given: shares.append(given[-1]) or forecast(*given)})
    result, lines, said = run("documents", data__source=chats, train__steps=2)
    assert "packed, each document apart, with positions of its own" in said
    assert "attention: documents" in (result.dir / "config.yaml").read_text()
    _, masked, _ = run("mask", data__source=chats, train__steps=2, model__attention="sdpa")
    assert [line["loss"] for line in lines] == pytest.approx([line["loss"] for line in masked], rel=1e-5)
    assert shares[0] is not None
    assert 0 < shares[0] < 1
    assert shares[1] is None


def test_the_share_of_documents_is_the_mean_of_their_squares() -> None:
    class Rows:
        batch_size = 2

        def batch(self, step: int) -> dict[str, torch.Tensor]:
            if step == 2:
                raise StopIteration
            rows = ((2, 2, 4), (8,)) if step == 0 else ((1,) * 8, (3, 5))
            return {"position_ids": positions_of(rows)}

    data: Any = Rows()
    config = Config.load(None, {"data.packing_isolated": True, "model.attention": "documents"})
    squares = (4 + 4 + 16) + 64 + 8 + (9 + 25)
    assert document_share(config, data) == squares / (4 * 64)
    assert document_share(config.with_resolved(model__attention="auto"), data) is None


def test_a_model_that_needs_a_mask_keeps_it(run: Any, chats: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The starts go to the layers as one document, so the probe sees documents of a row mixed."""
    find_starts = document_attention.find_starts

    def mixing(documents: torch.Tensor, window: int | None) -> torch.Tensor:
        return find_starts(torch.zeros_like(documents), window)

    monkeypatch.setattr(document_attention, "find_starts", mixing)
    result, _, said = run("run", data__source=chats, train__steps=1)
    assert "note: without a mask, a document's logits depend on the documents before it" in said
    assert ": packed documents keep a mask over whole rows, at most " in said
    config = (result.dir / "config.yaml").read_text()
    assert "packing_isolated: true" in config
    assert "attention: documents" not in config


def test_one_function_says_which_runs_stay_uncompiled() -> None:
    """Break: leave a condition out of `settle_compile`, or an argument out in `make_settings`."""

    def compiles(**words: Any) -> str:
        config = Config.load(None, {key.replace("__", "."): value for key, value in words.items()})
        return make_settings(resolve(config, has_accelerator=True, max_positions=None)).compile

    for attention in ("auto", "documents", "sdpa"):
        assert compiles(data__packing_isolated=True, model__attention=attention) == "auto"
    alone = {"data__packing": False}
    by_length = alone | {"data__group_by_length": True}
    for eager in ({"train__sequence_parallel": 2}, {"train__recompute": "products"}, by_length, alone):
        assert compiles(**eager) == "never"
    for padded in (alone | {"data__group_by_length": False}, alone | {"train__method": "dpo"}):
        assert compiles(**padded) == "auto"
    for each in (alone, by_length):
        assert compiles(**each, train__compile="always") == "always"
    assert compiles(offload__experts="streamed") == "never"
    with pytest.raises(ConfigError, match="streamed experts keep their own outputs"):
        compiles(train__recompute="products", train__compile="always", offload__experts="streamed")
