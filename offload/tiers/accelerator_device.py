"""An accelerator as the compute device: budget, staged copies, events, memory peaks."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from offload.accelerators import Accelerator
from offload.tiers.blocks import Blocks, as_bytes
from offload.tiers.counters import Ledger
from offload.tiers.host import Pinning

_STAGED_BYTES = 16 << 20
"""Bytes per staged H2D copy through pinned memory."""


_MOST_STAGED = 8
"""Maximum staging buffers per size. The next copy waits for the oldest one."""


_SHARE_OF_FREE_MEMORY = 0.9
"""Leaves room for allocator fragmentation and library workspaces."""


ROUNDING_BYTES = 256 << 20
"""Allocator slack above a budget, in bytes: each of a dozen streams uses parts of a 2 MiB and a 20 MiB block."""


class _Staging:
    """Reusable pinned buffers for small copies. The torch allocator would take a lock in every step."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator
        self._free: dict[int, list[tuple[torch.Tensor, torch.Event]]] = {}

    def take(self, like: torch.Tensor) -> torch.Tensor:
        """Return a contiguous buffer with shape and dtype from `like`, without pending copies."""
        size = 1 << (like.nbytes - 1).bit_length()
        free = self._free.setdefault(size, [])
        if len(free) >= _MOST_STAGED:  # a host far ahead would otherwise pin ever more memory
            free[0][1].synchronize()
        ready = next((number for number, (_, event) in enumerate(free) if event.query()), None)
        if ready is None:
            memory = self._accelerator.host_memory(size, torch.uint8)
        else:
            memory = free.pop(ready)[0]
        return memory[: like.nbytes].view(like.dtype).view(like.shape)

    def give_back(self, staged: torch.Tensor, event: torch.Event) -> None:
        """Allow reuse after `event`."""
        memory = torch.empty(0, dtype=torch.uint8, device="cpu").set_(staged.untyped_storage())
        self._free[memory.nbytes].append((memory, event))


class AcceleratorDevice:
    """Accelerator with the CpuDevice interface. Work runs in the caller's current stream; on a lane, in the lane
    stream.
    """

    late_bytes = 16 << 10
    """Difference between peaks in equal steps, in bytes: memory still used by a lane, and allocator rounding."""
    decodes_at_once = False

    def __init__(self, ledger: Ledger, accelerator: Accelerator, most_bytes: int | None = None) -> None:
        """`most_bytes`: limit for the torch allocator beside memory held by others, until `close` (None: no limit)."""
        self.ledger = ledger
        self.blocks = Blocks(ledger, self._resize)
        self._accelerator = accelerator
        self.torch_device = accelerator.device
        self._module = accelerator.module  # torch's module for this kind of device
        self.autocast_type = self.torch_device.type
        self.pinning: Pinning | None = None
        if accelerator.can_register:
            self.pinning = Pinning(accelerator)
        self._staging = _Staging(accelerator)
        accelerator.enter()
        if ledger.budget_bytes is None:
            ledger.budget_bytes = int(accelerator.free_bytes * _SHARE_OF_FREE_MEMORY)
        self._peak_bytes = 0  # before the last reset of the allocator's peak
        self._side_stream: Any = None  # made on first use
        accelerator.take_peak()  # reset: earlier peaks belong to others
        self._most_bytes = most_bytes
        self._unbound = self._bind()

    def _bind(self) -> Callable[[], Any]:
        """Limit the allocator; return the end of the limit, which comes without `close` too."""
        unbound: Callable[[], None] = lambda: None  # noqa: E731
        if self._most_bytes is not None:
            unbound = self._accelerator.bound(self._most_bytes + ROUNDING_BYTES)
        end = weakref.finalize(self, unbound)
        end.atexit = False  # the limit ends with the process in any case
        return end

    def address(self, memory: torch.Tensor | torch.UntypedStorage) -> int:
        return memory.data_ptr()

    def over(self, host: torch.Tensor) -> torch.Tensor:
        return self._accelerator.over(host)

    def return_holes(self) -> None:
        """Do nothing: the caching allocator of the accelerator keeps and uses its blocks."""

    def allocate(self, name: str, num_bytes: int, fix: str = "") -> torch.Tensor:
        self.ledger.reserve(name, num_bytes, fix)
        return self.blocks.add(torch.zeros(num_bytes, dtype=torch.uint8, device=self.torch_device))

    def _resize(self, block: torch.UntypedStorage, num_bytes: int) -> None:
        block.resize_(num_bytes)
        as_bytes(block).zero_()

    def park(self) -> None:
        self.blocks.empty()
        self._unbound()  # others may take all of the memory
        self._accelerator.empty_cache()

    def resume(self) -> None:
        self._unbound = self._bind()
        self.blocks.refill()
        self.wait()  # until cleared: the users run in other streams

    def copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Start an asynchronous copy between host and device.

        `data` hides the write from autograd. A running backward would otherwise report a modified saved weight.
        """
        target.data.copy_(source, non_blocking=True)
        for tensor in (target, source):
            if not tensor.is_cpu:
                self.lend(tensor)

    def host_memory(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        return self._accelerator.host_memory(numel, dtype)

    def copy_to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_cpu or tensor.requires_grad:  # gradients must return the same way
            return tensor.to(self.torch_device)
        device_copy = torch.empty(tensor.shape, dtype=tensor.dtype, device=self.torch_device)
        numel = _STAGED_BYTES // tensor.itemsize
        for piece, target in zip(tensor.reshape(-1).split(numel), device_copy.view(-1).split(numel), strict=True):
            staged = self._staging.take(piece)
            target.copy_(staged.copy_(piece), non_blocking=True)
            self._staging.give_back(staged, self._record_event())
        return device_copy

    def side_context(self) -> AbstractContextManager[Any]:
        if self._side_stream is None:
            self._side_stream = self._module.Stream(self.torch_device)
        return self._module.stream(self._side_stream)

    def stream_entry(self) -> Callable[[], AbstractContextManager[Any]]:
        stream = self._accelerator.current_stream()

        def enter() -> AbstractContextManager[Any]:
            self._accelerator.enter()
            return self._module.stream(stream)

        return enter

    def lend(self, tensor: torch.Tensor) -> None:
        tensor.record_stream(self._accelerator.current_stream())

    def copy_to_host(self, values: torch.Tensor) -> Callable[[], torch.Tensor]:
        staged = self._staging.take(values)
        staged.copy_(values.detach(), non_blocking=True)
        event = self._record_event()

        def wait() -> torch.Tensor:
            if not event.query():
                event.synchronize()
            host_values = staged.clone()  # the buffer serves the next copy
            self._staging.give_back(staged, event)
            return host_values

        return wait

    def wait(self) -> None:
        self._record_event().synchronize()

    def to_host(self, values: torch.Tensor) -> torch.Tensor:
        if values.is_cpu:
            return values
        host_values = torch.empty(values.shape, dtype=values.dtype, device="cpu")
        pieces = values.reshape(-1).split(_STAGED_BYTES // values.itemsize)
        wait = self.copy_to_host(pieces[0])
        for number, target in enumerate(host_values.view(-1).split(_STAGED_BYTES // values.itemsize), 1):
            ahead = wait
            if number < len(pieces):  # one copy ahead: the link is busy while the host unstages
                ahead = self.copy_to_host(pieces[number])
            target.copy_(wait())
            wait = ahead
        return host_values

    def _record_event(self) -> torch.Event:
        """Return an event after all work submitted to the current stream."""
        event = self._accelerator.event(sleeps=True)
        event.record(self._accelerator.current_stream())
        return event

    @property
    def peak_bytes(self) -> int:
        """Maximum bytes held at once, with temporaries."""
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
