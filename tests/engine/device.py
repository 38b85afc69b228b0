"""Default device for engines and the plain PyTorch reference: the CPU, or the `--device` argument."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from offload.accelerators import device_of, own_accelerator

_Module = TypeVar("_Module", bound=nn.Module)


def own_device() -> torch.device:
    """Return the default engine device."""
    return device_of(own_accelerator())


def twin(model: _Module, device: torch.device | None = None) -> _Module:
    """Copy a model to a device (None: the default), with the same ties.

    `Module.to` would untie weights if the device's tensors cannot replace CPU tensors.
    """
    device = device or own_device()
    copies: dict[int, Any] = {id(buffer): buffer.to(device, copy=True) for buffer in model.buffers()}
    for p in model.parameters():
        copies[id(p)] = nn.Parameter(p.detach().to(device, copy=True), requires_grad=p.requires_grad)
    return copy.deepcopy(model, copies)


def set_seed(number: int) -> None:
    """Seed torch's generators. `torch.manual_seed` takes milliseconds, so CPU runs seed only the default generator."""
    if own_device().type == "cpu":
        torch.default_generator.manual_seed(number)
    else:
        torch.manual_seed(number)


def cpu_only(reason: str) -> pytest.MarkDecorator:
    """Return a mark that skips tests on other devices, with the reason."""
    return pytest.mark.skipif(own_device().type != "cpu", reason=reason)


LEDGER = cpu_only("an accelerator's allocator counts all of the process: temporaries, and plain models too")
NO_LSTM = cpu_only("the simulated accelerator has no LSTM")
TWO_KERNELS = cpu_only("an update on an accelerator is within 2 ulp of the CPU's kernel, not its bits")
