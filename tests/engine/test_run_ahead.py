"""Limit for launches ahead of the device, on a simulated device with simulated stream events."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from offload.engine.units.runner import RunAhead
from offload.lanes.ticket import Ticket
from offload.tiers.counters import Ledger
from tests.engine.device import cpu_only

pytestmark = cpu_only("the device is played")

BUDGET = 3200


class Place:
    """An event. `synchronize` advances the device to the event."""

    def __init__(self, number, device):
        self.number, self.device = number, device

    def query(self):
        return self.number <= self.device.reached

    def synchronize(self):
        self.device.reached = max(self.device.reached, self.number)


@pytest.mark.parametrize(
    ("waiting_bytes", "budget", "behind"),
    [(101, BUDGET, 2), (100, BUDGET, 10), (101, None, 10)],
    ids=["more than a share", "a share", "no budget"],
)
def test_launches_are_two_uses_ahead_where_more_than_a_share_waits(waiting_bytes, budget, behind):
    device = SimpleNamespace(reached=0, waiting_bytes=waiting_bytes, ledger=Ledger("device", budget))
    ahead, most = RunAhead(device), 0
    for use in range(1, 11):
        ahead.enter()
        most = max(most, use - device.reached)
        ahead.leave((Ticket("compute", is_done=True, event=Place(use, device)),))
    assert most == behind


def test_what_the_device_has_done_is_not_asked_about():
    class Device(SimpleNamespace):
        @property
        def waiting_bytes(self):
            raise AssertionError("the allocator's figures take a tenth of a millisecond")

    device = Device(reached=0, ledger=Ledger("device", BUDGET))
    ahead = RunAhead(device)
    for use in range(1, 11):
        ahead.enter()
        ahead.leave((Ticket("compute", is_done=True, event=Place(use, device)),))
        device.reached = use
