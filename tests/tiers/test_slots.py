"""The device slot for streamed units, over a store on each tier."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from offload.errors import DoesNotFitError
from offload.lanes.lanes import Lanes
from offload.layout.build_regions import build_regions
from offload.layout.regions import ParameterInfo, Region
from offload.layout.residence import Residence
from offload.optim.adamw import AdamW
from offload.tiers.counters import Counters, Ledger
from offload.tiers.device import CpuDevice
from offload.tiers.slots import Slots
from offload.tiers.store import Store
from offload.tiers.tile import DeferredUpdates

SHAPES = {"a": [(40, 30), (7,)], "b": [(64, 64), (1,), ()]}


class Bench:
    """Two units with a store and a slot."""

    def __init__(self, tier: str = "cpu", precision: str = "fp32", device_memory: int | None = None) -> None:
        self.infos: list[ParameterInfo] = []
        units: dict[str, list[int]] = {}
        for unit, shapes in SHAPES.items():
            for number, shape in enumerate(shapes):
                units.setdefault(unit, []).append(len(self.infos))
                self.infos.append(ParameterInfo(len(self.infos), f"{unit}.{number}", shape, True, precision, False))
        self.regions = build_regions(self.infos, units, [AdamW().moments])
        self.device, self.host, self.counters = (
            CpuDevice(Ledger("device", device_memory), False),
            Ledger("cpu"),
            Counters(),
        )
        self.lanes = Lanes(overlap=False, throttle={})
        residence = Residence(common=tier)
        self.store = Store(
            self.regions,
            self.infos,
            device=self.device,
            host=self.host,
            lanes=self.lanes,
            residence=residence,
            counters=self.counters,
        )
        self.values = [torch.randn(info.shape) for info in self.infos]
        for info, value in zip(self.infos, self.values, strict=True):
            self.write(info.index, value)
        size = max(region.weight_bytes for region in self.regions)
        self.slots = Slots(
            self.store,
            DeferredUpdates(),
            slot_bytes=size if tier == "cpu" else 0,
            slot_name="unit slot",
            debug=True,
        )

    def write(self, index: int, value: torch.Tensor) -> None:
        self.store.values.write(index, lambda begin, end: value.view(-1)[begin:end], value.dtype)

    def of(self, unit: str) -> tuple[Region, ...]:
        return tuple(region for region in self.regions if region.units == (unit,))

    def fetch(self, regions: tuple[Region, ...]) -> None:
        """Fetch on demand to the slot's start."""
        cargo = self.slots.cargo_of(regions)
        if self.slots.cargo_bytes(cargo) and cargo not in self.slots.valid_offsets():
            self.slots.fetch(cargo, 0)

    def shown(self, regions: tuple[Region, ...]) -> dict[int, Any]:
        return {piece.parameter: p.detach().clone() for piece, p in self.slots.parameters(regions).items()}


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("tier", ["cpu", "device"])
def test_fetching_shows_a_units_weights_under_their_shapes(tier, precision):
    bench = Bench(tier, precision)
    for unit in ("a", "b", "a"):
        regions = bench.of(unit)
        bench.fetch(regions)
        for index, shown in bench.shown(regions).items():
            wanted = bench.values[index]
            assert shown.shape == wanted.shape
            assert shown.is_contiguous()
            stored = bench.store.values.read_range(index, 0, wanted.numel(), travelling=True)
            assert torch.equal(shown.view(-1), stored)
            if precision == "fp32":
                assert torch.equal(shown, wanted)
            else:
                assert shown.dtype == torch.bfloat16
                torch.testing.assert_close(shown.float(), wanted, rtol=2**-8, atol=0)
            assert torch.equal(bench.store.values.read(index), wanted), "the master keeps all bits"


def test_a_unit_that_is_still_there_is_not_fetched_again():
    bench = Bench()
    a, b = bench.of("a"), bench.of("b")
    bench.fetch(a)
    bench.fetch(a)
    assert bench.counters.h2d_bytes == a[0].weight_bytes
    bench.fetch(b)
    bench.fetch(a)
    assert bench.counters.h2d_bytes == 2 * a[0].weight_bytes + b[0].weight_bytes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_after_an_update_the_slot_is_poisoned_and_fetched_again(precision):
    bench = Bench(precision=precision)
    a, b = bench.of("a"), bench.of("b")
    bench.fetch(a)
    late = bench.slots.parameters(a)
    bench.slots.invalidate(b)
    assert not any(p.isnan().any() for p in late.values()), "another region's update"
    bench.slots.invalidate(a)
    assert all(p.isnan().all() for p in late.values())
    bench.write(0, torch.zeros(SHAPES["a"][0]))
    bench.fetch(a)
    assert not bench.shown(a)[0].any()


def test_resident_regions_have_a_place_of_their_own():
    bench = Bench()
    a, b = bench.of("a"), bench.of("b")
    bench.slots.keep(a)
    assert bench.device.ledger.allocations["resident weights"] == a[0].weight_bytes
    assert bench.slots.is_resident(a[0])
    assert not bench.slots.is_resident(b[0])
    kept = bench.slots.parameters(a)
    bench.fetch(b)
    assert all(torch.equal(p, bench.values[piece.parameter]) for piece, p in kept.items())
    bench.write(1, torch.ones(7))
    bench.slots.refresh()
    assert (kept[a[0].pieces[1]] == 1).all()


def test_a_store_on_the_device_needs_no_slot_and_moves_nothing():
    bench = Bench("device")
    bench.fetch(bench.of("a"))
    assert bench.counters.h2d_bytes == 0
    assert bench.slots.capacity_bytes == 0
    assert bench.host.current_bytes == 0


def test_a_slot_beyond_the_budget_is_refused():
    size = Bench().device.ledger.current_bytes
    Bench(device_memory=size)
    with pytest.raises(DoesNotFitError, match="unit slot"):
        Bench(device_memory=size - 1)


@pytest.mark.parametrize("tier", ["cpu", "device"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_ledgers_know_every_byte_of_the_states(tier, precision):
    bench = Bench(tier, precision)
    numel = sum(region.numel for region in bench.regions)
    ledger = bench.host if tier == "cpu" else bench.device.ledger
    assert ledger.current_bytes == 12 * numel
    bench.store.hold_gradients()
    assert ledger.allocations["gradients"] == numel * (4 if precision == "fp32" else 2)
    bench.store.hold_gradients([region.index for region in bench.store.states])
    assert ledger.allocations["gradients"] == 4 * numel
    bench.store.hold_gradients([region.index for region in bench.store.states])
    assert ledger.allocations["gradients"] == 4 * numel
