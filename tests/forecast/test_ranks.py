"""A step of several ranks, forecast: its links move the bytes, and exchange the elements, that an engine's do."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.device import cpu_only
from tests.engine.ranks import run
from tests.forecast import ranks_jobs
from tests.matrix import quick

pytestmark = cpu_only("what is forecast here is a CPU's step")


@pytest.mark.parametrize("stage", quick([0, 1, 2, 3], [1, 3]))
@pytest.mark.parametrize(
    ("placement", "settings"),
    [
        pytest.param({}, {}, id="deferred"),
        pytest.param({}, {"max_grad_norm": None, "prefetch": 1}, id="no clipping, one ahead", marks=pytest.mark.slow),
        pytest.param({"device_memory": "160KiB"}, {}, id="a budget", marks=pytest.mark.slow),
    ],
)
def test_ranks_move_and_exchange_what_is_foretold(
    stage: int, placement: dict[str, Any], settings: dict[str, Any]
) -> None:
    for told, made in run(2, ranks_jobs.told_and_made, placement=placement, zero_stage=stage, **settings):
        assert (told["h2d"], told["d2h"]) == (made["h2d"], made["d2h"])
        # Each rank's own bytes of what all get. New weights are handed round in turns, which is as long for both ranks.
        exchanged = made["reduced"] + made["gathered"] * (2 if stage in (1, 2) else 1)
        assert told["collective"] * 2 / 4 == exchanged
