"""The update rules by the names that configurations give them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.optim.adamw import AdamW
from offload.optim.factored import Adafactor, AdaLomo
from offload.optim.lion import Lion
from offload.optim.mezo import MeZO
from offload.optim.muon import Muon
from offload.optim.rule import UpdateRule
from offload.optim.sgd import LOMO, SGD

_RULES: Mapping[str, type[UpdateRule]] = {
    "adamw": AdamW,
    "lion": Lion,
    "sgd": SGD,
    "adafactor": Adafactor,
    "lomo": LOMO,
    "adalomo": AdaLomo,
    "muon": Muon,
    "mezo": MeZO,
}


def make_rule(name: str, settings: Mapping[str, Any]) -> UpdateRule:
    """Return the rule of this name with those of the settings that it has; likewise those that its groups name. Raises
    ConfigError.
    """
    groups = tuple((pattern, _with_rule(values, settings)) for pattern, values in settings["groups"])
    return _RULES[name].configured({**settings, "groups": groups})


def _with_rule(values: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a group with the rule that it names."""
    name = str(values.get("rule"))
    return {**values, "rule": _RULES[name].configured({**settings, "groups": ()})} if name in _RULES else values
