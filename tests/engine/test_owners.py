"""The first two owners of an engine, without the later ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from offload.distributed.comm import Comm
from offload.engine.memory import Memory
from offload.engine.prepare import prepare
from offload.engine.weights import Weights
from offload.planning.settings import Settings
from offload.tiers.counters import Counters
from tests.cases.models import build
from tests.engine.compare import placed
from tests.engine.handmade import Stack

OF_RESIDENT_UNITS = {"resident weights", "accumulated gradients"}
"""Planned memory that a later owner takes, with the units that stay on the device."""


@pytest.mark.parametrize("tier", ["cpu", "nvme"])
def test_memory_and_weights_take_what_is_planned_and_give_it_back(tier: str, tmp_path: Path) -> None:
    model, counters, comm = build(Stack), Counters(), Comm()
    prepared = prepare(model, Settings(placement=placed(tier, tmp_path)), comm)
    memory = Memory(prepared, counters, comm)
    ledgers = memory.device.ledger, memory.host, memory.disk
    weights = Weights(prepared, memory)
    held = {(ledger.tier, name): size for ledger in ledgers for name, size in ledger.allocations.items()}
    planned = {(each.tier, each.name): each.num_bytes for each in prepared.plan.allocations if each.num_bytes}
    assert held == {key: size for key, size in planned.items() if key[1] not in OF_RESIDENT_UNITS}
    memory.end_lanes()
    weights.free()
    memory.free()
    assert not any(ledger.current_bytes for ledger in ledgers)
