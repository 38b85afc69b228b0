"""How fast the network between the machines of a run is: measured as the run begins."""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from offload.distributed.comm import Comm

_SHORT_S = 0.02
"""What takes less than that is measured again, with more bytes."""
_NUM_BYTES = (1 << 20, 1 << 24)


@dataclass(frozen=True)
class Network:
    """The network of some machines that are alike."""

    num_machines: int
    """How many machines there are."""
    bytes_per_s: float
    """The bytes that a machine sends to others in a second, while it gets as many."""
    latency_s: float
    """The seconds that an exchange takes beside its bytes."""


def measure_network(comm: Comm) -> Network:
    """Let each rank give its bytes to those that stand in its place on all other machines, which have as many ranks
    each. Collective.

    The rate is that of the second half of so many bytes: a network that limits what one sends often lets some through
    at once, as clouds do, and no step is made of these.
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
        taken = seconds(num_bytes)
        if taken > _SHORT_S:
            break
    taken = max(seconds(2 * num_bytes) - taken, taken / 2, 1e-9)  # were it less, it was noise
    return Network(comm.num_machines, num_bytes * (between.size - 1) * comm.local_size / taken, latency_s)
