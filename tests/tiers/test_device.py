"""Memory of a CPU in the role of a device."""

from __future__ import annotations

from tests import forks

HOLES = """
import ctypes, re, torch
from offload.tiers.counters import Ledger
from offload.tiers.device import SETTLING_BYTES, CpuDevice

ctypes.CDLL(None).mallopt(-3, 32 << 20)  # M_MMAP_THRESHOLD: smaller blocks lie in the heap

def held():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])

device = CpuDevice(Ledger("device"), copies_aside=False)
blocks = [torch.ones(4 << 20, dtype=torch.uint8) for _ in range(64)]
kept, freed = blocks[::2], blocks[1::2]
num_bytes = sum(block.nbytes for block in freed)
del blocks, freed
for growth in (SETTLING_BYTES - 1, 1):
    device.ledger.reserve("kept", growth)
    before = held()
    device.return_holes()
    print(round((before - held()) / num_bytes, 1))
"""


def test_holes_between_kept_tensors_are_returned_to_the_system() -> None:
    """The returned part of freed memory: nothing before the ledger has grown enough, then all."""
    done = forks.run(["-c", HOLES])
    assert done.returncode == 0, done.stderr
    early, late = map(float, done.stdout.split())
    assert abs(early) <= 0.1
    assert late >= 0.9
