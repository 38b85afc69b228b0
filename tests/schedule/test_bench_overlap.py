"""`benchmarks.overlap`: results computed from measurements, and the engine settings requested."""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from benchmarks import overlap
from benchmarks.ideal import Unit, Use, Work, ideal, serial_seconds
from offload.native import kernels

NUM_BLOCKS, FORWARD_S, BACKWARD_S, LOSS_S, OVERHEAD_S = 4, 0.010, 0.030, 0.004, 0.001
SLOWDOWN, STEPS_IN_A_BLOCK, PAIRS = 1.05, 3, 2
NAMES = [f"blocks.{i}" for i in range(NUM_BLOCKS)]
NUM_PARAMETERS = 20 * 20
SIZE = 4 * NUM_PARAMETERS
UPDATE_BYTES = 2 * 3 * SIZE + SIZE  # weights and two moments are read and written, gradients are read
NORM = 3.0


@dataclass
class Span:
    lane: str
    name: str
    begin: float
    end: float


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(20, 20, bias=False) for _ in range(NUM_BLOCKS))
        self.norm = nn.LayerNorm(10)


@dataclass
class Shop:
    """Create engines on a simulated clock, at 1.05 times the ideal or fully serial."""

    now: float = 100.0
    made: list[FakeEngine] = field(default_factory=list)
    fails: bool = False
    hides: float = 0.0  # share of a throttled step done after the return

    def clock(self) -> float:
        return self.now

    def make(self, **settings: Any) -> FakeEngine:
        self.made.append(FakeEngine(self, **settings))
        return self.made[-1]


class FakeEngine:
    def __init__(
        self,
        shop: Shop,
        *,
        prefetch: int,
        throttle: dict[str, int] | None,
        max_grad_norm: float | None,
        clip: str = "auto",
        **settings: Any,
    ) -> None:
        self.shop, self.model, self.closed, self.num_steps = shop, Model(), False, 0
        self.prefetch, self.throttle, self.clip, self.max_grad_norm = prefetch, throttle, clip, max_grad_norm
        self.settings, self.spans, self.left_s = settings, [], 0.0
        slots = min(prefetch + 1, NUM_BLOCKS)
        self.counters = SimpleNamespace(h2d_bytes=(2 * NUM_BLOCKS - slots) * SIZE, d2h_bytes=NUM_BLOCKS * SIZE)

    def step(self, batch: Any) -> Any:
        assert not self.closed
        if self.shop.fails:
            raise RuntimeError("no")
        self.num_steps += 1
        corrected = 3 if self.clip == "speculative" and self.max_grad_norm < NORM else 0
        if self.throttle is None:
            self._inline()
        else:
            work = self._work(corrected)
            best = ideal(work, STEPS_IN_A_BLOCK, as_block=True)
            seconds = SLOWDOWN * best.seconds if self.prefetch else serial_seconds(work)
            self.shop.now += (1 - self.shop.hides) * seconds
            self.left_s += self.shop.hides * seconds
        times = SimpleNamespace(busy_seconds=0.5, exposed_seconds=0.25)
        lanes = dict.fromkeys(("compute", "h2d", "d2h", "update"), times)
        more = {"corrected": corrected} if self.clip == "speculative" else {}  # an older result lacks this field
        return SimpleNamespace(grad_norm=NORM, lanes=lanes, **more)

    def finish(self) -> None:
        assert not self.closed
        self.shop.now += self.left_s
        self.left_s = 0.0

    def _inline(self) -> None:
        self.spans = []
        passes = [(f"forward {name}", FORWARD_S) for name in [*NAMES, "norm"]]
        passes += [(f"backward {name}", BACKWARD_S) for name in ["norm", *NAMES[::-1]]]
        for name, seconds in passes:
            if name == "backward norm":
                self.shop.now += LOSS_S
            self._span("h2d", "fetch", OVERHEAD_S)
            self._span("compute", name, seconds)

    def _span(self, lane: str, name: str, seconds: float) -> None:
        self.spans.append(Span(lane, name, self.shop.now, self.shop.now + seconds))
        self.shop.now += seconds

    def _work(self, corrected: int) -> Work:
        assert self.throttle is not None
        update_s = UPDATE_BYTES / self.throttle["update"]
        unit = Unit(SIZE, SIZE / self.throttle["h2d"], SIZE / self.throttle["d2h"], update_s, update_s)
        uses = [Use(FORWARD_S, name) for name in NAMES] + [Use(FORWARD_S + LOSS_S + BACKWARD_S)]
        uses += [Use(BACKWARD_S, name, is_backward=True) for name in NAMES[::-1]]
        mode = "none" if self.max_grad_norm is None else self.clip
        capacity = (self.prefetch + 1) * SIZE
        return Work(uses, dict.fromkeys(NAMES, unit), capacity, mode, num_corrected=corrected)

    def close(self) -> None:
        assert not self.closed
        self.closed = True


COMPUTE_S = (NUM_BLOCKS + 1) * (FORWARD_S + BACKWARD_S) + LOSS_S


@pytest.fixture
def shop() -> Shop:
    return Shop()


def make_bench(shop: Shop) -> overlap.Bench:
    return overlap.Bench(shop.make, ["batch"], 1, "fp32", STEPS_IN_A_BLOCK, PAIRS, clock=shop.clock)


@pytest.mark.slow
@pytest.mark.parametrize(("ratio", "hides"), [(0.25, 0.0), (2.0, 0.0), (0.25, 0.9)])
def test_a_row(shop, ratio, hides):
    """Work after a step's return counts as well."""
    shop.hides = hides
    made = make_bench(shop)
    for case in overlap.cases([ratio]):
        result = made.row(case)
        row = result.fields()
        # A clock starting at 100 s with millisecond increments is accurate to a few units in the ninth digit.
        assert row["compute_seconds"] == pytest.approx(COMPUTE_S, rel=1e-6)
        assert row["over_ideal"] == pytest.approx(SLOWDOWN, rel=1e-4)
        assert row["within_ideal"]
        assert row["unit"] == "ms"
        assert row["value"] == pytest.approx(1e3 * row["measured_seconds"])
        assert (row["steps_in_a_block"], row["pairs"]) == (STEPS_IN_A_BLOCK, PAIRS)
        assert row["ideal_busy_seconds"]["h2d"] == pytest.approx(ratio * COMPUTE_S, rel=1e-3)
        assert row["ideal_busy_seconds"]["d2h"] == pytest.approx(ratio * COMPUTE_S, rel=1e-3)
        assert row["corrected"] == (3 if case.name == "speculative, corrected" else 0)
        if not row["corrected"]:
            assert row["ideal_busy_seconds"]["update"] == pytest.approx(ratio * COMPUTE_S, rel=1e-3)
        assert row["serial_is_measured"]
        assert row["serial_seconds"] == pytest.approx(row["serial_sum_seconds"], rel=1e-3)
        assert row["ratio"] == pytest.approx(row["serial_seconds"] / row["measured_seconds"])
        assert row["busy_seconds"] == dict.fromkeys(("compute", "h2d", "d2h", "update"), 0.5)
        assert row["exposed_seconds"] == dict.fromkeys(("compute", "h2d", "d2h", "update"), 0.25)
        assert (row["lane_ratio"], row["mode"], row["prefetch"]) == (ratio, case.mode, 1)
    made.close()
    assert all(engine.closed for engine in shop.made)


def test_what_the_engines_are_asked_for(shop):
    made = make_bench(shop)
    probe, baseline = shop.made
    assert probe.closed
    assert (probe.prefetch, set(probe.throttle)) == (1, {"h2d", "d2h", "update"})
    assert (baseline.prefetch, baseline.throttle, baseline.max_grad_norm) == (0, None, None)
    made.row(overlap.Case(0.5, "speculative, corrected", "speculative", 0.5))
    row, serial = shop.made[2:]
    assert (row.prefetch, row.clip, row.max_grad_norm) == (1, "speculative", 0.5 * NORM)
    assert (serial.prefetch, serial.throttle, serial.clip) == (0, row.throttle, "speculative")
    assert row.num_steps == overlap.NUM_WARM_STEPS + PAIRS * STEPS_IN_A_BLOCK
    seconds = 0.5 * COMPUTE_S
    assert row.throttle["h2d"] == pytest.approx(row.counters.h2d_bytes / seconds, rel=1e-4)
    assert row.throttle["d2h"] == pytest.approx(row.counters.d2h_bytes / seconds, rel=1e-4)
    assert row.throttle["update"] == pytest.approx(NUM_BLOCKS * UPDATE_BYTES / seconds, rel=1e-4)
    made.close()


def test_a_failure_closes_the_engine(shop):
    made = make_bench(shop)
    make = shop.make

    def failing(**settings: Any) -> FakeEngine:
        shop.fails = True
        return make(**settings)

    made._make = failing
    with pytest.raises(RuntimeError, match="no"):
        made.row(overlap.cases([1.0])[0])
    made.close()
    assert all(engine.closed for engine in shop.made)


def test_the_clip_modes_of_a_ratio():
    settings = {case.name: (case.mode, case.settings(4.0)) for case in overlap.cases([1.0])}
    assert settings == {
        "no clipping": ("none", {"max_grad_norm": None}),
        "deferred": ("deferred", {"clip": "deferred", "max_grad_norm": 2.0}),
        "speculative, corrected": ("speculative", {"clip": "speculative", "max_grad_norm": 2.0}),
        "speculative, nothing to correct": ("speculative", {"clip": "speculative", "max_grad_norm": 1e9}),
    }
    assert [case.ratio for case in overlap.cases((0.25, 2.0))] == [0.25] * 4 + [2.0] * 4


# -- pure parts --------------------------------------------------------------------------------------------------


def test_compute_uses():
    spans = [
        Span("compute", "backward a", 7.0, 10.0),
        Span("compute", "forward a", 1.0, 3.0),
        Span("h2d", "fetch a", 0.0, 1.5),  # half a second inside the forward
        Span("compute", "forward norm", 5.0, 6.0),
        Span("update", "update a", 9.5, 12.0),
        Span("h2d", "fetch b", 3.25, 4.0),
    ]
    assert overlap.compute_uses(spans, ["a"]) == [
        Use(1.5, "a"),
        Use(1.25),
        Use(1.0),
        Use(1.0),
        Use(2.5, "a", is_backward=True),
    ]


def test_median_uses():
    steps = [[Use(s, "a"), Use(2 * s, "a", is_backward=True)] for s in (1.0, 9.0, 2.0)]
    assert overlap.median_uses(steps) == [Use(2.0, "a"), Use(4.0, "a", is_backward=True)]
    with pytest.raises(ValueError):
        overlap.median_uses([*steps, [Use(1.0, "a")]])


def test_units_by_their_spans():
    names = [*NAMES, "norm", "nothing of the model"]
    spans = [Span("compute", f"forward {name}", 0, 1) for name in names] + [Span("h2d", "fetch blocks.7", 0, 1)]
    assert overlap.num_parameters(Model(), spans) == dict.fromkeys(NAMES, NUM_PARAMETERS)


@pytest.mark.parametrize(("num_slots", "capacity"), [(1, 5), (2, 9), (3, 11), (4, 12), (9, 12)])
def test_the_largest_sum_of_consecutive_units(num_slots, capacity):
    assert overlap.capacity_bytes([1, 5, 4, 2], num_slots) == capacity


def test_bandwidths():
    assert overlap.bandwidths({"h2d": 1000, "update": 1}, 0.5) == {"h2d": 2000, "update": 2}
    assert overlap.bandwidths({"d2h": 0}, 1.0) == {"d2h": 1}


def one_unit(update_s: float) -> Work:
    return Work([Use(1.0, "a"), Use(3.0, "a", is_backward=True)], {"a": Unit(1, 0.0, 0.0, update_s)}, 1)


@pytest.mark.parametrize(
    ("update_s", "measured", "within_ideal", "within_largest_lane"),
    [
        (0.1, 4.2, True, True),
        (0.1, 4.41, True, False),
        (0.1, 5.0, False, False),
        (1.0, 5.2, True, None),  # no schedule comes near the largest lane
        (1.0, 9.0, False, None),
    ],
)
def test_bounds(update_s, measured, within_ideal, within_largest_lane):
    steps = overlap.Steps(seconds=[measured, 0.9 * measured, 2 * measured])
    result = overlap.assemble(overlap.Case(1.0, "no clipping", "none", None), steps, one_unit(update_s), None, 3)
    row = result.details
    assert (row["within_ideal"], row["within_largest_lane"]) == (within_ideal, within_largest_lane)
    assert (row["largest_lane"], row["largest_lane_seconds"]) == ("compute", pytest.approx(4.0))
    assert not row["serial_is_measured"]
    assert row["serial_seconds"] == 4 + update_s
    assert row["best"] == pytest.approx(900 * measured)
    assert math.isclose(result.ratio or 0, (4 + update_s) / measured)


# -- wiring --------------------------------------------------------------------------------------------------------


@pytest.fixture
def threads_kept() -> Iterator[None]:
    before = torch.get_num_threads(), kernels.num_threads()
    yield
    torch.set_num_threads(before[0])
    kernels.set_threads(before[1])


@pytest.mark.slow
@pytest.mark.usefixtures("threads_kept")
def test_the_command(shop, monkeypatch):
    parser = argparse.ArgumentParser()
    overlap.add_arguments(parser)
    arguments = parser.parse_args(["--ratios", "1", "--steps", "3", "--layers", "17"])
    models = []

    def make(model: object, **settings: Any) -> FakeEngine:
        models.append(model)
        return shop.make(**settings)

    monkeypatch.setattr("offload.engine.engine.Engine", make)
    monkeypatch.setattr(overlap.step, "llama", lambda given: (given.hidden, given.layers, given.vocabulary))
    monkeypatch.setattr(overlap.Bench.__init__, "__defaults__", (shop.clock,))
    results = overlap.run(arguments)
    assert set(models) == {(256, 17, 512)}
    assert [result.name for result in results] == [f"ratio 1, {case.name}" for case in overlap.cases([1.0])]
    assert all(engine.closed for engine in shop.made)
    settings = shop.made[0].settings
    assert (settings["precision"], settings["recompute"], settings["head_chunk_bytes"]) == ("fp32", "always", None)
    assert (settings["placement"].parameters, settings["placement"].optimizer) == ("cpu", "cpu")
    assert torch.get_num_threads() == 1
