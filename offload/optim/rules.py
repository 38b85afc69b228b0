"""The update rules by the names that configurations give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from offload.optim.adamw import AdamW
from offload.optim.lion import Lion
from offload.optim.rule import UpdateRule
from offload.optim.sgd import SGD

_RULES: Mapping[str, Any] = {"adamw": AdamW, "lion": Lion, "sgd": SGD}


def make_rule(name: str, settings: Mapping[str, Any]) -> UpdateRule:
    """Return the rule of this name with those of the settings that it has. Raises ConfigError."""
    kind = _RULES[name]
    rule: UpdateRule = kind(**{field.name: settings[field.name] for field in fields(kind)})
    return rule
