"""Two simulated devices for the whole run; each test starts from the same settings."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests import accelerator
from tests.accelerator.build import CannotBuildError

if TYPE_CHECKING:
    from tests.accelerator.control import Control


@pytest.fixture(scope="session")
def loaded() -> Control:
    try:
        return accelerator.load(num_devices=2)
    except CannotBuildError as error:
        pytest.skip(str(error))


@pytest.fixture
def sim(loaded: Control) -> Iterator[Control]:
    """The simulation, with counters at zero and device 0 current."""
    loaded.reset()
    loaded.enter(0)
    yield loaded
    loaded.reset()


@pytest.fixture
def forgetful() -> Iterator[None]:
    """Recompile all run-time kernels, and clear the caches afterwards."""
    from offload.extras.quant import casts, device_kernels
    from offload.native import device_update

    caches = casts.KERNELS, device_kernels.KERNELS, device_update.KERNELS
    for kernels in caches:
        kernels.forget()
    yield
    for kernels in caches:
        kernels.forget()
