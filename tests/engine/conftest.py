"""Fixtures of the engine tests. One thread, since tiny matrices gain nothing from a second one."""

import gc
import importlib
from collections.abc import Iterator

import pytest
import torch

from offload.accelerators import own_accelerator
from offload.engine.spare_memory import SpareMemory
from tests.threads import torch_threads


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    with torch_threads(1):
        yield


@pytest.fixture(autouse=True, scope="module")
def device_is_left_empty() -> Iterator[None]:
    """Check after each file that device memory is empty.

    An accelerator's allocator counts the whole process: memory left by one file would be missing from the budgets of a
    few MiB in the next. The next file depends on test durations.
    """
    yield
    accelerator = own_accelerator()
    if accelerator is not None:
        gc.collect()
        torch.accelerator.synchronize()
        torch.empty(1, device=accelerator.device)  # the next allocation frees blocks used by other streams
        accelerator.take_peak()
        assert accelerator.peak_bytes < 1 << 20


@pytest.fixture
def small_tiles() -> Iterator[None]:
    """Make tiles small, so tiny regions go around the rings many times."""
    from tests.cases.run import small  # imports tests.engine.device, whose marks need the device of `--device`

    with small():
        yield


@pytest.fixture
def nothing_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units do not stay on the device in memory that steps leave unused. Otherwise fewer bytes move."""
    monkeypatch.setattr(SpareMemory, "end_step", lambda self, peak_bytes: None)


@pytest.fixture
def nothing_collected() -> Iterator[None]:
    """Disable garbage collection, and import dynamo early, so Ctrl-C always arrives.

    Python drops a KeyboardInterrupt raised in a collector callback (hypothesis has one). An interrupt during an import
    leaves a half-initialized module, and torch imports dynamo at first use.
    """
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.disable()
    yield
    gc.enable()
