"""The passes before the first step: when the model is recorded, on what, and how often."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from offload.engine.assemble import Assembly
from offload.engine.head import ChunkedHead, find_chunked_head
from offload.engine.loss import (
    Batch,
    LossFunction,
    LossRule,
    check_batch,
    check_loss,
    find_loss,
    probe_loss,
    select_inputs,
)
from offload.engine.record import Recording
from offload.errors import ConfigError
from offload.telemetry.counters import Counters

_ROWS = (2, 3)
_TOKENS = 16
_Found = TypeVar("_Found")


class Rehearsal:
    """Runs the recording passes, and those that try out the loss and the head.

    Each pass leaves weights, buffers, generators and counters as they were. `as_ours` is entered around every call of
    the model, so that the engine does not take it for an own loop's.
    """

    def __init__(
        self, model: nn.Module, parts: Assembly, counters: Counters, as_ours: Callable[[], AbstractContextManager[None]]
    ) -> None:
        self._model, self._parts, self._counters, self._as_ours = model, parts, counters, as_ours
        self._modes: list[bool] = []
        self.is_done = False

    def on_batch(self, batch: Batch, loss_fn: LossFunction | None) -> tuple[LossRule, ChunkedHead | None]:
        """Record on a few rows and tokens of a batch; return what was found about the loss, and a head for chunks."""

        def run(inputs: Batch, **extra: Any) -> Any:
            return self._model(**select_inputs(self._model, inputs, loss_fn is not None), **extra)

        def loss_of(sample: Batch) -> Any:
            outputs = run(sample)
            return check_loss(loss_fn(outputs, sample)) if loss_fn else find_loss(outputs)

        samples = [self._sample(batch, rows) for rows in _ROWS]
        self._record([(rows, partial(loss_of, sample)) for rows, sample in zip(_ROWS, samples, strict=True)])
        head = None
        with self._unseen(), in_eval_mode(self._model), torch.no_grad():  # dropout would blur the comparisons
            rule = self._watched(lambda: probe_loss(self._model, samples[0], run, loss_fn))
            if loss_fn is None and rule.shifts and rule.takes_count:
                head = find_chunked_head(self._model, samples[0], run)
        self._counters.clear()
        return rule, head

    def on_call(self, run: Callable[[], Any]) -> None:
        """Record on a call of an own loop, with its own arguments."""
        self._record([(0, run)] * 2)

    def forget_other_modes(self) -> None:
        """What was recorded in eval mode (no dropout, no moving statistics) does not hold in train mode."""
        if self.is_done and self._modes != [module.training for module in self._model.modules()]:
            self.is_done = False

    def _sample(self, batch: Batch, rows: int) -> Batch:
        """Return a few rows of a batch, repeated where it has too few; of token batches, a few tokens."""
        available = check_batch(batch)
        sample = {key: value[torch.arange(rows, device=value.device) % available] for key, value in batch.items()}
        shapes = {tuple(value.shape) for value in batch.values()}
        if hasattr(self._model, "config") and len(shapes) == 1 and len(next(iter(shapes))) == 2:
            sample = {key: value[:, :_TOKENS].contiguous() for key, value in sample.items()}
        return sample

    def _record(self, runs: list[tuple[int, Callable[[], Any]]]) -> None:
        """Run the recording passes, (rows, run) by (rows, run), each compared with the one before."""
        if self.is_done:
            return
        stream = self._parts.stream
        before: Recording | None = None
        for rows, run in runs:

            def record(recording: Recording, run: Callable[[], Any] = run) -> Recording:
                stream.recording = recording
                try:
                    with self._unseen(), torch.enable_grad():
                        recording.finish(run())
                finally:
                    stream.recording = None
                return recording

            before = self._settled(record, rows, before)
        self.is_done = True
        self._modes = [module.training for module in self._model.modules()]
        self._parts.gradients.begin_step()
        self._counters.clear()

    def _watched(self, run: Callable[[], _Found]) -> _Found:
        """Run what may read weights from outside in eval mode alone (RWKV rescales its blocks there)."""
        return self._settled(lambda _: run(), 0, None)

    def _settled(self, run: Callable[[Recording], _Found], rows: int, before: Recording | None) -> _Found:
        """Run under the eyes of a recording, again with more resident units as long as some are read from outside."""
        while True:
            recording = Recording(self._parts.units, self._parts.stream, rows, before)
            try:
                with recording.reads():
                    result = run(recording)
            except ConfigError:
                raise
            except Exception:  # with NaN in the place of weights anything may fail; the next pass has the weights
                if not recording.outside_readers:
                    raise
            else:
                if not recording.outside_readers:
                    return result
            self._parts.make_resident(recording.outside_readers)

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Leave buffers and generators as they were."""
        buffers = [(buffer, buffer.clone()) for buffer in self._model.buffers()]
        random = self._parts.device.random_state()
        try:
            with self._as_ours():
                yield
        finally:
            self._parts.device.set_random_state(random)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Within, every module is in eval mode; afterwards each is in its own again."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode
