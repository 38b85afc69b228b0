"""A feature is one case of the table: each net then runs it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, islice

import pytest

from tests.bits import worker
from tests.cases.__main__ import runs_of
from tests.cases.features import HASHED, Cell
from tests.contracts.contracts import CONTRACTS
from tests.engine.device import cpu_only
from tests.fuzz.cases import Case, draw
from tests.fuzz.workers import Crew

TOY = "each block twice"


def test_a_stage_of_ones_own_has_all_contracts_and_the_fuzzer() -> None:
    assert runs_of(TOY) == [*(f"contract {contract}" for contract in CONTRACTS), "fuzzer"]


@cpu_only("hashes are those of a CPU")
def test_a_hashed_run_has_the_stage_of_its_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break: leave out `registered` in the worker."""
    monkeypatch.setitem(HASHED, "toy", (TOY, Cell()))
    monkeypatch.setitem(HASHED, "plain", ("own blocks and loss", Cell()))
    assert worker.run("toy").split("-")[0] != worker.run("plain").split("-")[0]


@pytest.mark.slow
def test_the_fuzzer_runs_the_stage() -> None:
    crew = Crew()
    try:
        for case in islice(_staged("engine"), 4):
            assert not crew.run(case.name, case.world).wrong
    finally:
        crew.close()


def _staged(kind: str) -> Iterator[Case]:
    return (case for seed in count() if "stage" in (case := draw(kind, seed)).settings)
