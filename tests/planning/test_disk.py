"""Disk placement and tiles for arbitrary regions, budgets and tiers.

No byte is lost, no ranges overlap, and every feasible budget is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from offload.layout.planes import table
from offload.layout.regions import SHARD_MULTIPLE, Piece, Region
from offload.layout.residence import DISK, Residence, Row
from offload.optim.adamw import AdamW
from offload.planning import device_updates, disk
from offload.planning.disk import _spread, activation_ring_bytes, lay_out, ring_bytes
from offload.planning.memory import UnitPlan, plan_memory, staging_bytes
from offload.tiers.nvme import CHUNK_BYTES, stripe, stripe_bytes

PAGE_BYTES = 4096
KINDS = {"parameters": ("weights",), "gradients": ("gradients",), "optimizer": ("low", "exp_avg", "exp_avg_sq")}
HUGE = 64 << 20  # elements in the largest region, in shards of 2048: 2^37


def region(index: int, shards: int, compute: str = "bf16", trainable: bool = True, has_low: bool = True) -> Region:
    return Region(
        index=index,
        name=f"unit {index}",
        compute=compute,
        trainable=trainable,
        has_low=compute == "bf16" and (trainable or has_low),
        pieces=(Piece(index, 0, (shards * SHARD_MULTIPLE,)),),
        offsets=(0,),
        numel=shards * SHARD_MULTIPLE,
        units=(f"unit {index}",),
        table=table(compute, AdamW().moments),
    )


def plane_bytes(region: Region) -> dict[str, int]:
    return {plane.name: plane.num_bytes(region.numel) for plane in region.planes}


sizes = st.one_of(st.integers(1, 9), st.integers(1, 5000), st.integers(1, HUGE))
models = st.lists(
    st.tuples(sizes, st.sampled_from(["bf16", "fp32"]), st.booleans(), st.booleans()), min_size=1, max_size=12
).map(lambda found: [region(index, *one) for index, one in enumerate(found)])
placements = st.fixed_dictionaries({kind: st.sampled_from(["auto", "cpu", "nvme"]) for kind in KINDS})
tiles = st.integers(0, 10).map(lambda power: SHARD_MULTIPLE << power)


def everything(regions: Sequence[Region], tile_numel: int) -> Residence:
    """Return a layout with all planes on disk."""
    return Residence({r.index: Row(dict.fromkeys((p.name for p in r.planes), DISK), tile_numel) for r in regions})


def chosen(regions: Sequence[Region], tiers: Mapping[str, str], keeps: bool, host_bytes: int | None) -> Residence:
    staging = staging_bytes(regions, 2)
    return lay_out(regions, tiers, keeps_gradients=keeps, staging_bytes=staging, host_bytes=host_bytes)


def held(regions: Sequence[Region], layout: Residence, keeps: bool) -> dict[str, int]:
    """Return the planned bytes for a layout, by tier."""
    plan = plan_memory(
        [UnitPlan(r.name, (r,), resident=False) for r in regions],
        regions,
        layout,
        keeps_gradients=keeps,
        splits=False,
        rings=ring_bytes(layout, regions),
        stagings=2,
    )
    return {tier: sum(a.num_bytes for a in plan if a.tier == tier) for tier in ("cpu", "nvme")}


# -- tiles, records, files -----------------------------------------------------------------------------------


@given(models, tiles)
def test_tiles_cover_a_region_in_order(regions: list[Region], tile_numel: int) -> None:
    assume(all(r.numel <= 5000 * tile_numel for r in regions))
    layout = everything(regions, tile_numel)
    for one in regions:
        cut = layout.tiles(one)
        assert cut[0][0] == 0
        assert cut[-1][1] == one.numel
        assert all(before[1] == after[0] for before, after in pairwise(cut))
        assert all(0 < end - begin <= tile_numel and begin % SHARD_MULTIPLE == 0 for begin, end in cut)
        assert Residence().tiles(one) == [(0, one.numel)]


@given(models, tiles)
def test_records_hold_every_plane_once(regions: list[Region], tile_numel: int) -> None:
    assume(sum(r.numel for r in regions) <= 5000 * tile_numel)
    layout = everything(regions, tile_numel)
    records = [layout.record_bytes(one, end - begin) for one in regions for begin, end in layout.tiles(one)]
    assert layout.num_bytes(regions) == sum(records) == sum(sum(plane_bytes(r).values()) for r in regions)
    assert all(size % PAGE_BYTES == 0 for size in records)


chunks = st.integers(0, 40).map(lambda pages: pages * PAGE_BYTES * 50)


@given(chunks, chunks, st.integers(1, 5))
def test_stripes_hold_every_byte_once(offset: int, num_bytes: int, num_files: int) -> None:
    """Checked against a table of all pages, chunk by chunk."""
    table, ends = {}, [0] * num_files
    for page in range(0, offset + num_bytes, PAGE_BYTES):
        number = page // CHUNK_BYTES % num_files
        table[page] = number, ends[number]
        ends[number] += PAGE_BYTES
    assert stripe_bytes(offset + num_bytes, num_files) == ends
    found, page = stripe(offset, num_bytes, num_files), offset
    for number, place, size in found:
        for step in range(0, size, PAGE_BYTES):
            assert table[page + step] == (number, place + step)
        page += size
    assert page == offset + num_bytes


def test_nothing_makes_no_record() -> None:
    assert stripe(4096, 0, 3) == []
    assert stripe_bytes(0, 3) == [0, 0, 0]
    assert Residence().num_bytes([region(0, 3)]) == 0
    assert ring_bytes(Residence(), [region(0, 3)]) == {}
    assert chosen([], dict.fromkeys(KINDS, "nvme"), True, 0).rows == {}


# -- the share that stays in memory --------------------------------------------------------------------------


@given(st.lists(st.integers(0, 1 << 40), min_size=1, max_size=40), st.integers(-(1 << 40), 1 << 45))
def test_a_spread_keeps_its_budget_and_leaves_no_room(amounts: list[int], budget: int) -> None:
    wanted = {region(index, 1): size for index, size in enumerate(amounts)}
    kept = _spread(wanted, budget)
    used = sum(wanted[one] for one in kept)
    assert used <= max(0, budget)
    assert all(size > budget - used for one, size in wanted.items() if one not in kept and size)
    assert _spread(wanted, None) == set(wanted)
    assert _spread(wanted, sum(amounts)) == set(wanted)


@given(st.integers(1, 100), st.integers(0, 100), st.integers(1, 1 << 30))
def test_a_spread_is_even(count: int, num_kept: int, size: int) -> None:
    """With equal region sizes, the first k regions keep their fair share, for every k."""
    wanted = {region(index, 1): size for index in range(count)}
    kept = _spread(wanted, min(num_kept, count) * size)
    assert len(kept) == min(num_kept, count)
    for first, stays in enumerate(accumulate(one in kept for one in wanted), 1):
        assert abs(stays - first * len(kept) / count) <= 1


# -- the choice ----------------------------------------------------------------------------------------------

budgets = st.one_of(st.none(), st.integers(0, 1 << 22), st.integers(0, 1 << 34), st.integers(0, 1 << 43))


@given(models, placements, st.booleans(), budgets)
def test_what_was_asked_for_is_where_it_should_be(
    regions: list[Region], tiers: dict[str, str], keeps: bool, host_bytes: int | None
) -> None:
    layout = chosen(regions, tiers, keeps, host_bytes)
    for one in regions:
        there, has = layout.planes_on(DISK, one), plane_bytes(one)
        assert list(there) == [plane for plane in has if plane in there]
        assert set(there) <= set(has), "a frozen region has no moments"
        for kind, planes in KINDS.items():
            mine = set(planes) & set(has)
            if tiers[kind] == "cpu":
                assert not mine & set(there)
            elif tiers[kind] == "nvme":
                assert mine <= set(there)
            else:
                assert mine & set(there) in (set(), mine), "a kind of state of a region is in one place"
    if host_bytes is None:
        assert {tiers[kind] for kind in KINDS} >= {"nvme"} or not layout.rows
    assert all(row.tile_numel % SHARD_MULTIPLE == 0 for row in layout.rows.values())


@given(models, placements, st.booleans(), st.floats(0, 1))
def test_a_budget_is_kept_where_it_can_be(
    regions: list[Region], tiers: dict[str, str], keeps: bool, share: float
) -> None:
    """If the plan fits with all permitted planes on disk, the chosen plan fits too."""
    lowest = {kind: tier.replace("auto", "nvme") for kind, tier in tiers.items()}

    def least(host_bytes: int) -> int:
        return held(regions, chosen(regions, lowest, keeps, host_bytes), keeps)["cpu"]

    most = held(regions, Residence(), keeps)["cpu"]
    host_bytes = least(0) + int(share * max(0, most - least(0)))
    assume(least(host_bytes) <= host_bytes)
    assert held(regions, chosen(regions, tiers, keeps, host_bytes), keeps)["cpu"] <= host_bytes


@given(models, st.booleans())
def test_nothing_goes_to_disk_that_fits(regions: list[Region], keeps: bool) -> None:
    needed = held(regions, Residence(), keeps)["cpu"]
    tiers = dict.fromkeys(KINDS, "auto")
    assert not chosen(regions, tiers, keeps, needed).rows
    assert chosen(regions, tiers, keeps, needed - 1).rows
    assert held(regions, Residence(), keeps)["nvme"] == 0


@given(models, st.booleans(), budgets)
def test_weights_stay_before_gradients_and_gradients_before_moments(
    regions: list[Region], keeps: bool, host_bytes: int | None
) -> None:
    """The least moved planes go to disk first: no moments stay in space sufficient for a region's weights."""
    layout = chosen(regions, dict.fromkeys(KINDS, "auto"), keeps, host_bytes)
    low = [one.weight_bytes for one in regions if "weights" in layout.planes_on(DISK, one)]
    for one in regions:
        moments = {"low", "exp_avg", "exp_avg_sq"} & plane_bytes(one).keys()
        stays = sum(plane_bytes(one)[plane] for plane in moments - set(layout.planes_on(DISK, one)))
        assert not low or stays < min(low), "its place would have held weights"


# -- rings ---------------------------------------------------------------------------------------------------


@given(models, budgets)
def test_rings_do_not_grow_with_the_regions(regions: list[Region], host_bytes: int | None) -> None:
    layout = chosen(regions, dict.fromkeys(KINDS, "nvme"), True, host_bytes)
    rings = ring_bytes(layout, regions)
    assert sum(rings.values()) <= 4 * (16 + 4) * disk._LARGEST_TILE
    if host_bytes is not None and layout.rows[0].tile_numel > device_updates.SMALLEST_TILE:
        assert sum(rings.values()) <= host_bytes // 4
    largest = max(layout.record_bytes(one, layout.largest_tile(one)) for one in regions)
    assert rings[disk.UPDATE_RING] == 4 * largest
    assert all(size % PAGE_BYTES == 0 for size in rings.values())


@pytest.mark.parametrize("host_bytes", [None, 0, 1, 1 << 20, 3 << 22, 1 << 40])
@pytest.mark.parametrize("shards", [1, 1000, 1 << 20])
def test_the_ring_of_activations_is_bounded(host_bytes: int | None, shards: int) -> None:
    (size,) = activation_ring_bytes([region(0, shards)], host_bytes).values()
    assert 1 << 18 <= size <= 1 << 24
    assert size <= max(1 << 18, 4 * shards * SHARD_MULTIPLE)
    assert size % (4 * PAGE_BYTES) == 0
