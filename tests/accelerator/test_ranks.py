"""Ranks with one simulated device each. (`--device sim` runs all rank tests like this.)"""

from __future__ import annotations

import os
from typing import Any

import pytest

from tests import accelerator, forks
from tests.engine.ranks import run
from tests.engine.ranks_child import trained_on_simulated_devices
from tests.engine.test_ranks import MODES, STAGES, assert_equal, assert_near, plain
from tests.ports import free_port, rank_variables

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("sim")]


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give forked processes two devices."""
    monkeypatch.setenv(accelerator.LOADS, "1")
    monkeypatch.setenv("SIM_DEVICES", "2")


@pytest.mark.parametrize(("slow", "seed"), [("compute", 0), ("copies", 1)])
def test_two_devices_are_one_process_at_every_stage(
    slow: str, seed: int, simulated: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random delays do not matter, and each thread stays on the rank's device. A thread on another device would create
    a context there, hundreds of MB on a GPU.
    """
    monkeypatch.setenv(accelerator.JITTER, f"300 {seed} {slow}")
    common: dict[str, Any] = {"case": "plain", "rows": (1, 4), "num_steps": 4, "evaluate": 1, **MODES["deferred"]}
    by_rank = run(2, trained_on_simulated_devices, runs=[{**common, "zero_stage": stage} for stage in STAGES])
    wanted = plain("plain", 5, 4, "deferred")
    first = by_rank[0][0][0]
    for rank, (found, has_context) in enumerate(by_rank):
        assert has_context == [number == rank for number in range(2)]
        for stage, one in zip(STAGES, found, strict=True):
            assert_equal(one, first, f"rank {rank}, stage {stage}")
            assert_near(one, wanted, 1e-6)


def test_a_thread_on_another_device_is_seen(simulated: None) -> None:
    """Verifies the check itself."""
    runs = [{"case": "plain", "rows": (1, 4), "num_steps": 1, "zero_stage": 3}]
    _, (_, has_context) = run(2, trained_on_simulated_devices, runs=runs, broken=True)
    assert has_context == [True, True]


MEETS = """
import torch
from offload import Engine, Placement
model = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3)))
engine = Engine(model, placement=Placement(device_memory="1MiB"))
loss = engine.step({"input": torch.ones(2, 8)}, lambda out, _: out.square().mean()).loss
print(engine.comm.size, engine.device, float(loss))
engine.close()
"""


@pytest.mark.parametrize("own", [True, False])
def test_ranks_may_see_one_device_each_and_never_share_one(own: bool) -> None:
    """`srun --gpus-per-task=1`, Ray and Kubernetes start ranks like this."""
    told, port, ranks = {accelerator.LOADS: "1", "SIM_DEVICES": "1"}, free_port(), []
    for rank in range(2):
        its = rank_variables(rank, 2, port) | {"SIM_FIRST": str(rank * own)}
        ranks.append(forks.start(["-c", MEETS], env=os.environ | told | its, rank=rank))
    said = [rank.communicate() for rank in ranks]
    if own:
        assert [out.split()[:2] for out, _ in said] == [["2", "sim:0"]] * 2, said
    else:
        assert all("ranks 0 and 1 both compute on GPU SIM-0 of " in error for _, error in said), said
