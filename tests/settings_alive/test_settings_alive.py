"""Each setting of the command line has an effect outside the configuration: see `table.py`."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Any

import pytest

from tests.settings_alive import table
from tests.settings_alive.looks import Looks
from tests.settings_alive.table import BASES, NOT_SHOWN, ROWS, Row
from tests.threads import torch_threads


@pytest.fixture(scope="module")
def looks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Looks]:
    with torch_threads(1):
        yield Looks(tmp_path_factory.mktemp("looks"))


def test_each_setting_and_each_choice_has_a_row_or_a_reason() -> None:
    wanted, shown = set(table.wanted()), table.shown()
    assert wanted - shown - NOT_SHOWN.keys() == set(), "without a row in tests/settings_alive/table.py"
    assert NOT_SHOWN.keys() - wanted == set(), "no settings any more"
    assert NOT_SHOWN.keys() & shown == set(), "shown by a row"


def name_of(row: Row) -> str:
    return "-".join([row.key, row.base.replace(" ", "-"), *(f"{key}={value}" for key, value in row.given.items())])


@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=() if row.is_quick else pytest.mark.slow, id=name_of(row)) for row in ROWS],
)
def test_a_setting_is_alive(row: Row, looks: Looks) -> None:
    """Break: ignore the setting at the place of its use."""
    seen = {value: look(row, value, looks) for value in row.all_values}
    for value, other in combinations(seen, 2):
        is_same = row.same.get(value) == other or row.same.get(other) == value
        relation = "the same" if is_same else "different"
        assert (seen[value] == seen[other]) == is_same, (
            f"{row.key} {value} and {other} should have {relation} {row.shows}: {seen[value]} and {seen[other]}"
        )


def look(row: Row, value: str, looks: Looks) -> Any:
    found = looks.see(row.words(value), row.limits)
    if row.shows not in ("refusal", "outcome"):
        assert not found["refusal"], f"{row.key} {value} is refused: {found['refusal']}"
    return found[row.shows]


@pytest.mark.slow
@pytest.mark.parametrize("base", BASES)
def test_equal_words_have_equal_figures(base: str, looks: Looks) -> None:
    """Otherwise two runs of a row would differ without the setting."""
    words = {key: str(value) for key, value in BASES[base].items()}
    first, second = looks.see(words, {}), looks.see_anew(words, {})
    names = {row.shows for row in ROWS} & first.keys()
    assert {name: first[name] for name in names} == {name: second[name] for name in names}
