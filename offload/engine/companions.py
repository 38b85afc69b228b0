"""Companions: frozen models that stream beside the trained one, in the same budgets, lanes and slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from offload.errors import ConfigError

_NAME = "companions"


class Companions(nn.ModuleDict):
    """The companions of a model, by name. They stay in eval mode."""

    def train(self, _mode: bool = True) -> Companions:  # `model.train()` reaches submodules
        return self


def add_companion(model: nn.Module, name: str, companion: nn.Module) -> str:
    """Make `companion` a submodule of `model`, before `Engine(model)`: frozen, in eval mode, streamed like other frozen
    weights, and left out of checkpoints and exports. Return the beginning of the names of its parameters.

    A loss function calls the companion under torch.no_grad. Raises ConfigError for a name in use. `Engine` refuses a
    companion that shares parameters with the model.
    """
    companions = getattr(model, _NAME, None) or Companions()
    if not isinstance(companions, Companions) or name in companions:
        raise ConfigError(f"{type(model).__name__} has {_NAME} already, or one of the name {name!r}: use another name.")
    own = {id(parameter) for parameter in model.parameters()}
    for parameter in companion.parameters():
        if id(parameter) not in own:
            parameter.requires_grad_(False)
    companions[name] = companion.eval()
    model.add_module(_NAME, companions)
    return f"{_NAME}.{name}."


def companions_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the companions in `model`, by the beginnings of the names of their parameters."""
    found = getattr(model, _NAME, None)
    if not isinstance(found, Companions):
        return {}
    return {f"{_NAME}.{name}.": companion for name, companion in found.items()}


@contextmanager
def without_companions(model: nn.Module) -> Iterator[None]:
    """Context in which `model` has no companions."""
    if not companions_of(model):
        yield
        return
    companions = model._modules.pop(_NAME)
    try:
        yield
    finally:
        model.add_module(_NAME, companions)
