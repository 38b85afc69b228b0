"""Child processes for irreversible actions: system call filters, limits, users, kill signals."""

from __future__ import annotations

import ctypes
import subprocess
import textwrap

from tests import forks

IO_URING_SETUP, IO_URING_ENTER = 425, 426  # the same on every architecture
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("jt", ctypes.c_uint8), ("jf", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("instructions", ctypes.POINTER(_Instruction)))


def forbid(number: int, error: int, *, argument: int | None = None, bits: int = 0) -> None:
    """Make system call `number` fail with `error` in all threads from now on. With `argument`, only if this argument
    has one of `bits` set.

    Installs a seccomp filter: BPF over struct seccomp_data {int nr; u32 arch; u64 ip; u64 args[6]}.
    """
    load, equal, any_set, give = 0x20, 0x15, 0x45, 0x06
    steps = [(load, 0, 0, 0), (equal, 0, 1 if argument is None else 3, number)]
    if argument is not None:
        steps += [(load, 0, 0, 16 + 8 * argument), (any_set, 0, 1, bits)]
    steps += [(give, 0, 0, _ERRNO | error), (give, 0, 0, _ALLOW)]
    instructions = (_Instruction * len(steps))(*(_Instruction(*step) for step in steps))
    program = _Program(len(steps), instructions)
    libc = ctypes.CDLL(None, use_errno=True)
    set_no_new_privileges, syscall_seccomp = 38, {"x86_64": 317, "aarch64": 277}
    if libc.prctl(set_no_new_privileges, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")
    import platform

    set_mode_filter, all_threads = 1, 1
    if libc.syscall(syscall_seccomp[platform.machine()], set_mode_filter, all_threads, ctypes.byref(program)):
        raise OSError(ctypes.get_errno(), "seccomp")


_PREAMBLE = """
import errno, json, os, resource, sys, threading, time
import numpy as np
from offload.errors import ConfigError, DiskError
from offload.native.io import IoEngine
from tests.io.children import IO_URING_ENTER, IO_URING_SETUP, forbid
from tests.io.memory import pages

def round_trip(engine, path, num_bytes=1 << 20):
    source, back = pages(num_bytes, 1), pages(num_bytes)
    file = engine.open(path, num_bytes=num_bytes)
    engine.write(file, 0, source).wait()
    engine.read(file, 0, back).wait()
    assert np.array_equal(source, back)
    return file

"""


def start(code: str, *arguments: object) -> forks.Forked:
    """Start a Python process with `_PREAMBLE` and these lines."""
    return forks.start(["-c", _PREAMBLE + textwrap.dedent(code), *arguments])


def run(code: str, *arguments: object) -> str:
    """Run these lines in a Python process and return the output."""
    process = start(code, *arguments)
    try:
        out, err = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()
        raise AssertionError(f"the process hangs: {process.communicate()}") from None
    assert process.returncode == 0, err
    assert err == ""
    return out
