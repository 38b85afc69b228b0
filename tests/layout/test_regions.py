"""Regions for arbitrary models: every parameter once, no overlap, all aligned."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.extras.quant.codecs import INT8
from offload.layout.build_regions import build_regions
from offload.layout.codecs import EXACT
from offload.layout.planes import Factor
from offload.layout.regions import ParameterInfo, align
from offload.layout.residence import DISK, Residence, Row
from offload.layout.sharding import Sharding
from offload.optim.adamw import AdamW

MOMENTS = [AdamW().moments]
ALIGNMENT, SHARD = 128, 2048  # elements: 256 bytes in bf16, and 4096-byte pages in two-byte planes

shapes = st.sampled_from([(), (0,), (1,), (127,), (128,), (129,), (7, 9), (2048,), (3, 683), (70, 60)])


@st.composite
def models(draw: st.DrawFn) -> tuple[list[ParameterInfo], dict[str, list[int]]]:
    """Return parameters and units. Each parameter occurs at least once; some are tied or occur twice in a unit."""
    count = draw(st.integers(1, 12))
    parameters = [
        ParameterInfo(
            index=index,
            name=f"p{index}",
            shape=draw(shapes),
            trainable=draw(st.booleans()),
            compute=draw(st.sampled_from(["bf16", "fp32"])),
            bf16_source=draw(st.booleans()),
            lr_scale=draw(st.sampled_from([1.0, 0.5])),
            weight_decay=draw(st.sampled_from([0.0, 0.1])),
            link=draw(st.sampled_from([EXACT, INT8])),
        )
        for index in range(count)
    ]
    names = [f"unit {number}" for number in range(draw(st.integers(1, 5)))]
    units: dict[str, list[int]] = {name: [] for name in names}
    for index in range(count):
        for name in draw(st.lists(st.sampled_from(names), min_size=1, max_size=3)):
            units[name].append(index)
    return parameters, units


@settings(max_examples=40)
@given(models(), st.sampled_from([1, 2, 8]))
def test_every_parameter_lies_in_one_region_of_its_like_and_over_no_other(model, world_size):
    parameters, units = model
    regions = build_regions(parameters, units, MOMENTS, world_size)
    assert sorted(index for region in regions for index in region.parameters) == list(range(len(parameters)))
    assert [region.index for region in regions] == list(range(len(regions)))
    for region in regions:
        infos = [parameters[index] for index in region.parameters]
        assert region.sizes == tuple(info.numel for info in infos)
        assert region.units == tuple(name for name in units if region.parameters[0] in units[name])
        end = 0
        for info, offset, size in zip(infos, region.offsets, region.sizes, strict=True):
            assert offset % ALIGNMENT == 0
            assert end <= offset < end + ALIGNMENT, "overlap, or more padding than the alignment asks for"
            end = offset + size
            assert region.units == tuple(name for name in units if info.index in units[name]), "tied elsewhere"
            assert (region.compute, region.trainable) == (info.compute, info.trainable)
            assert region.link is (info.link if info.trainable else EXACT)
            assert region.has_low == (info.compute == "bf16" and (info.trainable or not info.bf16_source))
        assert region.numel >= end
        assert region.numel % (SHARD * world_size) == 0
        assert region.numel - align(end, ALIGNMENT) < SHARD * world_size
        settings = [(info.lr_scale, info.weight_decay) for info in infos]
        changes = sum(a != b for a, b in itertools.pairwise(settings))
        assert changes == len(set(settings)) - 1, "one kernel call updates neighbours of equal settings"


@settings(max_examples=25)
@given(models())
def test_a_rule_may_keep_no_low_half_of_what_it_trains(model):
    for region in build_regions(*model, MOMENTS, without_low=[0]):
        frozen = not region.trainable and any(not model[0][index].bf16_source for index in region.parameters)
        assert region.has_low == (region.compute == "bf16" and frozen)


@pytest.mark.parametrize(
    ("change", "states", "bytes_each"),
    [
        ({}, "weights low exp_avg exp_avg_sq", 14),
        ({"compute": "fp32"}, "weights exp_avg exp_avg_sq", 16),
        ({"link": INT8}, "codes weights low exp_avg exp_avg_sq", 14 + 132),
        ({"trainable": False}, "weights low", 4),
        ({"trainable": False, "bf16_source": True}, "weights", 2),
        ({"trainable": False, "compute": "fp32"}, "weights", 4),
    ],
)
def test_planes_of_a_parameter(change, states, bytes_each):
    info = ParameterInfo(index=0, name="w", shape=(SHARD,), trainable=True, compute="bf16", bf16_source=False)
    (region,) = build_regions([replace(info, **change)], {"unit": [0]}, MOMENTS)
    assert [plane.name for plane in region.states] == states.split()
    assert [plane.name for plane in region.planes[len(region.states) :]] == ["gradients"] * region.trainable
    assert sum(plane.num_bytes(1) for plane in region.planes) == bytes_each


@settings(max_examples=25)
@given(models(), st.sampled_from([1, 2, 3, 8]), st.sampled_from([2048, 4096, 1 << 20]), st.integers(0, 3))
def test_nothing_cuts_a_parameter_of_a_rule_by_matrix(model, num_ranges, tile, stage):
    """Rank ranges and disk tiles respect matrix parameters. The pieces cover each region exactly once."""
    regions = build_regions(*model, MOMENTS, num_ranges, factors={0: ()}, num_ranges=num_ranges if stage else 1)
    for region in regions:
        if not region.trainable:
            assert not region.by_matrix
            continue
        assert region.numel % (SHARD * num_ranges) == 0
        spans = list(zip(region.offsets, region.sizes, strict=True))
        assert all(offset % ALIGNMENT == 0 for offset, _ in spans)
        assert all(a + size <= b for (a, size), (b, _) in itertools.pairwise(spans))
        sharding = Sharding(rank=0, size=num_ranges, stage=stage)
        layout = Residence({region.index: Row({"weights": DISK}, tile)}, sharding)
        owners = range(sharding.num_ranges)
        parts = [part for owner in owners for part in layout.tiles(region, owner)]
        assert [begin for begin, _ in parts] == [0, *(end for _, end in parts[:-1])]
        assert parts[-1][1] == region.numel
        for offset, size in spans:
            assert any(begin <= offset and offset + size <= end for begin, end in parts)
        assert layout.largest_tile(region) == max(end - begin for begin, end in parts)
        if sharding.publishes:
            assert len({len(layout.tiles(region, owner)) for owner in owners}) == 1
        elif not stage:
            for begin, end in parts:
                its = [offset for offset, size in spans if begin <= offset < end and size]
                assert end - begin <= tile or len(its) <= 1


@pytest.mark.parametrize("sharding", [Sharding(0, 2, 1), Sharding(0, 2, 3), Sharding(0, 2, 3, 0, 2, spreads=True)])
def test_all_ranks_plan_the_disk_of_the_rank_with_most_pages(sharding: Sharding) -> None:
    """One rank owns more matrices than another, so its tiles end inside more pages."""
    info = ParameterInfo(index=0, name="w", shape=(70, 60), trainable=True, compute="bf16", bf16_source=False)
    matrices, num_ranges = [replace(info, index=index) for index in range(5)], sharding.num_ranges
    (region,) = build_regions(
        matrices, {"unit": range(5)}, MOMENTS, sharding.num_ranks, factors={0: ()}, num_ranges=num_ranges
    )
    rows = {region.index: Row(dict.fromkeys((plane.name for plane in region.states), DISK), 2048)}
    planned, written = [], []
    for rank, replica in itertools.product(range(sharding.size), range(sharding.num_replicas)):
        own = replace(sharding, rank=rank, replica=replica)
        layout = Residence(rows, own)
        tiles = [(owner == own.owner, tile) for owner in own.partners for tile in layout.tiles(region, owner)]
        written.append(sum(layout.record_bytes(region, end - begin, is_own) for is_own, (begin, end) in tiles))
        planned.append(layout.num_bytes([region]))
    assert set(planned) == {max(written)}
    assert sharding.publishes == (len(set(written)) == 1)


@pytest.mark.parametrize(
    ("shape", "rows", "columns", "elements"),
    [((), 0, 0, 1), ((7,), 0, 0, 7), ((3, 5), 3, 5, 0), ((2, 3, 5), 6, 10, 0), ((2, 4, 3, 5), 24, 40, 0)],
)
def test_factors_have_the_elements_of_a_shape(shape, rows, columns, elements):
    counts = [Factor("x", along).numel(shape) for along in ("rows", "columns", "elements")]
    assert counts == [rows, columns, elements]
