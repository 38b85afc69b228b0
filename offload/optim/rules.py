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
    groups = []
    for pattern, values in settings["groups"]:
        other = str(values.get("rule"))
        rule = {"rule": RULES[other].configured({**settings, "groups": ()})} if other in RULES else {}
        groups.append((pattern, {**values, **rule}))
    return RULES[name].configured({**settings, "groups": tuple(groups)})
