"""The one owner of "where is it": every region's planes, on the tier that the placement says.

A plane is a flat tensor over a region: `weights` (what travels: the bf16 high half, or the fp32 master), `low` (the low
half of a split master), `exp_avg`, `exp_avg_sq`, and `gradients` where they wait for the norm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from offload import native
from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Fence, Ticket
from offload.partition.layout import DiskLayout, ParameterInfo, Region
from offload.tiers.device import Device
from offload.tiers.host import Arena
from offload.tiers.ledger import Ledger
from offload.tiers.loan import Loan
from offload.tiers.nvme import Nvme, Record


def plane_dtype(region: Region, plane: str) -> torch.dtype:
    """Return the dtype of a region's plane; of gradients as they wait for the norm of one backward pass."""
    if plane in ("weights", "gradients"):
        return torch.bfloat16 if region.is_split else torch.float32
    return torch.int16 if plane == "low" else torch.float32


@dataclass(eq=False)
class Part:
    """Elements `begin` to `end` of a region, which are read, updated and written back at once: all of it, or a tile
    where some of its planes are on disk. `planes` are those in memory, but for the gradients.

    The fence of the weights also stands for the low half and the moments: updates alone write them.
    """

    begin: int
    end: int
    planes: dict[str, torch.Tensor]
    record: Record | None
    fence: Fence = field(default_factory=lambda: Fence("weights"))

    def fetch(self, is_ahead: bool) -> Loan:
        """Lend the weights to the device. `is_ahead`: for the next step."""
        return self._lend(("weights",), fetches=True, is_ahead=is_ahead)

    def land(self) -> Loan:
        """Lend memory for gradients that wait on disk."""
        assert self.record is not None
        return self.record.land()

    def lend(self, *names: str) -> Loan:
        """Lend these planes to the host; such as there are of them."""
        return self._lend(names)

    def _lend(self, names: Sequence[str], fetches: bool = False, is_ahead: bool = False) -> Loan:
        planes = {name: self.planes[name] for name in names if name in self.planes}
        loan = Loan(planes, self.fence.before_read(), self.fence.before_fill(), self.fence.read, self.fence.fill)
        elsewhere = [name for name in names if self.record is not None and name in self.record.planes]
        if self.record is None or not elsewhere:
            return loan
        return self.record.lend(elsewhere, loan, fetches=fetches, is_ahead=is_ahead)


@dataclass
class RegionState:
    """The planes of one region, and how often each of its parameters was updated (torch counts steps by parameter).
    `gradients` are those that wait in memory, behind the `landing` fence.
    """

    region: Region
    parts: list[Part]
    steps: list[int]
    gradients: torch.Tensor | None = None
    landing: Fence = field(default_factory=lambda: Fence("waiting gradients"))

    @property
    def keeps_gradients(self) -> bool:
        """True where the region's gradients wait for the norm."""
        return self.gradients is not None or self.lands_on_disk

    @property
    def lands_on_disk(self) -> bool:
        """True where the region's gradients wait on disk."""
        record = self.parts[0].record
        return self.gradients is None and record is not None and "gradients" in record.planes

    def count(self, touched: Sequence[bool]) -> None:
        """Note that the parameters that received a gradient were updated."""
        self.steps = [steps + has for steps, has in zip(self.steps, touched, strict=True)]

    def span(self, position: int) -> slice:
        """Return the elements of the region's parameter number `position`."""
        start = self.region.offsets[position]
        return slice(start, start + self.region.sizes[position])


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
        lanes: Lanes,
        layout: DiskLayout | None = None,
        nvme: Nvme | None = None,
    ) -> None:
        """`tier`: of what `layout` does not put on disk, for which there is `nvme`."""
        self.tier, self._device, self._host, self._lanes = tier, device, host, lanes
        self._home = {
            parameter: (region.index, position)
            for region in regions
            for position, parameter in enumerate(region.parameters)
        }
        self._infos, self._layout, self._nvme = infos, layout or DiskLayout(), nvme
        self._arenas: dict[str, Arena] = {}
        wanted = {
            region: {
                name: plane_dtype(region, name)
                for name in region.planes(keeps_gradients=False, accumulates=False)
                if name not in self._layout.of(region)
            }
            for region in regions
        }
        made = self._allocate("states", wanted)
        self.states = [self._state(region, {n: made[region, n] for n in names}) for region, names in wanted.items()]

    def _state(self, region: Region, planes: dict[str, torch.Tensor]) -> RegionState:
        dtypes = {name: plane_dtype(region, name) for name in self._layout.of(region)}
        parts = []
        for begin, end in self._layout.tiles(region):
            record = None
            if dtypes:
                assert self._nvme is not None
                record = self._nvme.record(region.name, end - begin, dtypes)
            parts.append(Part(begin, end, {name: flat[begin:end] for name, flat in planes.items()}, record))
        return RegionState(region, parts, [0] * len(region.parameters))

    def hold_gradients(self, accumulates: bool) -> None:
        """Make a gradient plane for every trained region: in the dtype of its weights, or in fp32 where several
        passes are summed.
        """
        trained = [state for state in self.states if state.region.trainable]
        wanted = {
            s.region: {"gradients": torch.float32 if accumulates else plane_dtype(s.region, "gradients")}
            for s in trained
            if accumulates or not s.lands_on_disk
        }
        if all(
            s.gradients is not None and s.gradients.dtype == wanted[s.region]["gradients"]
            for s in trained
            if s.region in wanted
        ):
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
        rings = self._nvme.pinned_bytes if self._nvme is not None else 0
        return rings + sum(arena.pinned_bytes for arena in self._arenas.values())

    def write(self, parameter: int, value: torch.Tensor) -> None:
        """Set the master weights of one parameter from a tensor of any float dtype and shape."""
        flat = value.detach().reshape(-1)
        for planes, mine, its in self.opened(parameter, "weights", "low", changes=True):
            part = flat[its]
            if "low" not in planes:
                planes["weights"][mine].copy_(part)
            elif part.dtype == torch.bfloat16:
                planes["weights"][mine].copy_(part)
                planes["low"][mine].zero_()
            else:
                hi, lo = native.split(part.float().to(planes["weights"].device))
                planes["weights"][mine].copy_(hi)
                planes["low"][mine].copy_(lo)

    def read(self, parameter: int) -> torch.Tensor:
        """Return a fresh fp32 CPU copy of one parameter's master weights, in its shape."""
        found = torch.empty(self._infos[parameter].shape, dtype=torch.float32)
        for planes, mine, its in self.opened(parameter, "weights", "low"):
            weights = planes["weights"][mine].cpu()
            found.view(-1)[its] = native.join(weights, planes["low"][mine].cpu()) if "low" in planes else weights
        return found

    def view(self, parameter: int) -> torch.Tensor:
        """Return the travelling weights of one parameter (bf16, or fp32), in its shape: without a copy where they are
        in memory, in one piece.
        """
        region, position = self._home[parameter]
        state, info = self.states[region], self._infos[parameter]
        if len(state.parts) == 1 and "weights" in state.parts[0].planes:
            return state.parts[0].planes["weights"][state.span(position)].view(info.shape)
        found = torch.empty(info.shape, dtype=plane_dtype(state.region, "weights"))
        for planes, mine, its in self.opened(parameter, "weights"):
            found.view(-1)[its] = planes["weights"][mine]
        return found

    def opened(
        self, parameter: int, *names: str, changes: bool = False
    ) -> Iterator[tuple[dict[str, torch.Tensor], slice, slice]]:
        """Yield (planes of a part, the parameter's elements in them, those in the parameter) of every part with a share
        of a parameter, for this thread to read or, with `changes`, to write.
        """
        region, position = self._home[parameter]
        state = self.states[region]
        span = state.span(position)
        for part in state.parts:
            begin, end = max(span.start, part.begin), min(span.stop, part.end)
            if begin >= end:
                continue
            loan = part.lend(*names)
            give_back = loan.read
            try:
                self._lanes.wait(loan.after, behind=loan.behind if changes else ())
                mine, its = (slice(begin - start, end - start) for start in (part.begin, span.start))
                yield loan.planes, mine, its
                give_back = loan.changed if changes else loan.read
            finally:
                give_back(Ticket("compute", is_done=True))

    def reset(self) -> None:
        """A step was interrupted: nothing is lent any more."""
        if self._nvme is not None:
            self._nvme.reset()

    def close(self) -> None:
        """Let go of the planes."""
        self.states.clear()
        for arena in self._arenas.values():
            arena.close()
        self._arenas.clear()
        if self._nvme is not None:
            self._nvme.close()
