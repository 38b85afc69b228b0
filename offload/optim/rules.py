"""Update rules by configuration name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload.doors import Door
from offload.optim.adamw import AdamW
from offload.optim.rule import UpdateRule
from offload.optim.sgd import SGD

RULES: Door[type[UpdateRule]] = Door("rule", {"adamw": AdamW, "sgd": SGD})
"""Update rules by the name in `optimizer.name`."""


def make_rule(name: str, settings: Mapping[str, Any]) -> UpdateRule:
    """Create the rule `name` from the settings known to the rule, including the rules named in groups. Raises
    ConfigError.
    """
    groups = tuple((pattern, _with_rule(values, settings)) for pattern, values in settings["groups"])
    return RULES[name].configured({**settings, "groups": groups})


def _with_rule(values: Mapping[str, Any], settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a group with the rule name replaced by a rule object."""
    name = str(values.get("rule"))
    return {**values, "rule": RULES[name].configured({**settings, "groups": ()})} if name in RULES else values
