"""A simulated accelerator for torch: on the CPU, as asynchronous as a GPU, and as unforgiving.

`load` gives torch the device "sim" and the module `torch.sim`, and the rest of torch takes it for a GPU. Kernels are
torch's CPU kernels, run by a thread for each stream; results have the bits of torch on a CPU with one thread. What goes
wrong on a GPU goes wrong here: a missing wait reads old data, memory freed too early is NaN, the host faults on device
memory, and the driver refuses what CUDA's refuses.
"""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.accelerator.control import Control

LOADS = "SIM_LOAD"
"""The variable by which processes that tests fork are told to load it as well."""
JITTER = "SIM_JITTER"
"""And this by which they are told to wait at random: microseconds at most, a seed, and which side is slow."""
_loaded: Control | None = None


def load(
    num_devices: int | None = None,
    memory_bytes: int | None = None,
    *,
    segment_bytes: int = 2 << 20,
    context_bytes: int = 0,
) -> Control:
    """Build the library where needed, give torch the device and return its `Control`. A process has one simulation: a
    second call returns it, whatever its arguments.

    `num_devices`: default SIM_DEVICES, or 1. `memory_bytes`: of each, default SIM_MEMORY_MIB, or 2 GiB; nothing is
    taken before it is used. `segment_bytes`: what the allocator reserves at once. `context_bytes`: device memory that a
    context takes. Raises build.CannotBuildError.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    import torch

    from tests.accelerator.build import build
    from tests.accelerator.control import Control
    from tests.accelerator.driver import open_driver
    from tests.accelerator.module import NAME, make_module

    driver = open_driver(build())
    num_devices = num_devices or int(os.environ.get("SIM_DEVICES", "1"))
    if num_devices > driver.most_devices():
        raise ValueError(f"{num_devices} simulated devices, and there can be {driver.most_devices()}")
    memory_bytes = memory_bytes or int(os.environ.get("SIM_MEMORY_MIB", "2048")) << 20
    driver.configure(num_devices, memory_bytes, segment_bytes, context_bytes)
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, make_module(driver, memory_bytes))
    torch.utils.generate_methods_for_privateuse1_backend()
    _loaded = Control(driver)
    atexit.register(_end, _loaded)
    return _loaded


def load_if_told() -> None:
    """Load it where this process's environment says so, and let its first device be this thread's."""
    if os.environ.get(LOADS):
        control = load()
        control.enter(0)
        most_us, seed, slow = (os.environ.get(JITTER) or "0 0 all").split()
        control.set_jitter(int(most_us), int(seed) + int(os.environ.get("RANK", "0")), slow)  # type: ignore[arg-type]


def _end(control: Control) -> None:
    """Let the streams' threads be idle when the process ends: what they use may be torn down then."""
    import torch

    for index in range(control.num_devices):
        if control.has_context(index):
            try:
                torch.accelerator.synchronize(index)
            except RuntimeError:  # of a kernel that failed, and nobody asked
                pass
