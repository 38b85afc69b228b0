"""Batch structure: the row count, the values with a row axis, and the cut into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from offload.errors import ConfigError, nearest

Batch = Mapping[str, Any]
"""Names to tensors (any dtype and rank), None, numbers, strings, and nested lists, tuples and dicts."""

IGNORED = -100
"""Label value for positions without a target."""
_PLAIN = (bool, int, float, str, type(None))
_LISTS = (list, tuple)


@dataclass(frozen=True)
class Chunk:
    """Tokens that go through the head at once.

    places: token positions in the flattened rows, int64.
    num_targets: number of counted tokens, at the front; the rest is filler.
    """

    places: torch.Tensor
    num_targets: int


def check_batch(batch: Batch) -> int:
    """Return the row count of a batch: from the labels, else the most frequent first dimension among the tensors.

    Ties go to the first tensor. Raises ConfigError for a batch without rows or with unsupported values.
    """
    if not isinstance(batch, Mapping) or not batch:
        description = "empty" if isinstance(batch, Mapping) else f"a {type(batch).__name__}"
        raise ConfigError(f"the batch is {description}; it must be a mapping from names to tensors [batch, ...].")
    sizes: dict[int, int] = {}
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            if value.dim():
                sizes[value.shape[0]] = sizes.get(value.shape[0], 0) + 1
        elif not isinstance(value, (*_PLAIN, *_LISTS, Mapping)):
            raise ConfigError(
                f"batch[{key!r}] is {type(value).__name__}; it must be a tensor, None, a number, a string, or a list "
                "of these."
            )
    # Labels decide: the first axis of other tensors may count patches of pictures, or tokens.
    labels = batch.get("labels")
    if isinstance(labels, torch.Tensor) and labels.dim():
        rows = labels.shape[0]
    else:
        rows = max(sizes, key=sizes.__getitem__, default=0)
    if not rows:
        shown = ", ".join(f"{key}: {describe(value)}" for key, value in batch.items())
        raise ConfigError(f"the batch has no rows ({shown}); at least one tensor [batch, ...] must have one row.")
    return rows


def has_equal_rows(batch: Batch, rows: int) -> bool:
    """True if all values are tensors with first dimension `rows`."""
    return all(isinstance(value, torch.Tensor) and value.shape[:1] == (rows,) for value in batch.values())


def is_token_batch(batch: Batch, rows: int) -> bool:
    """True if all values are tensors [rows, tokens, ...] like the labels, and token count and row count differ."""
    labels = batch.get("labels")
    if not isinstance(labels, torch.Tensor) or labels.dim() != 2 or labels.is_floating_point():
        return False
    # With as many tokens as rows, the size of an axis does not tell rows from tokens.
    return rows != labels.shape[1] and all(
        isinstance(value, torch.Tensor) and value.shape[:2] == labels.shape for value in batch.values()
    )


def batch_pattern(batch: Batch, rows: int) -> tuple[tuple[str, Hashable], ...]:
    """Return a key shared by batches with the same handling: sorted (name, property) pairs.

    Tensors give (number of axes, first axis with size `rows` or -1). Booleans, strings and None give the value, other
    values the type.
    """
    properties: list[tuple[str, Hashable]] = []
    for key, value in batch.items():
        if isinstance(value, torch.Tensor):
            row_axis = -1
            if rows in value.shape:
                row_axis = value.shape.index(rows)
            properties.append((key, (value.dim(), row_axis)))
        elif isinstance(value, bool | str | None):
            properties.append((key, repr(value)))
        else:
            properties.append((key, (type(value).__name__, isinstance(value, _LISTS) and len(value) == rows)))
    # Sorted: the order of the keys in a batch does not matter. By key alone: properties may not compare.
    return tuple(sorted(properties, key=lambda item: item[0]))


def describe(value: Any) -> str:
    """Describe a batch value for error messages."""
    if isinstance(value, torch.Tensor):
        return str(list(value.shape))
    if isinstance(value, (*_LISTS, Mapping)):
        return f"a {type(value).__name__} of {len(value)}"
    return repr(value)


def next_labels(batch: Batch) -> torch.Tensor:
    """Return the next label for each token, int64 [rows, tokens]; IGNORED at the end of a row.

    Source: `shift_labels` if present, else the labels shifted by one.
    """
    shifted: torch.Tensor | None = batch.get("shift_labels")
    if shifted is None:
        shifted = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return shifted


def map_tensors(function: Callable[[torch.Tensor], torch.Tensor], batch: Batch) -> dict[str, Any]:
    """Apply `function` to every tensor in a batch, also inside lists and dicts."""

    def of_leaf(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor):
            return function(leaf)
        return leaf

    def of_value(value: Any) -> Any:
        # Most values are leaves, with no tree to open.
        if isinstance(value, (torch.Tensor, *_PLAIN)):
            return of_leaf(value)
        return tree_map(of_leaf, value)

    return {key: of_value(value) for key, value in batch.items()}


Rows = Sequence[str] | Mapping[str, int | str | Callable[[Batch, torch.Tensor], Any] | None]
"""Row axes of batch values, for shapes that leave the axis open. See `Settings.rows`."""


@dataclass(frozen=True)
class BatchForm:
    """Row axes of a batch. A value without rows goes whole to every micro-batch.

    axes: row axis for each value with rows (0 for a list).
    owners: for values with several entries per row: the name of a size tensor [rows, ...] (the product per row is the
      entry count), or a function (batch, row numbers) that selects the entries.
    obstacle: reason why the model cannot run on a few rows alone, for error messages; "" if it can.
    """

    axes: Mapping[str, int]
    owners: Mapping[str, Any] = field(default_factory=dict)
    obstacle: str = ""

    @classmethod
    def of(cls, batch: Batch, row_axes: Rows | None = None) -> BatchForm:
        """Return the form of a batch: as in `named`, else rows along axis 0 if the size matches the row count.

        Raises ConfigError for a name, axis or row count that contradicts the batch.
        """
        rows = check_batch(batch)
        if row_axes is not None and not isinstance(row_axes, Mapping):
            # A list names all values with rows: any other value is shared by all rows.
            row_axes = dict.fromkeys(batch) | dict.fromkeys(row_axes, 0)
        row_axes = row_axes or {}
        for key in row_axes:
            # A batch may lack a named value, as rows without pictures do. Only a similar key is a misspelt name.
            if key not in batch and (close := nearest(key, batch, cutoff=0.85)):
                raise ConfigError(f"rows names {key!r}, which is not in the batch{close}.")
        axes = {key: 0 for key, value in batch.items() if key not in row_axes and _size(value, 0) == rows}
        owners: dict[str, Any] = {}
        for key, where in row_axes.items():
            if key not in batch or where is None or batch[key] is None:
                continue
            if not isinstance(where, int):
                owners[key] = where
            elif _size(batch[key], where) == rows:
                axes[key] = where
            else:
                raise ConfigError(
                    f"rows gives axis {where} as the row axis of {key}, but {key} is {describe(batch[key])}, and the "
                    f"batch has {rows} rows."
                )
        form = cls(axes, owners)
        for key, where in owners.items():
            if isinstance(where, str):
                # A selection of no rows checks the counts, before anything runs.
                form.select_entries(batch, key, torch.arange(0, device="cpu"))
        return form

    @property
    def is_whole(self) -> bool:
        """True if the model cannot run on a few rows alone."""
        return bool(self.obstacle)

    def take(self, batch: Batch, order: torch.Tensor) -> dict[str, Any]:
        """Return a batch with the selected rows. `order`: row numbers, int64 [rows], on the CPU."""
        selected = dict(batch)
        for key, axis in self.axes.items():
            value = batch[key]
            if isinstance(value, torch.Tensor):
                selected[key] = value.index_select(axis, order.to(value.device))
            else:
                selected[key] = type(value)(value[number] for number in order.tolist())
        return selected | {key: self.select_entries(batch, key, order) for key in self.owners}

    def select_entries(self, batch: Batch, key: str, order: torch.Tensor) -> Any:
        """Return the entries of value `key` (in `owners`) for the rows in `order`. Raises ConfigError."""
        owner, value = self.owners[key], batch[key]
        if not isinstance(owner, str):
            return owner(batch, order)
        sizes = batch.get(owner)
        counts: list[int] = []
        if isinstance(sizes, torch.Tensor) and sizes.dim() > 1:
            counts = sizes.flatten(1).prod(1).tolist()
        if sum(counts) != _size(value, 0) or len(counts) != check_batch(batch):
            raise ConfigError(
                f"rows takes the entries per row of {key} from {owner}, but {owner} is {describe(sizes)}, which gives "
                f"{sum(counts)} entries for {len(counts)} rows; {key} is {describe(value)}, and the batch has "
                f"{check_batch(batch)} rows. Pass a function (batch, numbers) for other layouts."
            )
        pieces = value.split(counts)
        # torch.cat refuses an empty list.
        return torch.cat([pieces[number] for number in order.tolist()] or [value[:0]])

    def parts(self, batch: Batch, total: int, rows: int | None) -> Iterator[dict[str, Any]]:
        """Yield micro-batches with at most `rows` rows (None: all `total` rows). The last one may be smaller."""
        step = rows or total
        for start in range(0, total, step):
            part, end = dict(batch), min(start + step, total)
            for key, axis in self.axes.items():
                value = batch[key]
                if isinstance(value, torch.Tensor):
                    part[key] = value.narrow(axis, start, end - start)
                else:
                    part[key] = value[start:end]
            yield part | {
                key: self.select_entries(batch, key, torch.arange(start, end, device="cpu")) for key in self.owners
            }

    def has_leading_rows(self, batch: Batch) -> bool:
        """True if this form gives every value of the batch a row axis, and this axis is 0."""
        return len(self.axes) == len(batch) and not any(self.axes.values())

    def constant_keys(self, batch: Batch, keys: Iterable[str]) -> set[str]:
        """Return the subset of `keys` with equal values in all rows.

        An equal value may belong to the whole batch; only differing values prove a row axis.
        """
        return {key for key in keys if key in self.axes and _is_constant(batch[key], self.axes[key])}

    def count_differences(self, batch: Batch, row: int) -> torch.Tensor:
        """Count the tensors in which each row differs from row `row`, int64 [rows] on the CPU."""
        counts = torch.zeros(check_batch(batch), dtype=torch.int64, device="cpu")
        for key, axis in self.axes.items():
            if isinstance(value := batch[key], torch.Tensor):
                rows = value.movedim(axis, 0).unsqueeze(-1).flatten(1)  # a vector becomes a column
                counts += (rows != rows[row : row + 1]).any(1).cpu()
        return counts


def _size(value: Any, axis: int) -> int:
    """Return the size along an axis, or -1 without this axis."""
    if isinstance(value, torch.Tensor) and 0 <= axis < value.dim():
        return value.shape[axis]
    if isinstance(value, _LISTS) and axis == 0:
        return len(value)
    return -1


def _is_constant(value: Any, axis: int) -> bool:
    if isinstance(value, torch.Tensor):
        first = value.narrow(axis, 0, 1)
        return torch.equal(value, first.expand_as(value))
    return all(_is_equal(item, value[0]) for item in value)


def _is_equal(one: Any, other: Any) -> bool:
    ones, others = tree_leaves(one), tree_leaves(other)
    # 1, 1.0 and True are equal to Python, and not to every model.
    return len(ones) == len(others) and all(
        type(a) is type(b) and (torch.equal(a, b) if isinstance(a, torch.Tensor) else bool(a == b))
        for a, b in zip(ones, others, strict=True)
    )
