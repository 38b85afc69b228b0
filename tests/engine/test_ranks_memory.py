"""Memory and traffic per rank equal ZeRO's formulas, including padding, to the byte.

Break, for bytes: hold a whole plane instead of a shard; pad shards instead of regions; shard gradients in stage 1, or
keep them whole in stage 2. For elements: gather frozen weights in stages 1 and 2; reduce frozen regions; count the
elements sent by one rank instead of all; count a prefetch for the step before its use.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.cases.models import build
from tests.engine.ranks import run
from tests.engine.ranks_child import Found, frozen_llama, odd_llama, refusal, trained
from tests.engine.sizes import Elements

STAGES = (0, 1, 2, 3)
WIDTHS = {"fp32": (4, 4, 8), "bf16": (2, 2, 10)}
"""Bytes per parameter: weights, gradients, optimizer states.

In bf16 a master's low half counts as optimizer state. In fp32 the weights are the masters.
"""
TIERS: dict[str, dict[str, str]] = {
    "cpu": {},
    "device": {"parameters": "device", "optimizer": "device"},
    "nvme": dict.fromkeys(("parameters", "optimizer", "gradients"), "nvme"),
}
PAIRS = (
    (("fp32", "cpu"), ("bf16", "device"), ("bf16", "nvme")),
    (("bf16", "cpu"), ("fp32", "device"), ("fp32", "nvme")),
)

pytestmark = pytest.mark.slow  # the quick run covers ranks by test_ranks.py and test_ranks_faults.py
OPTIMIZER = ("low", "exp avg", "exp avg sq")


def zero_bytes(num_elements: int, size: int, stage: int, weights: int, gradients: int, optimizer: int) -> int:
    """Return the model state bytes per rank (ZeRO, arXiv:1910.02054, sections 3.1 and 5.1 to 5.3).

    With 2, 2 and K bytes: (2 + 2 + K) P, 4 P + K P / N, 2 P + (2 + K) P / N and (4 + K) P / N for stages 0 to 3.
    """
    cut = {1: optimizer, 2: optimizer + gradients, 3: optimizer + gradients + weights}.get(stage, 0)
    whole = weights + gradients + optimizer - cut
    return whole * num_elements + cut * num_elements // size


def train(size: int, **settings: Any) -> list[Found]:
    common = {"case": "plain", "rows": (1,) * size, "num_steps": 3, "prefetch": 0}
    return [one for (one,) in run(size, trained, runs=[common | settings])]


def held(found: Found) -> dict[str, int]:
    """Return the bytes per state name, over all tiers. Device copies of offloaded weights do not count."""
    totals: dict[str, int] = {}
    for _, name, size in found.allocations:
        totals[name] = totals.get(name, 0) + size
    return {name: totals.get(name, 0) for name in ("weights", "gradients", *OPTIMIZER)}


@pytest.mark.parametrize(
    ("size", "precision", "tier"),
    [(size, precision, tier) for size in (2, 3) for precision, tier in PAIRS[size % 2]],
)
def test_states_cost_what_zero_says(size: int, precision: str, tier: str, tmp_path: Path) -> None:
    """For every state, rank and stage."""
    weights, gradients, optimizer = WIDTHS[precision]
    num_elements = Elements(build(odd_llama), size).all_trained
    common = {"case": "plain", "rows": (1,) * size, "num_steps": 2, "precision": precision}
    placed = {"placement": TIERS[tier], "folder": str(tmp_path), "max_grad_norm": 1.0, "clip": "deferred"}
    for by_stage in run(size, trained, runs=[{**common, **placed, "zero_stage": stage} for stage in STAGES]):
        for stage, found in zip(STAGES, by_stage, strict=True):
            states = held(found)
            wanted = zero_bytes(num_elements, size, stage, weights, gradients, optimizer)
            assert sum(states.values()) == wanted, (stage, states)
            assert states["weights"] == weights * num_elements // (size if stage == 3 else 1)
            assert states["gradients"] == gradients * num_elements // (size if stage >= 2 else 1)
            assert sum(states[name] for name in OPTIMIZER) == optimizer * num_elements // (size if stage else 1)


@pytest.mark.parametrize(("precision", "tier"), PAIRS[0])
def test_replicas_share_out_what_is_not_weights(precision: str, tier: str, tmp_path: Path) -> None:
    weights, gradients, optimizer = WIDTHS[precision]
    num_elements = Elements(build(odd_llama), 4).all_trained
    common = {"case": "plain", "rows": (1,) * 4, "num_steps": 2, "precision": precision, "replica_states": "shared"}
    placed = {"placement": TIERS[tier], "folder": str(tmp_path), "max_grad_norm": 1.0, "clip": "deferred"}
    for (found,) in run(4, trained, runs=[{**common, **placed, "zero_stage": 3, "replicas": 2}]):
        states = held(found)
        assert states["weights"] == weights * num_elements // 2
        assert states["gradients"] == gradients * num_elements // 4
        assert sum(states[name] for name in OPTIMIZER) == optimizer * num_elements // 4


def test_zero_bytes_are_the_papers() -> None:
    """Check the formula: 7.5 billion parameters, 64 ranks, K = 12, in GB (figure 1 of the paper)."""
    found = [zero_bytes(7_500_000_000, 64, stage, 2, 2, 12) / 1e9 for stage in STAGES]
    assert found == pytest.approx([120, 31.4, 16.6, 1.9], abs=0.05)


# -- exchanges -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "settings"),
    [
        (2, {"micro_batch_size": 1}),
        (2, {"micro_batch_size": 1, "delays": 1}),
        (3, {"max_grad_norm": None}),
        (2, {}),
        (4, {}),
    ],
)
def test_a_step_exchanges_what_zero_says(size: int, settings: Mapping[str, Any]) -> None:
    """Twice the parameters in stages 0 to 2, three times in stage 3 (arXiv:1910.02054, section 7).

    Weights still in a slot at the next use are not gathered again. In stage 3 the host link of a rank moves only the
    shards.
    """
    sizes = Elements(build(odd_llama), size)
    trained_numel, fetched = sizes.all_trained, sizes.fetched
    rows = (2 if settings else 1, *(1,) * (size - 1))
    common = {"case": "plain", "rows": rows, "num_steps": 3, "prefetch": 0, "is_counted": True, **settings}
    for by_stage in run(size, trained, runs=[{**common, "zero_stage": stage} for stage in STAGES]):
        for stage, found in zip(STAGES, by_stage, strict=True):
            for step, moved in enumerate(found.moved):
                where = f"stage {stage}, step {step}"
                assert moved["reduce_scatter_elements"] == trained_numel, where
                assert moved["h2d_bytes"] * (size if stage == 3 else 1) == 4 * fetched, where
                if stage >= 2:
                    assert moved["d2h_bytes"] * size == 4 * trained_numel, where
                gathered = moved["all_gather_elements"]
                if stage == 3:
                    assert gathered == fetched <= 2 * trained_numel, where
                elif stage and not step:
                    assert gathered in (0, trained_numel), "what was never updated is there already"
                else:
                    assert gathered == trained_numel, where


@pytest.mark.parametrize("stage", STAGES)
def test_frozen_regions_are_not_reduced(stage: int) -> None:
    """Frozen regions are not gathered in stages 0 to 2. In stage 3 they are fetched like all others."""
    sizes = Elements(build(frozen_llama), 2)
    for found in train(2, make=frozen_llama, zero_stage=stage):
        for moved in found.moved[1:]:
            assert moved["reduce_scatter_elements"] == sizes.all_trained
            if stage < 3:
                assert moved["all_gather_elements"] == sizes.all_trained
            else:
                assert moved["h2d_bytes"] * 2 == 4 * moved["all_gather_elements"]
                assert moved["all_gather_elements"] >= sizes.all_trained + sizes.all_frozen


# -- budgets ---------------------------------------------------------------------------------------------------------


BUDGETS = {"host_memory": ({}, "cpu"), "nvme_memory": (TIERS["nvme"], "nvme")}


@pytest.mark.parametrize(("key", "stage"), [("host_memory", 1), ("nvme_memory", 3)])
def test_the_ranks_of_a_machine_share_its_budget(key: str, stage: int, tmp_path: Path) -> None:
    """The sum over all ranks fits, and one byte less is refused on every rank.

    Break: give every rank the whole budget; round a share up.
    """
    placement, tier = BUDGETS[key]
    settings = {"placement": placement, "zero_stage": stage, "folder": str(tmp_path)}
    found = train(2, **settings)
    needed = sum(size for one in found for where, _, size in one.allocations if where == tier)
    assert run(2, refusal, **settings | {"placement": placement | {key: needed}}) == ["", ""]
    for error in run(2, refusal, **settings | {"placement": placement | {key: needed - 1}}):
        assert error.startswith("DoesNotFitError: ")
        assert f"offload.{key}" in error


# -- bandwidth -------------------------------------------------------------------------------------------------------
