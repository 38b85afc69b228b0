"""The one owner of "where is it": every region's planes, on the tier that the placement says.

A plane is a flat tensor over a region: `weights` (what travels: the bf16 high half, or the fp32 master), `low` (the low
half of a split master), `exp_avg`, `exp_avg_sq`, and `gradients` where they wait for the norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from offload import native
from offload.lanes.ticket import Fence
from offload.partition.layout import ParameterInfo, Region
from offload.tiers.device import Device
from offload.tiers.host import Arena
from offload.tiers.ledger import Ledger

_DTYPES = {"weights": torch.bfloat16, "low": torch.int16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}


@dataclass
class RegionState:
    """The planes of one region, and how often each of its parameters was updated (torch counts steps by parameter).

    The fence of the weights also stands for the low half and the moments: updates alone write them.
    """

    region: Region
    weights: torch.Tensor
    low: torch.Tensor | None
    exp_avg: torch.Tensor | None
    exp_avg_sq: torch.Tensor | None
    gradients: torch.Tensor | None
    steps: list[int]
    fences: dict[str, Fence] = field(
        default_factory=lambda: {"weights": Fence("weights"), "gradients": Fence("waiting gradients")}
    )

    def span(self, position: int) -> slice:
        """Return the elements of the region's parameter number `position`."""
        start = self.region.offsets[position]
        return slice(start, start + self.region.sizes[position])

    def write(self, position: int, value: torch.Tensor) -> None:
        """Set the master weights of one parameter from a tensor of any float dtype and shape."""
        span, flat = self.span(position), value.detach().reshape(-1)
        if not self.region.is_split:
            self.weights[span].copy_(flat)
        elif self.low is None or flat.dtype == torch.bfloat16:
            self.weights[span].copy_(flat)
            if self.low is not None:
                self.low[span].zero_()
        else:
            hi, lo = native.split(flat.float().to(self.weights.device))
            self.weights[span].copy_(hi)
            self.low[span].copy_(lo)

    def read(self, position: int) -> torch.Tensor:
        """Return a fresh fp32 CPU copy of the master weights of one parameter, flat."""
        span = self.span(position)
        if self.low is None:
            return self.weights[span].to("cpu", torch.float32, copy=True)
        return native.join(self.weights[span].cpu(), self.low[span].cpu())


class Store:
    """All regions' planes, each kind of state on its tier. Host memory is taken by the byte from one arena."""

    def __init__(
        self,
        regions: Sequence[Region],
        infos: Sequence[ParameterInfo],
        *,
        tier: str,
        device: Device,
        host: Ledger,
    ) -> None:
        self.tier, self._device, self._host = tier, device, host
        self._home = {
            parameter: (region.index, position)
            for region in regions
            for position, parameter in enumerate(region.parameters)
        }
        self._infos = infos
        self.states: list[RegionState] = []
        planes = {region: region.planes(keeps_gradients=False, accumulates=False) for region in regions}
        self._arenas: dict[str, Arena] = {}
        made = self._allocate(
            "states", {region: {name: _dtype(region, name) for name in names} for region, names in planes.items()}
        )
        for region in regions:
            found = {name: made.get((region, name)) for name in _DTYPES}
            self.states.append(RegionState(region, gradients=None, steps=[0] * len(region.parameters), **found))  # type: ignore[arg-type]

    def hold_gradients(self, accumulates: bool) -> None:
        """Make a gradient plane for every trained region: in the dtype of its weights, or in fp32 where several
        passes are summed.
        """
        trained = [state for state in self.states if state.region.trainable]
        wanted = {
            s.region: {"gradients": torch.float32 if accumulates else _dtype(s.region, "weights")} for s in trained
        }
        if all(s.gradients is not None and s.gradients.dtype == wanted[s.region]["gradients"] for s in trained):
            return
        for state in trained:
            if state.gradients is not None:
                ledger = self._host if self.tier == "cpu" else self._device.ledger
                ledger.release("gradients", state.gradients.nbytes)
                state.gradients = None
        self._arenas.pop("gradients", None)
        for (region, _), flat in self._allocate("gradients", wanted).items():
            self.states[region.index].gradients = flat

    def _allocate(
        self, kind: str, wanted: dict[Region, dict[str, torch.dtype]]
    ) -> dict[tuple[Region, str], torch.Tensor]:
        """Make planes: by one arena on the host, one by one on the device."""
        planes = [(region, name, dtype) for region, names in wanted.items() for name, dtype in names.items()]
        if self.tier == "device":
            return {
                (region, name): self._device.allocate(name.replace("_", " "), region.numel * dtype.itemsize).view(dtype)
                for region, name, dtype in planes
            }
        for region, name, dtype in planes:
            self._host.reserve(name.replace("_", " "), region.numel * dtype.itemsize)
        arena = Arena(
            sum(region.numel * dtype.itemsize for region, _, dtype in planes), pin=self._device.pins_host_memory
        )
        self._arenas[kind] = arena
        return {(region, name): arena.take(region.numel, dtype) for region, name, dtype in planes}

    def __getitem__(self, region: Region) -> RegionState:
        return self.states[region.index]

    @property
    def pinned_bytes(self) -> int:
        """Bytes of host memory that the device can copy from without staging."""
        return sum(arena.pinned_bytes for arena in self._arenas.values())

    def write(self, parameter: int, value: torch.Tensor) -> None:
        """Set the master weights of one parameter."""
        region, position = self._home[parameter]
        self.states[region].write(position, value)

    def read(self, parameter: int) -> torch.Tensor:
        """Return a fresh fp32 CPU copy of one parameter's master weights, in its shape."""
        region, position = self._home[parameter]
        return self.states[region].read(position).view(self._infos[parameter].shape)

    def view(self, parameter: int) -> torch.Tensor:
        """Return the travelling weights of one parameter (bf16, or fp32), in its shape, without a copy."""
        region, position = self._home[parameter]
        state = self.states[region]
        return state.weights[state.span(position)].view(self._infos[parameter].shape)

    def named(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield (name, fresh fp32 CPU copy) of every parameter in torch's order."""
        for info in self._infos:
            yield info.name, self.read(info.index)

    def close(self) -> None:
        """Let go of the planes."""
        self.states.clear()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()


def _dtype(region: Region, plane: str) -> torch.dtype:
    return torch.float32 if plane == "weights" and not region.is_split else _DTYPES[plane]
