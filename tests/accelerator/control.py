"""Settings and measurements specific to the simulated accelerator."""

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
    """Rates of a simulated device.

    A kernel takes the longer of FLOP time and memory time, plus a latency. A copy takes link time plus a latency.
    Kernels run one at a time, and so do copies in each direction.
    """

    half_flops_per_s: float
    """For 16-bit matrix products."""
    single_flops_per_s: float
    """For all other kernels."""
    memory_bytes_per_s: float
    to_device_bytes_per_s: float
    to_host_bytes_per_s: float
    peer_bytes_per_s: float
    kernel_latency_s: float = 2e-6
    copy_latency_s: float = 5e-6
    launch_latency_s: float = 4e-6
    """Time on the calling thread per kernel or copy, or the simulation's own time if longer."""
    flops_scale: float = 1.0
    """Factor on FLOPs, so that small shapes take the time of large ones."""
    bytes_scale: float = 1.0
    """Factor on bytes. For widths smaller by s and tokens by t: s * s for weights, s * s * t for FLOPs."""

    def scaled(self, flops: float, num_bytes: float) -> Cost:
        """Return the same device with scaled FLOPs and bytes, for shapes that represent larger ones."""
        return replace(self, flops_scale=self.flops_scale * flops, bytes_scale=self.bytes_scale * num_bytes)


H200 = Cost(  # SXM, dense; pinned copies over PCIe 5 x16
    half_flops_per_s=989e12,
    single_flops_per_s=67e12,
    memory_bytes_per_s=4.8e12,
    to_device_bytes_per_s=55e9,
    to_host_bytes_per_s=55e9,
    peer_bytes_per_s=450e9,
)
RTX_4090 = Cost(  # dense with float32 accumulation; PCIe 4 x16
    half_flops_per_s=165e12,
    single_flops_per_s=82.6e12,
    memory_bytes_per_s=1.008e12,
    to_device_bytes_per_s=25e9,
    to_host_bytes_per_s=25e9,
    peer_bytes_per_s=22e9,
)


class Control:
    """Control of a loaded simulation."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    @property
    def num_devices(self) -> int:
        return self._driver.device_count()

    def reset(self) -> None:
        """Wait for all devices and restore the initial settings. Allocations stay."""
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
        """Make `device` current for this thread."""
        torch.accelerator.set_device_index(device)

    def has_context(self, device: int = 0) -> bool:
        """Whether any use of the device, or a call with this device current, has created a context."""
        return bool(self._driver.has_context(device))

    def counters(self, device: int = 0) -> dict[str, int]:
        """Return the device counters, as defined by `sim::Counter` in csrc/device.h."""
        names = [self._driver.counter_name(which).decode() for which in range(self._driver.counters())]
        return {name: self._driver.counter(device, which) for which, name in enumerate(names)}

    def busy_seconds(self, device: int = 0) -> dict[str, float]:
        """Return the busy seconds per engine in the cost model, for all work begun so far."""
        return {name: self._driver.busy_seconds(device, which) for name, which in _ENGINES.items()}

    def reset_counters(self) -> None:
        for index in range(self.num_devices):
            self._driver.reset_counters(index)

    def set_jitter(
        self, most_us: int, seed: int = 0, slow: Literal["all", "compute", "copies", "copies to the host"] = "all"
    ) -> None:
        """Add a random delay of at most `most_us` microseconds before kernels and copies, seeded. 0: no delay."""
        self._driver.set_jitter(most_us, seed, _SIDES[slow])

    def set_launch_queue(self, most: int) -> None:
        """Limit pending launches per stream to `most`, like the queue in a driver; further launches block. 0: no
        limit.
        """
        self._driver.set_launch_queue(most)

    def set_cost(self, cost: Cost | None) -> None:
        """Simulate a device with these rates. Only change the cost while all devices are idle."""
        fields = None if cost is None else CostFields(on=True, **asdict(cost))
        self._driver.set_cost(None if fields is None else ctypes.byref(fields))

    def set_computing(self, on: bool) -> None:
        """False: kernels and copies do nothing, to measure other costs. Memory then has arbitrary values."""
        self._driver.set_computing(on)

    def set_poison(self, on: bool) -> None:
        """True (the default): fill fresh and freed memory with NaN."""
        self._driver.set_poison(on)

    def set_memory_limit(self, num_bytes: int, device: int = 0) -> None:
        """Limit the allocator to `num_bytes`."""
        self._driver.set_limit(device, num_bytes)

    def registered(self) -> tuple[int, int]:
        """Return (number, bytes) of registered host memory ranges."""
        return self._driver.registered_ranges(), self._driver.registered_bytes()

    @contextmanager
    def held(self, *streams: torch.Stream) -> Iterator[None]:
        """Pause these streams inside the block, so that a missing wait surely shows."""
        gates: list[Any] = [self._driver.hold(stream.device_index, stream.stream_id) for stream in streams]
        try:
            yield
        finally:
            for gate in gates:
                self._driver.release(gate)
