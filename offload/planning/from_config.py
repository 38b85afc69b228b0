"""Convert a configuration to engine settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pydantic import BaseModel

from offload.config.config import Config
from offload.optim.rule import UpdateRule
from offload.optim.rules import make_rule
from offload.planning.settings import Settings
from offload.tiers.placement import Placement


def placement(config: Config) -> Placement:
    """Return the state placement. Raises ConfigError if impossible."""
    return Placement(**_named(Placement, config.offload))


def update_rule(config: Config) -> UpdateRule:
    """Return the update rule. Raises ConfigError."""
    section = config.optimizer
    return make_rule(section.name, dict(section) | {"lr": float(section.lr or 0.0)})


def settings(config: Config) -> Settings:
    """Return the engine settings for a resolved configuration. Raises ConfigError."""
    named = _named(Settings, config.train, config.offload, config.run)
    of_rows = {"micro_batch_size": config.train.micro_rows}
    return Settings(**named | of_rows | {"optimizer": update_rule(config), "placement": placement(config)})


def _named(kind: Any, *sections: BaseModel) -> dict[str, Any]:
    """Return the values from config sections for dataclass fields with the same name."""
    said = {name: value for section in sections for name, value in section}
    return {field.name: said[field.name] for field in fields(kind) if field.name in said}
