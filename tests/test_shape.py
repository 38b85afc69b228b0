"""The numbers in `make shape`, on a few code lines."""

from __future__ import annotations

from graphlib import TopologicalSorter

import pytest

from offload.extras import NEEDS
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
        "offload.engine.step": "from offload.app.telemetry import loggers\nimport offload.lanes.ticket\n",
        "offload.app.trainer": "def f():\n    from offload.extras.data import rows\nfrom offload.engine import step\n",
        "offload.extras.data.rows": "from offload.extras.plan import search\nimport offload.app.hf\n",
        "offload.extras.generate.sampler": "from offload.extras.data import tokenizer\n",
    }
    assert shape.violations(modules) == [
        ("offload.engine.step", "offload.app.telemetry"),
        ("offload.app.trainer", "offload.extras.data.rows"),
        ("offload.extras.data.rows", "offload.extras.plan"),
    ]


def test_each_need_of_an_extra_is_an_import_and_needs_form_no_circle() -> None:
    pairs = {(shape.ring_of(one), shape.ring_of(other)) for one, other in shape.imports(shape.sources())}
    assert {(name, need) for name, needs in NEEDS.items() for need in needs} <= pairs
    TopologicalSorter(NEEDS).prepare()  # raises CycleError


def test_no_import_goes_outward() -> None:
    assert shape.violations(shape.sources()) == []


def test_tests_about_features_are_counted() -> None:
    text = "if codec is EXACT and self.delay: ...\nx = [c for c in d if c.codec]\nwhile comm.replicas > 1: ...\n"
    assert shape.asks({"one": text}) == {"codecs": 2, "delay": 1, "replicas": 1, "zeroth": 0}


def test_trial_runs_put_backs_comparisons_and_tolerances_are_counted() -> None:
    text = """\
_TOLERANCES = {1: 2}
def same_bits(one): ...
def put_back(self): ...
def isolated(self): ...
with self.isolated():
    assert abs(one) <= 1e-5 * two
"""
    found = {"offload.engine.one": text, "offload.app.one": text}
    assert shape.trials(found) == {"analyses": 1, "put_back": 2, "comparators": 1, "tolerances": 1}


def test_tokens_comments_and_packed_lines_are_counted() -> None:
    text = '''"""A docstring (of one token).

    """
a, b, c = 1, 2, 3  # why
x[0] = f(d if e else g)  # type: ignore
'''
    assert shape.lexemes({"one": text}) == {"tokens": 17, "code_lines": 2, "comments": 1}
    assert shape.lines_with_air({"one": text}) == {"tokens": 17, "conditional": 500.0, "packed": 1, "comments": 5}


def test_core_names_of_the_plan_are_counted() -> None:
    text = "from offload.lanes.ticket import Fence, Ticket\nfrom offload.extras.plan import search\nimport ast\n"
    found = {"offload.extras.plan.one": text, "offload.extras.plan.two": text, "offload.app.one": text}
    assert shape.plan_imports(found) == {"plan_names": 2, "plan_modules": 1}


def test_calls_during_one_forward_of_a_module_are_counted() -> None:
    from torch import nn

    class Two(nn.Module):
        def forward(self) -> None:
            shape.ring_of("offload.lanes")

    module = Two()
    with shape.Use(module) as use:
        use._folder = str(shape.ROOT / "tests/shape.py")
        shape.ring_of("offload.lanes")  # before
        module()
        module()
    assert use.counts() == {"use_calls": 1, "use_files": 1}


@pytest.mark.slow  # `.ci/run` prints the numbers
def test_a_traced_step_and_the_table_have_all_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    step = shape.warm_step()
    assert step["files"] > 20
    assert step["opened"] > step["executed"] > 500
    assert step["use_calls"] > step["use_files"] > 5
    monkeypatch.setattr(shape, "warm_step", lambda: step)
    found = shape.shape()
    assert list(found)[:5] == ["rings", "violations", "opened", "executed", "files"]
    assert {"settings", "prose", "tokens", "conditional", "packed", "comments", "longest"} < set(found)
    assert len(found["rings"]) == 3
    assert sum(found["rings"]) == sum(len(text.splitlines()) for text in shape.sources().values())
    assert set(found["prose"]) == {"offload", "docs", "tests"}
    assert all(text for _, text in shape.rows(found))
