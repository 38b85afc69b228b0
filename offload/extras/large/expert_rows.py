"""Token rows sorted by expert, in groups by record, with one wait for the device a layer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor


class RecordRows(NamedTuple):
    """Rows for the experts in one record."""

    first: int
    """First expert."""
    counts: tuple[int, ...]
    """Rows by expert."""
    ends: Tensor
    """Where the rows for each expert end, int32 [experts], on the device."""
    span: slice
    """Place in the layer."""
    tokens: Tensor
    """Tokens by row, int64 [rows]."""
    experts: Tensor
    """Experts by row, integers [rows]."""
    turns: tuple[Tensor, ...]
    """Row numbers, int64. A token has at most one row in a turn, and its experts ascend over the turns. Empty: one turn
    with all rows.
    """

    def add_to(self, result: Tensor, values: Tensor, *, descending: bool = False) -> None:
        """Add values [rows, width] to their tokens in `result` [tokens, width], expert by expert for each token.

        One sum over all rows would have no fixed order on a GPU.
        """
        if not self.turns:
            result.index_add_(0, self.tokens, values)
        turns = self.turns
        if descending:
            turns = turns[::-1]
        for turn in turns:
            result.index_add_(0, self.tokens[turn], values[turn])

    def by_expert(self) -> Iterator[tuple[int, slice]]:
        """Yield each expert with rows, counted from `first`, and where its rows are in the record."""
        for expert, (begin, end) in enumerate(pairwise(accumulate(self.counts, initial=0))):
            if begin < end:
                yield expert, slice(begin, end)


class ExpertRows:
    """Rows for each expert: one row for each choice of a token, sorted by expert, then choice, then token, the order in
    a family's own forward.
    """

    def __init__(self, index: Tensor, num_experts: int, num_together: int) -> None:
        """Waits for the device once. `index`: expert numbers, integers [tokens, choices]; numbers from `num_experts` on
        are no experts. `num_together`: experts in a record.
        """
        self._num_together = num_together
        self._shape = index.shape
        self._experts, self._places = index.t().reshape(-1).sort(stable=True)
        self._tokens = self._places % max(len(index), 1)  # transposed: a place is choice * tokens + token
        borders = _borders(self._experts, num_experts)
        self._ends = borders[1:].int()
        turn_borders = borders[:0]
        if num_together > 1:
            self._turns, turn_borders = self._take_turns(index, num_experts)
        found = torch.cat([borders, turn_borders]).tolist()  # the one wait
        self._borders, self._turn_borders = found[: num_experts + 1], found[num_experts + 1 :]

    def _take_turns(self, index: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
        """Return the row numbers by record and turn, and the borders between these."""
        num_records, num_choices = -(-num_experts // self._num_together), index.shape[1]
        chosen, order = index.long().sort(dim=1, stable=True)
        record = (chosen // self._num_together).masked_fill_(chosen >= num_experts, num_records)
        # How many earlier experts the token has in the record.
        turn = torch.arange(num_choices, device=index.device) - torch.searchsorted(record, record)
        number = record * num_choices + turn
        ordered, rows = self.sort(torch.empty_like(number).scatter_(1, order, number)).sort(stable=True)
        return rows, _borders(ordered, num_records * num_choices)

    @property
    def hit(self) -> set[int]:
        """Experts with rows."""
        return {expert for expert, (begin, end) in enumerate(pairwise(self._borders)) if begin < end}

    def of_record(self, experts: range) -> RecordRows:
        """Return the rows for the experts in a record."""
        borders = self._borders[experts.start : experts.stop + 1]
        span = slice(borders[0], borders[-1])
        return RecordRows(
            first=experts.start,
            counts=tuple(end - begin for begin, end in pairwise(borders)),
            ends=self._ends[experts.start : experts.stop] - span.start,
            span=span,
            tokens=self._tokens[span],
            experts=self._experts[span],
            turns=self._turns_of(experts.start // self._num_together, span.start),
        )

    def _turns_of(self, record: int, begin: int) -> tuple[Tensor, ...]:
        num_choices = self._shape[1]
        borders = self._turn_borders[record * num_choices :][: num_choices + 1]
        spans = [slice(*border) for border in pairwise(borders) if border[0] < border[1]]
        if len(spans) < 2:
            return ()
        return tuple(self._turns[span] - begin for span in spans)

    def sort(self, values: Tensor) -> Tensor:
        """Return values [rows] from values [tokens, choices]."""
        return values.t().reshape(-1)[self._places]

    def unsort(self, values: Tensor) -> Tensor:
        """Return values [tokens, choices] from values [rows]."""
        return torch.empty_like(values).scatter_(0, self._places, values).view(self._shape[::-1]).t().contiguous()


def _borders(numbers: Tensor, count: int) -> Tensor:
    """Return where each number from 0 to `count` begins among ascending `numbers`, int64 [count + 1]."""
    return torch.searchsorted(numbers, torch.arange(count + 1, dtype=numbers.dtype, device=numbers.device))
