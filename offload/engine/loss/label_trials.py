"""Trials of a loss on the same rows with other labels, without repeating the base model."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import nn

from offload.engine.comparison import OTHER_ORDER, are_same_loss, tolerance
from offload.engine.loss.batch import IGNORED, Batch
from offload.engine.loss.loss import LossFunction, LossRule, find_loss, labels_of
from offload.engine.units.trial import ENGINE_ERRORS
from offload.errors import ConfigError
from offload.modules import forwards_replaced


def find_base_model(model: nn.Module) -> nn.Module | None:
    """Return the transformers base model below the head, also through an adapter wrapper. None: no base model."""
    base_model = model
    # The base model of an adapter wrapper has a base model in turn. The innermost one names itself.
    while isinstance(below := getattr(base_model, "base_model", None), nn.Module) and below is not base_model:
        base_model = below
    if base_model is model:
        return None
    return base_model


_WEIGHT_TRIALS = 6
"""Trials of `find_other_weights`. One can hide weights by chance: two parts may have equal mean weights."""


class LabelTrials:
    """Runs a model repeatedly on the same rows with other labels.

    If the labels do not change the base model output, this output is computed once and only the head runs again.
    """

    def __init__(self, model: nn.Module, run: Callable[..., Any], recorded_losses: Collection[float] = ()) -> None:
        """`run`: the model on a batch and further arguments. `recorded_losses`: losses with the own labels."""
        self._base = find_base_model(model)
        self._run = run
        self._outputs = list[Any]()  # of the base model, one for each call in a forward
        self._recorded_losses = set(filter(math.isfinite, recorded_losses))
        self.output: Any = None
        """Output of the base model. None: labels may change the output."""

    def __call__(self, batch: Batch, **extra: Any) -> Any:
        if self.output is None:
            return self._run(batch, **extra)
        return self._run_head(self.output, batch, **extra)

    def learn(self, batch: Batch) -> None:
        """Run the unmodified model; with labels unlike those of the batch, if there is a base model output to store."""
        base, labels = self._base, _token_labels(batch)
        self._outputs = []
        if base is None:
            self._run(batch)
            return
        if labels is not None:
            batch = {**batch, "labels": _label_sets(labels)[1]}
        forward = base.forward

        def record_output(*args: Any, **kwargs: Any) -> Any:
            self._outputs.append(forward(*args, **kwargs))
            return self._outputs[-1]

        with forwards_replaced({base: record_output}):
            self._run(batch)

    def confirm(self, own: Batch, counted: Batch, loss_of: Callable[[Any, Batch], float]) -> None:
        """Accept the stored output for all labels if the loss with other labels is equal to the bit.

        Often the recording has computed the loss of the `own` labels. Otherwise, for example with dropout, the model
        runs again, with labels `counted` everywhere.
        """
        if len(self._outputs) != 1:  # no single output to put in place of the base model
            return

        def head_loss(batch: Batch) -> float:
            return loss_of(self._run_head(self._outputs[0], batch), batch)

        if head_loss(own) not in self._recorded_losses:
            full_loss = loss_of(self._run(counted), counted)
            if not math.isfinite(full_loss) or full_loss != head_loss(counted):
                return
        self.output = self._outputs[0]

    def _run_head(self, output: Any, batch: Batch, **extra: Any) -> Any:
        assert self._base is not None
        # A copy for each run: a model may replace fields of the output.
        with forwards_replaced({self._base: lambda *_args, **_kwargs: copy.copy(output)}):
            return self._run(batch, **extra)


def _token_labels(batch: Batch) -> torch.Tensor | None:
    """Return the labels of a batch with a label per token, else None."""
    labels = labels_of(batch)
    if labels is None or labels.dim() < 2 or labels.is_floating_point():
        return None
    return labels


def _label_sets(labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the labels without ignored positions, and labels that differ from these everywhere."""
    one = labels.masked_fill(labels == IGNORED, 0)
    return one, torch.where(one == 0, max(1, int(one.max())), 0).to(labels.dtype)


def find_other_weights(
    batch: Batch,
    rule: LossRule,
    loss_of: Callable[[Batch], torch.Tensor],
    cut: Callable[[int, Batch], torch.Tensor],
    any_rank: Callable[[bool], bool],
) -> str:
    """Return the reason why a loss is no mean over targets, such as class weights or a mean over rows. Empty: none.

    Rows with equal numbers of targets, or with equal labels, hide the weights. So each trial has labels of two kinds,
    mixed at random, in two parts of unequal size, each alone with the other part ignored. A difference counts only if
    the loss takes ignored labels as the engine does: a row whose other rows are ignored then has the loss of this row
    alone. Otherwise the loss has a mask of its own, or other targets.

    `loss_of`: the loss with other labels over the same outputs. `cut(row, batch)`: the loss of one row alone.
    `any_rank`: True if true on some rank. Collective.
    """
    labels = _labels_of_rows(batch)
    if labels is None:
        return ""
    generator = torch.Generator("cpu").manual_seed(0)  # the same trials in every run
    one, other = _label_sets(labels)
    is_target = torch.ones(labels.shape, dtype=torch.bool, device="cpu")
    if rule.shifts:
        is_target[:, :1] = False
    targets = is_target.flatten().nonzero()[:, 0]
    if len(targets) < 2:
        return ""

    def loss(trial_labels: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
        masked = trial_labels.masked_fill(~kept.to(labels.device), IGNORED)
        return _or_nan(lambda: loss_of({**batch, "labels": masked}))

    text, mixed = "", one
    for _ in range(_WEIGHT_TRIALS):
        is_one = torch.rand(labels.shape, generator=generator, device="cpu") < 0.5
        mixed = torch.where(is_one.to(labels.device), one, other)
        size = 1 + int(torch.randint(max(1, len(targets) // 3), (), generator=generator, device="cpu"))
        places = targets[torch.randperm(len(targets), generator=generator, device="cpu")[:size]]
        part = torch.zeros_like(is_target).flatten().index_fill(0, places, True).view_as(is_target)
        whole, share = loss(mixed, is_target), size / len(targets)
        parts = loss(mixed, part) * share + loss(mixed, is_target & ~part) * (1 - share)
        # A loss with another value at each call, as with dropout, shows nothing.
        if not text and _differ(whole, parts) and float(whole) == float(loss(mixed, is_target)):
            text = (
                f"the loss of {len(targets)} targets is {float(whole):.6g}, but {float(parts):.6g} as the mean of two "
                f"parts with {size} and {len(targets) - size} targets"
            )
    # All ranks go on if one does: `cut` runs the model, and this takes all ranks.
    if not any_rank(bool(text)):
        return ""
    is_alike = True
    for row in range(len(labels)):
        in_row = torch.zeros_like(is_target)
        in_row[row] = is_target[row]
        is_alike &= _are_near(loss(mixed, in_row), _or_nan(partial(cut, row, {**batch, "labels": mixed})))
    is_found = bool(text) and is_alike
    if not any_rank(is_found):
        return ""
    if is_found:
        return text
    return "a loss on another rank is no mean over targets"


def find_row_weights(
    batch: Batch,
    rule: LossRule,
    loss_of: Callable[[Batch], torch.Tensor],
    cut: Callable[[int, Batch], torch.Tensor],
    any_rank: Callable[[bool], bool],
) -> LossRule:
    """Return the rule for a loss with a denominator that does not count targets, such as a mean over all positions.

    `find_other_weights` leaves out such a loss: a row alone has another denominator than the batch. The loss is 0
    without targets, and adds up over rows: it ignores the labels that the engine ignores. Here one row after the other
    has one target or none. The rows alone must then add up to the loss, by their targets, or with equal weights. A mask
    beside the labels leaves out the ignored labels too; a loss that reads other values may have other targets.

    Arguments: see `find_other_weights`. Collective.
    """
    labels = _labels_of_rows(batch)
    if labels is None or rule.takes_count:
        return rule
    one, other = _label_sets(labels)
    # Labels of two kinds: the model may predict one kind, and a loss of 0 tells nothing.
    is_one = (torch.arange(labels.numel(), device=labels.device) % 3 == 0).view(labels.shape)
    mixed = torch.where(is_one, one, other)
    masks, read = [key for key in batch if key != "labels" and _is_mask(batch[key], labels)], set[str]()

    def trial(kept: torch.Tensor) -> Batch:
        masked = {key: batch[key] * kept.to(batch[key].device, batch[key].dtype) for key in masks}
        return _WatchedBatch({**batch, **masked, "labels": mixed.masked_fill(~kept.to(labels.device), IGNORED)}, read)

    def loss(kept: torch.Tensor) -> torch.Tensor:
        return _or_nan(lambda: loss_of(trial(kept)))

    nothing, rows = torch.zeros(labels.shape, dtype=torch.bool, device="cpu"), range(len(labels))
    # A loss over other values of the batch may have targets unknown to the engine.
    ignores = float(loss(nothing)) == 0.0 and read <= {"labels", *masks}
    if any_rank(not ignores):
        return rule
    by_row = [nothing.index_fill(0, torch.tensor([row], device="cpu"), True) for row in rows]
    is_sum = _are_near(loss(~nothing), sum(map(loss, by_row), torch.zeros((), device="cpu")))
    text, has_equal_weights = "", True
    for row, num_targets in product(rows, (0, 1)[: labels.dim()]):
        kept = ~by_row[row]
        if num_targets:
            kept[row, -1] = True
        inputs, whole = trial(kept), loss(kept)
        alone = torch.stack([_or_nan(partial(cut, each, inputs)) for each in rows]).float()
        counts = torch.tensor([rule.count(each[None]) for each in inputs["labels"]], device="cpu")
        parts = alone.masked_fill(counts == 0, 0.0) @ (counts / counts.sum())
        has_equal_weights &= _are_near(whole, alone.mean())
        if not text and _differ(whole, parts, is_half=True) and float(whole) == float(loss(kept)):
            text = (
                f"the loss of rows with {', '.join(map(str, counts.tolist()))} targets is {float(whole):.6g}, but "
                f"{float(parts):.6g} as the mean over the targets of the rows alone"
            )
    if any_rank(not (is_sum and text)):
        return rule
    if any_rank(not has_equal_weights):
        return replace(rule, obstacle=text)
    return replace(rule, weighs_rows=True)


class _WatchedBatch(dict[str, Any]):
    """A batch that adds the keys of read values to `read`."""

    def __init__(self, batch: Batch, read: set[str]) -> None:
        super().__init__(batch)
        self._read = read

    def __getitem__(self, key: str) -> Any:
        self._read.add(key)
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return super().get(key, default)

    def __iter__(self) -> Iterator[str]:
        self._read.update(self.keys())
        return super().__iter__()

    def values(self) -> Any:
        self._read.update(self.keys())
        return super().values()

    def items(self) -> Any:
        self._read.update(self.keys())
        return super().items()


def _labels_of_rows(batch: Batch) -> torch.Tensor | None:
    """Return the labels, int64 [rows] or [rows, tokens], of several rows. None: the batch has no such labels."""
    labels = labels_of(batch)
    if labels is None or labels.is_floating_point() or labels.dim() > 2 or len(labels) < 2:
        return None
    return labels


def _is_mask(value: Any, labels: torch.Tensor) -> bool:
    """True for zeros and ones in the shape of the labels."""
    return isinstance(value, torch.Tensor) and value.shape == labels.shape and bool(((value == 0) | (value == 1)).all())


def _or_nan(run: Callable[[], torch.Tensor]) -> torch.Tensor:
    """Return a loss, 0-dim on the host; NaN after an error of the caller's function."""
    try:
        return torch.as_tensor(run()).detach().cpu()
    except ENGINE_ERRORS:
        raise
    except Exception:
        return torch.tensor(math.nan)


def _are_near(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two losses are equal up to the rounding of 16-bit weights."""
    return bool(one.isfinite() and other.isfinite()) and not _differ(one, other, is_half=True)


def _differ(one: torch.Tensor, other: torch.Tensor, *, is_half: bool = False) -> bool:
    share = tolerance(OTHER_ORDER, [one], is_half=is_half).result
    # The constant is for losses of 0, with rounding errors alone.
    return bool((one - other).abs() > share * one.abs() + 1e-12)


def probe_loss(model: nn.Module, batch: Batch, trials: LabelTrials, loss_fn: LossFunction | None) -> LossRule | None:
    """Measure on a few rows if the loss shifts labels, and if the model loss divides by `num_items_in_batch`.

    Returns None if the loss is not finite on these rows. A shifting loss is equal with only the first label per row and
    with no label at all. Signatures are no evidence: several families accept the argument and ignore it. The result
    must not depend on the model's confidence, so two label sets that differ everywhere are tried; the model cannot
    predict both.
    """
    labels = _token_labels(batch)
    if labels is None:
        return LossRule(shifts=False)

    def loss_of(outputs: Any, inputs: Batch) -> float:
        if loss_fn is None:
            return float(find_loss(outputs))
        return float(loss_fn(outputs, inputs))

    def loss_with(trial_labels: torch.Tensor, **extra: int) -> float:
        inputs = {**batch, "labels": trial_labels}
        return loss_of(trials(inputs, **extra), inputs)

    def loss_or_nan(trial_labels: torch.Tensor) -> float:
        """Return the loss of a batch possibly without targets; NaN after an error."""
        try:
            return loss_with(trial_labels)
        except ENGINE_ERRORS:
            raise
        except Exception:
            return math.nan

    one, other = _label_sets(labels)
    counted = {**batch, "labels": one}
    asked = batch
    if not bool((labels[:, 1:] != IGNORED).any()):  # the loss without any target may be NaN, and confirm nothing
        asked = counted
    trials.confirm(asked, counted, loss_of)
    none = torch.full_like(labels, IGNORED)
    firsts = [torch.cat([trial_labels[:, :1], none[:, 1:]], 1) for trial_labels in (one, other)]
    empty, alone = loss_or_nan(none), [loss_or_nan(first) for first in firsts]
    shifts = all(are_same_loss(loss, empty) for loss in alone)
    # NaN without targets shows the missing target of the first label; NaN with all targets shows nothing.
    if shifts and empty != empty and not any(math.isfinite(loss_with(trial_labels)) for trial_labels in (one, other)):
        return None
    rule = LossRule(shifts=shifts)
    signature = inspect.signature(model.forward).parameters
    if loss_fn is not None:
        return rule
    if "num_items_in_batch" in batch:
        raise ConfigError(
            "the batch has num_items_in_batch, but the engine passes this number to the model: the count of targets "
            "in all micro-batches and ranks. Leave it out; to scale the loss in another way, pass a loss_fn to "
            "engine.step."
        )
    if "num_items_in_batch" in signature or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in signature.values()):
        count = rule.count(one)
        # By the labels with the larger loss: a loss near 0 would not show the division.
        once, wrong = max(
            (loss_with(trial_labels, num_items_in_batch=count), number)
            for number, trial_labels in enumerate((one, other))
        )
        twice = loss_with((one, other)[wrong], num_items_in_batch=2 * count)
        rule = LossRule(shifts=shifts, takes_count=abs(2 * twice - once) <= tolerance(OTHER_ORDER).loss * abs(once))
    return rule
