"""Update placement for host states from simulated machine rates; tiles and ring for any regions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offload import Placement
from offload.distributed.comm import Comm
from offload.engine.prepare import prepare
from offload.lanes.timeline import Throttle
from offload.layout.regions import SHARD_MULTIPLE, Region
from offload.layout.residence import DEVICE, Residence
from offload.layout.sharding import Sharding
from offload.machine.hardware import Hardware, Rates
from offload.planning import device_updates
from offload.planning.device_updates import all_on_device, estimate_seconds, ring_bytes, tile_numel
from offload.planning.disk import lay_out, optimizer_bytes
from offload.planning.machines import SpecifiedMachine, Speeds
from offload.planning.memory import UnitPlan, plan_memory
from offload.planning.settings import Settings
from tests.planning.test_disk import region

WHERE = ("device", "cpu", "nvme")
ON_HOST = {"parameters": "cpu", "gradients": "cpu", "optimizer": "cpu"}


def speeds(kernel: float, link: float, device: float = 1e12) -> Speeds:
    """Return machine speeds: host update, link and device update in bytes per second."""
    rates = Rates(link, link, 2 * link, {}, device, kernel, 1e-5)
    return Speeds(Hardware("played", "cuda", 1, 1 << 40, 1 << 40, None, None, shares_memory=False, rates=rates))


def is_faster(regions: Sequence[Region], throttles: Mapping[str, Throttle], fast: Speeds) -> bool:
    """Return whether updates of all trainable regions are faster on the device."""
    layouts = all_on_device(regions, SHARD_MULTIPLE, Sharding()), Residence()
    on_device, on_host = (estimate_seconds(regions, layout, throttles, fast) for layout in layouts)
    return on_device < on_host


@pytest.mark.parametrize(
    ("kernel", "link", "device", "wins"),
    [
        (20e9, 50e9, 1e12, True),  # 18 H2D bytes per element, against 26 bytes read and written on the host
        (200e9, 50e9, 1e12, False),
        (20e9, 5e9, 1e12, False),
        (20e9, 50e9, 10e9, False),
    ],
)
def test_auto_goes_by_what_is_faster(kernel: float, link: float, device: float, wins: bool) -> None:
    assert is_faster([region(0, 1 << 16)], {}, speeds(kernel, link, device)) == wins


def test_auto_counts_what_the_link_moves_besides() -> None:
    """Per element: 26 bytes on the host, or 14 H2D bytes plus two transfers of the 2-byte weights."""
    regions = [region(0, 1 << 16)]
    for link, wins in ((18.1e9, True), (17.9e9, False)):
        assert is_faster(regions, {}, speeds(26e9, link)) == wins
    fast = speeds(26e9, 100e9)
    assert not is_faster(regions, {"h2d": Throttle(17.9e9)}, fast)
    frozen = [region(1, 1 << 18, trainable=False)]  # frozen weights also need H2D copies
    assert not is_faster(regions + frozen, {"h2d": Throttle(20e9)}, fast)


def test_for_a_small_model_nothing_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SpecifiedMachine, "speeds", Mock(side_effect=AssertionError("it was")))
    settings, machine = Settings(placement=Placement(optimizer="cpu")), SpecifiedMachine(speeds(1e9, 1e9).hardware)
    for width, is_asked in ((64, False), (4096, True)):
        with pytest.raises(AssertionError) if is_asked else nullcontext():
            prepare(nn.Linear(width, width, device="meta"), settings, Comm(), machine)


SIZES = st.tuples(st.integers(1, 999), st.sampled_from(["bf16", "fp32"]), st.booleans(), st.booleans())


@given(st.lists(SIZES, min_size=1, max_size=5), st.one_of(st.none(), st.integers(0, 1 << 40)), st.integers(1, 3))
def test_the_ring_holds_four_of_any_tile(shapes: Any, device_bytes: int | None, size: int) -> None:
    regions = [region(index, size * shards, *how) for index, (shards, *how) in enumerate(shapes)]
    sharding = Sharding(0, size, 3)
    numel = tile_numel(regions, device_bytes, sharding)
    assert numel % SHARD_MULTIPLE == 0
    layout = lay_out(
        regions,
        ON_HOST,
        keeps_gradients=True,
        staging_bytes=0,
        host_bytes=None,
        sharding=sharding,
        update="device",
        most_numel=numel,
    )
    ring = ring_bytes(layout, regions)
    for one in regions:
        tiles = layout.tiles(one)
        assert [tiles[0][0], *(end for _, end in tiles)] == [*(begin for begin, _ in tiles), sharding.own(one).stop]
        assert one.trainable or len(tiles) == 1, "what is frozen moves nowhere"
        for first, last in tiles if one.trainable else ():
            assert 4 * sum(plane.num_bytes(last - first) for plane in one.planes) <= ring
    assert bool(ring) == any(one.trainable for one in regions)
    if device_bytes is not None and numel > device_updates.SMALLEST_TILE:
        assert ring * device_updates._RING_SHARE <= device_bytes


@given(st.lists(SIZES, min_size=1, max_size=5), st.integers(0, 1 << 26), st.sampled_from(["device", "both"]))
def test_what_stays_is_in_no_other_place(shapes: Any, device_bytes: int, update: str) -> None:
    regions = [region(index, *shape) for index, shape in enumerate(shapes)]
    units = [UnitPlan(one.name, (one,), resident=False) for one in regions]
    how = {"keeps_gradients": True, "staging_bytes": 0, "host_bytes": None, "update": update}
    how["most_numel"] = 1 << 20
    totals = []
    for tier in ("cpu", "nvme"):
        layout = lay_out(regions, ON_HOST | {"optimizer": tier}, device_bytes=device_bytes, **how)
        plan = plan_memory(units, regions, layout, keeps_gradients=True, splits=False)
        moments = {where: sum(a.num_bytes for a in plan if a.tier == where and "exp" in a.name) for where in WHERE}
        assert moments["device"] <= device_bytes
        assert not moments["nvme" if tier == "cpu" else "cpu"]
        for one in regions:
            is_elsewhere = one.trainable if update == "device" else bool(layout.planes_on(DEVICE, one))
            assert (layout.row(one).update == DEVICE) == is_elsewhere
        totals.append(sum(moments.values()))
    assert totals == [sum(8 * one.numel for one in regions if one.trainable)] * 2


def test_tiles_of_disk_and_of_memory_are_one() -> None:
    regions = [region(0, 1000), region(1, 100)]
    tiers = {"parameters": "cpu", "gradients": "cpu", "optimizer": "nvme"}
    how = {"keeps_gradients": True, "staging_bytes": 0, "host_bytes": None}
    assert not lay_out(regions, tiers, **how).updated_on_device
    small = lay_out(regions, tiers, update="device", most_numel=SHARD_MULTIPLE, **how)
    assert (small.rows[0].tile_numel, small.updated_on_device, len(small.tiles(regions[0]))) == (
        SHARD_MULTIPLE,
        {0, 1},
        1000,
    )
    large = lay_out(regions, tiers, update="device", most_numel=1 << 40, **how)
    assert lay_out(regions, tiers, **how).rows[0].tile_numel == large.rows[0].tile_numel
    assert Residence().tiles(regions[0]) == [(0, regions[0].numel)]


# -- both in one step ----------------------------------------------------------------------------------------


def test_the_first_regions_are_updated_on_the_device_as_far_as_it_has_room() -> None:
    """The gradients of the first regions arrive last, and the next forward pass needs these regions first."""
    regions = [region(index, 10) for index in range(6)]
    size = optimizer_bytes(regions[:1], Sharding())
    how = {"keeps_gradients": True, "staging_bytes": 0, "host_bytes": None, "most_numel": 1 << 20}
    for room, chosen in ((0, set()), (size - 1, set()), (3 * size, {0, 1, 2}), (6 * size, set(range(6)))):
        layout = lay_out(regions, ON_HOST, update="both", device_bytes=room, **how)
        assert layout.updated_on_device == layout.indices_on(DEVICE) == chosen
    mixed = [region(0, 100), *regions[1:]]  # a region without room leaves the space to later regions
    assert lay_out(mixed, ON_HOST, update="both", device_bytes=3 * size, **how).updated_on_device == {1, 2, 3}


def test_auto_takes_both_where_the_host_is_what_is_late() -> None:
    """The host moves 24 bytes per element. A device update moves 4 H2D and 2 D2H bytes."""
    model = nn.Sequential(*(nn.Linear(4096, 4096, bias=False, device="meta") for _ in range(8)))
    placement = Placement("cpu", "auto", device_memory="1600MiB")
    for kernel, link, update in ((100e9, 50e9, "both"), (2e9, 500e9, "device"), (500e9, 5e9, "cpu")):
        machine = SpecifiedMachine(speeds(kernel, link).hardware)
        plan = prepare(model, Settings(placement=placement, precision="bf16"), Comm(), machine).plan
        assert plan.update == update
        assert bool(plan.residence.indices_on(DEVICE)) == (update != "cpu")
