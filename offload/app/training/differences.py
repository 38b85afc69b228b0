"""First difference and distance between two training states."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch


@dataclass(frozen=True)
class Difference:
    """The first difference between the offloaded and the resident side."""

    step: int
    """Step after which the difference appears, counted from 1."""
    name: str
    """Differing value: "loss", "grad_norm", or a parameter name."""
    element: tuple[int, ...]
    """Element index in the parameter; () for a scalar."""
    offloaded: float
    """Value in the engine."""
    resident: float
    """Value on the resident side."""

    def __str__(self) -> str:
        place = f"{self.name}{list(self.element)}" if self.element else self.name
        return f"step {self.step}, {place}: offloaded {self.offloaded!r}, resident {self.resident!r}"

    def fields(self) -> dict[str, Any]:
        """Return a JSON object."""
        is_number = self.name in ("loss", "grad_norm")
        return {
            "step": self.step,
            "what": self.name if is_number else "weight",
            "parameter": None if is_number else self.name,
            "element": list(self.element),
            "offloaded": json_number(self.offloaded),
            "resident": json_number(self.resident),
        }


@dataclass
class WeightComparison:
    """Comparison between the weights on two sides, one parameter at a time."""

    num_parameters: int = 0
    """Parameters compared so far."""
    num_elements: int = 0
    """Elements compared so far."""
    differing: dict[str, int] = field(default_factory=dict)
    """Elements with different bits, for each differing parameter."""
    largest: float = 0.0
    """Largest absolute difference between two elements."""
    first: Difference | None = None
    """First difference in parameter order. None: no difference."""
    _distance: float = 0.0
    _change: float = 0.0

    def add(
        self, step: int, name: str, offloaded: torch.Tensor, resident: torch.Tensor, initial: torch.Tensor | None = None
    ) -> None:
        """Compare a parameter bit for bit. Tensors: fp32, equal shape, on the CPU.

        initial: common initial value, for `distance`.
        """
        self.num_parameters += 1
        self.num_elements += offloaded.numel()
        mismatch = first_mismatch(offloaded, resident)
        if mismatch is not None:
            element, count = mismatch
            gap = (offloaded.double() - resident.double()).abs_()
            self.differing[name] = count
            self.largest = max(self.largest, gap.max().item()) if not gap.isnan().any() else math.nan
            self._distance += gap.square_().sum().item()
            difference = Difference(step, name, element, offloaded[element].item(), resident[element].item())
            self.first = self.first or difference
        if initial is not None:
            self._change += (resident.double() - initial.double()).square_().sum().item()

    @property
    def distance(self) -> float:
        """Relative distance: L2 norm of the difference, divided by the L2 norm of the change in the resident weights.

        0 for equal weights; inf if nothing has changed.
        """
        if not self.differing:
            return 0.0
        return math.sqrt(self._distance / self._change) if self._change else math.inf

    def fields(self) -> dict[str, Any]:
        """Return a JSON object."""
        return {
            "parameters": self.num_parameters,
            "elements": self.num_elements,
            "differing_parameters": len(self.differing),
            "differing_elements": sum(self.differing.values()),
            "largest_difference": json_number(self.largest),
            "distance": json_number(self.distance),
        }


def first_mismatch(one: torch.Tensor, other: torch.Tensor) -> tuple[tuple[int, ...], int] | None:
    """Return the index of the first element with different bits, and the count of such elements.

    None: all equal. Both tensors are fp32. NaN equals itself; 0.0 differs from -0.0.
    """
    differs = one.contiguous().view(torch.int32) != other.contiguous().view(torch.int32)
    count = int(differs.sum())
    if not count:
        return None
    flat = int(differs.view(-1).to(torch.uint8).argmax())
    return tuple(int(index) for index in torch.unravel_index(torch.tensor(flat), one.shape)), count


def json_number(value: float) -> float | str:
    """Return a JSON value. Non-finite numbers become strings."""
    return value if math.isfinite(value) else str(value)
