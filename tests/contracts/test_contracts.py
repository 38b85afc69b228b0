"""Each feature holds each contract: one setting in the quick run, three more in the slow run."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from tests.cases.features import CASES, PLACES
from tests.cases.run import small
from tests.contracts.contracts import CLIPS, CONTRACTS, Setting
from tests.engine.device import own_device

pytestmark = pytest.mark.filterwarnings("error:the engine and plain PyTorch give different results")
"""With this warning an engine changes to a safer way of running, in which a mistake of a feature would not show."""
ON_DEVICE = "equals_reference", "place_changes_no_bit"
"""Contracts that the quick run repeats on another device than the CPU."""


def setting(row: int, column: int, turn: int) -> tuple[str, str, str]:
    """Return placement, precision and clipping for a case, a contract and a repetition, each by number.

    The contracts of a case have all placements in both precisions. A precision of a case has one way of clipping: the
    contracts compare with the same undisturbed runs.
    """
    number = (row + column + turn // 2) % 2
    place = list(PLACES)[(row // 2 + column // 2 + turn) % len(PLACES)]
    clip = list(CLIPS)[(row // 8 + number + turn) % len(CLIPS)]
    return place, ("fp32", "bf16")[number], clip


def cells() -> Iterator[Any]:
    for (row, (name, case)), (column, contract) in product(enumerate(CASES.items()), enumerate(CONTRACTS)):
        for turn in range(4):
            is_quick = turn == 0 and (contract in ON_DEVICE or own_device().type == "cpu")
            marks = [] if is_quick else [pytest.mark.slow]
            if contract in case.without:
                marks.append(pytest.mark.skip(reason=case.without[contract]))
            if turn == 0 or contract not in case.without:
                yield pytest.param(
                    name, contract, *setting(row, column, turn), marks=marks, id=f"{name}-{contract}-{turn}"
                )


@pytest.mark.parametrize(("name", "contract", "place", "precision", "clip"), list(cells()))
def test_a_feature_holds_a_contract(
    name: str, contract: str, place: str, precision: str, clip: str, tmp_path: Path
) -> None:
    with small(CASES[name]):
        CONTRACTS[contract](Setting(name, place, precision, clip, tmp_path))
