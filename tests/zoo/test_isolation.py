"""A packed row has the same loss as the separate documents, in every family accepted by the probe."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import nn

from offload.app.training.isolation import why_not_isolated
from tests.engine.documents import by_document, deviations
from tests.zoo.families import FIRST_WORD, Family, buildable, families

SIZES = 7, 13, 9
BESIDE = {
    "dots3_note_text": "the loss has a part that is made of a whole row",
    "git": "the loss has image tokens before the row",
}
"""Families with a loss beyond tokens."""


@cache
def why_not(name: str) -> str:
    """Return the reason against document isolation. Empty: the family isolates documents."""
    return why_not_isolated(built(families()[name]), torch.device("cpu"), 128, range(FIRST_WORD))


@cache
def why_not_one_by_one(name: str) -> str:
    """Like `why_not`, with attention over each document alone, without a mask."""
    return why_not_isolated(by_document(built(families()[name])), torch.device("cpu"), 128, range(FIRST_WORD))


def built(family: Family) -> nn.Module:
    """Return a family model without dropout."""
    return family.build(calm=True).eval()


def losses(family: Family) -> tuple[float, float]:
    """Return (loss of a row with three documents, token mean over the separate document losses)."""
    model, generator = built(family), torch.Generator().manual_seed(3)
    documents = [torch.randint(FIRST_WORD, 128, (1, size), generator=generator) for size in SIZES]
    labels = [torch.cat([torch.full((1, 1), -100), document[:, 1:]], 1) for document in documents]
    positions = torch.cat([torch.arange(size) for size in SIZES])[None]
    with torch.no_grad():
        row = torch.cat(documents, 1), torch.cat(labels, 1)
        packed = model(input_ids=row[0], labels=row[1], position_ids=positions, use_cache=False).loss.double()
        alone = [
            model(input_ids=document, labels=its, use_cache=False).loss.double() * (document.shape[1] - 1)
            for document, its in zip(documents, labels, strict=True)
        ]
    return float(packed), float(sum(alone)) / (sum(SIZES) - len(SIZES))


@pytest.mark.slow
@pytest.mark.parametrize("name", buildable())
def test_a_packed_loss_is_that_of_the_documents_alone(name: str) -> None:
    if why := why_not(name) or BESIDE.get(name):
        pytest.skip(why)
    packed, alone = losses(families()[name])
    assert packed == pytest.approx(alone, rel=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", buildable())
def test_documents_one_by_one_equal_documents_alone(name: str) -> None:
    """Forward and gradients, in every family that the probe lets through without a mask."""
    if why := why_not_one_by_one(name):
        pytest.skip(why)
    assert max(deviations(built(families()[name]), (SIZES, (sum(SIZES),)), FIRST_WORD, 128)) < 1e-6


@pytest.mark.parametrize(
    ("name", "is_apart", "is_apart_unmasked"),
    [
        ("llama", True, True),
        ("gemma3_text", True, True),
        ("doge", True, False),
        ("mamba", False, False),
        ("gpt_oss", False, False),
    ],
)
def test_the_probe_tells_what_mixes_documents(name: str, is_apart: bool, is_apart_unmasked: bool) -> None:
    assert bool(why_not(name)) is not is_apart
    assert bool(why_not_one_by_one(name)) is not is_apart_unmasked


@pytest.mark.slow
def test_the_page_has_those_that_are_let_through() -> None:
    from tests.zoo.table import PAGE, told_isolation

    assert told_isolation() in PAGE.read_text(encoding="utf-8")
