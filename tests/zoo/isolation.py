"""Document isolation in packed rows with restarting positions, by family."""

from __future__ import annotations

from functools import cache

import torch
from torch import nn

from offload.app.training.isolation import why_not_isolated
from tests.engine.documents import by_document
from tests.zoo.families import FIRST_WORD, Family, families

SIZES = 7, 13, 9


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
