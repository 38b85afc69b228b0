"""Over which network a rank reaches the others, and which of them are on its machine.

Names do not tell: clones of a machine, and containers of one host, may have one host name and one boot id, and none of
what a shared machine is taken for. So what is asked is what is wanted: whether a rank's own socket can be reached.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

LOOPBACK = "127.0.0.1"
_GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"


class Door:
    """A socket that exactly those processes can reach that share the kernel and its network (the namespace) with this
    one: Linux keeps names that begin with a zero byte per network namespace (unix(7)). Their 127.0.0.1 is this one's.
    """

    def __init__(self, num_ranks: int) -> None:
        self.name = f"\0offload-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.name)
        self._socket.listen(num_ranks)  # nobody is let in: that the kernel finds the door is the answer

    def reaches(self, name: str) -> bool:
        """Return whether the door of that name, which is open, is on this machine."""
        with socket.socket(socket.AF_UNIX) as visitor, suppress(OSError):
            visitor.connect(name)
            return True
        return False

    def close(self) -> None:
        self._socket.close()


def address_toward(host: str) -> str:
    """Return the address of this machine by which it is reached from the network that leads to `host`."""
    with suppress(OSError):
        found = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(found[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(found[0][4])  # sends nothing
            return str(probe.getsockname()[0])
    return LOOPBACK


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_address(store: Any, rank: int, size: int, host: str) -> str:
    """Return the address by which others reach this rank, once all have come to a store of torch on `host`. The host
    itself may know its name as that of its loopback; then the address is the one toward the others. Collective.
    """
    address = address_toward(host)
    store.set(f"address-{rank}", address)
    told = [str(found, "ascii") for found in store.multi_get([f"address-{other}" for other in range(size)])]
    away = next((other for other in told if not is_loopback(other)), None)
    return address_toward(away) if away and is_loopback(address) else address


@contextmanager
def gloo_over(address: str) -> Iterator[None]:
    """Within, groups of gloo are made over the interface that has an address of several machines, unless the user has
    named one. Gloo would take the one of the host's own name, which may be the loopback.
    """
    name = None if is_loopback(address) or _GLOO_INTERFACE in os.environ else _interface(address)
    if name:
        os.environ[_GLOO_INTERFACE] = name
    try:
        yield
    finally:
        if name:
            del os.environ[_GLOO_INTERFACE]


def _interface(address: str) -> str | None:
    has = ((name, each.address.partition("%")[0]) for name, its in psutil.net_if_addrs().items() for each in its)
    return next((name for name, its in has if its == address.partition("%")[0]), None)
