"""Tiny matrices gain nothing from a second thread."""

import gc
import importlib
from collections.abc import Iterator

import pytest
import torch

from offload.accelerators import own_accelerator
from offload.engine.spare_memory import SpareMemory


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="module")
def device_is_left_empty() -> Iterator[None]:
    """An accelerator's allocator counts all of the process: what one file left there would be missing in the next, from
    budgets of a few MiB. Which file that is depends on how long others take.
    """
    yield
    accelerator = own_accelerator()
    if accelerator is not None:
        gc.collect()
        torch.accelerator.synchronize()
        torch.empty(1, device=accelerator.device)  # what other streams have used is freed by who asks next
        accelerator.take_peak()
        assert accelerator.peak_bytes < 1 << 20


@pytest.fixture
def nothing_left_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """An accelerator's memory is a budget, and what steps leave of it takes units, which move less then. Not here."""
    monkeypatch.setattr(SpareMemory, "end_step", lambda self, peak_bytes: None)


@pytest.fixture
def nothing_collected() -> Iterator[None]:
    """Python drops the Ctrl-C that comes in a callback of its collector, of which hypothesis has one. One that comes
    in an import leaves half a module, and torch imports dynamo at first use.
    """
    importlib.import_module("torch._dynamo")
    gc.collect()
    gc.disable()
    yield
    gc.enable()
