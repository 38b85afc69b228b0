"""Memory of a CPU in the role of a device."""

from __future__ import annotations

import subprocess
import sys

import pytest

FORWARD = """
import re, torch
from offload.tiers.counters import Ledger
from offload.tiers.device import CpuDevice

def held():
    return 1024 * int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1])

def forward(device):
    kept = []
    for layer in range(64):
        temporary = torch.ones((8 << 20) + (layer << 12), dtype=torch.uint8)
        kept += [torch.ones(1 << 20, dtype=torch.uint8) for _ in range(3)]
        del temporary
        device.ledger.reserve("kept", 3 << 20)
        returns and device.return_holes()
    return kept

device = CpuDevice(Ledger("device"), copies_aside=False)
torch.ones(31 << 20, dtype=torch.uint8)  # malloc keeps blocks below this size from here on
before = held()
kept = forward(device)
print((held() - before) / (64 * 3 << 20))
"""


@pytest.mark.parametrize(("returns", "low", "high"), [(True, 1.0, 1.5), (False, 1.6, 4.0)])
def test_holes_between_kept_tensors_are_returned_to_the_system(returns: bool, low: float, high: float) -> None:
    """Memory of the process for each kept byte, after a forward whose temporaries leave holes."""
    code = f"returns = {returns}\n{FORWARD}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert low <= float(done.stdout) < high
