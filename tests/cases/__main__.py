"""Lists the runs of each case.

python -m tests.cases [CASE ...]
"""

from __future__ import annotations

import sys

from tests.cases.features import CASES
from tests.contracts.contracts import CONTRACTS
from tests.fuzz.cases import RULES, STAGES


def runs_of(name: str) -> list[str]:
    """Return the runs of a case: contracts, hashes, and the fuzzer."""
    case = CASES[name]
    contracts = [f"contract {contract}" for contract in CONTRACTS if contract not in case.without]
    hashes = [f"bits {run}" for run in case.bits]
    return [*contracts, *hashes, *["fuzzer"] * (name in {*RULES, *STAGES})]


def main(names: list[str]) -> None:
    for name in names or CASES:
        print(f"{name}: {', '.join(runs_of(name))}")


if __name__ == "__main__":
    main(sys.argv[1:])
