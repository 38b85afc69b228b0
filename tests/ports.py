"""Ports and variables for process groups in tests."""

from __future__ import annotations

import random
import socket
from contextlib import suppress
from pathlib import Path

_FIRST, _LAST = 10_000, 32_000


def free_port() -> int:
    """Return a free port that no process gets by asking for any port.

    The caller listens on the port only later, after a start of processes. Until then a connection of another test
    may take a port of the range of automatic ports.
    """
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    last = min(low, _LAST) if low > _FIRST + 1000 else _LAST
    while True:
        port = random.SystemRandom().randrange(_FIRST, last)  # not the seed of a test
        with suppress(OSError), socket.create_server(("", port)):
            return port


def rank_variables(rank: int = 0, size: int = 1, port: int | None = None) -> dict[str, str]:
    """Return the variables of torchrun for a rank on this machine. `port`: the same for all ranks; None: a free one."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    numbers["MASTER_PORT"] = free_port() if port is None else port
    return {"MASTER_ADDR": "127.0.0.1"} | {name: str(number) for name, number in numbers.items()}
