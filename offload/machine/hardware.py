"""Hardware description for planning: memory sizes and rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from offload.fused_attention import Capability

ATTENTION_SHARE = 0.63
"""Attention rate relative to matrix products, for machines without a measured rate.

Measured on an H200 with cuDNN attention over heads of 128 (forward and backward): 458 of 731 TFLOP/s.
"""
_MOVED_SHARE = 0.64
"""Rate of elementwise kernels relative to plain memory traffic, for machines without a measured rate.

Measured on an H200: 2.63 of 4.08 TB/s. No other GPU was measured. GPUs with less bandwidth per core may reach more, so
the assumption is the cautious one.
"""
FP8 = "fp8"
"""Key of the rate of FP8 products."""
FP8_GAINS = {"fp8_tensorwise": 1.78, "fp8_rowwise": 1.71}
"""FP8 products as fast as so many in bf16, by `train.matmul`.

Measured on an H200 in four shapes (benchmarks/results/gpu-nvidia-h200.json): 1.74 to 1.82 with one scale a tensor, 1.68
to 1.75 with one a row. Data sheets have 2.
"""


SYSTEM_BYTES = 4 << 30
"""A described machine keeps so much host memory for its system, unless its file has `system_bytes`."""


@dataclass(frozen=True)
class Rates:
    """Rates for one device and its host.

    h2d_bytes_per_s, d2h_bytes_per_s: copies between pinned memory and device, one direction at a time.
    both_ways_bytes_per_s: both directions concurrently, summed.
    flops_per_s: torch matrix products, by precision: "fp32"; "bf16", or "fp16" for a device without
        bf16; and "fp8" if the device has such products, with one scale a tensor. See `flops` and `fp8_flops`.
    device_bytes_per_s: device memory reads and writes in long stretches, such as the operands of a product.
    host_bytes_per_s: host memory reads and writes by all cores, in place, as in an update.
    launch_s: seconds to launch a small torch operation from Python, forward only.
    nvme_read_bytes_per_s, nvme_write_bytes_per_s: disk rates without the page cache. Both None: no disk; only write
        None: read-only disk.
    nvme_both_ways_bytes_per_s: disk reads and writes of equal size at the same time, summed; None: neither slows the
        other.
    collective_bytes_per_s: exchange rate between one rank and the others; None: one device, or unknown.
    network_bytes_per_s: send rate to other machines, equal to the receive rate, for all ranks together; None: unknown.
    network_latency_s: seconds per exchange between machines, independent of size.
    attention_flops_per_s: fused attention, forward and backward, by precision. A missing precision has 0.63 of the
        matrix product rate.
    moved_bytes_per_s: device memory reads and writes of elementwise kernels: products with a broadcast, casts, norms,
        updates. None: 0.64 of `device_bytes_per_s`.
    fresh_bytes_per_s: memory of large results, taken from the system each time and filled with zeros by it; None: an
        allocator keeps memory, as on an accelerator.
    """

    h2d_bytes_per_s: float
    d2h_bytes_per_s: float
    both_ways_bytes_per_s: float
    flops_per_s: Mapping[str, float]
    device_bytes_per_s: float
    host_bytes_per_s: float
    launch_s: float
    nvme_read_bytes_per_s: float | None = None
    nvme_write_bytes_per_s: float | None = None
    collective_bytes_per_s: float | None = None
    network_bytes_per_s: float | None = None
    network_latency_s: float = 0.0
    attention_flops_per_s: Mapping[str, float] | None = None
    moved_bytes_per_s: float | None = None
    nvme_both_ways_bytes_per_s: float | None = None
    fresh_bytes_per_s: float | None = None

    @property
    def has_bf16(self) -> bool:
        """True if the device multiplies in bf16 itself, so that no emulation is chosen."""
        return "bf16" in self.flops_per_s

    def flops(self, precision: str) -> float:
        """Return the rate for matrix products in FLOP/s: for fp16 the one for bf16, for emulated bf16 the one for fp32,
        if it has none of its own.
        """
        rates = self.flops_per_s
        if precision == "fp16" and precision not in rates:
            precision = "bf16"
        return rates.get(precision, rates["fp32"])

    def fp8_flops(self, matmul: str, precision: str) -> float:
        """Return the rate of products by `train.matmul` in FLOP/s. A CPU emulates FP8."""
        if FP8 not in self.flops_per_s or matmul not in FP8_GAINS:
            return self.flops(precision)
        return self.flops_per_s[FP8] * FP8_GAINS[matmul] / FP8_GAINS["fp8_tensorwise"]

    def attention(self, precision: str) -> float:
        """Return the rate of fused attention in FLOP/s."""
        measured = (self.attention_flops_per_s or {}).get(precision)
        if measured is None:
            return ATTENTION_SHARE * self.flops(precision)
        return measured

    @property
    def elementwise(self) -> float:
        """Rate of elementwise kernels in bytes per second."""
        measured = self.moved_bytes_per_s
        if measured is None:
            return _MOVED_SHARE * self.device_bytes_per_s
        return measured

    @property
    def disk_shares(self) -> dict[str, float]:
        """Share, by link, that a disk transfer's time keeps the other direction from the disk: 0 to 1.

        1: a disk that reads and writes in turn. Empty: reads and writes do not slow each other.
        """
        read = self.nvme_read_bytes_per_s
        write = self.nvme_write_bytes_per_s
        both = self.nvme_both_ways_bytes_per_s
        if read is None or write is None or both is None:  # no disk, or no measurement
            return {}
        seconds_in_turn = 1 / read + 1 / write  # for a byte in each direction
        seconds_together = 2 / both
        return dict.fromkeys(("nvme_read", "nvme_write"), min(1.0, seconds_together / seconds_in_turn))

    @property
    def host_shares(self) -> dict[str, float]:
        """Share, by link, that a transfer's time keeps other links from the host's memory.

        Updates and copies use one memory: beside an H200, AdamW and copies together moved 162 to 176 GB/s with 8 to 16
        threads, as much as AdamW alone.
        """
        memory = self.host_bytes_per_s
        return {"update": 1.0, "h2d": self.h2d_bytes_per_s / memory, "d2h": self.d2h_bytes_per_s / memory}

    @property
    def has_disk(self) -> bool:
        """True if read and write rates are known."""
        return self.nvme_read_bytes_per_s is not None and self.nvme_write_bytes_per_s is not None


@dataclass(frozen=True)
class Hardware:
    """A machine, measured or from a description.

    name: display name.
    device: device type in torch notation: cuda, cpu, ...
    num_devices: number of devices; 1 for a CPU; None: one for each rank.
    device_bytes: free memory of one device; None: CPU, limited only by a budget.
    host_bytes: host memory available to all ranks together.
    system_bytes: host memory beside that, left to the system.
    disk_bytes: free disk space; None: no disk.
    endurance_bytes: rated disk endurance in bytes written; None: unknown.
    shares_memory: the device uses host memory, so offloading to the host saves nothing.
    capability: NVIDIA compute capability, which decides on torch's kernels; None: another device, or unknown.
    rates: rates per device.
    num_machines: number of machines in the run, connected by a network.
    sources: source of each figure, by field name.
    notes: sentences to show beside a plan.
    """

    name: str
    device: str
    num_devices: int | None
    device_bytes: int | None
    host_bytes: int
    disk_bytes: int | None
    endurance_bytes: int | None
    shares_memory: bool
    rates: Rates
    num_machines: int = 1
    capability: Capability | None = None
    system_bytes: int = 0
    sources: Mapping[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    @property
    def all_host_bytes(self) -> int:
        """The host's memory, with the system's part."""
        return self.host_bytes + self.system_bytes

    def with_host_memory(self, num_bytes: int) -> Hardware:
        """Return a copy whose host has so much memory, with the system's part."""
        return self.with_(host_bytes=num_bytes - self.system_bytes)

    def with_(self, **changes: Any) -> Hardware:
        """Return a copy with some fields replaced."""
        return replace(self, **changes)
