"""Fixture for both kernel implementations."""

import pytest

from offload.native import kernels


@pytest.fixture(params=["native", "torch"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "torch":
        monkeypatch.setattr(kernels, "_core", None)
    elif not kernels.is_native():
        pytest.skip("the C++ kernels were not built")
