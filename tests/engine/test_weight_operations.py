"""Torch's operations over offloaded weights under the watch of a recording, in a process with guarded memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from offload import SGD, Engine
from tests.cases.models import build
from tests.engine.compare import train_both
from tests.engine.device import cpu_only
from tests.engine.handmade import WIDTH, Stack, cross_entropy, words
from tests.engine.inside import resident_names
from tests.engine.weight_operations_child import BESIDE_THE_DATABASE, Watched, ask
from tests.forks import MINUTES, ROOT

pytestmark = cpu_only("kernels of the CPU are watched")
GUARD = Path(__file__).with_name("guarded_memory.c")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_torchs_operations_see_a_tensor_as_the_placeholder_says(tmp_path: Path) -> None:
    """Shape, strides, dtype and device of results, and shapes of gradients, are those over a plain weight.

    Each aligned allocation of the process ends before a page without access: a kernel that trusts wrong strides ends
    the process. The operations are those of torch's own database, and a few beside it.
    """
    guard, out = tmp_path / "guard.so", tmp_path / "outcomes"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-pthread", "-o", guard, GUARD], check=True)
    environment = os.environ | {"LD_PRELOAD": str(guard), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.engine.weight_operations_child", str(out), "0"]
    child = subprocess.run(command, env=environment, cwd=ROOT, timeout=MINUTES, stderr=subprocess.PIPE, text=True)
    lines = list(map(json.loads, out.read_text().splitlines()))
    assert child.returncode == 0, f"{lines[-1]} ended the process: {child.stderr[-2000:]}"
    outcomes = dict(zip([line["name"] for line in lines[::2]], lines[1::2], strict=True))
    asked = {name: outcome for name, outcome in outcomes.items() if "asked" in outcome}
    left_out = Counter(outcome["left_out"] for outcome in outcomes.values() if "left_out" in outcome)
    num_calls = sum(outcome["asked"] for outcome in asked.values())
    print(f"{len(outcomes)} operations, {len(asked)} asked in {num_calls} calls; left out: {dict(left_out)}")
    assert {name: outcome["differences"] for name, outcome in asked.items() if outcome["differences"]} == {}
    assert not any(reason.startswith("no samples") for reason in left_out)
    assert len(asked) > 600
    assert sum(outcome["seen"] for outcome in asked.values()) > 0.95 * num_calls


@pytest.mark.parametrize("operation", BESIDE_THE_DATABASE, ids=lambda operation: operation.name)
def test_operations_beside_torchs_database(operation: object, watched: Watched) -> None:
    outcome = ask(operation, watched)  # type: ignore[arg-type]
    assert outcome["differences"] == []
    assert outcome["seen"] == outcome["asked"] > 0


@pytest.fixture(scope="module")
def watched() -> Watched:
    return Watched()


def test_a_view_past_the_end_of_a_placeholder_is_refused_like_one_of_a_tensor(watched: Watched) -> None:
    weight = watched.weight_of(torch.empty(4, 3), trains=False)
    rows = weight[1:][1:]
    plain = torch.empty(4, 3)[1:][1:]
    assert rows.storage_offset() == plain.storage_offset() == 6
    for tensor in (rows, plain):
        assert tensor.as_strided((2, 3), (3, 1)).shape == (2, 3)
        with pytest.raises(RuntimeError):
            tensor.as_strided((3, 3), (3, 1))


class OldWeightNorm(Stack):
    """A hook before the unit reads weights of the unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH)) for _ in range(2))


@pytest.mark.filterwarnings("ignore:unit .* is read from outside", "ignore:.*weight_norm")
def test_weights_made_by_a_hook_train_like_plain_ones() -> None:
    losses = []
    for with_engine in (False, True):
        model = build(OldWeightNorm)
        trainer = (
            Engine(model, SGD(lr=0.1), max_grad_norm=None) if with_engine else torch.optim.SGD(model.parameters(), 0.1)
        )
        for seed in range(3):
            batch = words(seed)
            if isinstance(trainer, Engine):
                losses.append(trainer.step(batch, loss_fn=cross_entropy).loss.item())
                continue
            loss = cross_entropy(model(batch["x"]), batch)
            loss.backward()
            trainer.step()
            trainer.zero_grad()
            losses.append(loss.item())
    assert losses[:3] == losses[3:]


class ReadsNumbers(Stack):
    """Numbers of a weight leave torch, and no operation of torch is seen."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + abs(self.blocks[0].up.bias.tolist()[0]))


@pytest.mark.filterwarnings("ignore:unit .* is read from outside")
def test_a_weight_read_as_a_number_stays_on_the_device() -> None:
    engine, _ = train_both(build(ReadsNumbers), [words(0), words(1)], loss_fn=cross_entropy)
    assert "blocks.0" in resident_names(engine)
