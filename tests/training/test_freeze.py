"""Frozen parameters of a run: by their names, and in the check of the export."""

from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from offload.app.hf.models import freeze
from offload.errors import ConfigError


@pytest.mark.slow
def test_the_export_is_checked_with_the_codes_of_what_trains(run: Any) -> None:
    """Break: unfreeze all parameters in the reloaded model. The embeddings are then quantized."""
    freezes = ["embed_tokens", r"layers\.[01]\."]
    settings = {"optimizer__freeze": freezes, "train__steps": 1, "offload__link_weights": "int8"}
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
