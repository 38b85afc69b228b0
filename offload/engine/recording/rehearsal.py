"""The passes before the first step: when the model is recorded, on what, and how often."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch

from offload.distributed.agreement import digest
from offload.engine.loss.chunked_head import ChunkedHead, find_chunked_head
from offload.engine.loss.loss import Batch, LossFunction, LossRule, check_batch, probe_loss, run_loss, select_inputs
from offload.engine.recording.recording import Recording
from offload.engine.state import EngineState
from offload.engine.units.condition import Moment, buffer_places
from offload.errors import ConfigError
from offload.telemetry.counters import Counters

_ROWS = (2, 3)
_TOKENS = 16
_FEWEST_COLUMNS = 4  # that show whether a loss shifts, and adds up over chunks
_Found = TypeVar("_Found")


class Rehearsal:
    """Runs the recording passes, and those that try out the loss and the head.

    Each pass leaves weights, buffers, generators and counters as they were.
    """

    def __init__(self, state: EngineState, counters: Counters) -> None:
        self._model, self._state, self._counters = state.model, state, counters
        self._modes: tuple[list[bool], frozenset[int]] = ([], frozenset())
        self._found: dict[Hashable, tuple[LossRule, ChunkedHead | None]] = {}
        self._equal: set[Hashable] = set()  # of these, what was recorded on equal rows
        self.is_complete = True
        """False from the begin of a recording until whoever asked for it has noted what it found."""
        self.decided: dict[str, list[int]] = {}  # of the model's own loss, by the names of a batch's tensors
        self._modules = list(self._model.modules())
        configs = {id(m.config): m.config for m in self._modules if hasattr(getattr(m, "config", None), "__dict__")}
        self._configs = list(configs.values())

    def is_new(self, batch: Batch, loss_fn: LossFunction | None) -> bool:
        """True where this kind of batch, loss and configuration was not recorded yet; or on equal rows alone, which do
        not tell whether units may be cut, while these differ.
        """
        signature = self._signature(batch, loss_fn)
        was_equal = signature in self._equal and not _are_equal(self._sample(batch, max(_ROWS), whole=True))
        return signature not in self._found or was_equal

    def on_batch(
        self, batch: Batch, loss_fn: LossFunction | None, is_new: bool, departed: bool | None
    ) -> tuple[LossRule, ChunkedHead | None]:
        """Return what is known about the loss, and a head for chunks. Collective: record first where this `is_new` to
        some rank, on a few rows and tokens; or again, on rows of whole length, where a rank has departed from what was
        recorded: this one, or not (None: none has).
        """
        signature = self._signature(batch, loss_fn)
        if not is_new and departed is None:
            return self._found[signature]
        self.is_complete = False
        rule, head = self._rehearse(batch, loss_fn, departed)
        if rule is None:  # the next batch may tell
            return LossRule(), None
        if loss_fn is None:
            rule, head = self._keep_decision(batch, rule, head)
        self._found[signature] = rule, head
        return rule, head

    def _signature(self, batch: Batch, loss_fn: LossFunction | None) -> Hashable:
        return _kind(loss_fn), tuple(sorted((key, value.dim()) for key, value in batch.items())), self._flags()

    def _rehearse(
        self, batch: Batch, loss_fn: LossFunction | None, departed: bool | None
    ) -> tuple[LossRule | None, ChunkedHead | None]:

        def run(inputs: Batch, **extra: Any) -> Any:
            return self._model(**select_inputs(self._model, inputs, loss_fn is not None), **extra)

        again = departed is not None
        samples = self._shared([self._sample(batch, rows, again) for rows in _ROWS], bool(departed), check_batch(batch))
        signature = self._signature(batch, loss_fn)
        (self._equal.add if _are_equal(samples[-1]) else self._equal.discard)(signature)
        for variant in [samples] if again else self._variants(samples):
            runs = [partial(run_loss, self._model, sample, loss_fn) for sample in variant]
            self._record(list(zip(_ROWS, runs, strict=True)))
        head = None
        probe = self._probe(samples[0])
        with (
            self._unseen(),
            self._state.undo.in_eval_mode(self._model),
            torch.no_grad(),
        ):  # dropout would blur the comparisons
            # Once: a watch takes as long as a run, and which weights are read does not depend on the labels.
            self._watched(lambda: run(probe))
            rule = probe_loss(self._model, probe, run, loss_fn)
            if loss_fn is None and rule is not None and rule.shifts and rule.takes_count:
                head = find_chunked_head(self._model, probe, run, self._state.undo)
        self._forget_traffic()
        return rule, head

    def give_up(self) -> None:
        """What a recording has learned in part is forgotten, with all that it may have written over."""
        if not self.is_complete:
            self.begin_again(self.decided)

    def begin_again(self, decided: Mapping[str, Sequence[int]]) -> None:
        """Forget what was recorded, as a fresh engine has not, and go on with what another has `decided`."""
        self.decided = {key: list(values) for key, values in decided.items()}
        self._found.clear()
        for unit in self._state.units:
            unit.known.clear()
        self.is_complete = True

    def _keep_decision(
        self, batch: Batch, rule: LossRule, head: ChunkedHead | None
    ) -> tuple[LossRule, ChunkedHead | None]:
        """Return what was decided about the model's own loss when it was tried first: it must not change with a batch,
        nor where a run goes on from a checkpoint.
        """
        names = " ".join(f"{name}:{value.dim()}" for name, value in sorted(batch.items()))
        key = f"{names} {digest(repr(self._flags()).encode())}"
        kept = [int(rule.shifts), int(rule.takes_count), head.vocabulary if head else 0]
        shifts, takes_count, vocabulary = self.decided.setdefault(key, kept)
        return LossRule(bool(shifts), bool(takes_count)), ChunkedHead.of(self._model, vocabulary, self._state.undo)

    def is_new_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
        """True where this kind of call of an own loop was not recorded yet."""
        return self._signature_of_call(args, kwargs) not in self._found

    def on_call(self, run: Callable[[], Any], args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        """Record on a call of an own loop, with its own arguments. Collective."""
        self.is_complete = False
        self._record([(0, run)] * 2)
        self._found[self._signature_of_call(args, kwargs)] = (LossRule(), None)
        self.is_complete = True

    def _signature_of_call(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Hashable:
        plain = [(key, value) for key, value in kwargs.items() if isinstance(value, bool | int | str | None)]
        return "own loop", len(args), tuple(sorted(kwargs)), tuple(sorted(plain, key=repr)), self._flags()

    def forget_other_modes(self) -> None:
        """What was recorded in eval mode (no dropout, no moving statistics) does not hold in train mode, nor with other
        parameters frozen.
        """
        if self._found and self._modes != self._current_modes():
            self._found.clear()

    def _current_modes(self) -> tuple[list[bool], frozenset[int]]:
        return [module.training for module in self._modules], self._state.snapshot.frozen

    def _flags(self) -> Hashable:
        """Return the switches of the model's configuration: some make tensors leave units by another way."""
        return tuple(
            (key, value) for config in self._configs for key, value in vars(config).items() if isinstance(value, bool)
        )

    def _sample(self, batch: Batch, rows: int, whole: bool) -> Batch:
        """Return a few rows of a batch, repeated where it has too few, those with most padding first; of token batches,
        a few tokens, or all with `whole`.
        """
        available = check_batch(batch)
        order = torch.arange(rows, device=next(iter(batch.values())).device) % available
        mask = batch.get("attention_mask")
        if mask is not None and mask.dim() == 2:
            order = mask.sum(1).argsort(stable=True)[order]
        sample = {key: value[order] for key, value in batch.items()}
        if not whole and self._is_text(batch):
            sample = {key: value[:, :_TOKENS].contiguous() for key, value in sample.items()}
        return sample

    def _probe(self, sample: Batch) -> Batch:
        """Return a sample on which a loss is tried: with a few columns, however many the batch has, and no padding."""
        if not self._is_text(sample):
            return sample
        length = next(iter(sample.values())).shape[1]
        columns = torch.arange(min(max(length, _FEWEST_COLUMNS), _TOKENS)) % length
        return {
            key: torch.ones_like(value[:, columns]) if key == "attention_mask" else value[:, columns]
            for key, value in sample.items()
        }

    def _is_text(self, batch: Batch) -> bool:
        """True where all of a batch is [rows, tokens]."""
        shapes = {tuple(value.shape) for value in batch.values()}
        return hasattr(self._model, "config") and len(shapes) == 1 and len(next(iter(shapes))) == 2

    def _shared(self, samples: list[Batch], departed: bool, num_rows: int) -> list[Batch]:
        """Return the same samples on all ranks, so that all learn the same: of a rank that has departed, if one has,
        and then of the one whose batch tells most, by its different rows, and by its padding.
        """
        comm = self._state.comm
        if comm.size == 1:
            return samples
        mask = samples[-1].get("attention_mask")
        padding = 0 if mask is None else int((mask == 0).sum())
        worth = departed, min(num_rows, max(_ROWS)), padding, -comm.rank
        host = [{key: value.cpu() for key, value in sample.items()} for sample in samples]
        told = comm.gather_objects((worth, host), "samples to record on")
        _, chosen = max(told, key=lambda found: found[0])
        device = self._state.device.torch_device
        return [{key: value.to(device) for key, value in sample.items()} for sample in chosen]

    def _variants(self, samples: list[Batch]) -> list[list[Batch]]:
        """Return samples without and with padding where there are several ranks: later batches may have some on one of
        them alone, and the model may then leave the mask out on the others.
        """
        mask = samples[0].get("attention_mask")
        if self._state.comm.size == 1 or mask is None or mask.dim() != 2:
            return [samples]
        variants: list[list[Batch]] = []
        for num_padded in (0, min(max(1, mask.shape[1] // 4), mask.shape[1] - 1)):
            masks = [torch.ones_like(sample["attention_mask"]) for sample in samples]
            for each in masks:
                each[:1, each.shape[1] - num_padded :] = 0
            variants.append([{**s, "attention_mask": m} for s, m in zip(samples, masks, strict=True)])
        return variants

    def _record(self, runs: list[tuple[int, Callable[[], Any]]]) -> None:
        """Run the recording passes, (rows, run) by (rows, run), each compared with the one before."""
        before: Recording | None = None
        for rows, run in runs:

            def record(recording: Recording, run: Callable[[], Any] = run) -> Recording:
                with self._unseen(), self._state.router.recorded(recording.call), torch.enable_grad():
                    recording.finish(run())
                return recording

            before = self._settled(record, rows, before)
        self._modes = self._current_modes()
        self._forget_traffic()

    def _forget_traffic(self) -> None:
        """What the first step needs counts as its own: it is fetched again."""
        self._state.executor.forget()
        self._state.lanes.timeline.discount("h2d", "nvme_read")
        self._counters.clear()

    def _watched(self, run: Callable[[], _Found]) -> _Found:
        """Run what may read weights from outside in eval mode alone (RWKV rescales its blocks there)."""
        return self._settled(lambda _: run(), 0, None)

    def _settled(self, run: Callable[[Recording], _Found], rows: int, before: Recording | None) -> _Found:
        """Run under the eyes of a recording, again with more resident units as long as some are read from outside."""
        while True:
            recording = Recording(self._state.units, self._state.runner, rows, before)
            try:
                with self._state.undo.within(recording.reads()):
                    result = run(recording)
            except ConfigError:
                raise
            except Exception:  # with NaN in the place of weights anything may fail; the next pass has the weights
                if not recording.outside_readers:
                    raise
            else:
                if not recording.outside_readers:
                    return result
            self._state.make_resident(recording.outside_readers)

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Leave modules and generators as they were."""
        before = Moment(self._state.device, self._modules, buffer_places(self._modules))
        with self._state.undo.afterwards(before.put_back), self._state.as_ours():
            yield


def _kind(loss_fn: Any) -> Hashable:
    """Return what tells loss functions apart: the code, since a lambda in a loop is a new function every time, and the
    switches that it was made with.
    """
    if isinstance(loss_fn, partial):
        return _kind(loss_fn.func), _switches([*loss_fn.args, *loss_fn.keywords.items()])
    closure = inspect.getclosurevars(loss_fn).nonlocals if inspect.isfunction(loss_fn) else {}
    state = getattr(getattr(loss_fn, "__self__", loss_fn), "__dict__", {})
    return getattr(loss_fn, "__code__", type(loss_fn)), _switches([*closure.items(), *state.items()])


def _switches(values: Sequence[Any]) -> Hashable:
    return tuple(v for v in values if isinstance(v[1] if isinstance(v, tuple) else v, bool | str | None))


def _are_equal(sample: Batch) -> bool:
    """True where all rows of a sample are the same."""
    return all(torch.equal(value, value[:1].expand_as(value)) for value in sample.values())
