"""Stored forecasts: as they were planned, by today's rates, and as the pages print them."""

from __future__ import annotations

import copy
import datetime
import json
from typing import Any

import pytest

from benchmarks import forecasts

NUM_TURNS = 32
"""Slow tests that plan a stored entry again. A share has two."""


@pytest.fixture(scope="module")
def documents() -> dict[str, Any]:
    return {group: forecasts.read(group) for group in forecasts.TABLES}


def test_stored_entries_are_as_planned_by_the_rates_of_today() -> None:
    """Break: edit a figure, a rate of a described machine, or a number of the planner."""
    faults = dict(forecasts.faults(forecasts.ledger()))
    assert set(faults.values()) <= {forecasts.OLDER, forecasts.LACKING}, "run `python -m benchmarks.forecasts`"
    assert "readme" not in {group for group, _ in faults}, "no row of the README is marked"


@pytest.mark.parametrize("group", forecasts.TABLES)
def test_an_edited_figure_is_found(group: str, documents: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    table = forecasts.TABLES[group]
    name = next(name for name in table.names() if table.entry(documents[group], name) is not None)
    edited = copy.deepcopy(documents[group])
    assert _edit(table.entry(edited, name)), "a number in place"
    monkeypatch.setattr(forecasts, "read", lambda each: edited if each == group else documents[each])
    assert ((group, name), "changed by hand") in [*forecasts.faults(forecasts.ledger())]


def _edit(value: Any) -> bool:
    """Change the first number in a JSON value, in place; False: there is none."""
    places = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in places:
        if isinstance(each, float | int) and not isinstance(each, bool) and key != "host_gib":  # of its name
            value[key] = each + 1
            return True
        if isinstance(each, str) and "tokens/s" in each:
            value[key] = f"1{each}"
            return True
        if isinstance(each, dict | list) and _edit(each):
            return True
    return False


@pytest.mark.parametrize("group", [group for group, table in forecasts.TABLES.items() if table.page is not None])
def test_a_page_prints_the_stored_figures(group: str, documents: dict[str, Any]) -> None:
    """Break: another figure in the page. tests/test_docs.py has this for the README and the page "Will it fit?"."""
    table = forecasts.TABLES[group]
    assert table.page is not None
    assert table.page.read_text() == table.text(documents[group], forecasts.older(group)), (
        "run `python -m benchmarks.forecasts --most 0`"
    )


@pytest.mark.slow
@pytest.mark.parametrize("number", range(NUM_TURNS))
def test_an_entry_of_this_turn_is_planned_as_stored(
    number: int, documents: dict[str, Any], pytestconfig: pytest.Config
) -> None:
    """Each run takes other entries: by the number of the share, else by the day."""
    turn = pytestconfig.getoption("slow_turn") or datetime.date.today().toordinal()
    keys = [key for key, _ in forecasts.entries()]
    group, name = keys[(turn * NUM_TURNS + number) % len(keys)]
    if reason := dict(forecasts.faults(forecasts.ledger())).get((group, name)):
        pytest.skip(f"{group}: {name}: {reason}, as its page says")
    table = forecasts.TABLES[group]
    stored = table.entry(documents[group], name)
    document: dict[str, Any] = {}
    table.put(document, name, forecasts.make((group, name)))
    planned = table.entry(json.loads(json.dumps(document)), name)
    for each in (stored, planned):
        if isinstance(each, dict):
            each.pop("commit", None)
    assert planned == stored, f"{group}: {name}: run `python -m benchmarks.forecasts --again --match '{name}'`"
