"""What NVIDIA's library tells of GPUs, where it is installed (nvidia-ml-py): the link, power, who else is there.
Nothing depends on it.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any


def nvml_gpus() -> list[dict[str, Any]]:
    """Return what there is to tell of each GPU as plain data; nothing without the library, or its driver."""
    try:
        import pynvml
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        return [_describe(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
    except pynvml.NVMLError:
        return []
    finally:
        with suppress(pynvml.NVMLError):
            pynvml.nvmlShutdown()


def _describe(nvml: Any, index: int) -> dict[str, Any]:
    """Return what one GPU tells; kinds differ in what they have."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(handle)
    found: dict[str, Any] = {"name": name.decode() if isinstance(name, bytes) else name}
    asked = {
        "pcie_generation": nvml.nvmlDeviceGetMaxPcieLinkGeneration,  # the current one is lower while nothing moves
        "pcie_lanes": nvml.nvmlDeviceGetCurrPcieLinkWidth,
        "pcie_most_lanes": nvml.nvmlDeviceGetMaxPcieLinkWidth,
        "power_limit_watts": lambda one: nvml.nvmlDeviceGetEnforcedPowerLimit(one) / 1000,
        "num_processes": lambda one: len(nvml.nvmlDeviceGetComputeRunningProcesses(one)),
    }
    for key, ask in asked.items():
        with suppress(nvml.NVMLError):
            found[key] = ask(handle)
    return found
