"""Merge Python objects passed to Trainer into the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.app.config.config import Config
from offload.app.hf.model_object import ModelObject
from offload.app.training.task import TASKS
from offload.errors import ConfigError


def merge_arguments(config: Any, model: Any, data: Any, eval_data: Any) -> tuple[Config, ModelObject | None]:
    """Return the configuration for a run, and the model object, if any.

    `config`: as for `Trainer`. `model`, `data`, `eval_data`: None for the configured ones. Raises ConfigError.
    """
    if config is None or isinstance(config, Mapping):
        config = Config.load(None, config, may_go_on=True)
    elif isinstance(config, str | Path):
        config = Config.load(config, may_go_on=True)
    elif not isinstance(config, Config):
        raise ConfigError(
            f"config is a {type(config).__name__}; it should be a path, a mapping of settings, or a Config."
        )
    config = config.model_copy(deep=True)
    user_model = None if model is None else ModelObject(model)
    if user_model is not None:
        if config.lora.adapts:
            raise ConfigError(
                "an adapter is configured (lora) over a model given in Python, but a later load must find its base "
                "again: set model.path to the folder of the base."
            )
        _put(config, "model.path", user_model.path)
        if config.data.tokenizer is None and user_model.tokenizer is not None:
            _put(config, "data.tokenizer", user_model.tokenizer)
    if data is not None:
        if config.data.sources:
            raise ConfigError("data is given, and data.sources is set too: leave one of them out.")
        _put(config, "data.source", [TASKS["rows"].store(data, "data")])
    if eval_data is not None:
        _put(config, "data.eval_source", [TASKS["rows"].store(eval_data, "eval_data")])
    return config, user_model


def _put(config: Config, key: str, value: Any) -> None:
    """Set a value passed beside the configuration. Raises ConfigError if the configuration has another value."""
    section, field = key.split(".")
    before, default = config.get(key), config.SECTIONS[section].model_fields[field].get_default()
    setattr(getattr(config, section), field, value)
    if before not in (default, config.get(key)):
        raise ConfigError(f"{key} is {before}, but Trainer got another one as an argument: leave one of them out.")
