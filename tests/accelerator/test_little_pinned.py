"""A driver that pins little or nothing, as in WSL and in sandboxes: equal bits, and one warning for each kind."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests import accelerator, forks

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("loaded")]

TRAIN = """
import hashlib, json, warnings
from tests import accelerator
sim = accelerator.load(num_devices=1)
sim.enter(0)
import torch
from offload import AdamW, Engine, Placement
from offload.extras.large.document_operation import Documents
from tests.cases.models import build, llama, tokens

def model():  # more than a MiB of states
    return build(lambda: llama(hidden_size=128, intermediate_size=256))

held = []

def train(update):
    losses = []
    with Engine(model(), AdamW(), Placement("cpu", "cpu"), device="sim", precision="bf16", update=update) as engine:
        held.append(sim.registered()[1])
        for seed in range(3):
            result = engine.step(tokens(seed))
            losses += [result.loss.item(), result.grad_norm]
        text = b"".join(value.numpy().tobytes() for _, value in engine.edit())
    return [losses, hashlib.sha256(text).hexdigest()]

with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    trained = [train(update) for update in ("cpu", "device")]
    starts = torch.tensor([[3, 0, 1, 0], [3, 1, 0, 0]], dtype=torch.int32)
    borders = Documents.of(starts).borders_on(torch.device("sim:0")).tolist()
    large = torch.arange(9 << 20, dtype=torch.int32)
    arrived = torch.equal(large.to("sim").cpu(), large)
told = [str(each.message) for each in caught if "pin" in str(each.message)]
print(json.dumps({"trained": trained, "borders": borders, "arrived": arrived, "told": told, "held": held}))
"""


def train(mib: int | None) -> dict[str, Any]:
    limit = {} if mib is None else {accelerator.PIN_MIB: str(mib)}
    done = forks.run(["-c", TRAIN], env={**os.environ, **limit})
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_run_with_little_pinned_memory_has_the_same_bits() -> None:
    """Break: let `host_memory` raise, or leave out the margin."""
    free, none, little = train(None), train(0), train(1)
    assert (free.pop("told"), free["arrived"]) == ([], True)
    assert min(free.pop("held")) > 1 << 20
    assert none.pop("held") == [0, 0]
    assert 0 < max(little.pop("held")) < 3 << 18, "gradients are refused, and give their part back"
    for limited, num_small in ((none, 1), (little, 0)):  # the small buffers find it
        told = limited.pop("told")
        assert [text.count("small buffers of sim:0") for text in told].count(1) == num_small
        assert len(told) == 2 + num_small, "the states of each engine"
        assert all("WSL2 pins only a part" in text for text in told)
    assert free == none == little
