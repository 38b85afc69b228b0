"""One micro-batch of a unit use, and interfaces of its forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

from offload.engine.units.arguments import Arguments
from offload.engine.units.unit import Unit
from offload.tiers.device import Device

Forward = Callable[..., Any]


class ForwardRunner(Protocol):
    """Runs modules over weights in device memory."""

    @property
    def device(self) -> Device:
        """The compute device."""
        ...

    def is_weight(self, tensor: torch.Tensor) -> bool:
        """True for a tensor over weights on the device."""
        ...

    def run(self, unit: Unit, use: Use, forward: Forward) -> Arguments:
        """Run `forward` as the unit forward; return (result, container changes)."""
        ...


@dataclass
class Product:
    """A matrix product or attention in a forward. Its outputs wait for the recomputation, or are computed again."""

    outputs: list[torch.Tensor]
    """The outputs, or what waits for them; empty: none wait."""
    work: float
    """Multiplications that kept outputs spare, each at the rate of bf16 products."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the outputs. Views of one memory count once."""
        storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in self.outputs}
        return sum(storages.values())


class Use(NamedTuple):
    """One micro-batch of a unit use. The unit weights are on the device."""

    runner: ForwardRunner
    """The unit runner."""
    arguments: Arguments
    """Call arguments."""
    tensors: Sequence[torch.Tensor]
    """Micro-batch tensors."""
    others: Sequence[Any]
    """Non-tensor arguments."""
    needs: Sequence[bool] | None = None
    """requires_grad per tensor. None: the use has no backward."""
    keep_products: Callable[[Sequence[Product]], None] | None = None
    """Decides which product outputs wait for the recomputation: it changes `Product.outputs`. None: none wait."""


class Forwards(Protocol):
    """Chooses the forward of each use."""

    def enter(self, unit: Unit) -> None:
        """Begin a unit use, with its weights on the device."""
        ...

    def leave(self) -> None:
        """End the use, if there is one."""
        ...

    def forward_of(self, unit: Unit, use: Use) -> Forward:
        """Return the forward for a use, with the signature of the module forward."""
        ...

    def for_recomputation(self, forward: Forward) -> Forward:
        """Return the recomputation function for a use run with `forward`."""
        ...

    def record(self, unit: Unit, runner: ForwardRunner, arguments: Arguments, rows: int | None) -> Forward:
        """Learn about a unit during a recorded use and return the forward to run. `rows`: see `Stage.record`."""
        ...
