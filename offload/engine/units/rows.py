"""Rows of a unit use: micro-batches of the batch on one rank, and their random numbers."""

from __future__ import annotations

import hashlib
from typing import NamedTuple

from offload.engine.units.arguments import Arguments
from offload.engine.units.traits import Span
from offload.engine.units.unit import Unit


class Rows(NamedTuple):
    """Batch rows of a pass on one rank, and the place of one use in the step. The defaults: a whole batch."""

    batch: int = 0
    """Rows in the batch."""
    size: int = 0
    """Rows in a micro-batch."""
    num_parts: int = 1
    """Maximum micro-batch count over all ranks."""
    rank: int = 0
    """Rank with these rows."""
    step: int = 0
    """Step number."""
    use: int = 0
    """Number of the unit's calls so far in this step, this one included."""

    @property
    def is_cut(self) -> bool:
        """True if the rank has more than one micro-batch."""
        return self.size < self.batch

    def of(self, unit: Unit) -> list[Span | None]:
        """Return the micro-batches of a unit, or [None] for the whole input."""
        if not (self.is_cut and unit.traits.grows):
            return [None]
        return [(start, min(start + self.size, self.batch), self.batch) for start in range(0, self.batch, self.size)]

    def can_cut(self, unit: Unit, arguments: Arguments) -> bool:
        """Select the traits of a unit for a call. False if the batch is cut, and the arguments cannot be."""
        is_known = unit.recall(arguments.structure) and unit.traits.is_compared
        return not self.is_cut or (is_known and unit.traits.can_cut(arguments, self.batch))

    def seed(self, run: int, unit: Unit, part: int) -> int:
        """Return the generator seed of one micro-batch. `run`: the seed of the run."""
        return generator_seed(run, self.step, unit.number, self.use, part, self.rank)


def generator_seed(*numbers: int) -> int:
    """Return a 63-bit seed from numbers, equal on every machine and Python version."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
