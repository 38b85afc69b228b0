"""What a plan asks of the machine that it is for: this one, or one that is described."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from offload.accelerators import Accelerator, device_of
from offload.distributed.comm import Comm
from offload.errors import format_bytes
from offload.machine.hardware import Hardware
from offload.machine.limits import least, memory_limits
from offload.machine.probe import probe


@dataclass(frozen=True)
class Free:
    """How much memory one rank may take, and what bounds it."""

    device_bytes: int | None
    """Bytes of the accelerator's memory; None without an accelerator."""
    host_bytes: int
    """Bytes of the host's memory."""
    host_bound: str
    """What bounds the host's memory, for people."""
    in_host: bool
    """True if the device's memory is the host's."""
    given_bytes: int = 0
    """Bytes of the host's memory that the model gives back once its weights are taken over."""


@dataclass(frozen=True)
class Speeds:
    """How fast what a plan compares is for one rank, by the rates of a machine that was measured, or is described."""

    hardware: Hardware
    """Whose rates they are."""
    num_ranks: int = 1
    """How many ranks share the host's memory."""

    def update(self, *, on_device: bool) -> float:
        """Return the bytes of states that an update reads and writes in a second."""
        rates = self.hardware.rates
        return rates.device_bytes_per_s if on_device else rates.host_bytes_per_s / self.num_ranks

    def link(self, *, is_up: bool) -> float | None:
        """Return the bytes that go up to the device, or down from it, in a second; None where that takes no time."""
        if self.hardware.device == "cpu":
            return None
        return self.hardware.rates.h2d_bytes_per_s if is_up else self.hardware.rates.d2h_bytes_per_s

    def flops(self, precision: str) -> float:
        """Return the floating point operations of matrix products in "fp32" or "bf16" that are made in a second."""
        return self.hardware.rates.flops_per_s[precision]


class Machine(Protocol):
    """What a plan asks."""

    @property
    def device(self) -> str:
        """What computes, as torch names it."""

    @property
    def has_accelerator(self) -> bool:
        """True where what computes is not the CPU, so that copies run beside it."""

    def speeds(self, comm: Comm) -> Speeds:
        """Return how fast it is. Collective."""

    def free(self, comm: Comm) -> Free:
        """Return what each rank may take. Collective."""


@dataclass(frozen=True)
class ThisMachine:
    """The machine on which the plan is made, as it is now."""

    accelerator: Accelerator | None
    """The accelerator of this rank; None for the CPU."""
    given_bytes: int = 0
    """Bytes of the host's memory that the model has until the engine has its weights."""
    found: Free | None = None
    """What all ranks found free, where one of them plans alone."""

    @property
    def device(self) -> str:
        return str(device_of(self.accelerator))

    @property
    def has_accelerator(self) -> bool:
        return self.accelerator is not None

    def speeds(self, comm: Comm) -> Speeds:
        """Return the rates that were measured and kept; where there are none, rank 0 measures, in a few seconds."""
        measured = probe(self.device) if comm.rank == 0 else None
        hardware = comm.gather_objects(measured, "rates of the machine")[0]
        assert hardware is not None
        return Speeds(hardware, comm.local_size)

    def free(self, comm: Comm) -> Free:
        """Return the least that any rank has, as their plans have to be the same."""
        if self.found is not None:
            return self.found
        device = -1 if self.accelerator is None else self.accelerator.free_bytes
        bound = least(memory_limits(), comm.local_size)
        mine = device, self.given_bytes, bound.share(comm.local_size), str(bound)
        found = comm.gather_objects(mine, "free memory")
        device, given = min(each[0] for each in found), min(each[1] for each in found)
        host, said = min(each[2:] for each in found)
        in_host = self.accelerator is None or self.accelerator.is_integrated
        return Free(None if device < 0 else device, host, said, in_host, given)


@dataclass(frozen=True)
class DescribedMachine:
    """A machine by its figures. Nothing of this machine is looked at."""

    hardware: Hardware
    """The figures."""
    num_ranks: int = 1
    """How many ranks share the machine."""

    @property
    def device(self) -> str:
        return self.hardware.device

    @property
    def has_accelerator(self) -> bool:
        return self.hardware.device != "cpu"

    def speeds(self, _comm: Comm) -> Speeds:
        return Speeds(self.hardware, self.num_ranks)

    def free(self, comm: Comm) -> Free:
        device_bytes = self.hardware.device_bytes if self.has_accelerator else None
        bound = f"the memory of {self.hardware.name} ({format_bytes(self.hardware.host_bytes)})"
        in_host = not self.has_accelerator or self.hardware.shares_memory
        return Free(device_bytes, self.hardware.host_bytes // comm.local_size, bound, in_host)
