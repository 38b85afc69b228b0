"""Ranks that are not there, so that one process can plan for any number of them."""

from __future__ import annotations

from typing import TypeVar

from offload.distributed.comm import Comm

_Value = TypeVar("_Value")


class ImaginedRanks(Comm):
    """Rank 0 of so many on one machine, none of which runs: each would give what this one gives, and nobody has tensors
    to exchange.
    """

    def __init__(self, size: int) -> None:
        self.size = self.local_size = size

    def gather_objects(self, value: _Value, what: str) -> list[_Value]:  # noqa: ARG002
        return [value] * self.size
