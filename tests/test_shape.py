"""The numbers in `make shape`, on a few code lines."""

from __future__ import annotations

from collections import Counter

import pytest

from tests import shape


def test_each_module_has_a_ring_and_each_name_of_the_table_a_module() -> None:
    modules = shape.sources()
    assert {shape.ring_of(name) for name in modules} == set(shape.RINGS)
    for name in " ".join(shape.RINGS.values()).split():
        assert name.removesuffix(".__init__") in modules, f"{name} of RINGS is no module any more"
    with pytest.raises(KeyError):
        shape.ring_of("offload_other.engine")


def test_imports_go_inward() -> None:
    modules = {
        "offload.engine.step": "from offload.telemetry import loggers\nimport offload.lanes.ticket\n",
        "offload.training.trainer": "def f():\n    from offload.data import rows\nfrom offload.engine import step\n",
        "offload.data.rows": "from offload.forecast import search\nfrom offload.data import cache\nimport offload.hf\n",
    }
    assert shape.violations(modules) == [
        ("offload.engine.step", "offload.telemetry"),
        ("offload.training.trainer", "offload.data.rows"),
        ("offload.data.rows", "offload.forecast"),
    ]


MOST_VIOLATIONS = {"core": 24, "application": 39, "extras": 19}
"""Imports against the rings, by the importing ring. A number may fall, never rise."""


def test_imports_against_the_rings_only_become_fewer() -> None:
    rings = [shape.ring_of(module) for module, _ in shape.violations(shape.sources())]
    found = Counter(ring if ring in MOST_VIOLATIONS else "extras" for ring in rings)
    assert found == MOST_VIOLATIONS, "lower the number in this test after a mend"


def test_tests_about_features_are_counted() -> None:
    text = "if codec is EXACT and self.delay: ...\nx = [c for c in d if c.codec]\nwhile comm.replicas > 1: ...\n"
    assert shape.asks({"one": text}) == {"codecs": 2, "delay": 1, "replicas": 1, "zeroth": 0}


def test_a_traced_step_and_the_table_have_all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    step = shape.warm_step()
    assert step["files"] > 20
    assert step["opened"] > step["executed"] > 500
    monkeypatch.setattr(shape, "warm_step", lambda: step)
    found = shape.shape()
    assert list(found)[:7] == ["rings", "violations", "opened", "executed", "files", "settings", "prose"]
    assert len(found["rings"]) == 3
    assert sum(found["rings"]) == sum(len(text.splitlines()) for text in shape.sources().values())
    assert set(found["prose"]) == {"offload", "docs", "tests"}
    assert all(text for _, text in shape.rows(found))
