"""Trial runs before the first step: when to record the model, on which rows, and how often."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from traceback import walk_tb
from typing import Any

import torch

from offload.engine.entries import ModelCall
from offload.engine.flow import Flow
from offload.engine.loss.batch import (
    Batch,
    BatchForm,
    batch_pattern,
    check_batch,
    describe,
    has_equal_rows,
    is_token_batch,
)
from offload.engine.loss.batch_agreement import PassInputs
from offload.engine.loss.chunked_head import ChunkedHead, find_chunked_head
from offload.engine.loss.label_trials import LabelTrials, find_other_weights, find_row_weights, probe_loss
from offload.engine.loss.loss import (
    LossFunction,
    LossRule,
    Needs,
    as_loss,
    find_loss,
    has_even_targets,
    run_loss,
    select_inputs,
)
from offload.engine.recording.equivalence import isolated
from offload.engine.recording.known import KnownPass, KnownPasses, TrialResult, int_arguments
from offload.engine.recording.recording import FirstPass, Recording, SecondPass, UseDetector
from offload.engine.recording.samples import ROWS, Samples
from offload.engine.units.arguments import Arguments
from offload.engine.units.find import Splitting
from offload.engine.units.runner import UnitRunner
from offload.engine.units.snapshots import Snapshot
from offload.engine.units.trial import ENGINE_ERRORS
from offload.engine.units.unit import Unit
from offload.errors import ConfigError
from offload.layout.planes import DTYPES
from offload.modules import in_eval_mode

_DTYPE_NAME = re.compile(r"\bfloat\b|c10::BFloat16|c10::Half")
"""Dtypes in the errors of torch's products."""


class TrialRuns:
    """Runs the recording passes, and the trials of loss and head.

    `known`: receives the results. `may_cut_rows`: batches may need to be cut into rows, or are parts of a larger batch.
    Every pass restores weights, buffers, random generators and counters.
    """

    def __init__(self, flow: Flow, known: KnownPasses, may_cut_rows: bool, has_backward: bool) -> None:
        self._flow = flow
        self._model = flow.model
        self._has_backward = has_backward
        self._may_cut_rows = may_cut_rows
        self.known = known
        self.samples = Samples(flow, known.rows)

        # Of the present recording.
        self.is_complete = True
        """False from the start of a recording until `end`."""
        self._is_training = False
        self._roots: Mapping[str, Any] = {}
        """The arguments of the model call."""
        self._recorded_losses: list[float] = []
        self._unused_sample: tuple[Batch, Batch] | None = None
        """A batch and the recorded rows of it, for the equivalence check."""

        self.loss_decisions: dict[str, list[int]] = {}
        """Loss decisions by the names of the batch tensors."""
        self._foreign_decisions: set[str] = set()
        """Keys of decisions from another engine, not yet tried here."""

    def on_batch(self, inputs: PassInputs, departed: bool | None) -> PassInputs:
        """Record a kind of batch that is new to some rank; return the inputs completed with the results. Collective.

        The recording runs on a few rows and tokens, or on the whole batch if a few rows cannot run alone. Not None
        `departed`: some rank departed from the recorded behaviour (True: this rank), and the recording is repeated on
        rows of full length.
        """
        batch, loss_fn = inputs.batch, inputs.loss_fn
        known = self.known.look_up(batch, loss_fn)
        (self.known.claims or set()).discard(known.kind)
        self.is_complete, self._roots = False, {"batch": batch, "loss_fn": loss_fn}
        self._is_training = inputs.is_training
        leader = self.samples.choose_leader(batch, known.is_new, departed)
        with self._with_dtypes_explained(batch):
            form = self._record_batch(batch, loss_fn, known, leader, departed is not None)
        rule, head = self._try_loss(batch, loss_fn, form, leader, departed is not None)
        if rule is None:  # not conclusive: the next batch may be
            return replace(inputs, rule=LossRule(), head=None, form=form)
        if as_loss(loss_fn).needs.allows_chunks:
            rule, head = self._keep_decision(batch, rule, head)
        rule = replace(rule, counts_rows=as_loss(loss_fn).counts_groups)
        pattern = batch_pattern(batch, known.rows)
        if self.samples.compute_on_leader(leader, lambda: pattern) == pattern:  # else another rank's pattern
            self.known.results[known.kind] = TrialResult(rule, head, form.obstacle)
            self.known.store_ints(known.kind, int_arguments((), batch))
        return replace(inputs, rule=rule, head=head, form=form)

    def find_other_rule(self, inputs: PassInputs) -> str:
        """Compare the loss rule from another engine with trials of this loss. Return the difference; empty: none.

        Collective. An equivalence check says nothing about the rule if the few rows have equal numbers of targets.
        """
        self._roots, self._is_training = {"batch": inputs.batch, "loss_fn": inputs.loss_fn}, inputs.is_training
        self._recorded_losses.clear()
        leader = self.samples.choose_leader(inputs.batch, False, None)
        own, other = self._try_loss(inputs.batch, inputs.loss_fn, inputs.form, leader, False)[0], inputs.rule
        difference = ""
        if own is not None:
            if not other.obstacle:
                difference = own.obstacle
            if replace(own, counts_rows=other.counts_rows, obstacle=other.obstacle) != other:
                difference = "the loss counts targets in another way"
        found = self._flow.comm.gather_objects(difference, "rule of a loss")
        return next(filter(None, found), "")

    def take_sample(self, inputs: PassInputs) -> Batch:
        """Return rows for an equivalence check: the last recorded ones if not taken yet. Collective."""
        unused, self._unused_sample = self._unused_sample, None
        if unused is not None and unused[0] is inputs.batch:
            return unused[1]
        leader = self.samples.choose_leader(inputs.batch, False, None)  # a new batch has recorded rows
        return self.samples.take(inputs.batch, inputs.form, leader, False, as_loss(inputs.loss_fn).group)[0]

    def _record_batch(
        self, batch: Batch, loss_fn: LossFunction | None, known: KnownPass, leader: int, has_full_length: bool
    ) -> BatchForm:
        """Record on a few rows of a batch, else on the whole batch. Return the row axes used."""
        rows, kind = known.rows, known.kind
        form = known.form
        is_text = self.samples.compute_on_leader(leader, lambda: is_token_batch(batch, rows))  # the leader's batch
        # Owner functions stay with each caller.
        leader_form = self.samples.compute_on_leader(leader, lambda: replace(form, owners={}))
        if self._flow.comm.rank != leader:
            form = leader_form
        self.known.constant_keys.pop(kind, None)
        if not form.is_whole:
            samples = self.samples.take(batch, form, leader, has_full_length, as_loss(loss_fn).group)
            self._unused_sample = batch, samples[0]
            self.known.constant_keys[kind] = self._constant_keys(samples[-1], form, is_text)
            self._note_targets(batch, kind)
            try:
                sizes = [check_batch(sample) for sample in samples]
                variants = [samples]
                if not has_full_length:
                    variants = self.samples.variants(form, samples)
                self._record_on(sizes, loss_fn, variants)
                return form
            except ENGINE_ERRORS:
                raise
            except Exception as error:  # rows cannot run alone, or the row axes are wrong
                if is_text:
                    raise
                self.forget_traffic()
                self._flow.runner.has_failed = False
                rows_text = " and ".join(map(str, ROWS))
                reason = f"{type(error).__name__}: {error}".splitlines()[0]
            form = replace(form, obstacle=f"on {rows_text} rows the model raises {reason}")
        self.known.constant_keys.pop(kind, None)
        samples = self.samples.take(batch, form, leader, has_full_length)
        self._unused_sample = batch, samples[0]
        try:
            self._record_on((0, 0), loss_fn, [samples])
        except Exception as error:
            if isinstance(error, ENGINE_ERRORS) or has_equal_rows(batch, rows) or _is_raised_in(loss_fn, error):
                raise
            description = ", ".join(f"{key}: {describe(value)}" for key, value in batch.items())
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"the model does not run on the batch ({description}): {reason}") from error
        return form

    def _constant_keys(self, sample: Batch, form: BatchForm, is_text: bool) -> set[str]:
        """Return the keys with equal values in all rows of a sample, where these tell too little about other rows."""
        keys = form.constant_keys(sample, form.axes)
        if len(keys) == len(form.axes) or (self._may_cut_rows and not is_text):
            return keys
        if not self._may_cut_rows:
            return set()
        # Weights of tokens for the loss alone: equal in all rows, they fit any parts.
        return keys - {*inspect.signature(self._model.forward).parameters, "labels"}

    def accept(self, inputs: PassInputs) -> None:
        """Note that this kind of batch, recorded by another engine, is checked, on rows like those of this batch."""
        batch, form = inputs.batch, inputs.form
        known = self.known.look_up(batch, inputs.loss_fn)
        (self.known.claims or set()).discard(known.kind)
        if not form.is_whole:
            is_text = is_token_batch(batch, known.rows)
            self.known.constant_keys[known.kind] = self._constant_keys(batch, form, is_text)
            self._note_targets(batch, known.kind)

    def _note_targets(self, batch: Batch, kind: str) -> None:
        """Note if rows of the batch, which is recorded or checked, have equal numbers of targets."""
        self.known.even.discard(kind)
        if self._may_cut_rows and has_even_targets(batch):
            self.known.even.add(kind)

    def _record_on(self, rows: Sequence[int], loss_fn: LossFunction | None, variants: Sequence[list[Batch]]) -> None:
        variants_before = [
            (unit, {key: variant.copy() for key, variant in unit.variants.items()}) for unit in self._flow.units
        ]
        self._recorded_losses.clear()

        def run(sample: Batch) -> torch.Tensor:
            loss = run_loss(self._model, sample, loss_fn, has_backward=self._has_backward)
            self._recorded_losses.append(float(loss.detach()))
            return loss

        try:
            for samples in variants:
                self._record([(num_rows, partial(run, s)) for num_rows, s in zip(rows, samples, strict=True)])
        except Exception:  # discard the partial results
            for unit, before in variants_before:
                unit.variants.clear()
                unit.variants.update(before)
            raise

    def _try_loss(
        self, batch: Batch, loss_fn: LossFunction | None, form: BatchForm, leader: int, has_full_length: bool
    ) -> tuple[LossRule | None, ChunkedHead | None]:
        shared: Snapshot | None = None

        def run(inputs: Batch, **extra: Any) -> Any:
            with isolated(self._flow, self._roots, shared):  # each run starts from the same state
                return self._model(**select_inputs(self._model, inputs, loss_fn), **extra)

        loss = as_loss(loss_fn)
        if loss.counts_groups and not loss.needs.allows_chunks:
            return LossRule(shifts=loss.shifts), None
        probe = self.samples.probe(form, self.samples.take(batch, form, leader, has_full_length)[0])
        splitting = self._flow.splitting
        if loss_fn is not None and loss.needs.allows_chunks:  # the model loss decides if the head allows chunks
            if loss.needs is Needs.MEAN:
                splitting = Splitting()  # a row block of a head has a part of a token's logits
            probe, loss_fn = {**select_inputs(self._model, probe, loss_fn), "labels": probe["labels"]}, None

        def probe_with(has_graph: bool) -> tuple[LossRule | None, ChunkedHead | None]:
            nonlocal shared
            head = shared = None
            # Dropout would blur the comparisons.
            with isolated(self._flow, self._roots), in_eval_mode(self._model), torch.set_grad_enabled(has_graph):
                # Some weights are read from outside only in eval mode (RWKV rescales blocks there). One watched run is
                # enough, as slow as a normal run: reads do not depend on the labels.
                trials = LabelTrials(self._model, run, self._recorded_losses)
                self._run_until_settled(lambda _: trials.learn(probe))
                with isolated(self._flow, self._roots) as shared:
                    rule = probe_loss(self._model, probe, trials, loss_fn)
                    if rule is not None and self._may_cut_rows and not form.is_whole:
                        rule = self._find_weights(probe, rule, trials, form, loss_fn)
                    if loss_fn is None and rule is not None and rule.shifts and rule.takes_count:
                        head = find_chunked_head(self._model, probe, trials, trials.output, splitting)
            return rule, head

        try:
            rule, head = probe_with(False)
        except ENGINE_ERRORS:
            raise
        except Exception:  # a forward that asks for its graph, as by h.register_hook, runs with one alone
            if not self._has_backward:
                raise
            with self._flow.runner.saved.trial_mode():
                rule, head = probe_with(True)
        self.forget_traffic()
        return rule, head

    def _find_weights(
        self, probe: Batch, rule: LossRule, trials: LabelTrials, form: BatchForm, loss_fn: LossFunction | None
    ) -> LossRule:
        """Return the rule with the weights of parts. Trials only if the outputs do not depend on the labels."""
        model, comm = self._model, self._flow.comm
        takes_labels = loss_fn is None or "labels" in select_inputs(model, probe, loss_fn)
        if takes_labels and trials.output is None:
            return rule
        outputs = None
        if not takes_labels:  # one run of the model is enough for all labels
            outputs = model(**select_inputs(model, probe, loss_fn))

        def loss_from(found: Any, inputs: Batch) -> torch.Tensor:
            if loss_fn is None:
                return find_loss(found)
            return loss_fn(found, inputs)

        def loss_of(inputs: Batch) -> torch.Tensor:
            if takes_labels:
                return loss_from(trials({**probe, "labels": inputs["labels"]}), inputs)
            return loss_from(outputs, inputs)

        def cut(row: int, inputs: Batch) -> torch.Tensor:
            number = torch.tensor([row], device="cpu")
            part, own = form.take(inputs, number), form.take({**probe, "labels": inputs["labels"]}, number)
            return loss_from(model(**select_inputs(model, own, loss_fn)), part)

        def any_rank(found: bool) -> bool:
            return comm.any(found, "weights of a loss")

        obstacle = find_other_weights(probe, rule, loss_of, cut, any_rank)
        if obstacle:
            return replace(rule, obstacle=obstacle)
        return find_row_weights(probe, rule, loss_of, cut, any_rank)

    def discard_incomplete(self) -> None:
        """Discard an incomplete recording, with everything the recording may have overwritten."""
        if not self.is_complete:
            self.reset(self.loss_decisions)

    def adopt(self, loss_decisions: Mapping[str, Sequence[int]]) -> None:
        """Discard all recordings, and take over loss decisions of another engine."""
        self.reset(loss_decisions)
        self._foreign_decisions = {*loss_decisions}

    def reset(self, loss_decisions: Mapping[str, Sequence[int]]) -> None:
        """Discard all recordings, as in a fresh engine, except these loss decisions."""
        self.loss_decisions = {key: list(values) for key, values in loss_decisions.items()}
        self._foreign_decisions &= {*loss_decisions}
        self.known.results.clear()
        self.known.choices.clear()
        for unit in self._flow.units:
            unit.variants.clear()
        self.is_complete = True

    def _keep_decision(
        self, batch: Batch, rule: LossRule, head: ChunkedHead | None
    ) -> tuple[LossRule, ChunkedHead | None]:
        """Return the first loss decision for this pattern, fixed for later batches. A decision of another engine stays
        if the first trial here agrees about the targets: the loss may be another one.
        """
        # Names and axes of the values, and options of the model: an analysis has the decision by this key.
        names = " ".join(
            f"{name}:{value.dim() if isinstance(value, torch.Tensor) else type(value).__name__}"
            for name, value in sorted(batch.items())
        )
        key = f"{names} {self.known.flags()}"
        decision = [int(rule.shifts), int(rule.takes_count), 0]  # 0: no head in chunks
        if head is not None:
            decision[2] = head.vocabulary
        if key in self._foreign_decisions and self.loss_decisions[key][:2] != decision[:2]:
            self.loss_decisions[key] = decision
        self._foreign_decisions.discard(key)
        shifts, takes_count, vocabulary = self.loss_decisions.setdefault(key, decision)
        if head is None or head.vocabulary != vocabulary:
            head = ChunkedHead.of(self._model, vocabulary)
        return replace(rule, shifts=bool(shifts), takes_count=bool(takes_count)), head

    def on_call(self, call: ModelCall, check_equivalence: Callable[[], None]) -> None:
        """Record a call in the caller's own loop with copied arguments, then run the equivalence check. Collective."""
        self.is_complete = False
        self._is_training = True
        self._roots = {"arguments": (call.args, call.kwargs)}
        if self._flow.stages.needs_short_recording:
            self._record_few(self.samples.call_samples(call)[:-1])
        with self._with_dtypes_explained(call.args, call.kwargs):
            self._record([(0, call.run_on_copies)] * 2)
        check_equivalence()
        self.forget_traffic()
        self.known.store_ints(self.known.signature_of_call(call), int_arguments(call.args, call.kwargs))
        self.end()

    def end(self) -> None:
        """End the present recording, which is complete, and keep nothing of the batch."""
        self.is_complete = True
        self._roots = {}
        self._unused_sample = None

    @contextmanager
    def _with_dtypes_explained(self, *given: Any) -> Iterator[None]:
        """Context that explains a torch error about fp32 tensors in `given` or in the model, beside bf16 weights.

        Libraries that ask for bf16 run such a model under autocast.
        """
        try:
            yield
        except RuntimeError as error:
            tensors = Arguments((given, {})).tensors
            changed = {info.compute for info in self._flow.infos if not info.bf16_source} - {"fp32"}
            wide = next((tensor for tensor in tensors if tensor.dtype == torch.float32), None)
            is_inside = wide is None and {"float"} < set(_DTYPE_NAME.findall(str(error)))
            if isinstance(error, ENGINE_ERRORS) or not changed or (wide is None and not is_inside):
                raise
            what = "with its own float32 tensors, such as buffers,"
            short, advice = changed.pop(), "C"
            dtype = str(DTYPES[short])
            if wide is not None:
                what = f"on float32 {describe(wide)}"
                advice = f"Give the model {short} tensors, model(x.to({dtype})), or c"
            raise ConfigError(
                f"the model does not run {what} with weights in {short}: {error}. An engine in {short} computes with "
                f"{short} weights, without the autocast of plain accelerate or the plain Trainer. {advice}ompute in "
                "fp32: "
                "mixed_precision='no' of an accelerator, bf16=False of a Trainer, precision='fp32' of Engine or "
                "offload.wrap, --train.precision fp32 of a run."
            ) from error

    def on_inference(self, call: ModelCall) -> None:
        """Find weights read from outside units, e.g. by the loss, at the first call of a pattern. Collective."""
        signature = f"{self.known.signature_of_call(call)} {call.module.training}"
        if signature not in self.known.watched_calls:
            roots = {"arguments": (call.args, call.kwargs)}

            def run(_: Recording) -> None:
                with isolated(self._flow, roots):
                    call.run_on_copies()

            with self._with_dtypes_explained(call.args, call.kwargs):
                self._run_until_settled(run)
            self.forget_traffic()
            self.known.watched_calls.add(signature)

    def _record_few(self, samples: Sequence[ModelCall]) -> None:
        """Record on a few rows and tokens of a call, if these run alone.

        The recording then covers units whose trial on all rows would take too much memory.
        """
        flow, is_known = self._flow, bool(samples)
        for sample in samples:
            try:
                self._record([(0, sample.run_on_copies)])
            except ENGINE_ERRORS:
                raise
            except Exception:
                flow.runner.has_failed = is_known = False
        if flow.comm.any(not is_known, "outcome of a sample call"):
            for variant in (variant for unit in flow.units for variant in unit.variants.values()):
                variant.learned.clear()  # from another mode

    def _record(self, runs: list[tuple[int, Callable[[], Any]]]) -> None:
        """Run the recording passes in (rows, run) pairs, each compared with the previous pass."""
        begin: Callable[..., Recording] = FirstPass
        flow = self._flow
        for rows, run in runs:

            def record(recording: Recording, run: Callable[[], Any] = run) -> None:
                with isolated(flow, self._roots), flow.router.trial_mode(recording.call), torch.enable_grad():
                    recording.finish(run())

            recording = self._run_until_settled(record, partial(begin, rows=rows))
            if self._is_training:
                recording.refuse_writes()
            begin = partial(SecondPass, before=recording)
        flow.stages.check()
        self.known.update_modes()
        self.forget_traffic()

    def forget_traffic(self) -> None:
        """Discard fetched weights and transfer counters, so that the first step fetches and counts all weights."""
        self._flow.executor.forget()
        self._flow.lanes.timeline.discount("h2d", "nvme_read")
        self._flow.counters.clear()

    def _run_until_settled(
        self, run: Callable[[Recording], object], begin: Callable[[Sequence[Unit], UnitRunner], Recording] = FirstPass
    ) -> Recording:
        """Return the recording of a run. Repeat with more resident units until no unit is read from outside."""
        while True:
            recording = begin(self._flow.units, self._flow.runner)
            try:
                with self._flow.ownership.watched(recording.note_read), UseDetector(recording):
                    run(recording)
            except ConfigError:
                self._flow.runner.weights_changed()
                raise
            except Exception:  # filler values replaced the weights, so any error is possible
                if not recording.outside_readers:
                    raise
            else:
                if not recording.outside_readers:
                    recording.note_writes()
                    if recording.written:  # copy the weights to the device again
                        slots, written = self._flow.slots, recording.written
                        slots.refresh([region for unit in written for region in unit.regions], always=True)
                        slots.compute_after_resident()
                    return recording
            self._flow.make_resident(recording.outside_readers)


def _is_raised_in(function: Any, error: Exception) -> bool:
    """True if the exception comes from the caller's function."""
    while isinstance(function, partial):
        function = function.func
    code = getattr(function, "__code__", getattr(type(function).__call__, "__code__", None))
    return any(frame.f_code is code for frame, _ in walk_tb(error.__traceback__))
