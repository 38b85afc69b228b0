"""The thread pool: default size, concurrent callers, fork, exit."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from offload.native import kernels

pytestmark = pytest.mark.skipif(not kernels.is_native(), reason="the C++ kernels were not built: there is no pool")


@pytest.fixture(autouse=True)
def _default_threads():
    yield
    kernels.set_threads(None)


def test_the_default_is_the_physical_cores_of_this_process():
    assert 1 <= kernels.num_threads() <= len(os.sched_getaffinity(0))
    kernels.set_threads(3)
    assert kernels.num_threads() == kernels.describe()["threads"] == 3
    kernels.set_threads(None)
    assert kernels.num_threads() <= len(os.sched_getaffinity(0))


def test_the_default_follows_the_affinity_mask():
    code = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
from offload.native import kernels
print(kernels.num_threads())
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=True).stdout == b"1\n"


def test_the_pool_survives_a_fork():
    code = """
import os, numpy
from offload.native import kernels
x = numpy.ones(1_000_000, dtype="f4")
assert kernels.sum_squares(x, threads=3) == 1e6
child = os.fork()
if child == 0:
    right = kernels.sum_squares(x, threads=3) == 1e6
    os._exit(0 if right and len(os.listdir("/proc/self/task")) == 3 else 1)  # the child has workers of its own
assert kernels.sum_squares(x, threads=3) == 1e6
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, timeout=120)


def test_the_process_ends_while_a_daemon_thread_computes():
    code = """
import threading, time, numpy
from offload.native import kernels
x = numpy.ones(1_000_000, dtype="f4")
def forever():
    while True:
        kernels.sum_squares(x, threads=3)
threading.Thread(target=forever, daemon=True).start()
time.sleep(0.2)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
