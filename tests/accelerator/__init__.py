"""Simulated accelerator for torch: runs on the CPU, asynchronous like a GPU and as strict.

`load` registers the device "sim" and the module `torch.sim`; torch treats both like a GPU. Kernels are torch's CPU
kernels, run in one thread per stream, with the bits of a single-threaded CPU.

GPU errors also fail here: a missing wait reads old data, memory freed too early is NaN, the host faults on device
memory, and the driver refuses the same calls as CUDA.
"""

from __future__ import annotations

import atexit
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.accelerator.control import Control

LOADS = "SIM_LOAD"
"""Environment variable: forked test processes load the simulation too."""
JITTER = "SIM_JITTER"
"""Environment variable for random delays in these processes: maximum in microseconds, seed, slow side."""
PIN_MIB = "SIM_PIN_MIB"
"""Environment variable: all host memory that the driver pins, in MiB. csrc/pinned.cpp reads it."""
_loaded: Control | None = None


def load(
    num_devices: int | None = None,
    memory_bytes: int | None = None,
    *,
    segment_bytes: int = 2 << 20,
    context_bytes: int = 0,
) -> Control:
    """Build the library if needed, register the device and return the `Control`.

    A process has one simulation; further calls return this one and ignore all arguments. `num_devices`: default
    SIM_DEVICES, or 1. `memory_bytes`: per device, default SIM_MEMORY_MIB, or 2 GiB; pages are allocated at first use.
    `segment_bytes`: size of an allocator reservation. `context_bytes`: device memory of a context. Raises
    build.CannotBuildError.
    """
    global _loaded
    if _loaded is not None:
        return _loaded
    import torch

    from tests.accelerator.build import build
    from tests.accelerator.control import Control
    from tests.accelerator.driver import open_driver
    from tests.accelerator.module import NAME, make_module
    from tests.accelerator.rtc import CACHE

    os.environ.setdefault("XDG_CACHE_HOME", str(CACHE))
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
    """Load the simulation if SIM_LOAD is set, and make device 0 current for this thread."""
    if os.environ.get(LOADS):
        control = load()
        control.enter(0)
        most_us, seed, slow = (os.environ.get(JITTER) or "0 0 all").split()
        control.set_jitter(int(most_us), int(seed) + int(os.environ.get("RANK", "0")), slow)  # type: ignore[arg-type]


def _end(control: Control) -> None:
    """Wait for all stream threads before exit, since their objects may be destroyed then."""
    import torch

    for index in range(control.num_devices):
        if control.has_context(index):
            try:
                torch.accelerator.synchronize(index)
            except RuntimeError:  # a failed kernel's error, never queried
                pass
