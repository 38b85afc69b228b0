"""Placement search: equal to brute force, within every budget, and no deeper tier than useful."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st

from offload import Placement
from offload.extras.plan.search import MIN_GAIN, PlacementCandidate, PlacementSearch, placements, search
from offload.extras.plan.workload import Workload
from offload.machine.hardware import Hardware, Rates
from offload.planning.machines import ThisMachine
from offload.planning.settings import Settings
from tests.engine.device import cpu_only
from tests.forecast.planned import Stack, planned, workload

pytestmark = cpu_only("plans here are a CPU's")

WIDTH, DEPTH = 16, 4
KIB = 1 << 10
ANYWHERE: dict[str, Any] = {"parameters": "auto", "optimizer": "auto", "activations": "auto"}
RATES = Rates(2e7, 2e7, 4e7, {"fp32": 1.0, "bf16": 2.0}, 1e11, 4e7, 0.0, 5e6, 5e6)
MACHINE = Hardware("made up", "cuda", 1, 1 << 30, 1 << 30, 1 << 40, None, False, RATES)
BASE = planned(Stack(WIDTH, DEPTH), Settings())


def work() -> Workload:
    return workload(WIDTH, DEPTH, Settings(), seconds=0.005, kept_bytes=30 * KIB)


def placer(rates: Rates = RATES) -> PlacementSearch:
    return PlacementSearch(BASE, work(), replace(MACHINE, rates=rates), ThisMachine(None))


def wanted(**placement: Any) -> Settings:
    """Return settings with every choice open. Throttled links make a CPU plan with lanes."""
    return Settings(
        placement=Placement(**{**ANYWHERE, "nvme_dir": "/tmp", **placement}),
        recompute="auto",
        throttle={"collective": 1e12},
    )


@dataclass
class Fake:
    """Estimate with fixed values; `was_played` records a simulation request."""

    least_seconds: float
    bound_seconds: float
    step_seconds_: float
    fits: bool = True
    was_played: bool = False

    @property
    def step_seconds(self) -> float:
        self.was_played = True
        return self.step_seconds_


_SECONDS = st.sampled_from([0.0, 0.004, 0.008, 0.5, 1.0])


@given(st.lists(st.tuples(_SECONDS, _SECONDS, _SECONDS, st.booleans()), max_size=12))
def test_what_is_found_is_what_brute_force_finds(drawn: list[tuple[float, float, float, bool]]) -> None:
    fakes = [Fake(1 + a, 1 + a + b, 1 + a + b + c, fits) for a, b, c, fits in drawn]
    fitting = [fake for fake in fakes if fake.fits]
    fastest = min((fake.step_seconds_ for fake in fitting), default=0)
    assert search(fakes) is next((fake for fake in fitting if fake.step_seconds_ <= fastest * (1 + MIN_GAIN)), None)


@pytest.mark.parametrize(
    ("fakes", "chosen", "played"),
    [
        ([Fake(1.0, 3.0, 4.0), Fake(2.0, 2.0, 2.5), Fake(2.6, 2.6, 2.7)], 1, [False, True, False]),
        ([Fake(2.0, 2.0, 2.0), Fake(1.99, 1.99, 1.99), Fake(2.0, 2.0, 2.0)], 0, [True, True, False]),
    ],
    ids=["slower by its bound", "no faster by more than is worth it"],
)
def test_what_cannot_be_chosen_is_not_played(fakes: list[Fake], chosen: int, played: list[bool]) -> None:
    assert search(fakes) is fakes[chosen]
    assert [fake.was_played for fake in fakes] == played


@pytest.mark.slow
@pytest.mark.parametrize(
    "placement",
    [{"device_memory": "150KiB", "host_memory": "260KiB"}, {"device_memory": "400KiB", "activations": "device"}],
)
def test_no_placement_that_fits_is_faster(placement: dict[str, Any]) -> None:
    place = placer()
    every = [PlacementCandidate(each, place) for each in placements(wanted(**placement))]
    found = search(every)
    fastest = min(each.step_seconds for each in every if each.fits)
    assert found is not None
    assert found is next(each for each in every if each.fits and each.step_seconds <= fastest * (1 + MIN_GAIN))
    for each in every:
        if each.fits:
            assert each.least_seconds <= each.step_seconds * 1.0001
            assert each.bound_seconds <= each.step_seconds * 1.0001


@pytest.mark.slow
@how(max_examples=6, deadline=None)
@given(st.integers(60, 500), st.integers(40, 400), st.sampled_from([5e6, 2e7, 1e10]))
def test_no_budget_is_ever_exceeded(device_kib: int, host_kib: int, link: float) -> None:
    settings = wanted(device_memory=device_kib * KIB, host_memory=host_kib * KIB)
    place = placer(replace(RATES, h2d_bytes_per_s=link, d2h_bytes_per_s=link))
    found = search([PlacementCandidate(each, place) for each in placements(settings)])
    if found is not None:
        step = found.step
        assert step is not None
        held = {tier: sum(a.num_bytes for a in step.plan.allocations if a.tier == tier) for tier in ("device", "cpu")}
        assert step.memory.device_bytes <= device_kib * KIB
        waiting = step.waiting_bytes("cpu")
        assert held["cpu"] + waiting <= host_kib * KIB
        assert held["device"] <= device_kib * KIB


@pytest.mark.slow
def test_what_is_chosen_says_where_everything_is_and_what_does_not_fit_is_left_as_it_is() -> None:
    chosen = placer().choose(wanted(device_memory="150KiB"))
    assert "auto" not in (chosen.placement.parameters, chosen.placement.optimizer, chosen.update)
    assert placer().choose(chosen) == chosen
    impossible = wanted(device_memory="10KiB")
    assert placer().choose(impossible) is impossible


def test_a_machine_without_a_disk_has_nothing_on_it() -> None:
    place = placer(replace(RATES, nvme_read_bytes_per_s=None, nvme_write_bytes_per_s=None))
    on_disk = replace(wanted().placement, parameters="nvme", optimizer="nvme", device_memory=150 * KIB)
    assert PlacementCandidate(replace(wanted(), placement=on_disk, update="cpu"), placer()).fits
    assert not PlacementCandidate(replace(wanted(), placement=on_disk, update="cpu"), place).fits


def test_settings_that_say_what_they_want_are_left_alone() -> None:
    chosen = Settings(placement=Placement(parameters="cpu", optimizer="cpu"), update="cpu", clip="deferred", prefetch=2)
    assert list(placements(chosen)) == [chosen]


def test_ranks_may_shard_less_than_they_are_told() -> None:
    chosen = Settings(placement=Placement(parameters="cpu", optimizer="cpu"), update="cpu", clip="deferred", prefetch=2)
    stages = [each.zero_stage for each in placements(chosen, num_ranks=2)]
    assert stages == [0, 1, 2, 3]
