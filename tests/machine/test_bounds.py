"""The limiting resource in a step, computed by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from offload.extras.tools.diagnosis import find_bounds
from offload.machine.hardware import Hardware, Rates

RATES = Rates(
    h2d_bytes_per_s=20e9,
    d2h_bytes_per_s=10e9,
    both_ways_bytes_per_s=25e9,
    flops_per_s={"fp32": 1e13, "bf16": 8e13},
    device_bytes_per_s=1e12,
    host_bytes_per_s=52e9,
    launch_s=1e-5,
)
MACHINE = Hardware("x", "cuda", 1, 1 << 34, 1 << 36, None, None, False, RATES)


def test_a_step_of_1e9_parameters() -> None:
    found = find_bounds(MACHINE)
    assert found["seconds"] == {"update": 26e9 / 52e9, "h2d": 4e9 / 20e9, "d2h": 2e9 / 10e9}
    assert (found["precision"], found["lane"]) == ("bf16", "update")
    assert found["num_tokens"] == 0.5 * 8e13 / 8e9


@pytest.mark.parametrize(
    ("changes", "lane"),
    [
        ({"h2d_bytes_per_s": 5e9}, "h2d"),
        ({"d2h_bytes_per_s": 2e9}, "d2h"),
        ({"nvme_read_bytes_per_s": 4e9, "nvme_write_bytes_per_s": 4e9}, "nvme_read"),
        ({"nvme_read_bytes_per_s": 4e9, "nvme_write_bytes_per_s": 1e9}, "nvme_write"),
    ],
)
def test_the_slowest_lane_is_named(changes: dict[str, float], lane: str) -> None:
    assert find_bounds(replace(MACHINE, rates=replace(RATES, **changes)))["lane"] == lane


def test_a_cpu_computes_in_fp32() -> None:
    found = find_bounds(replace(MACHINE, device="cpu"))
    assert (found["precision"], found["seconds"]["update"]) == ("fp32", 28e9 / 52e9)
    assert found["num_tokens"] == round(28 / 52 * 1e13 / 8e9)
