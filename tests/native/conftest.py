"""Fixtures for all kernel implementations."""

import pytest

from offload.native import kernels
from tests.native.states import ISAS


@pytest.fixture(params=["native", "torch"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(kernels, "_core", None)
    elif not kernels.is_native():
        pytest.skip("the C++ kernels were not built")


@pytest.fixture(params=[*ISAS, "torch"])
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Each instruction set, and the torch fallback (None)."""
    if request.param == "torch":
        monkeypatch.setattr(kernels, "_core", None)
        return None
    return request.param
