"""Runs with frozen parameters: weights against plain PyTorch, and refused settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from offload.app.hf.models import freeze
from offload.checkpoint.reader import Reader
from offload.errors import ConfigError
from tests.training.conftest import HOST

FREEZE = ["embed_tokens", r"layers\.[01]\."]


@pytest.mark.slow
def test_frozen_parameters_stay_and_have_no_states(run: Any) -> None:
    """Streamed or resident, in one process or two. The other parameters train as in the first step of the whole run."""
    settings = {"optimizer__freeze": FREEZE, "checkpoint__every": 2}
    begun, _, _ = run("begun", train__steps=1, optimizer__lr=0.0)
    result, lines, said = run("some", **settings)
    streamed, streamed_lines, _ = run("streamed", **settings, **HOST)
    before, after, other = (
        dict(AutoModelForCausalLM.from_pretrained(each.export).named_parameters()) for each in (begun, result, streamed)
    )
    for name, weight in after.items():
        is_frozen = "embed_tokens" in name or "layers.0." in name or "layers.1." in name
        assert torch.equal(weight, before[name]) == is_frozen, name
        assert torch.equal(weight, other[name]), name
    num_frozen = sum(weight.numel() for name, weight in after.items() if torch.equal(weight, before[name]))
    assert f"frozen: {num_frozen:,} parameters (optimizer.freeze)" in said
    with Reader(result.dir / "checkpoints/step-3") as reader:
        planes = {name: set(entry.planes) for name, entry in reader.contents.items()}
    assert planes["model.embed_tokens.weight"] < planes["lm_head.weight"]
    assert [line["loss"] for line in lines] == [line["loss"] for line in streamed_lines]
    num_trained = sum(weight.numel() for weight in after.values()) - num_frozen
    assert streamed_lines[-1]["d2h_bytes"] < 4 * (num_trained + num_frozen // 2), "no gradients of what is frozen"
    more, _, _ = run("some", **{**settings, "train__steps": 5, "optimizer__warmup_steps": 0})
    assert more.steps == 5
    with pytest.raises(ConfigError, match=r"optimizer\.freeze is .* and was"):
        run("some", **{**settings, "optimizer__freeze": ["embed_tokens"], "train__steps": 6})


@pytest.mark.slow
def test_the_export_is_checked_with_the_codes_of_what_trains(run: Any) -> None:
    """Break: unfreeze all parameters in the reloaded model. The embeddings are then quantized."""
    settings = {"optimizer__freeze": FREEZE, "train__steps": 1, "offload__link_weights": "int8"}
    _, _, said = run("coded", **settings)
    assert "approximate: 1 of" in said
    assert "logits bit-equal" in said


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        self.norm = nn.LayerNorm(3)
        self.head.weight = self.table.weight


def test_a_tied_parameter_is_found_by_any_of_its_names_and_what_finds_nothing_is_refused() -> None:
    model = Tied()
    freeze(model, ["head"])
    assert not model.table.weight.requires_grad
    assert model.norm.weight.requires_grad
    with pytest.raises(ConfigError, match="'tabel'.*none of the 4 parameter names .such as"):
        freeze(Tied(), ["tabel"])
    with pytest.raises(ConfigError, match="all 4 parameter names, so nothing is left to train"):
        freeze(Tied(), ["weight", "bias"])
