"""Each feature holds each contract in four settings.

The quick run has the first setting: each feature beside plain PyTorch, and every second pair of a feature and another
contract, or every fifth one of a dear contract. The remaining pairs are slow tests.
"""

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

ON_DEVICE = "equals_reference", "place_changes_no_bit"
"""Contracts that the quick run repeats on another device than the CPU, with every feature."""
DEAR = {
    "place_changes_no_bit",
    "resumes_as_if_never_stopped",
    "ranks_are_one",
    "micro_batches_add_up",
    "bytes_are_as_planned",
}
"""Contracts of half a second and more."""


def setting(row: int, column: int, turn: int) -> tuple[str, str, str]:
    """Return placement, precision and clipping for a case, a contract and a repetition, each by number.

    The contracts of a case have all placements, and both precisions over the repetitions. In a repetition they have one
    precision and one way of clipping, because they compare with one undisturbed run. The first contract compares with
    plain PyTorch, and has the other precision.
    """
    number = (row + (column == 0) + turn // 2) % 2
    place = list(PLACES)[(row // 2 + column // 2 + turn) % len(PLACES)]
    clip = list(CLIPS)[(row // 8 + number + turn) % len(CLIPS)]
    return place, ("fp32", "bf16")[number], clip


def is_quick(row: int, column: int, contract: str) -> bool:
    if own_device().type != "cpu":
        return contract in ON_DEVICE
    # An odd number, or a dear contract would have one precision: rows alternate in it.
    return contract == "equals_reference" or (row + column) % (5 if contract in DEAR else 2) == 0


def cells() -> Iterator[Any]:
    for (row, (name, case)), (column, contract) in product(enumerate(CASES.items()), enumerate(CONTRACTS)):
        for turn in range(4) if own_device().type != "cpu" or not case.on_devices else ():
            marks = [] if turn == 0 and is_quick(row, column, contract) else [pytest.mark.slow]
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
