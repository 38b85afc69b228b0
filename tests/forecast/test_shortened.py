"""A forecast simulates a few identical blocks and extrapolates to the real depth."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from offload.extras.plan.simulated_step import (
    FEW,
    SimulatedCall,
    SimulatedPlan,
    SimulatedStep,
    simulate,
    simulate_passes,
    simulate_shortened,
)
from offload.layout.residence import DISK, Residence, Row
from offload.planning.settings import Settings
from offload.tiers.nvme import UPDATE_RING
from tests.forecast.test_simulated_step import NUMEL, regions
from tests.matrix import matrix

SIZE = 4 * NUMEL
DEPTH = 48
LINKS = ("h2d", "d2h", "update", "update_on_device", "here", "nvme_read", "nvme_write")
ON_DISK = {"exp_avg": DISK, "exp_avg_sq": DISK}


def plan(slots: int = 4, residence: Residence = Residence(), corrects: bool = False, **settings: Any) -> SimulatedPlan:  # noqa: B008
    return SimulatedPlan(
        regions(DEPTH),
        Settings(**settings),
        residence,
        2 * SIZE,
        slots * SIZE,
        DEPTH,
        None,
        rings={UPDATE_RING: 16 * SIZE} if residence.rows else {},
        staging_bytes=2 * SIZE,
        corrects=corrects,
    )


CASES = {
    "few slots": plan(),
    "half of them stay": plan(DEPTH // 2),
    "all stay": plan(DEPTH),
    "no clipping": plan(max_grad_norm=None),
    "speculative": plan(clip="speculative", corrects=True),
    "on disk": plan(residence=Residence(dict.fromkeys(range(DEPTH), Row(ON_DISK, NUMEL)))),
    "half on disk": plan(residence=Residence(dict.fromkeys(range(0, DEPTH, 2), Row(ON_DISK, NUMEL)))),
}


def both(its: SimulatedPlan, ratio: float, shortened: Callable[..., SimulatedStep]) -> list[SimulatedStep]:
    """Return a step with all blocks, and a shortened one, which takes nearly as long."""
    seconds = dict.fromkeys(LINKS, lambda num_bytes: ratio * num_bytes / SIZE)
    calls = [SimulatedCall((region,), 1.0, 2.0) for region in its.regions]
    found = [simulate(calls, its, seconds), shortened(calls, its, seconds, 6)]
    assert found[1].seconds == pytest.approx(found[0].seconds, rel=0.05)
    return found


@matrix(name=[*CASES], ratio=[0.3, 1.5], strength=1)
def test_a_step_is_nearly_what_it_is_with_all_blocks(name: str, ratio: float) -> None:
    all_of_it, few = both(CASES[name], ratio, simulate_shortened)
    for link in ("d2h", "update", "nvme_write"):
        assert few.busy_s[link] == pytest.approx(all_of_it.busy_s[link])
    assert few.busy_s["h2d"] == pytest.approx(all_of_it.busy_s["h2d"], rel=0.05)


@matrix(name=["few slots", "all stay"], ratio=[0.3, 1.5], strength=1)
def test_a_step_of_many_passes_is_extrapolated_from_two(name: str, ratio: float) -> None:
    its = replace(CASES[name], passes=9, summed=frozenset(region.index for region in CASES[name].regions))
    all_of_it, few = both(its, ratio, simulate_passes)
    for link in ("h2d", "d2h", "update"):
        assert few.busy_s[link] == pytest.approx(all_of_it.busy_s[link], rel=0.05)


def test_a_small_model_is_played_as_it_is() -> None:
    its = replace(plan(), regions=regions(FEW))
    calls = [SimulatedCall((region,), 1.0, 2.0) for region in its.regions]
    seconds = dict.fromkeys(LINKS, lambda num_bytes: num_bytes / SIZE)
    assert simulate_shortened(calls, its, seconds, 6) == simulate(calls, its, seconds)
