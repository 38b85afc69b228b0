"""Several simulated machines on one host.

Each machine has a network namespace, linked to a bridge with a throttle or a cut, and a mount namespace with a separate
host name and disk. Processors, memory and kernel belong to the host.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

_CLONE_NEWNS, _CLONE_NEWUTS, _CLONE_NEWNET = 0x00020000, 0x04000000, 0x40000000  # from linux/sched.h
_MS_BIND, _MS_REC, _MS_PRIVATE = 4096, 16384, 1 << 18  # from linux/mount.h


@dataclass(frozen=True)
class Network:
    """Machine `number` is the namespace `name(number)` with the address `m<number>`. The bridge is in `name('hub')`.

    A process (`owner`) has one network at a time.
    """

    owner: int
    folder: Path
    size: int

    def name(self, which: object) -> str:
        return f"offload-{self.owner}-{which}"

    def words(self, number: int, disk: Path | None = None) -> list[str]:
        """Return the `tests.forks` words to run a module on a machine; the caller adds MODULE and its words.

        `disk`: the folder mounted as `run` on this machine.
        """
        entered = [self.name(number), str(number), str(self.folder), "" if disk is None else str(disk)]
        return ["-m", "tests.cluster.network", *entered]

    def throttle(self, rate: str) -> None:
        """Limit the send and receive rate of each machine, for example "10gbit"."""
        bucket = ["tbf", "rate", rate, "burst", "128kb", "latency", "1s"]
        for number in range(self.size):
            # Otherwise the send queue holds a second of data, and acknowledgements wait behind this queue.
            _ip("netns", "exec", self.name(number), "sysctl", "-qw", "net.ipv4.tcp_limit_output_bytes=65536")
            _ip("netns", "exec", self.name(number), "tc", "qdisc", "replace", "dev", "eth0", "root", *bucket)
            _ip("netns", "exec", self.name("hub"), "tc", "qdisc", "replace", "dev", f"p{number}", "root", *bucket)

    def cut(self, number: int) -> None:
        """Disconnect a machine: packets are lost without an error."""
        _ip("-n", self.name("hub"), "link", "set", f"p{number}", "nomaster")

    def plug(self, number: int) -> None:
        """Reconnect a machine after a cut."""
        _ip("-n", self.name("hub"), "link", "set", f"p{number}", "master", "bridge")


@contextmanager
def network(folder: Path, size: int) -> Iterator[Network]:
    """Make `size` machines. Skip the test with the reason if namespaces are not permitted."""
    for left in Path("/var/run/netns").glob("offload-*-*"):  # from killed tests
        if not psutil.pid_exists(int(left.name.split("-")[1])):
            subprocess.run(["ip", "netns", "del", left.name], check=False, capture_output=True)
    made = Network(os.getpid(), folder, size)
    names = [made.name(which) for which in ("hub", *range(size))]
    (folder / "nsswitch.conf").write_text("hosts: files\n")
    hosts = [f"10.77.0.{number + 1} m{number}" for number in range(size)]
    for number in range(size):
        # Many hosts map their own name to a loopback address, and torchrun gives this name to the other machines.
        known = ["127.0.0.1 localhost", f"127.0.1.1 m{number}", *hosts[:number], *hosts[number + 1 :]]
        (folder / f"hosts-{number}").write_text("\n".join([*known, ""]))
    try:
        try:
            for name in names:
                _ip("netns", "add", name)
            _ip("-n", made.name("hub"), "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        except (OSError, subprocess.CalledProcessError) as error:
            pytest.skip(f"no network namespaces here: {error}")
        _ip("-n", made.name("hub"), "link", "set", "bridge", "up")
        for number in range(size):
            own, hub = made.name(number), made.name("hub")
            _ip("link", "add", "eth0", "netns", own, "type", "veth", "peer", "name", f"p{number}", "netns", hub)
            _ip("-n", own, "addr", "add", f"10.77.0.{number + 1}/24", "dev", "eth0")
            for where, link in ((own, "lo"), (own, "eth0"), (hub, f"p{number}")):
                _ip("-n", where, "link", "set", link, "up")
            _ip("-n", hub, "link", "set", f"p{number}", "master", "bridge")
        yield made
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True)


def _enter(namespace: str, number: str, folder: str, disk: str) -> None:
    """Move this process to a machine."""
    libc = ctypes.CDLL(None, use_errno=True)

    def call(name: str, *arguments: object) -> None:
        if getattr(libc, name)(*arguments):
            error = ctypes.get_errno()
            raise OSError(error, f"{name}: {os.strerror(error)}")

    with Path("/var/run/netns", namespace).open("rb") as file:
        call("setns", file.fileno(), _CLONE_NEWNET)
    call("unshare", _CLONE_NEWNS | _CLONE_NEWUTS)
    socket.sethostname(f"m{number}")
    call("mount", b"none", b"/", None, _MS_REC | _MS_PRIVATE, None)
    binds = {f"{folder}/hosts-{number}": "/etc/hosts", f"{folder}/nsswitch.conf": "/etc/nsswitch.conf"}
    if disk:
        binds[disk] = f"{folder}/run"
    for source, target in binds.items():
        call("mount", source.encode(), target.encode(), None, _MS_BIND, None)


def main(words: Sequence[str]) -> None:
    """Run `NAMESPACE NUMBER FOLDER DISK MODULE WORDS`: the module on a machine, like `python -m`."""
    namespace, number, folder, disk, module, *rest = words
    _enter(namespace, number, folder, disk)
    # The rendezvous log inspects the call stack. In a forked process with many imports this takes seconds.
    dynamic_rendezvous.get_method_name = lambda depth=2: ""
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
