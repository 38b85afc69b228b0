"""The processor entry in env.json."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cpuinfo
import pytest

from offload.app import environment


@pytest.fixture(autouse=True)
def asks_anew() -> Iterator[None]:
    environment._processor.cache_clear()
    yield
    environment._processor.cache_clear()


@pytest.mark.slow
def test_the_processor_is_the_kernel_s_and_no_process_is_started_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    if "model name" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("the kernel does not name this processor")
    expected = cpuinfo.get_cpu_info()["brand_raw"]
    monkeypatch.delattr(cpuinfo, "get_cpu_info")
    found = environment.describe_environment()["cpu"]
    assert found["name"] == expected
    assert set(found["flags"]) <= set(Path("/proc/cpuinfo").read_text().split())


def test_a_processor_that_the_kernel_does_not_name_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    told: dict[str, Any] = {"brand_raw": "Neoverse-V2", "flags": ["sve", "fp", "asimd"]}
    monkeypatch.setattr(cpuinfo, "get_cpu_info", lambda: told)
    monkeypatch.setattr(environment, "read_text", lambda path: "processor\t: 0\nFeatures\t: fp asimd sve\n")
    found = environment.describe_environment()["cpu"]
    assert (found["name"], found["flags"]) == ("Neoverse-V2", ["asimd", "sve"])
