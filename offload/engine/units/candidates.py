"""Units before memory allocation, and the splitting of layers too large for one unit."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from offload.doors import Door
from offload.layout.regions import Piece, Region


@dataclass(frozen=True)
class ParameterPlace:
    """The place where a module holds a parameter."""

    module: nn.Module
    """Owner module."""
    key: str
    """Key in `module._parameters`."""
    parameter: int
    """Parameter index in the model."""


@dataclass
class UnitCandidate:
    """A unit before memory allocation.

    If the children of a module are separate units, the module's own unit keeps only the directly registered parameters
    and stays on the device.
    """

    name: str
    """Module name in the model."""
    module: nn.Module
    """Unit module."""
    places: list[ParameterPlace]
    """Places for all unit parameters."""
    whole: bool
    """True if the unit owns all module parameters, including child modules.

    False for a parent whose children have separate units.
    """
    resident: bool
    """True if the weights stay on the device."""
    is_block: bool = False
    """True if the module is an element of an outermost module list."""
    records: tuple[tuple[Piece, ...], ...] = ()
    """Streamed experts only: parameter pieces per record (experts fetched together).

    Empty: the unit is fetched as a whole.
    """
    blocks: Any = None
    """A split layer and each unit with a part of the layer: the object of `Splitting.blocks`. None: whole."""
    layer: str = ""
    """Part of a split layer only: name of the layer; otherwise empty."""
    rows: tuple[Piece, ...] = ()
    """Part of a split layer only: layer parameter pieces in this unit."""

    @property
    def is_cut(self) -> bool:
        """True for a split layer, without own weights."""
        return self.blocks is not None and not self.layer

    @property
    def parameters(self) -> list[int]:
        """Parameter indices in module order, without duplicates."""
        return list(dict.fromkeys(place.parameter for place in self.places))

    @property
    def cargoes(self) -> dict[str, Sequence[int | Piece]]:
        """Parameter indices or pieces fetched together, keyed by unit name as in `Region.units`.

        One entry for the unit, or one per record; empty for a split layer.
        """
        if self.is_cut:
            return {}
        if not self.records:
            return {self.name: self.rows or self.parameters}
        return {f"{self.name} [{number}]": pieces for number, pieces in enumerate(self.records)}


def regions_of(unit: UnitCandidate, regions: Iterable[Region]) -> tuple[Region, ...]:
    """Return the regions with parameters of this unit."""
    names = unit.cargoes.keys()
    return tuple(region for region in regions if not names.isdisjoint(region.units))


@dataclass(frozen=True)
class Splitting:
    """Whole layers: nothing is split. Base class of all splittings."""

    share_bytes: float = math.inf
    """Maximum weight bytes of a unit, as far as a unit can be split."""
    blocks: Mapping[nn.Module, Any] = field(default_factory=dict)
    """Split layers. Layers with a shared weight have the same object."""

    def units_of(self, layer: str, block: Any) -> Iterable[UnitCandidate]:  # noqa: ARG002
        """Return the units for the parts of a layer, in model order. `block`: an object of `blocks`."""
        return ()

    @property
    def description(self) -> str:
        """Report text about split layers. Empty: none."""
        return ""

    @property
    def whole_description(self) -> str:
        """Report sentence about oversized parameters left whole, with reasons. Empty: none."""
        return ""

    @property
    def functions(self) -> Mapping[int, Mapping[Any, Callable[..., torch.Tensor]]]:
        """Replacements for torch functions over a split weight or bias, by parameter index; see `OffloadedTensor`."""
        return {}

    def heads(self, whole: Any) -> Sequence[Any]:  # noqa: ARG002
        """Return variants of the `ChunkedHead` `whole` with a split weight, the most probable first."""
        return ()


SPLITTINGS: Door[Any] = Door("splitting", {})
"""rows: class of a `Splitting` with a method `of(model, infos, rule, share_bytes)`.
experts: function (candidates, infos, rule, num_replicas) -> candidates.
"""
