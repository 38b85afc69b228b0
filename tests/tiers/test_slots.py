"""`debug` fills the weights in the device slot with NaN at their update, so that a late reader shows."""

from __future__ import annotations

import torch

from offload import Engine, Placement
from tests.cases.models import build, llama, tokens
from tests.engine.inside import memory_of, parts_of, settle


def test_after_an_update_the_weights_in_the_slot_are_poisoned() -> None:
    found = []
    for debug in (False, 1):
        with Engine(build(llama), placement=Placement("cpu", "cpu"), debug=debug, prefetch=0) as engine:
            engine.step(tokens(0))
            settle(engine)
            parts_of(engine).store.lanes.h2d.drain()
            slots = memory_of(engine).slots
            stale = [slot for slot in slots._slots if slot.cargo not in slots.valid_offsets()]
            found.append(all(slots._memory[s.begin : s.end].view(torch.float32).isnan().all() for s in stale))
            assert stale
    assert found == [False, True]
