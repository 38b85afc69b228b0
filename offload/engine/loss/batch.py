"""What a batch is: its rows, which of its values have them along which axis, and how it is cut in them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations, product
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from offload.errors import ConfigError

Batch = Mapping[str, Any]
"""Names to tensors of any dtype and rank, None, numbers, strings, and lists, tuples and dicts of those."""

_PLAIN = (bool, int, float, str, type(None))
_LISTS = (list, tuple)
_MOST_CHANGES = 2  # of the first guess, in a form that is tried


def check_batch(batch: Batch) -> int:
    """Return the number of rows of a batch: of its labels, else that which most of its tensors have, the first of
    several; ConfigError where it has none, or is no batch.
    """
    if not isinstance(batch, Mapping) or not batch:
        given = "empty" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise ConfigError(f"the batch is {given}; a mapping from names to tensors [batch, ...] is wanted.")
    sizes: dict[int, int] = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            if value.dim():
                sizes[value.shape[0]] = sizes.get(value.shape[0], 0) + 1
        elif not isinstance(value, (*_PLAIN, *_LISTS, Mapping)):
            raise ConfigError(
                f"batch[{key!r}] is {type(value).__name__}; tensors, None, numbers, texts and lists of those are taken."
            )
    labels = batch.get("labels")
    if isinstance(labels, torch.Tensor) and labels.dim():
        rows = labels.shape[0]
    else:
        rows = max(sizes, key=sizes.__getitem__, default=0)
    if not rows:
        shown = ", ".join(f"{key}: {describe(value)}" for key, value in batch.items())
        raise ConfigError(f"the batch has no rows ({shown}); at least one tensor [batch, ...] of one row is wanted.")
    return rows


def has_equal_rows(batch: Batch, rows: int) -> bool:
    """True where all of a batch is tensors whose first axis is the rows, by its size."""
    return all(isinstance(value, torch.Tensor) and value.shape[:1] == (rows,) for value in batch.values())


def is_token_batch(batch: Batch, rows: int) -> bool:
    """True where all of a batch is tensors [rows, tokens, ...] as its labels are, and not as many tokens as rows."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2 or labels.is_floating_point():
        return False
    return rows != labels.shape[1] and all(
        isinstance(value, torch.Tensor) and value.shape[:2] == labels.shape for value in batch.values()
    )


def pattern(batch: Batch, rows: int) -> tuple[tuple[str, Hashable], ...]:
    """Return what batches that are handled alike have in common: names, numbers of axes, which axis has the size of the
    rows (-1: none), switches, and what else is no tensor by its kind.
    """
    found: list[tuple[str, Hashable]] = []
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            found.append((key, (value.dim(), value.shape.index(rows) if rows in value.shape else -1)))
        elif isinstance(value, bool | str | None):
            found.append((key, repr(value)))
        else:
            found.append((key, (type(value).__name__, isinstance(value, _LISTS) and len(value) == rows)))
    return tuple(sorted(found, key=lambda item: item[0]))


def describe(value: Any) -> str:
    """Return what a value of a batch is, for people."""
    if isinstance(value, torch.Tensor):
        return str(list(value.shape))
    return f"a {type(value).__name__} of {len(value)}" if isinstance(value, (*_LISTS, Mapping)) else repr(value)


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> dict[str, Any]:
    """Return a batch with `function` of each of its tensors, those in lists and dicts included."""
    return {
        key: function(value)
        if isinstance(value, torch.Tensor)
        else value
        if isinstance(value, _PLAIN)
        else tree_map(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, value)
        for key, value in batch.items()
    }


@dataclass(frozen=True)
class BatchForm:
    """How batches of a kind are cut in rows.

    `axes`: of what has rows, along which axis (0 of a list); what is not among them is every row's. `is_whole`: not
    even a few rows of it run by themselves. `obstacle`: why its parts do not make the whole, for people; "" where they
    do, or where nobody has asked. `adds_up`: its loss is the mean over its rows, or over their targets; None where that
    was not tried. `undecided`: of `axes`, what had the same in all rows when this was tried, and might be every row's.
    """

    axes: Mapping[str, int]
    is_whole: bool = False
    obstacle: str = ""
    adds_up: bool | None = None
    undecided: Sequence[str] = field(default=())

    @classmethod
    def guess(cls, batch: Batch, rows: int) -> BatchForm:
        """Return the form in which all has rows whose first axis has their number."""
        return next(forms_of(batch, rows))

    def take(self, batch: Batch, order: torch.Tensor) -> dict[str, Any]:
        """Return a batch of the rows of these numbers (int64 [rows], on the CPU), in their order."""
        taken = dict(batch)
        for key, axis in self.axes.items():
            value = batch[key]
            if isinstance(value, torch.Tensor):
                taken[key] = value.index_select(axis, order.to(value.device))
            else:
                taken[key] = type(value)(value[number] for number in order.tolist())
        return taken

    def num_rows(self, batch: Batch) -> int:
        """Return how many rows a batch of this form has."""
        key, axis = next(iter(self.axes.items()))
        value = batch[key]
        return value.shape[axis] if isinstance(value, torch.Tensor) else len(value)

    def parts(self, batch: Batch, total: int, rows: int | None) -> Iterator[dict[str, Any]]:
        """Yield micro-batches of at most `rows` rows of the batch's `total`; the last may be smaller."""
        step = rows or total
        for start in range(0, total, step):
            part, end = dict(batch), min(start + step, total)
            for key, axis in self.axes.items():
                value = batch[key]
                is_tensor = isinstance(value, torch.Tensor)
                part[key] = value.narrow(axis, start, end - start) if is_tensor else value[start:end]
            yield part

    def is_rows_of(self, batch: Batch) -> bool:
        """True where all of a batch has its rows along the first axis."""
        return len(self.axes) == len(batch) and not any(self.axes.values())

    def rows_are_alike(self, batch: Batch, keys: Sequence[str] | None = None) -> bool:
        """True where all rows of a batch are the same, or those of some of its values."""
        return all(_is_alike(batch[key], self.axes[key]) for key in (self.axes if keys is None else keys))

    def misfit(self, shapes: Sequence[tuple[str, Any]], rows: int) -> str:
        """Return which tensor has not these rows where the form has them, or ""."""
        for key, shape in shapes:
            axis = self.axes.get(key)
            if axis is not None and isinstance(shape, tuple) and shape[axis] != rows:
                return f"{key} {list(shape)} has not its {rows} rows"
        return ""


def forms_of(batch: Batch, rows: int) -> Iterator[BatchForm]:
    """Yield the forms that a batch may have by its shapes, the likeliest first: all has rows whose first axis has their
    number; then one value is every row's, or has rows along another axis, then two.
    """
    choices: dict[str, list[int | None]] = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            sized = [axis for axis, size in enumerate(value.shape) if size == rows]
        else:
            sized = [0] if isinstance(value, _LISTS) and len(value) == rows else []
        if sized:
            is_first = sized[0] == 0
            choices[key] = [0] if key == "labels" else [*sized[:is_first], None, *sized[is_first:]]
    doubtful = [key for key, found in choices.items() if len(found) > 1]
    for num_changes in range(_MOST_CHANGES + 1):
        for keys in combinations(doubtful, num_changes):
            for others in product(*(choices[key][1:] for key in keys)):
                chosen = {key: found[0] for key, found in choices.items()} | dict(zip(keys, others, strict=True))
                axes = {key: axis for key, axis in chosen.items() if axis is not None}
                if axes:
                    yield BatchForm(axes)


def _is_alike(value: Any, axis: int) -> bool:
    if isinstance(value, torch.Tensor):
        first = value.narrow(axis, 0, 1)
        return torch.equal(value, first.expand_as(value))
    return all(_same(item, value[0]) for item in value)


def _same(one: Any, other: Any) -> bool:
    ones, others = tree_leaves(one), tree_leaves(other)
    return len(ones) == len(others) and all(
        type(a) is type(b) and (torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b))
        for a, b in zip(ones, others, strict=True)
    )
