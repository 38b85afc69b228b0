"""Data for the `doctor` command: machine properties, and the code paths available on this machine."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offload.app.environment import describe_environment, integrated_note
from offload.errors import DiskError, OffloadError, format_bytes
from offload.extras.plan.probe import probe
from offload.files.directories import check_dirs, check_space, file_system, free_bytes, open_nameless
from offload.lanes.timeline import DISK_LANES
from offload.machine.hardware import Hardware
from offload.machine.limits import memory_limits, node_bytes, tightest_limit
from offload.native import kernels
from offload.native.io import ALIGNMENT_BYTES, IoEngine
from offload.tiers.host import Arena


def diagnose(nvme_dirs: Sequence[str], *, probes: bool = False, refresh: bool = False) -> dict[str, Any]:
    """Return a description of the machine and of each disk folder, in JSON form.

    probes: include measured rates and the expected bottleneck.
    refresh: measure again instead of using the cache.

    Raises ConfigError if two folders are the same.
    """
    report: dict[str, Any] = {"environment": describe_environment(), "kernels": kernels.describe()}
    with IoEngine("auto") as engine:
        # Tried: a limit on locked memory shows only in a registration.
        engine.register(_pages(1 << 20))
        report["io"] = {
            "engine": engine.name,
            "why_not_better": engine.why or None,
            "registered": not engine.why_unregistered,
            "why_unregistered": engine.why_unregistered or None,
        }
        disks = report["nvme"] = [_describe_dir(directory, engine) for directory in nvme_dirs]
    usable = [each["dir"] for each in disks if each["usable"]]
    if usable:
        check_dirs(usable)  # every folder is usable; this checks the combination
    if probes:
        report["probe"] = _describe_machine(probe(None, usable, refresh=refresh))
    return report


def _describe_machine(machine: Hardware) -> dict[str, Any]:
    """Return hardware figures, limits and expected bottleneck in JSON form."""
    limits, lockable = memory_limits(), lockable_bytes()
    gpus = nvml_gpus()
    report: dict[str, Any] = {"hardware": asdict(machine), "bounds": find_bounds(machine)}
    report["limits"] = [{**asdict(limit), "text": str(limit)} for limit in limits]
    report["bound_by"] = str(tightest_limit(limits))
    report |= {"lockable_bytes": lockable, "node_bytes": node_bytes(), "nvml": gpus, "notes": [*machine.notes]}
    if machine.shares_memory:
        report["notes"].append(integrated_note(machine.name))
    if lockable is not None:
        report["notes"].append(
            f"this user may lock {format_bytes(lockable)} of memory (`ulimit -l`): further io_uring buffers are not "
            "registered, which costs some CPU time"
        )
    if len(report["node_bytes"]) > 1:
        report["notes"].append(
            f"{len(report['node_bytes'])} NUMA nodes: ranks use the node near their GPU; a single rank uses all nodes, "
            "and half of its copies cross between them"
        )
    for gpu in gpus:
        # A card in a short slot silently copies at a half or a quarter of the rate.
        if gpu.get("pcie_lanes", 0) < gpu.get("pcie_most_lanes", 0):
            lanes, most = gpu["pcie_lanes"], gpu["pcie_most_lanes"]
            report["notes"].append(f"{gpu['name']} has {lanes} of {most} PCIe lanes: use a slot with all lanes")
    return report


def _describe_dir(directory: str, engine: IoEngine) -> dict[str, Any]:
    """Test a folder with the disk operations of a run, on a small scale."""
    # All fields, also after a failed test: readers of the JSON need no checks.
    fields = ("dir", "file_system", "free_bytes", "usable", "refusal", "direct", "why_buffered")
    report: dict[str, Any] = dict.fromkeys(fields) | {"dir": directory, "usable": False}
    path = Path(directory)
    if path.is_dir():
        report |= {"file_system": file_system(path.resolve()), "free_bytes": free_bytes(path)}
    try:
        (place,) = check_dirs([directory])
        check_space([place], ALIGNMENT_BYTES)
        report |= _try_direct(place, engine)
    except OffloadError as error:
        report["refusal"] = str(error)
    else:
        report["usable"] = True
    return report


def _try_direct(directory: Path, engine: IoEngine) -> dict[str, Any]:
    """Write and read one block. A file system may accept O_DIRECT on open and reject the transfer."""
    block = _pages(ALIGNMENT_BYTES)
    reason = ""
    for direct in (True, False):
        # Without a name: a crash leaves no file behind.
        file = engine.open(directory, direct=direct, opener=open_nameless)
        try:
            file.reserve(0, ALIGNMENT_BYTES)
            engine.write(file, 0, block).wait()
            engine.read(file, 0, block).wait()
        except DiskError as error:
            if not file.is_direct:  # no simpler way is left
                raise
            reason = str(error)
            continue
        finally:
            file.close()
        return {"direct": file.is_direct, "why_buffered": reason or file.why_buffered or None}
    raise AssertionError("the buffered attempt returns or raises")


def _pages(num_bytes: int) -> Any:
    import torch

    return Arena(num_bytes).take(num_bytes, torch.uint8)


def nvml_gpus() -> list[dict[str, Any]]:
    """Return NVML data for each GPU. Empty without pynvml or the NVIDIA driver."""
    try:
        import pynvml
    except ImportError:
        return []
    with suppress(pynvml.NVMLError):
        pynvml.nvmlInit()
        try:
            return [_describe(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount())]
        finally:
            with suppress(pynvml.NVMLError):
                pynvml.nvmlShutdown()
    return []


def _describe(nvml: Any, index: int) -> dict[str, Any]:
    """Return NVML data for one GPU, without unsupported fields."""
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    name = nvml.nvmlDeviceGetName(handle)
    if isinstance(name, bytes):  # older versions of pynvml
        name = name.decode()
    fields: dict[str, Any] = {"name": name}
    queries = {
        "pcie_generation": nvml.nvmlDeviceGetMaxPcieLinkGeneration,  # the current value drops when the link is idle
        "pcie_lanes": nvml.nvmlDeviceGetCurrPcieLinkWidth,
        "pcie_most_lanes": nvml.nvmlDeviceGetMaxPcieLinkWidth,
        "power_limit_watts": lambda gpu: nvml.nvmlDeviceGetEnforcedPowerLimit(gpu) / 1000,
        "num_processes": lambda gpu: len(nvml.nvmlDeviceGetComputeRunningProcesses(gpu)),
    }
    for key, query in queries.items():
        with suppress(nvml.NVMLError):
            fields[key] = query(handle)
    return fields


NUM_PARAMETERS = 10**9
"""Model size for the reported times."""
_FLOPS = 8
"""FLOPs per parameter and token: forward 2, recomputation 2, backward 4 (arXiv:2104.07857, equation 7)."""


TRAFFIC = {
    "bf16": {"update": 26, "h2d": 4, "d2h": 2, "nvme_read": 16, "nvme_write": 12},
    "fp32": {"update": 28, "h2d": 8, "d2h": 4, "nvme_read": 20, "nvme_write": 12},
}
"""Bytes per parameter and step, by compute precision, for AdamW with fp32 states and gradients waiting for the norm.

update: reads and writes to weights, two moments and the gradient in host memory.
h2d: weights, for forward and backward.
d2h: gradients.
nvme_read, nvme_write: with weights and optimizer states on disk.
"""


def find_bounds(machine: Hardware) -> dict[str, Any]:
    """Return the expected bottleneck of a step with NUM_PARAMETERS parameters and full offloading, in JSON form.

    precision: compute precision.
    seconds: seconds per lane.
    lane: the slowest lane.
    num_tokens: tokens per step needed for compute to hide the slowest lane.
    """
    precision = "bf16"
    if machine.device == "cpu":
        precision = "fp32"
    # The time of AdamW on the host is the time of the memory traffic.
    rates = asdict(machine.rates) | {"update_bytes_per_s": machine.rates.host_bytes_per_s}
    seconds = {
        lane: num_bytes * NUM_PARAMETERS / rates[f"{lane}_bytes_per_s"]
        for lane, num_bytes in TRAFFIC[precision].items()
        if machine.rates.has_disk or lane not in DISK_LANES
    }
    lane = max(seconds, key=seconds.__getitem__)
    # Compute grows with the tokens, and the bytes of a step do not.
    num_tokens = seconds[lane] * machine.rates.flops(precision) / (_FLOPS * NUM_PARAMETERS)
    return {"precision": precision, "seconds": seconds, "lane": lane, "num_tokens": round(num_tokens)}


def lockable_bytes() -> int | None:
    """Return the mlock limit in bytes, relevant for registered io_uring buffers. None: no limit.

    Memory pinned by a GPU driver is not counted here, but counts in control groups.
    """
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    if limit == resource.RLIM_INFINITY or os.geteuid() == 0:  # the kernel sets root no limit
        return None
    return limit
