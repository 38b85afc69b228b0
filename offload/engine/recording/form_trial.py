"""Which of a batch's values have rows, by what the model makes of them: a few rows, together and one by one, have to
give the same results and the same loss. A shape alone tells nothing: there may be as many positions as rows.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from offload.engine.loss.batch import Batch, BatchForm, describe
from offload.engine.loss.loss import LossRule, labels_of
from offload.errors import OffloadError

_MOST_ROWS = 4

Run = Callable[[Batch], tuple[Any, float]]
"""Runs the model on a batch, in eval mode; returns its outputs and its loss."""
Take = Callable[[BatchForm], Batch]
"""Returns a few rows of a batch that has this form: the same ones on all ranks."""


@dataclass(frozen=True)
class _Outcome:
    """What came of a form. `ran`: on the rows together; `ran_apart`: on each as well."""

    ran: bool = False
    ran_apart: bool = False
    is_alike: bool = False
    tells: bool = True
    text: str = ""


def rows_to_try(batch: Batch, rows: int) -> torch.Tensor:
    """Return the numbers of a few rows, two at least: of those that have targets the ones with fewest and most among
    them, so that it shows by what their losses are weighed.
    """
    numbers = [0, rows // 3, 2 * rows // 3, rows - 1]
    labels = labels_of(batch)
    if labels is not None and labels.dim() > 1 and not labels.is_floating_point():
        counts = torch.tensor([LossRule().count(row) for row in labels.cpu().split(1)])
        order = counts.argsort(stable=True)
        numbers = [int(order[min(int((counts == 0).sum()), rows - 1)]), int(order[-1]), *numbers][:_MOST_ROWS]
    few = list(dict.fromkeys(numbers))
    return torch.tensor(few if len(few) > 1 else few * 2)


def find_form(batch: Batch, rows: int, forms: Iterable[BatchForm], take: Take, run: Run, precision: float) -> BatchForm:
    """Return the form of a batch, the first of `forms` in which its rows make the whole, within `precision`. Where none
    does: the first in which a few rows run, or a whole one, with the obstacle. Collective.
    """
    failed: list[tuple[BatchForm, _Outcome]] = []
    for form in forms:
        sample = take(form)
        outcome = _try(form, sample, run, precision)
        if outcome.is_alike:
            undecided = _undecided(form, sample, run, precision)
            return replace(form, adds_up=True if outcome.tells else None, undecided=undecided)
        failed.append((form, outcome))
    form, outcome = max(failed, key=lambda each: (each[1].ran_apart, each[1].ran), default=(BatchForm({}), _Outcome()))
    obstacle = outcome.text
    if not outcome.ran_apart:
        obstacle = f"tried on rows by themselves, the model says: {outcome.text}"
        others = [key for key, value in batch.items() if _is_other(value, rows)]
        if others:
            named = f"{others[0]} {describe(batch[others[0]])}"
            obstacle = f"{named} does not go with its {rows} rows one by one; {obstacle}"
    return replace(form, is_whole=not outcome.ran, obstacle=obstacle, adds_up=False if outcome.ran_apart else None)


def _undecided(form: BatchForm, sample: Batch, run: Run, precision: float) -> Sequence[str]:
    """Return what has the same in all rows, and may be every row's as well by what the model makes of it."""
    alike = [key for key in form.axes if key != "labels" and form.rows_are_alike(sample, [key])]
    found = []
    for key in alike:
        other = BatchForm({name: axis for name, axis in form.axes.items() if name != key})
        if other.axes and _try(other, sample, run, precision).is_alike:
            found.append(key)
    return found


def _try(form: BatchForm, sample: Batch, run: Run, precision: float) -> _Outcome:
    ran = ran_apart = False
    parts = list(form.parts(sample, form.num_rows(sample), 1))
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Using a target size")  # which may be broadcast in a wrong form
            outputs, loss = run(sample)
            ran = True
            found = [run(part) for part in parts]
            ran_apart = True
    except (OffloadError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # whatever a model makes of what is no batch
        return _Outcome(ran, ran_apart, text=f"{type(error).__name__}: {error}".splitlines()[0])
    if not math.isfinite(loss):
        return _Outcome(True, True, is_alike=True, tells=False)
    wholes = [_weighed(parts, [one for _, one in found], rule) for rule in (LossRule(), LossRule(shifts=False))]
    if not any(abs(whole - loss) <= precision * abs(loss) + 1e-6 for whole in wholes):
        text = f"the loss of {len(parts)} rows is {loss:.6g}, and {wholes[-1]:.6g} what they make one by one"
        return _Outcome(True, True, text=f"{text}: it is no mean over rows")
    if not _same_rows(_tensors(outputs), [_tensors(of_part) for of_part, _ in found], precision):
        return _Outcome(True, True, text="rows one by one give other results than together")
    return _Outcome(True, True, is_alike=True)


def _weighed(parts: Sequence[Batch], losses: Sequence[float], rule: LossRule) -> float:
    """Return the mean of the rows' losses by their targets; rows without any have none."""
    labels = [labels_of(part) for part in parts]
    weights = [1 if its is None else rule.count(its) for its in labels]
    return sum(w * loss for w, loss in zip(weights, losses, strict=True) if w) / max(1, sum(weights))


def _tensors(outputs: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _same_rows(whole: Sequence[torch.Tensor], parts: Sequence[Sequence[torch.Tensor]], precision: float) -> bool:
    """True where each part's results are the rows of the whole's, or the whole's own."""
    if any(len(part) != len(whole) for part in parts):
        return False
    for number, tensor in enumerate(whole):
        if not tensor.dim() or tensor.shape[0] != len(parts):
            continue
        pieces = [part[number] for part in parts]
        if all(piece.shape == (1, *tensor.shape[1:]) for piece in pieces):
            is_same = _close(tensor, torch.cat(pieces), precision)
        else:
            is_same = all(piece.shape == tensor.shape and _close(tensor, piece, precision) for piece in pieces)
        if not is_same:
            return False
    return True


def _close(one: torch.Tensor, other: torch.Tensor, precision: float) -> bool:
    scale = float(one.abs().nan_to_num(0.0, 0.0).max()) if one.numel() else 0.0
    return torch.allclose(one.float(), other.float(), rtol=0.0, atol=precision * scale + 1e-6, equal_nan=True)


def _is_other(value: Any, rows: int) -> bool:
    """True for what has a number of its own, other than that of the rows."""
    if isinstance(value, torch.Tensor):
        return value.dim() > 0 and value.shape[0] != rows
    return isinstance(value, list | tuple) and len(value) != rows
