"""Streamed experts under PEFT's LoRA on parameters (`target_parameters`).

PEFT adds scale * lhs @ rhs to a whole stack of experts before the forward. Streamed experts add the same product, by
the same operation, to the experts in a record after the fetch. The factors of all experts are trained parameters of the
block.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from offload.engine.units.find import ParameterPlace

_LEVEL = ".base_layer"
"""End of the name of a module under an adapter."""


class Factors(NamedTuple):
    """Low-rank change of one stack of experts: scale * lhs @ rhs."""

    parameter: int
    """Model index of the stack."""
    lhs: Tensor
    """[experts, rows, rank], in the dtype of the stack."""
    rhs: Tensor
    """[experts, rank, columns], in the dtype of the stack."""
    scale: float

    def of_experts(self, experts: range) -> Factors:
        """Return the factors for the experts in a record, outside of the graph."""
        lhs, rhs = (
            each[experts.start : experts.stop].detach().requires_grad_(each.requires_grad)
            for each in (self.lhs, self.rhs)
        )
        return self._replace(lhs=lhs, rhs=rhs)  # leaves, so that each record has a backward alone

    def add_to(self, weight: Tensor) -> Tensor:
        """Return the changed weights, [experts, rows, columns]."""
        with torch.autocast(weight.device.type, enabled=False):  # as around PEFT's own change
            return torch.baddbmm(weight, self.lhs, self.rhs, alpha=self.scale)


def matrices(changes: Sequence[Factors]) -> list[Tensor]:
    """Return lhs and rhs of each change, in turns."""
    return [matrix for each in changes for matrix in (each.lhs, each.rhs)]


def wrappers_over(name: str, get_module: Callable[[str], nn.Module]) -> list[Any]:
    """Return the adapter modules around the module `name`, the innermost first."""
    wrappers = []
    while name.endswith(_LEVEL):
        name = name.removesuffix(_LEVEL)
        wrappers.append(get_module(name))
    return wrappers


def unsupported_reason(wrappers: Sequence[Any], stacks: Sequence[str]) -> str:
    """Return the reason why experts cannot be cut under `wrappers`. Empty: they can. `stacks`: parameter names."""
    lora: Any = sys.modules.get("peft.tuners.lora.layer")  # no import: a model under PEFT has imported it
    for wrapper in wrappers:
        if lora is None or not isinstance(wrapper, lora.ParamWrapper):
            return f"{type(wrapper).__name__} changes its parameters as a whole"
        if wrapper.parameter_name not in stacks or wrapper.num_experts == 1:
            return f"the adapter of {wrapper.parameter_name} does not consist of matrices by expert"
        if len(wrapper.lora_A) > 1:
            return f"{wrapper.parameter_name} has {len(wrapper.lora_A)} adapters, and only one can be streamed"
    return ""


class ExpertAdapters:
    """The adapters of one layer of streamed experts. While PEFT's wrappers run, `active` has the factors."""

    def __init__(self, wrappers: Sequence[Any], parameters: Mapping[str, int]) -> None:
        """`parameters`: model index of each stack by parameter name."""
        self._wrappers = wrappers
        self._parameters = parameters
        self.active: list[Factors] = []

    @classmethod
    def over(cls, name: str, places: Sequence[ParameterPlace], model: nn.Module) -> ExpertAdapters:
        """Return the adapters over the unit of experts `name` in `model`. `places`: of the stacks."""
        return cls(wrappers_over(name, model.get_submodule), {place.key: place.parameter for place in places})

    def divert(self) -> None:
        """Collect the factors in place of PEFT's change of the whole stack."""
        for wrapper in self._wrappers:
            wrapper._activate_lora = partial(self._activate, wrapper)

    def undo(self) -> None:
        """Restore PEFT's way."""
        for wrapper in self._wrappers:
            del wrapper._activate_lora

    @contextmanager
    def _activate(self, wrapper: Any, active_adapters: Sequence[str]) -> Iterator[None]:
        names = [name for name in active_adapters if name in wrapper.lora_A]
        before = self.active  # of the wrapper around this one, for another stack
        index = self._parameters[wrapper.parameter_name]
        self.active = [*before, *(Factors(index, *wrapper.get_delta_factors(name)) for name in names)]
        try:
            yield
        finally:
            self.active = before
