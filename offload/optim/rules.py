"""Update rules by configuration name."""

from __future__ import annotations

from offload.doors import Door
from offload.optim.adamw import AdamW
from offload.optim.rule import UpdateRule
from offload.optim.sgd import SGD

RULES: Door[type[UpdateRule]] = Door("rule", {"adamw": AdamW, "sgd": SGD})
"""Update rules by the name in `optimizer.name`."""
