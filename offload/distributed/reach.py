"""Network reachability: the network interface to other ranks, and the ranks on the same machine.

Host names and boot ids are unreliable: cloned machines and containers on one host may share both, without a common
network. So each rank tests directly whether the other ranks' sockets are reachable.
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


class NamespaceSocket:
    """Abstract Unix socket, reachable only for processes with the same kernel and network namespace: Linux keeps names
    with a leading zero byte per network namespace (unix(7)). These processes also share the loopback address.
    """

    def __init__(self, num_ranks: int) -> None:
        self.name = f"\0offload-{secrets.token_hex(16)}"
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.bind(self.name)
        self._socket.listen(num_ranks)  # no connection is accepted: a successful connect is the answer

    def reaches(self, name: str) -> bool:
        """Return True if the open door `name` is on this machine."""
        with socket.socket(socket.AF_UNIX) as visitor, suppress(OSError):
            visitor.connect(name)
            return True
        return False

    def close(self) -> None:
        self._socket.close()


def address_toward(host: str) -> str:
    """Return the address of this machine in the network toward `host`."""
    with suppress(OSError):
        addresses = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)
        with socket.socket(addresses[0][0], socket.SOCK_DGRAM) as probe:
            probe.connect(addresses[0][4])  # sends no packet
            return str(probe.getsockname()[0])
    return LOOPBACK


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def own_address(store: Any, rank: int, size: int, host: str) -> str:
    """Return the address of this rank for other ranks, after all ranks have registered in the torch store on `host`. On
    `host`, the host name may resolve to the loopback; the address toward another rank is used then. Collective.
    """
    address = address_toward(host)
    store.set(f"address-{rank}", address)
    addresses = [str(entry, "ascii") for entry in store.multi_get([f"address-{other}" for other in range(size)])]
    remote = next((other for other in addresses if not is_loopback(other)), None)
    return address_toward(remote) if remote and is_loopback(address) else address


@contextmanager
def gloo_over(address: str) -> Iterator[None]:
    """Create gloo groups inside this context on the interface with `address`, unless `address` is the loopback or the
    user has set GLOO_SOCKET_IFNAME. By default gloo resolves the host name, possibly to the loopback.
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
