"""GPU properties from a simulated NVML. Without the library they are omitted."""

from __future__ import annotations

import builtins
import sys
import types
from typing import Any

import pytest

from offload.extras.tools.diagnosis import nvml_gpus


class PlayedError(Exception):
    pass


def played(**changes: Any) -> Any:
    """Return a simulated nvidia-ml-py module with one GPU and some unsupported queries."""

    def refuse(*_: Any) -> None:
        raise PlayedError

    told = {
        "NVMLError": PlayedError,
        "nvmlInit": lambda: None,
        "nvmlShutdown": lambda: None,
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetName": lambda _: b"one",
        "nvmlDeviceGetMaxPcieLinkGeneration": lambda _: 4,
        "nvmlDeviceGetCurrPcieLinkWidth": lambda _: 8,
        "nvmlDeviceGetMaxPcieLinkWidth": lambda _: 16,
        "nvmlDeviceGetEnforcedPowerLimit": refuse,
        "nvmlDeviceGetComputeRunningProcesses": lambda _: [1, 2],
    }
    return types.SimpleNamespace(**told | {name: change or refuse for name, change in changes.items()})


@pytest.mark.parametrize("name", ["one", b"one"])
def test_a_gpu_tells_what_it_can(monkeypatch: pytest.MonkeyPatch, name: Any) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", played(nvmlDeviceGetName=lambda _: name))
    about = {"name": "one", "pcie_generation": 4, "pcie_lanes": 8, "pcie_most_lanes": 16, "num_processes": 2}
    assert nvml_gpus() == [about]


@pytest.mark.parametrize("fails", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetHandleByIndex", "nvmlDeviceGetName"])
def test_a_library_without_a_driver_is_as_none(monkeypatch: pytest.MonkeyPatch, fails: str) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", played(**{fails: None, "nvmlShutdown": None}))
    assert nvml_gpus() == []


def test_without_the_library_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    importing = builtins.__import__

    def refuse(name: str, *rest: Any) -> Any:
        if name == "pynvml":
            raise ImportError(name)
        return importing(name, *rest)

    monkeypatch.delitem(sys.modules, "pynvml", raising=False)
    monkeypatch.setattr(builtins, "__import__", refuse)
    assert nvml_gpus() == []
