"""Describe software and hardware for env.json and `doctor`. Nothing runs on import."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from offload.machine.limits import memory
from offload.system import cpu_quota, read_text

TESTED = {"torch": ("2.11", "2.13"), "transformers": ("5.17", "5.24")}
"""(oldest, newest) tested release. Oldest as in pyproject.toml, newest as in constraints.txt."""
_PACKAGES = ("torch", "transformers", "tokenizers", "safetensors", "pydantic", "tyro", "numpy", "nanobind")


def describe_environment() -> dict[str, Any]:
    """Return versions, CPU, GPUs and memory in JSON form."""
    import offload
    from offload.accelerators import accelerators
    from offload.native.core import core

    return {
        "offload": offload.__version__,
        "python": sys.version.split()[0],
        "platform": platform.platform(),
        "versions": {name: version for name in _PACKAGES if (version := version_of(name)) is not None},
        "cpu": _cpu(),
        "memory": memory(),
        "gpus": [each.describe() for each in accelerators()],
        "native": "torch fallback" if core is None else "compiled",
    }


def describe_untested() -> str | None:
    """Return a sentence about packages outside the tested version range; None: all are tested."""
    untested = [
        f"{name} {version}"
        for name, (oldest, newest) in TESTED.items()
        if (version := version_of(name)) is not None and not _release(oldest) <= _release(version) <= _release(newest)
    ]
    if not untested:
        return None
    tested = " and ".join(f"{name} {oldest} to {newest}" for name, (oldest, newest) in TESTED.items())
    return f"offload is tested with {tested}; this machine has {' and '.join(untested)}."


def _release(version: str) -> tuple[int, ...]:
    """Return (major, minor)."""
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])


@cache
def version_of(package: str) -> str | None:
    """Return the package version; None: not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu() -> dict[str, Any]:
    import torch

    properties: dict[str, Any] = {
        "num_cores": os.cpu_count(),  # of the machine; this process may be bound to fewer
        "num_threads": torch.get_num_threads(),
        "machine": platform.machine(),
    }
    if hasattr(os, "sched_getaffinity"):
        properties["num_usable_cores"] = len(os.sched_getaffinity(0))
    if quota := cpu_quota():
        properties["quota"] = asdict(quota)
    return properties | _processor()


@cache
def _processor() -> dict[str, Any]:
    """Return name and instruction set flags for the first core from /proc/cpuinfo.

    Where these are missing, as on ARM, py-cpuinfo provides them at the cost of a new process.
    """
    lines = [line.partition(":") for line in read_text(Path("/proc/cpuinfo")).split("\n\n")[0].splitlines()]
    fields = {name.strip(): value.strip() for name, _, value in lines}
    name, flags = fields.get("model name"), fields.get("flags", "").split()
    if "model name" not in fields or "flags" not in fields:
        try:
            import cpuinfo
        except ImportError:  # a name is no reason to require a library
            return _caches()
        info = cpuinfo.get_cpu_info()
        name, flags = info.get("brand_raw"), info.get("flags", ())
    # Of some hundred flags, the ones of instruction sets for arithmetic.
    kept = sorted(flag for flag in flags if flag.startswith(("avx", "fma", "amx", "f16c", "asimd", "sve")))
    return {"name": name, "flags": kept} | _caches()


def _caches() -> dict[str, int]:
    """Return the L2 and L3 cache sizes seen by the first core, shared caches included."""
    sizes: dict[str, int] = {}
    for folder in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*"):
        level, size = read_text(folder / "level").strip(), read_text(folder / "size").strip()  # like 3 and 32768K
        if level in ("2", "3") and size.endswith("K"):
            sizes[f"l{level}_cache_bytes"] = int(size[:-1]) * 1024
    return sizes


def describe_cores(cpu: Mapping[str, Any]) -> str:
    """Return the cores of the machine, of this process, and of the quota, for `cpu` of `describe_environment`."""
    text = f"{cpu['num_cores']} cores"
    usable = cpu.get("num_usable_cores", cpu["num_cores"])
    if usable != cpu["num_cores"]:
        text += f", {usable} of them visible"
    if quota := cpu.get("quota"):
        text += f", a quota of {quota['cores']:.3g} ({quota['where']})"
    return text


def integrated_note(name: str) -> str:
    """Return a note about devices using host memory."""
    return (
        f"{name} uses the host's memory: states offloaded to the cpu tier take the same memory. Weights in the dtype "
        "of compute are used there without a copy, gradients and quantized weights are copied. "
        "--offload.parameters device --offload.optimizer device copies nothing; only nvme saves memory."
    )
