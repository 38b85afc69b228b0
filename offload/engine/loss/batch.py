"""What a batch is: its rows, which of its values have them along which axis, and how it is cut in them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from offload.errors import ConfigError, nearest

Batch = Mapping[str, Any]
"""Names to tensors of any dtype and rank, None, numbers, strings, and lists, tuples and dicts of those."""

IGNORED = -100
"""The label of what is no target."""
_PLAIN = (bool, int, float, str, type(None))
_LISTS = (list, tuple)


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


def next_labels(batch: Batch) -> torch.Tensor:
    """Return the label that follows each token of a batch, int64 [rows, tokens]: its shift_labels, where it has such,
    else its labels one place on; IGNORED, where none follows.
    """
    given = batch.get("shift_labels")
    shifted: torch.Tensor = torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)
    return shifted if given is None else given


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


Rows = Sequence[str] | Mapping[str, int | str | Callable[[Batch, torch.Tensor], Any] | None]
"""What of a batch has its rows, where shapes do not tell: see `Settings.rows`."""


@dataclass(frozen=True)
class BatchForm:
    """How a batch is cut in rows; what has none belongs whole to every part.

    axes: of what has rows, along which axis (0 of a list).
    owners: of what has entries of rows, by name, whose they are, as in `Rows`.
    obstacle: why not even a few rows run by themselves, for people; "" where they do.
    """

    axes: Mapping[str, int]
    owners: Mapping[str, Any] = field(default_factory=dict)
    obstacle: str = ""

    @classmethod
    def of(cls, batch: Batch, named: Rows | None = None) -> BatchForm:
        """Return the form of a batch: what `named` says, and what it does not name has rows if its first axis has their
        number. Raises ConfigError where a name, an axis or a number is none of the batch's.
        """
        rows = check_batch(batch)
        if named is not None and not isinstance(named, Mapping):
            named = dict.fromkeys(batch) | dict.fromkeys(named, 0)
        named = named or {}
        for key in named:
            if key not in batch and (close := nearest(key, batch, cutoff=0.85)):
                raise ConfigError(f"rows names {key!r}, which the batch does not have{close}.")
        axes = {key: 0 for key, value in batch.items() if key not in named and _size(value, 0) == rows}
        owners: dict[str, Any] = {}
        for key, where in named.items():
            if key not in batch or where is None or batch[key] is None:
                continue
            if not isinstance(where, int):
                owners[key] = where
            elif _size(batch[key], where) == rows:
                axes[key] = where
            else:
                raise ConfigError(
                    f"rows says that {key} has its rows along axis {where}, and {key} is {describe(batch[key])}, of a "
                    f"batch of {rows} rows."
                )
        form = cls(axes, owners)
        for key, where in owners.items():
            if isinstance(where, str):
                form.owned(batch, key, torch.arange(0, device="cpu"))
        return form

    @property
    def is_whole(self) -> bool:
        """True where not even a few rows run by themselves."""
        return bool(self.obstacle)

    def take(self, batch: Batch, order: torch.Tensor) -> dict[str, Any]:
        """Return a batch of the rows of these numbers (int64 [rows], on the CPU), in their order."""
        taken = dict(batch)
        for key, axis in self.axes.items():
            value = batch[key]
            if isinstance(value, torch.Tensor):
                taken[key] = value.index_select(axis, order.to(value.device))
            else:
                taken[key] = type(value)(value[number] for number in order.tolist())
        return taken | {key: self.owned(batch, key, order) for key in self.owners}

    def owned(self, batch: Batch, key: str, order: torch.Tensor) -> Any:
        """Return the entries of rows of these numbers, of what `owners` has. Raises ConfigError."""
        owner, value = self.owners[key], batch[key]
        if not isinstance(owner, str):
            return owner(batch, order)
        sizes = batch.get(owner)
        counts = sizes.flatten(1).prod(1).tolist() if isinstance(sizes, torch.Tensor) and sizes.dim() > 1 else []
        if sum(counts) != _size(value, 0) or len(counts) != check_batch(batch):
            raise ConfigError(
                f"rows says that {owner} tells how many entries of {key} each row has, and {owner} is "
                f"{describe(sizes)}, which tells of {sum(counts)} entries of {len(counts)} rows; {key} is "
                f"{describe(value)}, of a batch of {check_batch(batch)} rows. A function (batch, numbers) may say more."
            )
        pieces = value.split(counts)
        return torch.cat([pieces[number] for number in order.tolist()] or [value[:0]])

    def parts(self, batch: Batch, total: int, rows: int | None) -> Iterator[dict[str, Any]]:
        """Yield micro-batches of at most `rows` rows of the batch's `total`; the last may be smaller."""
        step = rows or total
        for start in range(0, total, step):
            part, end = dict(batch), min(start + step, total)
            for key, axis in self.axes.items():
                value = batch[key]
                is_tensor = isinstance(value, torch.Tensor)
                part[key] = value.narrow(axis, start, end - start) if is_tensor else value[start:end]
            yield part | {key: self.owned(batch, key, torch.arange(start, end, device="cpu")) for key in self.owners}

    def is_rows_of(self, batch: Batch) -> bool:
        """True where all of a batch has its rows along the first axis."""
        return len(self.axes) == len(batch) and not any(self.axes.values())

    def alike(self, batch: Batch, keys: Iterable[str]) -> set[str]:
        """Return which of these have the same in all rows of a batch, and may be every row's as well."""
        return {key for key in keys if key in self.axes and _is_alike(batch[key], self.axes[key])}

    def differing(self, batch: Batch, row: int) -> torch.Tensor:
        """Return in how many tensors each row of a batch differs from one of them, int64 [rows] on the CPU."""
        found = torch.zeros(check_batch(batch), dtype=torch.int64, device="cpu")
        for key, axis in self.axes.items():
            if isinstance(value := batch[key], torch.Tensor):
                rows = value.movedim(axis, 0).flatten(1) if value.dim() > 1 else value[:, None]
                found += (rows != rows[row : row + 1]).any(1).cpu()
        return found


def _size(value: Any, axis: int) -> int:
    """Return the size of a value along an axis; -1 for what has no such axis."""
    if isinstance(value, torch.Tensor):
        return value.shape[axis] if 0 <= axis < value.dim() else -1
    return len(value) if isinstance(value, _LISTS) and axis == 0 else -1


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
