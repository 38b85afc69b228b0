"""A packed row has the same loss as the separate documents, in every family accepted by the probe."""

from __future__ import annotations

import pytest

from tests.engine.documents import deviations
from tests.zoo.families import FIRST_WORD, buildable, families
from tests.zoo.isolation import SIZES, built, losses, why_not, why_not_one_by_one
from tests.zoo.table import PAGE, told_isolation

BESIDE = {
    "dots3_note_text": "the loss has a part that is made of a whole row",
    "git": "the loss has image tokens before the row",
}
"""Families with a loss beyond tokens."""


@pytest.mark.slow
@pytest.mark.parametrize("name", buildable())
def test_a_packed_loss_is_that_of_the_documents_alone(name: str) -> None:
    if why_not(name):
        pytest.skip(why_not(name))
    if name in BESIDE:
        pytest.skip(BESIDE[name])
    packed, alone = losses(families()[name])
    assert packed == pytest.approx(alone, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", buildable())
def test_documents_one_by_one_equal_documents_alone(name: str) -> None:
    """Forward and gradients, in every family that the probe lets through without a mask."""
    if why := why_not_one_by_one(name):
        pytest.skip(why)
    assert max(deviations(built(families()[name]), (SIZES, (sum(SIZES),)), FIRST_WORD, 128)) < 1e-6


@pytest.mark.parametrize(("name", "is_apart"), [("llama", True), ("gemma3_text", True), ("doge", False)])
def test_the_probe_tells_what_needs_a_mask(name: str, is_apart: bool) -> None:
    assert not why_not(name)
    assert bool(why_not_one_by_one(name)) is not is_apart


@pytest.mark.slow
def test_the_page_has_those_that_are_let_through() -> None:
    assert told_isolation() in PAGE.read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "is_apart"), [("llama", True), ("mamba", False), ("gpt_oss", False)])
def test_the_probe_tells_what_mixes_documents(name: str, is_apart: bool) -> None:
    assert bool(why_not(name)) is not is_apart
