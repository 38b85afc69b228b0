"""A forecast simulates all blocks, and extrapolates from a few passes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from offload.extras.plan.simulated_step import SimulatedCall, SimulatedPlan, simulate, simulate_passes
from offload.layout.residence import DISK, Residence, Row
from offload.planning.settings import Settings
from offload.tiers.nvme import UPDATE_RING
from offload.tiers.placement import Placement
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


@pytest.mark.parametrize("ratio", [0.3, 0.9, 1.5])
def test_every_block_is_simulated(ratio: float) -> None:
    """A link that is nearly as busy as compute may fall behind only after thirty blocks, with graphs on the host."""
    placement = Placement(parameters="cpu", optimizer="cpu", gradients="cpu", graphs="cpu")
    its = replace(plan(update="cpu", max_grad_norm=None, placement=placement), in_stream=True)
    calls = [SimulatedCall((region,), 1.0, 1.1, graph_bytes=SIZE) for region in its.regions]
    seconds = {**dict.fromkeys(LINKS, lambda num_bytes: ratio * num_bytes / SIZE), "update": lambda _: 0.01}
    assert simulate_passes(calls, its, seconds) == simulate(calls, its, seconds)


CASES = {
    "few slots": plan(),
    "all stay": plan(DEPTH),
    "no clipping": plan(max_grad_norm=None),
    "speculative": plan(clip="speculative", corrects=True),
    "on disk": plan(residence=Residence(dict.fromkeys(range(DEPTH), Row(ON_DISK, NUMEL)))),
}


@matrix(name=[*CASES], ratio=[0.3, 1.5], strength=1)
def test_a_step_of_many_passes_is_extrapolated_from_three(name: str, ratio: float) -> None:
    its = replace(CASES[name], passes=9, summed=frozenset(region.index for region in CASES[name].regions))
    seconds = dict.fromkeys(LINKS, lambda num_bytes: ratio * num_bytes / SIZE)
    calls = [SimulatedCall((region,), 1.0, 2.0) for region in its.regions]
    whole, few = simulate(calls, its, seconds), simulate_passes(calls, its, seconds)
    assert few.seconds == pytest.approx(whole.seconds, rel=0.02)
    for link in ("h2d", "d2h", "update"):
        assert few.busy_s[link] == pytest.approx(whole.busy_s[link], rel=0.05)
