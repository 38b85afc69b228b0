"""The choice of how a use of a unit is kept between forward and backward."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from offload.engine.units import keep
from offload.engine.units.recompute_policy import GraphChoice
from offload.engine.units.traits import GraphTraits, UnitTraits

SIGNATURE = ((True,), frozenset[int]())


def policy(mode: str, *, is_measured: bool = True, fits: bool = False, offloads: bool = False, pool: Any = None) -> Any:
    choice = GraphChoice(mode, has_budget=True, can_offload=pool is not None)
    return SimpleNamespace(
        mode=mode,
        graph_offload=pool,
        keeps_on_device=lambda _: choice.stays(fits),
        is_measured=lambda _: is_measured,
        offloads=lambda _: choice.leaves(offloads),
    )


@pytest.mark.parametrize(
    ("chosen_by", "expected"),
    [
        (policy("always", fits=True), keep.Inputs),
        (policy("always", offloads=True, pool="cpu"), keep.OffloadedGraph),
        (policy("never"), keep.SavedGraph),
        (policy("never", pool="cpu"), keep.OffloadedGraph),
        (policy("auto", fits=True), keep.SavedGraph),
        (policy("auto"), keep.Inputs),
        (policy("auto", offloads=True, pool="cpu"), keep.OffloadedGraph),
        (policy("products", fits=True), keep.Products),
        (policy("products"), keep.Inputs),
        (policy("products", is_measured=False), keep.MeasuredProducts),
    ],
)
def test_mode_and_room_choose(chosen_by: Any, expected: type) -> None:
    unit: Any = SimpleNamespace(traits=UnitTraits(), weight_bytes=100)
    assert keep.keep_for(chosen_by, unit, ("unit",), SIGNATURE) is expected


@pytest.mark.parametrize(
    ("traits", "expected"),
    [
        (UnitTraits(keeps=True, graphs={SIGNATURE: GraphTraits(keeps_nothing=True)}), keep.InputsAndTensors),
        (UnitTraits(graphs={SIGNATURE: GraphTraits(keeps_nothing=True)}, mutated={0}), keep.SavedGraph),
        (UnitTraits(rewrites=True), keep.Inputs),
        (UnitTraits(mutated={0}), keep.Inputs),
        (UnitTraits(copied_bytes=11), keep.Inputs),
        (UnitTraits(copied_bytes=10), keep.OffloadedGraph),
    ],
)
def test_traits_go_before_the_mode(traits: UnitTraits, expected: type) -> None:
    unit: Any = SimpleNamespace(traits=traits, weight_bytes=100)
    assert keep.keep_for(policy("never", pool="cpu"), unit, ("unit",), SIGNATURE) is expected
