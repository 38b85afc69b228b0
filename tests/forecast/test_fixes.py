"""Changes tried if a plan does not fit, and the notes on changes to training itself."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offload.config.config import Config
from offload.forecast.alternatives import _fixes

ON_DISK = {"offload.parameters": "nvme", "offload.optimizer": "nvme", "offload.gradients": "nvme"}
UNCLIPPED = {"train.max_grad_norm": None}


def fixes(over: set[str], **settings: Any) -> list[dict[str, Any]]:
    """Return the changes tried for a plan over budget on the tiers `over`."""
    found: Any = SimpleNamespace(
        config=Config.load(None, {"train.micro_batch_size": 1, **settings}),
        memory=SimpleNamespace(shortfalls=dict.fromkeys(over, 1), is_one_memory=False),
        hardware=SimpleNamespace(rates=SimpleNamespace(has_disk=True)),
        prepared=SimpleNamespace(plan=SimpleNamespace(update="cpu")),
        refusal="",
        num_replicas=1,
        num_groups=1,
    )
    return list(_fixes(found))


@pytest.mark.parametrize(
    ("over", "settings", "on_disk", "unclipped"),
    [
        ({"device"}, {"offload.nvme_dir": ["/disk"]}, True, False),  # a tied weight is cut if its sums are on disk
        ({"device"}, {}, False, False),
        ({"device"}, {"offload.nvme_dir": ["/disk"], "offload.gradients": "nvme"}, False, False),
        ({"cpu"}, {"offload.nvme_dir": ["/disk"]}, True, True),
        ({"cpu"}, {"train.max_grad_norm": None}, False, False),
        ({"cpu"}, {"optimizer.name": "mezo"}, False, False),
    ],
)
def test_gradients_go_to_disk_or_wait_for_no_norm_before_a_step_has_fewer_rows(
    over: set[str], settings: dict[str, Any], on_disk: bool, unclipped: bool
) -> None:
    tried = fixes(over, **settings)
    assert (ON_DISK in tried) == on_disk
    assert (UNCLIPPED in tried) == unclipped
    rows = [index for index, change in enumerate(tried) if "train.batch_size" in change]
    assert rows
    assert all(tried.index(each) < rows[0] for each in (ON_DISK, UNCLIPPED) if each in tried)
