"""Decisions of a run are functions of its settings and a few facts."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from offload.app.config.config import Config
from offload.app.training.decisions import FROM_NUM_STEPS, FROM_START, decide, resolve_rows, resolve_saved_rows


def data(**facts: Any) -> Any:
    """Return what a prepared data set tells, with a step for each tenth of an epoch."""
    known = {"has_pictures": False, "is_isolated": False, "by_length": False, "num_steps": lambda epochs: 10 * epochs}
    return SimpleNamespace(**known | facts)


def test_the_tables_name_settings() -> None:
    for key in (*FROM_START, *FROM_NUM_STEPS):
        assert key in dict(Config().items())


def test_a_decision_reads_those_above_and_leaves_what_somebody_has_set() -> None:
    table: dict[str, Callable[[Config, Any], Any]] = {
        "train.precision": lambda *_: "fp32",
        "train.steps": lambda config, most: most if config.train.precision == "fp32" else 0,
    }
    assert decide(Config(), table, 7).train.steps == 7
    assert decide(Config(train={"steps": 3}), table, 7).train.steps == 3


def test_new_rows_of_several_documents_are_attended_one_by_one() -> None:
    """Break: let a resumed run decide its attention, too."""
    for resumes, attention in ((False, "documents"), (True, "auto")):
        config = resolve_rows(Config(), data(is_isolated=True), resumes=resumes)
        assert (config.data.packing, config.data.packing_isolated) == (True, True)
        assert config.model.attention == attention
    shared = Config(train={"sequence_parallel": 2})
    assert resolve_rows(shared, data(is_isolated=True), resumes=False).model.attention == "auto"


def test_rows_with_pictures_are_not_packed() -> None:
    config = resolve_rows(Config(train={"epochs": 3}), data(has_pictures=True, by_length=True), resumes=False)
    assert (config.data.packing, config.data.packing_isolated, config.data.group_by_length) == (False, False, True)
    assert (config.train.steps, config.optimizer.warmup_steps) == (30, 1)


@pytest.mark.parametrize(
    ("saved", "packing", "is_isolated", "by_length"),
    [
        ({"packing": "isolated"}, True, True, False),
        ({"packing": True, "group_by_length": True}, True, False, True),
        ({"packing": False}, False, False, False),
        ({}, True, False, False),
    ],
)
def test_auto_at_a_resume_means_the_rows_of_the_checkpoint(
    saved: dict[str, Any], packing: bool, is_isolated: bool, by_length: bool
) -> None:
    found = resolve_saved_rows(Config(), saved).data
    assert (found.packing, found.packing_isolated, found.group_by_length) == (packing, is_isolated, by_length)
    given = Config(data={"packing_isolated": False, "group_by_length": False})
    assert resolve_saved_rows(given, saved) == given
