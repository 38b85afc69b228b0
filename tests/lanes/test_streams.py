"""Lanes on a simulated GPU: current device per thread, host waits and event counts."""

from __future__ import annotations

import time
from collections.abc import Iterator
from unittest.mock import Mock

import pytest

from offload.accelerators import CudaAccelerator
from offload.lanes import streams
from offload.lanes.streams import StreamLanes
from offload.lanes.timeline import Throttle
from tests.lanes.patience import nothing, within
from tests.lanes.played_device import PlayedEvent, PlayedModule, played_accelerator

LANES = ["h2d", "d2h", "collective", "network", "update", "fetch_read", "update_read", "activation_read"]
LANES += ["update_write", "activation_write", "decoding"]


@pytest.fixture
def accelerator() -> CudaAccelerator:
    return played_accelerator()


@pytest.fixture
def played(accelerator: CudaAccelerator) -> PlayedModule:
    return accelerator.module


@pytest.fixture
def lanes(accelerator: CudaAccelerator) -> Iterator[StreamLanes]:
    lanes = StreamLanes(accelerator, throttle={"d2h": Throttle(latency_s=1e-4)}, delay_seed=None, abort=None)
    yield lanes
    within(lanes.close)


@pytest.mark.parametrize("name", LANES)
def test_the_thread_of_every_lane_sets_its_device_first(played: PlayedModule, lanes: StreamLanes, name: str) -> None:
    """Otherwise waits for work in other lanes would create a context on another GPU."""
    copied = lanes.h2d.submit(nothing)
    ticket = getattr(lanes, name).submit(nothing, reads=(copied, *lanes.mark()))
    lanes.wait([ticket])
    assert f"offload {name}" in played.entered
    assert not played.strays


def test_what_fails_to_set_the_device_fails_the_work(
    played: PlayedModule, lanes: StreamLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(played, "set_device", Mock(side_effect=RuntimeError("the device is lost")))
    ticket = lanes.update.submit(nothing)
    with pytest.raises(RuntimeError, match="the device is lost"):
        within(lambda: lanes.wait([ticket]))


def test_the_host_sleeps_while_it_waits_for_an_event(
    played: PlayedModule, lanes: StreamLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlayedEvent, "query", lambda event: event in played.waited)
    copied = lanes.d2h.submit(nothing, reads=lanes.mark())
    lanes.wait([lanes.update.submit(nothing, reads=[copied]), copied])
    lanes.end_step()
    assert len(played.waited) >= 3
    assert all(event.blocking for event in played.waited)


class Later:
    """Event completed only by a wait."""

    came_at: float | None = None

    def query(self) -> bool:
        return self.came_at is not None

    def synchronize(self) -> None:
        time.sleep(2e-3)
        self.came_at = time.perf_counter()


@pytest.mark.parametrize("name", ["update", "d2h"])
def test_a_played_link_begins_when_what_its_work_waits_for_has_come(
    accelerator: CudaAccelerator, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    throttle = {name: Throttle(latency_s=1e-3)}
    lanes = StreamLanes(accelerator, throttle=throttle, delay_seed=None, abort=None)
    copied = lanes.h2d.submit(nothing)
    lanes.wait([copied])
    copied.event = event = Later()
    ticket = getattr(lanes, name).submit(nothing, reads=[copied])
    lanes.wait([ticket])
    assert event.came_at is not None
    assert ticket.begin >= event.came_at
    assert ticket.end >= ticket.begin + 1e-3
    within(lanes.close)


def test_passes_that_no_step_ends_do_not_pile_up_events(
    played: PlayedModule, lanes: StreamLanes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_MOST_SPANS", 64)
    for number in range(500):
        begin = lanes.now()
        lanes.wait([lanes.h2d.submit(nothing, name="u")])
        lanes.record_compute(str(number), begin)
    del begin
    assert len(lanes.timed) <= 65
    assert len(played.events) <= 3 * 65
    *_, spans = lanes.end_step()
    assert [span.name for span in spans if span.lane == "compute"] == [str(number) for number in range(500)]
    assert sum(span.lane == "h2d" for span in spans) == 500, "nothing is lost"
