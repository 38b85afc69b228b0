"""Throttles for lanes, as written in a configuration."""

from __future__ import annotations

import pytest

from offload.errors import ConfigError
from offload.lanes.timeline import LANES, Throttle
from offload.planning.settings import parse_throttle

ALL = "h2d, d2h, collective, network, nvme_read, nvme_write, update"


@pytest.mark.parametrize(
    ("value", "throttle"),
    [
        ("1GB", Throttle(1e9)),
        ("2 MiB", Throttle(2 * 2**20)),
        (5000, Throttle(5000.0)),
        (2.5e9, Throttle(2.5e9)),
        (0.5, Throttle(0.5)),
        (None, Throttle()),
        ("none", Throttle()),
        ({}, Throttle()),
        ({"bandwidth": "1GB"}, Throttle(1e9)),
        ({"bandwidth": None, "latency_seconds": 0.001}, Throttle(None, 0.001)),
        ({"latency_seconds": 2}, Throttle(None, 2.0)),
        ({"bandwidth": 7.0, "latency_seconds": 0}, Throttle(7.0)),
    ],
)
@pytest.mark.parametrize("lane", LANES)
def test_accepted(lane, value, throttle):
    assert parse_throttle({lane: value}) == {lane: throttle}


def test_every_lane_has_its_own_and_none_is_needed():
    assert parse_throttle({"update": 3, "h2d": "1KiB"}) == {"h2d": Throttle(1024), "update": Throttle(3)}
    assert parse_throttle({}) == parse_throttle(None) == {}


@pytest.mark.parametrize(
    ("setting", "parts"),
    [
        (
            {"h2h": 1},
            ["offload.throttle.h2h", "unknown lane", "did you mean h2d?", ALL],
        ),
        ({"compute": 1}, ["offload.throttle.compute", "unknown lane", ALL]),
        ({5: 1}, ["offload.throttle.5", "unknown lane", ALL]),
        ({"h2d": "fast"}, ["offload.throttle.h2d", "'fast'", "a size such as"]),
        ({"h2d": {"bandwidth": "fast"}}, ["offload.throttle.h2d.bandwidth", "'fast'", "a size such as"]),
        ({"h2d": True}, ["offload.throttle.h2d", "True", "a size such as"]),
        ({"h2d": [1, 2]}, ["offload.throttle.h2d", "[1, 2]", "a size such as"]),
        ({"h2d": -1}, ["offload.throttle.h2d", "-1", "a size such as"]),
        ({"h2d": 0}, ["offload.throttle.h2d", " 0;", "more than 0 bytes per second"]),
        ({"h2d": "0 GiB"}, ["offload.throttle.h2d", "'0 GiB'", "more than 0 bytes per second"]),
        ({"update": 0.0}, ["offload.throttle.update", "0.0", "more than 0 bytes per second"]),
        ({"update": -1.5}, ["offload.throttle.update", "-1.5", "more than 0 bytes per second"]),
        ({"update": float("inf")}, ["offload.throttle.update", "inf", "more than 0 bytes per second"]),
        ({"update": float("nan")}, ["offload.throttle.update", "nan", "more than 0 bytes per second"]),
        (
            {"d2h": {"bandwith": 1}},
            ["offload.throttle.d2h.bandwith", "unknown", "did you mean bandwidth?", "bandwidth, latency_seconds"],
        ),
        ({"d2h": {1: 1}}, ["offload.throttle.d2h.1", "unknown", "bandwidth, latency_seconds"]),
        *(
            ({"d2h": {"latency_seconds": value}}, ["offload.throttle.d2h.latency_seconds", repr(value), "at least 0"])
            for value in (-1, -0.1, float("nan"), float("inf"), "1s", None, [1])
        ),
        ("1GB", ["offload.throttle is '1GB'", ALL]),
        (["h2d"], ["offload.throttle is ['h2d']", ALL]),
    ],
)
def test_refused(setting, parts):
    with pytest.raises(ConfigError) as refusal:
        parse_throttle(setting)
    for part in parts:
        assert part in str(refusal.value)
