"""A machine as a plan sees it: how much memory there is, and how fast what moves and computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Rates:
    """What one device of a machine and its host do in a second.

    h2d_bytes_per_s, d2h_bytes_per_s: pinned memory to the device and back, one of them at a time.
    both_ways_bytes_per_s: both at once, added up.
    flops_per_s: matrix products as torch makes them, by precision ("fp32", "bf16").
    device_bytes_per_s: memory of the device, read and written.
    host_bytes_per_s: memory of the host, read and written in place by all cores, as an update does.
    launch_s: a small operation of torch from Python, forward, in seconds.
    nvme_read_bytes_per_s, nvme_write_bytes_per_s: files past the page cache; None without a disk.
    collective_bytes_per_s: what one rank exchanges with the others; None for one device.
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


@dataclass(frozen=True)
class Hardware:
    """A machine, measured or described.

    name: as people call it.
    device: what computes, as torch names its kind: cuda, cpu, ...
    num_devices: how many of them, 1 for a CPU.
    device_bytes: free memory of one device; None for a CPU, where only a budget bounds it.
    host_bytes: memory of the host that runs may take, all ranks together.
    disk_bytes: free bytes of the disk; None without one.
    endurance_bytes: what the disk's maker lets be written to it in its life; None where that is not known.
    shares_memory: the device computes in the host's memory, so that offloading to it is a loss.
    rates: how fast it is.
    sources: where each figure is from, by its name.
    """

    name: str
    device: str
    num_devices: int
    device_bytes: int | None
    host_bytes: int
    disk_bytes: int | None
    endurance_bytes: int | None
    shares_memory: bool
    rates: Rates
    sources: Mapping[str, str] = field(default_factory=dict)
