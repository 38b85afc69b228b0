"""Convert a configuration to engine settings."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from pydantic import BaseModel

from offload.app.config.config import Config
from offload.optim.rule import UpdateRule
from offload.optim.rules import make_rule
from offload.planning.settings import Settings
from offload.tiers.placement import Placement


def make_placement(config: Config) -> Placement:
    """Return the state placement. Raises ConfigError if impossible."""
    return Placement(**_matching_fields(Placement, config.offload))


def make_update_rule(config: Config) -> UpdateRule:
    """Return the update rule. Raises ConfigError."""
    section = config.optimizer
    return make_rule(section.name, dict(section) | {"lr": float(section.lr or 0.0)})


def make_settings(config: Config) -> Settings:
    """Return the engine settings for a resolved configuration. Raises ConfigError."""
    named = _matching_fields(Settings, config.train, config.offload, config.run)
    of_rows = {"micro_batch_size": config.train.micro_rows}
    return Settings(**named | of_rows | {"optimizer": make_update_rule(config), "placement": make_placement(config)})


def _matching_fields(dataclass_type: Any, *sections: BaseModel) -> dict[str, Any]:
    """Return the values from config sections for dataclass fields with the same name."""
    values = {name: value for section in sections for name, value in section}
    return {field.name: values[field.name] for field in fields(dataclass_type) if field.name in values}
