"""Merge Python objects passed to Trainer into the configuration."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.config.config import Config
from offload.data.given import as_file
from offload.errors import ConfigError
from offload.hf.given import GivenModel


def settle(config: Any, model: Any, data: Any, eval_data: Any) -> tuple[Config, GivenModel | None]:
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
    given = None if model is None else GivenModel(model)
    if given is not None:
        if config.adapts:
            raise ConfigError(
                "an adapter is configured (lora) over a model given in Python, but a later load must find its base "
                "again: set model.path to the folder of the base."
            )
        _put(config, "model.path", given.path)
        if config.data.tokenizer is None and given.tokenizer is not None:
            _put(config, "data.tokenizer", given.tokenizer)
    if data is not None:
        if config.data.sources:
            raise ConfigError("data is given, and data.sources is set too: leave one of them out.")
        _put(config, "data.source", [as_file(data, "data")])
    if eval_data is not None:
        _put(config, "data.eval_source", [as_file(eval_data, "eval_data")])
    return config, given


def _put(config: Config, key: str, value: Any) -> None:
    """Set a value passed beside the configuration. Raises ConfigError if the configuration has another value."""
    section, field = key.split(".")
    was, default = config.get(key), config.SECTIONS[section].model_fields[field].get_default()
    setattr(getattr(config, section), field, value)
    if was not in (default, config.get(key)):
        raise ConfigError(f"{key} is {was}, but Trainer got another one as an argument: leave one of them out.")
