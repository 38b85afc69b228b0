"""A frozen model beside the trained one: the check, and a submodule, so that one engine streams both."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from torch import nn
from transformers import PreTrainedConfig

from offload.app.config.config import Config
from offload.app.config.presets import PRESETS
from offload.app.config.sections import ModelSection
from offload.app.hf.models import (
    BuiltModel,
    is_found,
    load_model_config,
    max_positions,
    model_kind,
    rope_limit,
    vocab_size,
    without_weights,
)
from offload.engine.companions import add_companion
from offload.errors import ConfigError
from offload.files.sources import Source

KEYS = "distill.teacher", "prefs.reference"
"""Settings that name another model, for the loss."""


@contextmanager
def companion_at(config: Config, key: str) -> Iterator[ModelSection]:
    """Context with the model named by the setting `key`. Errors name this setting in place of model.path."""
    try:
        name = config.get(key)
        if name in PRESETS and not Path(name).exists():
            yield ModelSection(preset=name, attention=config.model.attention)
        else:
            yield ModelSection(path=name, attention=config.model.attention)
    except ConfigError as error:
        raise type(error)(str(error).replace("model.path", key)) from error


def rope_limits(config: Config, architecture: PreTrainedConfig) -> int | None:
    """Return the lowest `rope_limit` in a run with other models. Raises ConfigError."""
    limits = [rope_limit(architecture)]
    for key in KEYS:
        with companion_at(config, key) as section:
            section = without_weights(section)  # a resumed run may need no reference any more
            if section.path and is_found(section):
                limits.append(rope_limit(load_model_config(section)))
    return min(filter(None, limits), default=None)


def check_companion(config: Config, key: str, architecture: PreTrainedConfig, num_tokens: int) -> None:
    """Raise ConfigError if the model named by the setting `key` has no probabilities for the tokens of the run."""
    length, most = int(config.data.sequence_length or 0), max_positions(architecture)
    reason = ""
    if (kind := model_kind(architecture).name) != "causal":
        reason = f"a model of the kind {kind}: only causal language models have probabilities of the next token"
    elif (own := vocab_size(architecture)) < num_tokens:  # more rows than tokens are padding, and left out
        reason = f"which has probabilities for {own:,} tokens, but the model has {num_tokens:,}"
    elif most is not None and length > most:
        reason = f"which has positions for {most:,} tokens, but data.sequence_length is {length:,}"
    if reason:
        raise ConfigError(f"{key} is {config.get(key)}, {reason}. Set --{key} to another model.")


def build_checked(config: Config, key: str, build: Callable[[ModelSection], BuiltModel], num_tokens: int) -> BuiltModel:
    """Return the model that the setting `key` names, after `check_companion`."""
    with companion_at(config, key) as section:
        built = build(section)
    check_companion(config, key, built.model.config, num_tokens)
    return built


def beside(built: BuiltModel, name: str, companion: BuiltModel) -> BuiltModel:
    """Return `built` with the frozen model of `companion` beside it. Both may be unfilled."""
    prefix = add_companion(built.model, name, companion.model)

    def fill(unit: str, module: nn.Module) -> Mapping[nn.Parameter, Source] | None:
        if f"{unit}.".startswith(prefix):
            return companion.fill(f"{unit}.".removeprefix(prefix).removesuffix("."), module)
        found = dict(built.fill(unit, module) or {})
        if not unit:  # the whole model: both
            found.update(companion.fill("", companion.model) or {})
        return found

    def source(parameter: str) -> Source | None:
        if parameter.startswith(prefix):
            return companion.source(parameter.removeprefix(prefix))
        return built.source(parameter)

    def close() -> None:
        built.close()
        companion.close()

    quantized = {**built.quantized, **companion.quantized}
    return replace(built, fill=fill, source=source, close=close, quantized=quantized)
