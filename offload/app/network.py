"""Measure the network between machines at startup."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from offload.distributed.comm import Comm

_SHORT_S = 0.02
"""Shorter measurements are repeated with more bytes."""
_NUM_BYTES = (1 << 20, 1 << 24)


@dataclass(frozen=True)
class Network:
    """Network between identical machines."""

    num_machines: int
    """Machine count."""
    bytes_per_s: float
    """Bytes per second one machine sends, while receiving the same amount."""
    latency_s: float
    """Seconds per exchange, independent of size."""


def measure_network(comm: Comm) -> Network:
    """Measure an all-gather between corresponding ranks on all machines. Collective.

    All machines have equal rank counts. The rate covers only the second half of the bytes, because rate-limited cloud
    networks often let a first burst pass at full speed.
    """
    _, between = comm.split(comm.num_machines)

    def seconds(num_bytes: int) -> float:
        full = torch.zeros(num_bytes * between.size, dtype=torch.uint8, device="cpu")
        best = float("inf")
        for _ in range(3):
            comm.barrier("measuring of the network")
            begin = time.perf_counter()
            between.all_gather(full, full[between.rank * num_bytes :][:num_bytes], "measuring of the network")
            best = min(best, max(comm.gather_objects(time.perf_counter() - begin, "what the network takes")))
        return best

    latency_s = seconds(1)
    for num_bytes in _NUM_BYTES:
        duration = seconds(num_bytes)
        if duration > _SHORT_S:
            break
    duration = max(seconds(2 * num_bytes) - duration, duration / 2, 1e-9)  # a smaller value is noise
    return Network(comm.num_machines, num_bytes * (between.size - 1) * comm.local_size / duration, latency_s)
