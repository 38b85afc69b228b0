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
SETTINGS = list(product(PLACES, ("fp32", "bf16"), CLIPS))
STRIDES = (7, 5, 11)
"""Strides per case, contract and repetition. They are coprime to the 24 settings, so neighbours differ in placement,
precision and clipping.
"""


def cells() -> Iterator[Any]:
    for (row, (name, case)), (column, contract) in product(enumerate(CASES.items()), enumerate(CONTRACTS)):
        for turn in range(4):
            place, precision, clip = SETTINGS[
                (row * STRIDES[0] + column * STRIDES[1] + turn * STRIDES[2]) % len(SETTINGS)
            ]
            is_quick = turn == 0 and (contract in ON_DEVICE or own_device().type == "cpu")
            marks = [] if is_quick else [pytest.mark.slow]
            if contract in case.without:
                marks.append(pytest.mark.skip(reason=case.without[contract]))
            if turn == 0 or contract not in case.without:
                yield pytest.param(name, contract, place, precision, clip, marks=marks, id=f"{name}-{contract}-{turn}")


@pytest.mark.parametrize(("name", "contract", "place", "precision", "clip"), list(cells()))
def test_a_feature_holds_a_contract(
    name: str, contract: str, place: str, precision: str, clip: str, tmp_path: Path
) -> None:
    with small(CASES[name]):
        CONTRACTS[contract](Setting(name, place, precision, clip, tmp_path))
