"""Several passes in a step are gradient accumulation: bit for bit, or within rounding for tied weights."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from offload import Engine, MeZO, Placement
from offload.engine.units.activation_offload import CHECKPOINTS
from offload.errors import ConfigError
from tests.engine.compare import PLACES, PROPORTIONAL, assert_same, assert_weights, placed, weights
from tests.engine.device import set_seed
from tests.engine.families import bert, build, gpt2, llama, t5, tokens
from tests.engine.inside import updating_device
from tests.engine.reference import Reference, count_labels, count_shifted

ROWS = 4
MODELS: dict[str, tuple[Callable[[], nn.Module], Any, float | None]] = {
    "llama": (llama, count_shifted, None),
    "dropout": (partial(llama, attention_dropout=0.2), count_shifted, None),
    "gpt2": (gpt2, count_shifted, 1e-6),
    "bert": (bert, count_labels, 1e-6),
    "t5": (t5, count_labels, 1e-6),
}
"""Models by name, with the count of targets and the tolerance: a tied weight sums the gradients of a pass first."""


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("place", PLACES)
def test_two_passes_are_gradient_accumulation(place: str, model: str, tmp_path: Path) -> None:
    make, count, within = MODELS[model]
    told: dict[str, Any] = {"max_grad_norm": 0.5} if within is None else {"optimizer": PROPORTIONAL}
    reference = Reference(build(make), micro_batch_size=ROWS // 2, **told)
    with Engine(build(make), passes=2, placement=placed(place, tmp_path), **told) as engine:
        reference.update_on(updating_device(engine))
        for seed in range(2):
            set_seed(seed)
            loss, norm = reference.step(tokens(seed, ROWS), None, count)
            set_seed(seed)
            result = engine.step(tokens(seed, ROWS))
            near = partial(pytest.approx, rel=within or 0.0, abs=0.0)
            assert (float(result.loss), result.grad_norm) == (near(float(loss)), near(norm))
            assert_weights(engine, reference, within, f"after step {seed}")


def test_passes_are_cut_into_micro_batches_and_head_chunks() -> None:
    """Seven rows in three passes (2, 2 and 3 rows), and fewer rows than passes."""
    found = []
    for settings in ({}, {"passes": 3, "micro_batch_size": 1, "head_chunk_bytes": 4 * 64 * 8}):
        with Engine(build(llama), optimizer=PROPORTIONAL, **settings) as engine:
            results = [engine.step(tokens(seed, rows)) for seed, rows in enumerate((7, 1))]
            found.append(([float(result.loss) for result in results], weights(engine)))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    assert_same(found[1][1], found[0][1], within=1e-6)


class Mixed(nn.Module):
    """Two layers, with `normed` a batch norm between them, which mixes rows."""

    def __init__(self, normed: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 4)
        self.norm = nn.BatchNorm1d(16) if normed else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.norm(self.up(x))))


def contrast(outputs: torch.Tensor, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a loss over all pairs of rows."""
    return functional.cross_entropy(outputs @ batch["x"][:, :4].T, torch.arange(len(outputs), device=outputs.device))


def mean(outputs: torch.Tensor, _batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """Return a mean over rows."""
    return outputs.square().mean()


@pytest.mark.parametrize(("normed", "loss_fn"), [(True, mean), (False, contrast)])
def test_rows_that_are_mixed_stay_in_one_pass(normed: bool, loss_fn: Callable[..., torch.Tensor]) -> None:
    """Break: leave passes out of the check of cut rows."""
    found = []
    for passes in (1, 3):
        torch.manual_seed(0)
        with Engine(Mixed(normed), optimizer=PROPORTIONAL, passes=passes) as engine:
            batch = {"x": torch.randn(6, 8, generator=torch.Generator().manual_seed(1))}
            with pytest.warns(UserWarning, match="batches are not split") if passes > 1 else nullcontext():
                results = [float(engine.step(batch, loss_fn=loss_fn).loss) for _ in range(2)]
            found.append((results, weights(engine)))
    assert found[1][0] == found[0][0]
    assert_same(found[1][1], found[0][1])


def test_graphs_of_the_caller_end_after_the_last_pass() -> None:
    found = []
    for passes in (1, 3):
        table = torch.randn(64, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        batch = tokens(0, 6)
        batch = {"inputs_embeds": table[batch["input_ids"].cpu()] * 1.0, "labels": batch["labels"]}
        with Engine(build(llama), optimizer=PROPORTIONAL, passes=passes) as engine:
            loss = float(engine.step(batch).loss)
        found.append((loss, table.grad))
    assert found[1][0] == pytest.approx(found[0][0], rel=1e-6)
    torch.testing.assert_close(found[1][1], found[0][1], rtol=1e-5, atol=1e-7)


def test_passes_hold_the_inputs_of_their_rows_alone() -> None:
    peaks = []
    for passes in (1, 4):
        placement = Placement("cpu", "cpu", activations="cpu")
        with Engine(build(llama), passes=passes, placement=placement) as engine:
            engine.step(tokens(0, 8))
            peaks.append({name: size for _, name, size in engine.allocations}[CHECKPOINTS])
    assert peaks[1] == peaks[0] / 4


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"passes": 0}, "train.passes is 0; it must be a whole number, at least 1"),
        ({"optimizer": MeZO(lr=1e-3), "passes": 2}, "MeZO has no gradients to add up: set --train.passes 1"),
        ({"sequence_parallel": 2, "passes": 2}, "shared rows are computed in one pass"),
    ],
)
def test_other_passes_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        Engine(build(llama), **settings)
