"""Machine properties needed for planning, for this machine or one given by a specification."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from offload.accelerators import Accelerator, device_of
from offload.distributed.comm import Comm
from offload.doors import Door
from offload.errors import format_bytes
from offload.fused_attention import Capability
from offload.machine.hardware import Hardware
from offload.machine.limits import memory_limits, tightest_limit


class Probe(Protocol):
    """Finds the rates of this machine. Door: a function under a name in `PROBES`."""

    def __call__(self, device: str | None = None, /) -> Hardware:
        """Return this machine. device: in torch notation; None: the available accelerator, else the CPU."""


PROBES: Door[Probe] = Door("probe", {})
MEASURED = "measured"
"""Probe for plans: cached rates, or a measurement of some seconds."""


@dataclass(frozen=True)
class FreeMemory:
    """Memory available to one rank."""

    device_bytes: int | None
    """Free accelerator memory in bytes; None: no accelerator."""
    host_bytes: int
    """Free host memory in bytes."""
    host_bound: str
    """Name of the tightest host memory limit, for messages."""
    in_host: bool
    """True if the device uses host memory."""
    model_bytes: int = 0
    """Host bytes the model releases after the engine has copied the weights."""
    total_device_bytes: int | None = None
    """Accelerator memory in bytes, free or not; None: no accelerator."""
    uses_pages: bool = False
    """True if the accelerator computes over host memory without copies, at full rate."""


@dataclass(frozen=True)
class Speeds:
    """Rates for one rank, used to compare plans."""

    hardware: Hardware
    """Machine with the rates."""
    num_ranks: int = 1
    """Ranks sharing host memory bandwidth."""

    def update(self, *, on_device: bool) -> float:
        """Return the update rate in bytes read and written per second."""
        rates = self.hardware.rates
        if on_device:
            return rates.elementwise
        return rates.host_bytes_per_s / self.num_ranks

    def link(self, *, is_up: bool) -> float | None:
        """Return the H2D or D2H rate in bytes per second. None: copies take no time."""
        if self.hardware.device == "cpu":
            return None
        if is_up:
            return self.hardware.rates.h2d_bytes_per_s
        return self.hardware.rates.d2h_bytes_per_s

    def flops(self, precision: str) -> float:
        """Return the matrix product rate in FLOP/s by precision."""
        return self.hardware.rates.flops(precision)


@dataclass(frozen=True)
class ThisMachine:
    """The current machine."""

    accelerator: Accelerator | None
    """Accelerator for this rank; None: CPU."""
    model_bytes: int = 0
    """Host bytes the model occupies until the engine has copied the weights."""
    agreed_memory: FreeMemory | None = None
    """Result from all ranks, set when one rank plans alone."""

    @property
    def device(self) -> str:
        """Compute device in torch notation."""
        return str(device_of(self.accelerator))

    @property
    def capability(self) -> Capability | None:
        """Compute capability; None: not an NVIDIA GPU."""
        return None if self.accelerator is None else self.accelerator.capability

    @property
    def has_accelerator(self) -> bool:
        """True if compute runs on an accelerator, so copies can overlap."""
        return self.accelerator is not None

    def speeds(self, comm: Comm) -> Speeds:
        """Return the cached rates. Without a cache, rank 0 measures for a few seconds. Collective."""
        comm = comm.world
        # One rank measures: several at once would share the links, and ranks must agree on the numbers.
        measured = None
        if comm.rank == 0:
            measured = Speeds(PROBES[MEASURED](self.device), comm.local_size)
        speeds = comm.from_rank(0, measured, "rates of the machine")
        assert speeds is not None
        return speeds

    def free_memory(self, comm: Comm) -> FreeMemory:
        """Return the minimum over all ranks, because all ranks need the same plan. Collective."""
        comm = comm.world
        if self.agreed_memory is not None:
            return self.agreed_memory
        accelerator = self.accelerator
        # The ranks of a machine share its host memory, so each reports its part.
        device = None if accelerator is None else (accelerator.free_bytes, accelerator.total_bytes)
        bound = tightest_limit(memory_limits(), comm.local_size)
        own = device, self.model_bytes, (bound.share(comm.local_size), str(bound))
        memories = comm.gather_objects(own, "free memory")
        devices, model_bytes, hosts = zip(*memories, strict=True)
        # The tightest rank decides, and names the limit.
        host, host_bound = min(hosts)
        if accelerator is None:
            return FreeMemory(None, host, host_bound, in_host=True, model_bytes=min(model_bytes))
        free, total = map(min, zip(*devices, strict=True))
        in_host, uses_pages = accelerator.is_integrated, accelerator.uses_pages
        return FreeMemory(free, host, host_bound, in_host, min(model_bytes), total, uses_pages)


@dataclass(frozen=True)
class SpecifiedMachine:
    """A machine from a specification. This machine is not examined."""

    hardware: Hardware
    """Hardware figures."""
    num_ranks: int = 1
    """Ranks sharing the machine."""

    @property
    def device(self) -> str:
        return self.hardware.device

    @property
    def capability(self) -> Capability | None:
        return self.hardware.capability

    @property
    def has_accelerator(self) -> bool:
        return self.hardware.device != "cpu"

    def speeds(self, _comm: Comm) -> Speeds:
        return Speeds(self.hardware, self.num_ranks)

    def free_memory(self, comm: Comm) -> FreeMemory:
        device_bytes = self.hardware.device_bytes if self.has_accelerator else None
        bound = f"the memory of {self.hardware.name} ({format_bytes(self.hardware.host_bytes)})"
        in_host = not self.has_accelerator or self.hardware.shares_memory
        host_bytes = self.hardware.host_bytes // comm.local_size
        uses_pages = self.has_accelerator and self.hardware.shares_memory
        return FreeMemory(device_bytes, host_bytes, bound, in_host, 0, device_bytes, uses_pages)


Machine = ThisMachine | SpecifiedMachine
"""Machine with the properties a plan depends on."""
