"""The device: an accelerator, or an arena of ordinary memory that is held to the same budget.

The CPU device makes everything above it provable on a machine without a GPU: the same slots, the same copies, the same
refusals.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from offload.accelerators import Accelerator
from offload.tiers.host import Arena, copy_in_one_thread
from offload.tiers.ledger import Ledger
from offload.tiers.pinning import Pinning

_STAGED_BYTES = 16 << 20
"""What goes up at once, by way of pinned memory."""
_MOST_STAGED = 8
"""Pieces of one size that are under way: whoever has more waits for the first one."""
_SHARE_OF_FREE_MEMORY = 0.9
"""The rest is for the allocator's fragments and the libraries' workspaces."""
ROUNDING_BYTES = 256 << 20
"""What the allocator may have beside a budget: each of a dozen streams has a part of 2 and one of 20 MiB in use."""


class CpuDevice:
    """Ordinary memory in the part of a device."""

    torch_device = torch.device("cpu")
    pinning: Pinning | None = None
    late_bytes = 0
    """By which the peaks of equal steps differ: the ledger counts what is held, to the byte."""
    waiting_bytes = 0
    """What nobody holds any more, and a stream still uses."""
    decodes_at_once = True
    """Codes are decoded in one pass over memory, and not by torch's operations one after the other."""

    def __init__(self, ledger: Ledger, copies_aside: bool) -> None:
        self.ledger = ledger
        self._copies_aside = copies_aside

    def allocate(self, name: str, num_bytes: int, fix: str = "") -> torch.Tensor:
        """Return `num_bytes` of device memory as a flat uint8 tensor, entered in the ledger under `name`."""
        self.ledger.reserve(name, num_bytes, fix)
        return Arena(num_bytes).take(num_bytes, torch.uint8)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy between host and device, and convert."""
        if self._copies_aside:
            copy_in_one_thread(target, source)
        else:
            target.data.copy_(source)

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a few elements of the host, flat, which the device copies from and to without staging."""
        return torch.empty(numel, dtype=dtype, device="cpu")

    def bring_up(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the device. The host may write to what it gave, and waits only where much is under way."""
        return tensor

    def aside(self) -> AbstractContextManager[Any]:
        """Within, what this thread computes on the device is beside everything else."""
        return nullcontext()

    def entered(self) -> Callable[[], AbstractContextManager[Any]]:
        """Return what another thread enters to compute as this one does now."""
        return nullcontext

    def lend(self, tensor: torch.Tensor) -> None:
        """The caller's stream uses a tensor of another one, whose memory is nobody else's before that is done."""

    def bring_down(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Begin to copy a few values to the host behind what compute was given so far. Return what waits for them."""
        return lambda: values

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once."""
        return self.ledger.peak_bytes

    def take_recent_peak(self) -> int:
        """Return the most that was held at once since this was called last."""
        return self.ledger.take_recent_peak()

    def random_state(self) -> tuple[torch.Tensor, ...]:
        """Return the state of the generators that a forward on this device may draw from."""
        return (torch.get_rng_state(),)

    def set_random_state(self, state: tuple[torch.Tensor, ...]) -> None:
        """Put back what `random_state` returned."""
        torch.set_rng_state(state[0])

    def seed(self, number: int) -> None:
        """Seed those generators. torch.manual_seed takes milliseconds: for each kind of device that was not used so far
        it keeps a call for later, and where that came from.
        """
        torch.default_generator.manual_seed(number)

    def close(self) -> None:
        """Leave driver and allocator as they were."""
        if self.pinning is not None:
            self.pinning.close()


class _Staging:
    """Pinned memory for what is small, kept and used again: torch's allocator takes a lock, and would be asked in
    every step.
    """

    def __init__(self) -> None:
        self._free: dict[int, list[tuple[torch.Tensor, torch.Event]]] = {}

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return contiguous memory in the shape and dtype of a tensor, of which no copy is under way."""
        size = 1 << (like.nbytes - 1).bit_length()
        free = self._free.setdefault(size, [])
        if len(free) >= _MOST_STAGED:
            free[0][1].synchronize()
        over = next((number for number, (_, event) in enumerate(free) if event.query()), None)
        memory = (
            torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True) if over is None else free.pop(over)[0]
        )
        return memory[: like.nbytes].view(like.dtype).view(like.shape)

    def give_back(self, staged: torch.Tensor, event: torch.Event) -> None:
        """Let it be taken again after an event."""
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(staged.untyped_storage())
        self._free[memory.nbytes].append((memory, event))


class AcceleratorDevice:
    """An accelerator, with what CpuDevice has. Work goes into the caller's stream, which on a lane is the lane's."""

    late_bytes = 16 << 10
    """By which the peaks of equal steps differ: freed memory that a lane still uses, and the allocator's rounding."""
    decodes_at_once = False

    def __init__(self, ledger: Ledger, accelerator: Accelerator, most_bytes: int | None = None) -> None:
        """`most_bytes`: what torch's allocator may have beside what others hold, until `close`; None without end."""
        self.ledger, self._accelerator = ledger, accelerator
        self.torch_device, self._module = accelerator.device, accelerator.module
        self.pinning: Pinning | None = Pinning(accelerator) if accelerator.can_register else None
        self._staging = _Staging()
        accelerator.enter()
        if ledger.budget_bytes is None:
            ledger.limit(int(accelerator.free_bytes * _SHARE_OF_FREE_MEMORY))
        self._peak_bytes = 0
        self._beside: Any = None
        accelerator.take_peak()  # what others held before is not this one's
        unbound = (lambda: None) if most_bytes is None else accelerator.bound(most_bytes + ROUNDING_BYTES)
        self._unbound = weakref.finalize(self, unbound)  # without close() as well
        self._unbound.atexit = False

    def allocate(self, name: str, num_bytes: int, fix: str = "") -> torch.Tensor:
        self.ledger.reserve(name, num_bytes, fix)
        return torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device)

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Enqueue a copy between host and device. `data`: autograd, which may be in the middle of a backward, must not
        take it for a change of the weights that it has saved next to it.
        """
        target.data.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if not tensor.is_cpu:
                self.lend(tensor)

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(numel, dtype=dtype, device="cpu", pin_memory=True)

    def bring_up(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cpu or tensor.requires_grad:  # whose gradients come back by the same way
            return tensor.to(self.torch_device)
        up = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.torch_device)
        numel = _STAGED_BYTES // tensor.itemsize
        for piece, target in zip(tensor.reshape(-1).split(numel), up.view(-1).split(numel), strict=True):
            staged = self._staging.take(piece)
            target.copy_(staged.copy_(piece), non_blocking=True)
            self._staging.give_back(staged, self._present())
        return up

    def aside(self) -> AbstractContextManager[Any]:
        if self._beside is None:
            self._beside = self._module.Stream(self.torch_device)
        return self._module.stream(self._beside)

    def entered(self) -> Callable[[], AbstractContextManager[Any]]:
        stream = self._accelerator.current_stream()

        def enter() -> AbstractContextManager[Any]:
            self._accelerator.enter()
            return self._module.stream(stream)

        return enter

    def lend(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._accelerator.current_stream())

    def bring_down(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        staged = self._staging.take(values)
        staged.copy_(values.detach(), non_blocking=True)
        event = self._present()

        def wait() -> torch.Tensor:
            if not event.query():
                event.synchronize()
            found = staged.clone()
            self._staging.give_back(staged, event)
            return found

        return wait

    def _present(self) -> torch.Event:
        """Return an event for all that this thread's stream was given."""
        event = self._accelerator.event(sleeps=True)
        event.record(self._accelerator.current_stream())
        return event

    @property
    def peak_bytes(self) -> int:
        """The most that was held at once, temporaries of operations included."""
        return max(self._peak_bytes, self._accelerator.peak_bytes)

    @property
    def waiting_bytes(self) -> int:
        return self._accelerator.waiting_bytes

    def take_recent_peak(self) -> int:
        recent = self._accelerator.take_peak()
        self._peak_bytes = max(self._peak_bytes, recent)
        return recent

    def random_state(self) -> tuple[torch.Tensor, ...]:
        return torch.get_rng_state(), self._module.get_rng_state(self.torch_device)

    def set_random_state(self, state: tuple[torch.Tensor, ...]) -> None:
        torch.set_rng_state(state[0])
        self._module.set_rng_state(state[1], self.torch_device)

    def seed(self, number: int) -> None:
        torch.default_generator.manual_seed(number)
        with self._module.device(self.torch_device):
            self._module.manual_seed(number)

    def close(self) -> None:
        if self.pinning is not None:
            self.pinning.close()
        self._unbound()


Device = CpuDevice | AcceleratorDevice


def copy_planes(device: Device, targets: Mapping[str, torch.Tensor], sources: Mapping[str, torch.Tensor]) -> None:
    """Copy each of the targets from the source of its name, between host and device."""
    for name, target in targets.items():
        device.copy(target, sources[name])


def open_device(
    accelerator: Accelerator | None, ledger: Ledger, copies_aside: bool, most_bytes: int | None = None
) -> Device:
    """Return an accelerator, or the CPU in its part. `copies_aside`: on threads of their own. `most_bytes`: what an
    accelerator's allocator may have beside what others hold.
    """
    if accelerator is None:
        return CpuDevice(ledger, copies_aside)
    return AcceleratorDevice(ledger, accelerator, most_bytes)
