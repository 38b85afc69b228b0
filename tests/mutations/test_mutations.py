"""The mistakes that are made on purpose can be made. (That tests find them: make mutations.)"""

from __future__ import annotations

from tests.mutations import applied, list_mutations


def test_every_mutation_can_be_made() -> None:
    for name in list_mutations():
        with applied(name):
            pass
