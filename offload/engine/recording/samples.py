"""Sample rows for recording and equivalence checks: a few rows, equal on all ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import torch

from offload.engine.entries import ModelCall
from offload.engine.flow import Flow
from offload.engine.loss.batch import IGNORED, Batch, BatchForm, Rows, check_batch, map_tensors
from offload.engine.loss.loss import labels_of
from offload.errors import ConfigError

ROWS = (2, 3)
_TOKENS = 16
_FEWEST_COLUMNS = 4  # the minimum to detect if a loss shifts labels and adds up over chunks
_Result = TypeVar("_Result")


class Samples:
    """Takes samples from batches. `rows`: configured row axes, or None."""

    def __init__(self, flow: Flow, rows: Rows | None) -> None:
        self._flow = flow
        self._rows = rows  # row axes of the values, as configured
        self._has_peers = flow.runner.has_peers

    def _select_rows(self, batch: Batch, form: BatchForm, rows: int, has_full_length: bool, group: int = 1) -> Batch:
        """Return `rows` rows (or groups of `group` rows) of a batch, repeated if there are too few.

        The row with the most padding comes first, then rows in the order of most differences from this row. A token
        batch is cut to a few tokens unless `has_full_length`.
        """
        mask = _padding_mask(form, batch)
        first = 0
        if mask is not None:
            first = int(mask.sum(1).argmin()) // group
        num_differences = form.count_differences(batch, first * group).view(-1, group).sum(1)
        num_differences += _has_other_count(batch, first, group)
        others = num_differences.argsort(stable=True, descending=True)
        order = [first, *(row for row in others.tolist() if row != first)]
        numbers = torch.tensor([order[number % len(order)] for number in range(rows)], device="cpu")
        sample = form.take(batch, (numbers[:, None] * group + torch.arange(group, device="cpu")).flatten())
        if not has_full_length and self._is_text(form, batch):
            begin = _first_column(sample.get("labels"))
            sample = {key: value[:, begin : begin + _TOKENS].contiguous() for key, value in sample.items()}
        return _detach(sample)

    def probe(self, form: BatchForm, sample: Batch) -> Batch:
        """Return a sample for loss trials: few columns, no padding."""
        if not self._is_text(form, sample):
            return sample
        length = next(iter(sample.values())).shape[1]
        columns = torch.arange(min(max(length, _FEWEST_COLUMNS), _TOKENS)) % length
        return {
            key: torch.ones_like(value[:, columns]) if key == "attention_mask" else value[:, columns]
            for key, value in sample.items()
        }

    def _is_text(self, form: BatchForm, batch: Batch) -> bool:
        """True if all batch values are tensors [rows, tokens]. Those that the model does not name, for the loss alone,
        may have further axes.
        """
        if not hasattr(self._flow.model, "config") or form.is_whole or not form.has_leading_rows(batch):
            return False
        named = inspect.signature(self._flow.model.forward).parameters
        shapes = set()
        for key, value in batch.items():
            shape = tuple(getattr(value, "shape", ()))
            if key not in named:
                shape = shape[:2]
            shapes.add(shape)
        return len(shapes) == 1 and len(next(iter(shapes))) == 2

    def choose_leader(self, batch: Batch, is_new: bool, departed: bool | None) -> int:
        """Return the rank with the best samples; all ranks record on these.

        Priority: a rank that departed from the recorded behaviour, a rank with an unrecorded batch, more rows, more
        padding, the lowest rank.
        """
        comm = self._flow.comm
        if not self._has_peers:
            return 0
        form = BatchForm.of(batch, self._rows)
        mask = _padding_mask(form, self._select_rows(batch, form, max(ROWS), departed is not None))
        padding = 0
        if mask is not None:
            padding = int((mask == 0).sum())
        priority = bool(departed), is_new, min(check_batch(batch), max(ROWS)), padding, -comm.rank
        # The last entry is the negative rank, so no two ranks have the same priority.
        return -max(comm.gather_objects(priority, "choice of the recording samples"))[-1]

    def take(self, batch: Batch, form: BatchForm, leader: int, has_full_length: bool, group: int = 1) -> list[Batch]:
        """Return the samples to record on, equal on all ranks."""
        if form.is_whole:  # no other number of rows runs, so both passes have the same
            return [self._build_on_leader(leader, lambda: _detach(batch))] * len(ROWS)
        return [
            self._build_on_leader(leader, partial(self._select_rows, batch, form, rows, has_full_length, group))
            for rows in ROWS
        ]

    def _build_on_leader(self, leader: int, build: Callable[[], Batch]) -> Batch:
        """Return the batch built by the leader."""
        if not self._has_peers:
            return build()
        host = self.compute_on_leader(leader, lambda: map_tensors(torch.Tensor.cpu, build()))
        return map_tensors(lambda tensor: tensor.to(self._flow.device.torch_device), host)

    def compute_on_leader(self, leader: int, compute: Callable[[], _Result]) -> _Result:
        """Return the value computed by the leader. Collective."""
        comm = self._flow.comm
        own: Any = None
        if comm.rank == leader:
            own = compute()
        return cast(_Result, comm.from_rank(leader, own, "recording samples"))

    def variants(self, form: BatchForm, samples: list[Batch]) -> list[list[Batch]]:
        """Return samples without and with padding if there are several ranks.

        Later batches may have padding on one rank only, and the model may skip the mask on the others.
        """
        mask = _padding_mask(form, samples[0])
        if not self._has_peers or mask is None:
            return [samples]
        variants: list[list[Batch]] = []
        for num_padded in (0, min(max(1, mask.shape[1] // 4), mask.shape[1] - 1)):
            masks = [torch.ones_like(sample["attention_mask"]) for sample in samples]
            for each in masks:
                each[:1, each.shape[1] - num_padded :] = 0
            variants.append([{**s, "attention_mask": m} for s, m in zip(samples, masks, strict=True)])
        return variants

    def call_samples(self, call: ModelCall) -> list[ModelCall]:
        """Return samples of a call in the caller's own loop, for recording and equivalence check.

        A few argument rows if the arguments look like a batch; last, the whole call.
        """
        try:
            batch = {**{str(number): value for number, value in enumerate(call.args)}, **call.kwargs}
            sample = self._select_rows(batch, BatchForm.of(batch), min(ROWS), has_full_length=False)
        except (ConfigError, IndexError):
            return [call]
        named = {key: value for key, value in sample.items() if key in call.kwargs}
        unnamed = [sample[str(number)] for number in range(len(call.args))]
        return [call._replace(args=unnamed, kwargs=named), call]


def _has_other_count(batch: Batch, first: int, group: int) -> torch.Tensor:
    """Return 1 for groups of rows with another number of targets than group `first`, else 0, int64 [groups]."""
    labels = labels_of(batch)
    if labels is None:
        return torch.zeros((), dtype=torch.int64, device="cpu")
    counts = (labels != IGNORED).reshape(len(labels) // group, -1).sum(1).cpu()
    return (counts != counts[first]).long()


def _first_column(labels: torch.Tensor | None) -> int:
    """Return the first column of a text sample with some target: 0, unless a long prompt comes first."""
    if labels is None or (targets := (labels[:, 1:] != IGNORED).any(0).nonzero()).numel() == 0:
        return 0
    first = int(targets[0])
    if first + 1 < _TOKENS:  # the first columns have it
        return 0
    return first


def _detach(batch: Batch) -> Batch:
    """Detach the batch from the caller's graph, so that a trial leaves no gradients there."""
    return map_tensors(lambda t: t.detach().requires_grad_() if t.requires_grad else t, batch)


def _padding_mask(form: BatchForm, batch: Batch) -> torch.Tensor | None:
    """Return the padding mask [rows, tokens]. None: no mask."""
    mask = batch.get("attention_mask")
    if isinstance(mask, torch.Tensor) and mask.dim() == 2 and form.axes.get("attention_mask") == 0:
        return mask
    return None
