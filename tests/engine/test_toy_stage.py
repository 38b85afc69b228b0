"""A stage of one's own is planned as it runs. It trains as a case of tests/cases/features.py."""

from __future__ import annotations

import pytest

from offload.app.config.config import Config
from offload.extras.plan.forecast import Forecaster
from offload.extras.plan.machine_files import read_machine
from tests.cases.features import CASES
from tests.cases.run import registered
from tests.engine.device import cpu_only
from tests.forecast.dry_engine import BASE, BYTES, compare, model_config

MACHINE = "rtx-4090"


@pytest.mark.slow
@cpu_only("the plan and the engine on shapes need no device")
def test_its_plan_is_its_step() -> None:
    """No line of the plan knows the stage. Break: leave out `in_memory`."""
    config = Config.load(None, BASE)
    before = Forecaster(config, 1, architecture=model_config()).predict(config, read_machine(MACHINE)).timing
    assert before is not None
    with registered(CASES["each block twice"]):
        found = compare("always", MACHINE)
    assert found.planned.busy_s["compute"] == pytest.approx(2 * before.lane_seconds["compute"], rel=0.05)
    assert found.dry.seconds == pytest.approx(found.planned.seconds, rel=0.0125, abs=2e-3)
    assert {lane: found.dry.moved_bytes[lane] for lane in BYTES} == {
        lane: found.planned.moved_bytes[lane] for lane in BYTES
    }
    assert found.dry_bytes == pytest.approx(found.planned_bytes, rel=0.01)
