"""Combinations of settings: `conflicts.txt` has the words and the message of each refused one."""

import shlex
from itertools import chain
from pathlib import Path

import pytest

from offload.app.config import conflicts
from offload.app.config.at_resume import AtResume, at_resume
from offload.app.config.config import Config
from offload.app.config.options import read_command
from offload.app.training.decisions import resolve
from offload.app.training.parts import make_settings
from offload.conflicts import CONFLICTS, ENGINE_CONFLICTS, PLACEMENT
from offload.errors import ConfigError

ENTRIES = [entry.split("\n") for entry in Path(__file__).with_name("conflicts.txt").read_text().strip().split("\n\n")]


def _make(words: list[str]) -> None:
    config, _ = read_command(words, "test", "", {}, may_go_on=False)
    config.check_source()
    make_settings(resolve(config, has_accelerator=False, max_positions=None))


@pytest.mark.parametrize(("words", "message"), ENTRIES, ids=[words for words, _ in ENTRIES])
def test_a_refusal_names_the_settings_and_the_remedy(words: str, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        _make(shlex.split(words))
    assert str(raised.value) == message


def test_the_defaults_are_in_no_conflict() -> None:
    """A row or a text with an unknown key raises AttributeError."""
    config = Config()
    settings = make_settings(resolve(config, has_accelerator=False, max_positions=None))
    of_runs = chain(conflicts.DATA, conflicts.SOURCES, conflicts.RUN, *CONFLICTS.values())
    of_engines = chain(PLACEMENT, *ENGINE_CONFLICTS.values())
    for rows, get in ((of_runs, config._setting), (of_engines, settings._setting)):
        assert not [row.message(get) for row in rows if not row.message(get) or row.applies(get)]


def test_a_remedy_works_at_a_resume() -> None:
    """A setting left out at a resume comes from the earlier run, so the remedy names a value, except for settings with
    a value that no resume can change.
    """
    tables = (conflicts.DATA, conflicts.SOURCES, conflicts.RUN, PLACEMENT, *CONFLICTS.values())
    rows = [row for row in chain(*tables, *ENGINE_CONFLICTS.values()) if "leave" in row.fix]
    assert rows
    fixed = (AtResume.FIXED, AtResume.STATE)
    assert {row.key for row in rows if at_resume(row.key) not in fixed} == set()
