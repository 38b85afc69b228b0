"""Companions: frozen models that stream beside the trained one, in the same budgets, lanes and slots."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from weakref import WeakSet

from torch import nn

from offload.errors import ConfigError

_COMPANIONS: WeakSet[nn.Module] = WeakSet()


def add_companion(model: nn.Module, name: str, companion: nn.Module) -> None:
    """Make `companion` the submodule `name` of `model`, before `Engine(model)`: frozen, in eval mode, streamed like
    other frozen weights, and left out of checkpoints and exports.

    A loss function calls the companion under torch.no_grad. Raises ConfigError for a name in use, and for a companion
    that shares parameters with the model.
    """
    if hasattr(model, name):
        raise ConfigError(f"{type(model).__name__} has an attribute {name!r} already: give the companion another name.")
    own = {id(parameter) for parameter in model.parameters()}
    shared = next((each for each, parameter in companion.named_parameters() if id(parameter) in own), None)
    if shared is not None:
        raise ConfigError(
            f"the companion {name!r} shares {shared} with the model, where it would no longer train: give a companion "
            "with parameters of its own, such as a copy (copy.deepcopy)."
        )
    companion.requires_grad_(False)
    companion.eval()
    companion.train = MethodType(_stay, companion)  # type: ignore[method-assign]  # `model.train()` reaches submodules
    model.add_module(name, companion)
    _COMPANIONS.add(companion)


def companions_of(model: nn.Module) -> dict[str, nn.Module]:
    """Return the companions in `model`, by the beginnings of the names of their parameters."""
    return {f"{name}.": child for name, child in model.named_children() if child in _COMPANIONS}


def _stay(companion: nn.Module, _mode: bool = True) -> nn.Module:
    return companion


@contextmanager
def without_companions(model: nn.Module) -> Iterator[None]:
    """Context in which `model` has no companions."""
    companions = companions_of(model)
    for prefix in companions:
        delattr(model, prefix.removesuffix("."))
    try:
        yield
    finally:
        for prefix, companion in companions.items():
            model.add_module(prefix.removesuffix("."), companion)
