"""What only the simulated accelerator can be asked and told."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch

from tests.accelerator.driver import CostFields, Driver

_SIDES = {"all": 0, "compute": 1, "copies": 2, "copies to the host": 3}
_ENGINES = {"compute": 1, "to_device": 2, "to_host": 3, "peer": 4}


@dataclass(frozen=True)
class Cost:
    """Rates of a device that is played. A kernel takes the longer of its FLOPs and its bytes, and its latency; a copy
    its bytes over the link, and its latency. What computes takes turns, and so does each direction of the link.
    """

    half_flops_per_s: float
    """Of matrix products in 16 bits."""
    single_flops_per_s: float
    """Of all others."""
    memory_bytes_per_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    peer_bytes_per_s: float
    kernel_latency_s: float = 2e-6
    copy_latency_s: float = 5e-6
    launch_latency_s: float = 4e-6
    """On the calling thread, for each kernel and copy; where the simulation takes longer itself it is that."""
    flops_scale: float = 1.0
    """Each FLOP counts this many times: small shapes take the time of large ones."""
    bytes_scale: float = 1.0
    """The same for bytes. Widths smaller by s and tokens by t: s * s for weights, s * s * t for FLOPs."""

    def scaled(self, flops: float, num_bytes: float) -> Cost:
        """Return the same device, for shapes that stand for larger ones."""
        return replace(self, flops_scale=self.flops_scale * flops, bytes_scale=self.bytes_scale * num_bytes)


H200 = Cost(  # SXM, dense, behind PCIe 5 x16 as pinned copies reach it
    half_flops_per_s=989e12,
    single_flops_per_s=67e12,
    memory_bytes_per_s=4.8e12,
    to_device_bytes_per_s=55e9,
    to_host_bytes_per_s=55e9,
    peer_bytes_per_s=450e9,
)
RTX_4090 = Cost(  # dense with float32 sums, behind PCIe 4 x16
    half_flops_per_s=165e12,
    single_flops_per_s=82.6e12,
    memory_bytes_per_s=1.008e12,
    to_device_bytes_per_s=25e9,
    to_host_bytes_per_s=25e9,
    peer_bytes_per_s=22e9,
)


class Control:
    """The simulation itself, of a library that is loaded."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @property
    def num_devices(self) -> int:
        return self._driver.device_count()

    def reset(self) -> None:
        """Everything as it was at first, but for what is allocated: waits for the devices."""
        for index in range(self.num_devices):
            if self.has_context(index):
                torch.accelerator.synchronize(index)
        self.set_jitter(0)
        self.set_launch_queue(0)
        self.set_cost(None)
        self.set_computing(True)
        self.set_poison(True)
        self._driver.set_sync_mode(0)
        self._driver.take_error()
        for index in range(self.num_devices):
            self.set_memory_limit(2**62, index)
        self.reset_counters()

    def enter(self, device: int) -> None:
        """Be this thread's device."""
        torch.accelerator.set_device_index(device)

    def has_context(self, device: int = 0) -> bool:
        """True once something has used a device, or was called in a thread that had it as its current one."""
        return bool(self._driver.has_context(device))

    def counters(self, device: int = 0) -> dict[str, int]:
        """Return what a device has counted; `sim::Counter` in csrc/device.h says what that is."""
        names = [self._driver.counter_name(which).decode() for which in range(self._driver.counters())]
        return {name: self._driver.counter(device, which) for which, name in enumerate(names)}

    def busy_seconds(self, device: int = 0) -> dict[str, float]:
        """Return how long each engine was busy by the cost model, of the work that was begun."""
        return {name: self._driver.busy_seconds(device, which) for name, which in _ENGINES.items()}

    def reset_counters(self) -> None:
        for index in range(self.num_devices):
            self._driver.reset_counters(index)

    def set_jitter(
        self, most_us: int, seed: int = 0, slow: Literal["all", "compute", "copies", "copies to the host"] = "all"
    ) -> None:
        """Wait at random before each kernel or copy, at most so long, by this seed; 0 for not at all."""
        self._driver.set_jitter(most_us, seed, _SIDES[slow])

    def set_launch_queue(self, most: int) -> None:
        """Let a stream hold so many launches that are not done, as a driver's queue does; whoever has more blocks. 0:
        as many as are given.
        """
        self._driver.set_launch_queue(most)

    def set_cost(self, cost: Cost | None) -> None:
        """Play a device. Change it only while the devices are idle."""
        fields = None if cost is None else CostFields(on=True, **asdict(cost))
        self._driver.set_cost(None if fields is None else ctypes.byref(fields))

    def set_computing(self, on: bool) -> None:
        """Let kernels and copies do nothing at all, to see what else takes time. Memory holds anything then."""
        self._driver.set_computing(on)

    def set_poison(self, on: bool) -> None:
        """Fill fresh and freed memory with NaN, which is the default."""
        self._driver.set_poison(on)

    def set_memory_limit(self, num_bytes: int, device: int = 0) -> None:
        """Let the allocator hold no more than that."""
        self._driver.set_limit(device, num_bytes)

    def registered(self) -> tuple[int, int]:
        """Return how many ranges of host memory are registered, and their bytes."""
        return self._driver.registered_ranges(), self._driver.registered_bytes()

    @contextmanager
    def held(self, *streams: torch.Stream) -> Iterator[None]:
        """Let streams do nothing that they are given inside: whoever does not wait for them overtakes them for sure."""
        gates: list[Any] = [self._driver.hold(stream.device_index, stream.stream_id) for stream in streams]
        try:
            yield
        finally:
            for gate in gates:
                self._driver.release(gate)
