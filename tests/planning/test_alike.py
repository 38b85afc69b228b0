"""Plans count alike regions once: every plan equals the plan that takes each region for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.layout.regions import Region, alike, without_repeats
from offload.layout.sharding import Sharding
from offload.planning.device_updates import streamed_bytes, update_bytes
from offload.planning.disk import lay_out, optimizer_bytes, ring_bytes
from offload.planning.memory import UnitPlan, plan_memory, shard_bytes, staging_bytes
from offload.schedule.build import window_bytes
from tests.planning.test_disk import region

TIERS = ("parameters", "gradients", "optimizer")
shardings = st.sampled_from([Sharding(), Sharding(0, 2, 3), Sharding(0, 2, 2, 0, 2)])


def stacks(kinds: Sequence[tuple[int, bool, int]]) -> list[Region]:
    """Return regions from (size, trainable, number of neighbours)."""
    flat = [(size, trainable) for size, trainable, count in kinds for _ in range(count)]
    return [
        region(index, 4 * size, trainable=is_trained, has_low=False) for index, (size, is_trained) in enumerate(flat)
    ]


models = st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.integers(1, 5)), min_size=1, max_size=5).map(stacks)


def apart(regions: Sequence[Region]) -> list[Region]:
    """Return equal regions, each of a kind of its own."""
    copies = [replace(each) for each in regions]
    for each in copies:
        vars(each)["kind"] = object()
    return copies


def planned(regions: Sequence[Region], how: Mapping[str, Any], passes: int, in_records: bool) -> tuple[Any, ...]:
    layout = lay_out(regions, staging_bytes=staging_bytes(regions, 2, how["sharding"]), **how)
    middle = -(-len(regions) // 2)
    halves = regions[:middle], regions[middle:]
    units = [UnitPlan(each.name, (each,), resident=each.index == 0) for each in halves[0]]
    units.append(UnitPlan("experts", tuple(halves[1]), False, in_records))
    keeps = how["keeps_gradients"]
    rings = ring_bytes(layout, regions)
    plan = plan_memory(
        units, regions, layout, keeps_gradients=keeps, splits=False, passes=passes, rings=rings, stagings=2, buffers=2
    )
    trainable = [each for each in regions if each.trainable]
    sums = (
        update_bytes(regions, how["sharding"]),
        streamed_bytes(trainable, layout),
        optimizer_bytes(regions, layout.sharding),
    )
    return plan, layout, sums, layout.resting_labels(regions)


@given(
    models,
    st.fixed_dictionaries({kind: st.sampled_from(["auto", "cpu", "nvme"]) for kind in TIERS}),
    st.one_of(st.none(), st.floats(0, 1)),
    st.tuples(st.booleans(), st.booleans(), st.integers(1, 2), st.sampled_from(["cpu", "both", "device"])),
    shardings,
)
def test_a_plan_is_the_sum_over_its_regions(
    regions: list[Region],
    tiers: Mapping[str, str],
    share: float | None,
    options: tuple[bool, bool, int, str],
    sharding: Sharding,
) -> None:
    keeps, in_records, passes, update = options
    all_bytes = sum(plane.num_bytes(each.numel) for each in regions for plane in each.planes)
    how = {
        "tiers": tiers,
        "keeps_gradients": keeps,
        "host_bytes": None if share is None else int(share * all_bytes),
        "sharding": sharding,
        "update": update,
        "device_bytes": all_bytes // 8,
    }
    assert planned(regions, how, passes, in_records) == planned(apart(regions), how, passes, in_records)


@given(models, st.integers(1, 4))
def test_a_window_sees_no_more_neighbours_of_a_kind_than_it_holds(regions: list[Region], most: int) -> None:
    few = without_repeats(regions, most)
    assert window_bytes([each.numel for each in few], most) == window_bytes([each.numel for each in regions], most)
    assert sum(count for _, count in alike(regions)) == len(regions)


@pytest.mark.parametrize("accumulates", [False, True])
@given(st.integers(1, 4), st.integers(1, 3))
def test_large_regions_are_staged_in_parts(accumulates: bool, count: int, stagings: int) -> None:
    regions = [region(index, 10_000) for index in range(count)]  # two parts and a half
    whole = apart(regions)
    for each in (regions, whole):
        found = staging_bytes(each, stagings, accumulates=accumulates)
        parts = [1 << 24, 1 << 24, 2 * regions[0].numel - (1 << 25)] if accumulates else [2 * regions[0].numel]
        assert found == window_bytes(parts * count, stagings)
    assert shard_bytes(regions, stagings, Sharding(0, 2, 3)) == shard_bytes(whole, stagings, Sharding(0, 2, 3))
