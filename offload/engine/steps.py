"""One step, from the batch to the update, and one evaluation."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from offload.accelerators import own_accelerator
from offload.doors import Door
from offload.engine.analysis import Analysis, Analyst
from offload.engine.entries import ModelCall
from offload.engine.equivalence_checks import EquivalenceChecks
from offload.engine.flow import Flow
from offload.engine.foreign_writes import ForeignWrites
from offload.engine.loss.batch import IGNORED, Batch, BatchForm, map_tensors
from offload.engine.loss.batch_agreement import PassInputs, RankBatch, agree_on_pass, host_labels
from offload.engine.loss.loss import LossFunction, Needs, as_loss
from offload.engine.loss.parts import Losses
from offload.engine.methods.method import Backward, Method
from offload.engine.methods.result import StepResult
from offload.engine.recording.known import KnownPasses, TrialResult
from offload.engine.recording.trial_runs import TrialRuns
from offload.engine.units.execution_mode import ExecutionMode
from offload.engine.units.snapshots import Snapshot, buffers_of
from offload.engine.units.traits import PartsDifferError, UnrecordedCallError
from offload.errors import ConfigError, DoesNotFitError, warn
from offload.modules import in_eval_mode
from offload.planning.device_updates import forward_seconds, is_small_update, slowest_throttles, update_seconds
from offload.planning.machines import ThisMachine
from offload.planning.settings import LEAST_CHUNK_BYTES, Settings

_Result = TypeVar("_Result")
METHODS: Door[type[Method]] = Door("method", {"backward": Backward})
"""Training methods, by the `method` name of the update rule."""
_MOST_DEPARTURES = 3
"""Limit per batch: each departure is recorded on one rank's rows, and several ranks may each have a new call."""


def _memory_error(error: torch.OutOfMemoryError) -> DoesNotFitError:
    """Return a DoesNotFitError for an out-of-memory error in a step, with torch's text."""
    message = str(error).partition("If reserved but unallocated")[0]  # drops advice on allocator settings: already set
    return DoesNotFitError(
        f"a step on this batch does not fit into the device memory: {' '.join(message.split())}",
        "Lower --train.batch_size, --train.micro_batch_size, --train.head_chunk_bytes or --data.sequence_length, raise "
        "--train.passes, set --train.recompute always and --offload.activations cpu, raise --offload.device_memory if "
        "it is below the physical memory, or set --offload.optimizer cpu if optimizer states are on the device.",
    )


class Steps:
    """Runs steps and evaluations with the update rule's training method."""

    def __init__(self, flow: Flow, settings: Settings) -> None:
        self._flow = flow
        self._recovery = flow.recovery
        self._rule = settings.optimizer
        self._micro_rows = settings.micro_batch_size
        self._num_passes = settings.passes
        self._throttles = settings.throttles
        cuts = settings.splits or settings.passes > 1 or flow.runner.has_peers
        has_backward = self._rule.has_gradients
        self.losses = Losses(flow, settings.chunk_bytes(flow.plan.full_device_bytes), has_backward)
        # Only an automatic choice follows the decision of another engine (`restore_decisions`).
        self._chooses_chunks = settings.head_chunk_bytes == "auto"
        self._chooses_clip = flow.updates.clip == "auto"
        self.known = KnownPasses(flow, settings.rows)
        self.trial_runs = TrialRuns(flow, self.known, cuts, has_backward)
        self._modules = list(flow.model.modules())
        self.method: Method = METHODS[self._rule.method](flow, settings, self.losses, self._take_snapshot)
        self.foreign_writes = ForeignWrites(flow, updates_later=settings.delay > 0 or not has_backward)
        self.equivalence = EquivalenceChecks(flow, self.method, self.losses, self.known, settings.precision)
        self._analyst = Analyst(flow, self.known, settings)

    def step(self, batch: Batch, loss_fn: LossFunction | None) -> StepResult:
        """Train on a batch in host memory."""
        self.foreign_writes.check()
        self.known.forget_other_modes()
        inputs = self._agree("step", batch, loss_fn, self.method.lr)
        result = self._run_with_retries(self._step, inputs)
        self.foreign_writes.note()
        return result

    def evaluate(self, batch: Batch, loss_fn: LossFunction | None) -> torch.Tensor:
        """Return the batch's loss without side effects."""
        self.foreign_writes.check()
        inputs = self._agree("evaluate", batch, loss_fn)
        with self._flow.counters.preserve():  # a recording, for a new kind of batch, clears them
            loss = self._run_with_retries(self._evaluate, inputs)
        self.foreign_writes.note()
        return loss

    def replay(self, records: Iterable[Any]) -> None:
        """Repeat steps from records. Raises ConfigError."""
        for record in records:
            with self._recovery.given_up_on_error():
                self.method.replay(record)
        self._flow.lanes.drain_updates()

    def _step(self, inputs: PassInputs) -> StepResult:
        if not inputs.num_targets and as_loss(inputs.loss_fn).needs is Needs.MEAN:
            labels = inputs.batch["labels"]
            raise ConfigError(
                f"the batch has no target: all {labels.numel()} labels are {IGNORED} or first in their row."
            )
        self.resolve_clip(inputs.plan.num_elements)
        with self._recovery.given_up_on_error():
            self._flow.spare_memory.begin_step(inputs.plan.num_elements)
            return self.method.step(inputs)

    def _evaluate(self, inputs: PassInputs) -> torch.Tensor:
        flow = self._flow
        random = flow.device.random_state()
        with (
            self._recovery.given_up_on_error(),
            ExitStack() as undo,
            in_eval_mode(flow.model),
        ):
            undo.callback(flow.device.set_random_state, random)
            flow.updates.flush()
            flow.slots.compute_after_resident()
            flow.runner.writes.begin()
            flow.executor.begin(inputs.plan.schedule_key)
            total = self.losses.total(inputs)
            flow.runner.check_writes()
            flow.executor.end()
            flow.lanes.timeline.discount("h2d", "nvme_read")
            flow.executor.begin_fetches(*self.method.expected)
            (loss,) = self.method.sum(float(flow.device.copy_to_host(total)()))
            return torch.tensor(loss, dtype=torch.float32, device="cpu")

    def resolve_clip(self, tokens: int) -> str:
        """Decide `clip: auto` for steps with `tokens` tokens on this rank, or leave the decision to the steps.

        Return the mode.
        """
        flow, updates = self._flow, self._flow.updates
        if updates.clip == "auto" and updates.num_unclipped is None:
            if flow.lanes.overlap and flow.plan.corrects_cheaply and not self._hides_updates(tokens):
                updates.decide("auto", num_unclipped=0)
            else:
                updates.decide("deferred")
        return updates.clip

    def _hides_updates(self, tokens: int) -> bool:
        """Return whether an update that begins after the norm ends within the next forward. Collective."""
        flow, throttles = self._flow, slowest_throttles(self._flow.comm, self._throttles)
        regions, sharding = flow.regions, flow.plan.residence.sharding
        if is_small_update(regions, sharding, throttles):
            return True
        speeds = ThisMachine(own_accelerator(str(flow.device.torch_device))).speeds(flow.comm)
        forward_s = forward_seconds(flow.infos, regions, len(flow.units), tokens, sharding, throttles, speeds)
        hides = update_seconds(regions, flow.plan.residence, throttles, speeds) <= forward_s
        return flow.comm.from_rank(0, hides, "choice of train.clip")  # token counts may differ

    @property
    def analysis(self) -> Analysis:
        """Results of all trial runs so far."""
        return self._analyst.collect(self.trial_runs.loss_decisions)

    def adopt(self, analysis: Analysis) -> None:
        """Take over another engine's analysis in place of the own recordings. Raises ConfigError for another model."""
        if differences := self._analyst.differences(analysis):
            raise ConfigError(
                f"the analysis given to Engine() belongs to another model: {', '.join(differences)} differ. Leave out "
                "analysis, so that the first step analyses this model."
            )
        self._adopt(analysis)

    def _adopt(self, analysis: Analysis) -> None:
        self.trial_runs.adopt(analysis.losses)
        self._analyst.adopt(analysis)  # of another model only the decisions

    @property
    def decisions(self) -> dict[str, Any]:
        """Final decisions that change result bits; JSON."""
        updates = self._flow.updates
        clip = {"clip": updates.clip, "unclipped": updates.num_unclipped}
        scale = updates.loss_scale.state_dict()
        return {**clip, **scale, "chunk_bytes": self.losses.chunk_bytes, "analysis": vars(self.analysis)}

    def restore_decisions(self, decided: Mapping[str, Any]) -> None:
        """Take over another engine's decisions."""
        if self._chooses_clip:
            self._flow.updates.decide(decided["clip"], decided.get("unclipped"))
        self._flow.updates.loss_scale.load_state_dict(decided)
        if self._chooses_chunks:
            self.losses.chunk_bytes = decided.get("chunk_bytes", LEAST_CHUNK_BYTES)  # the value before it was saved
        self._adopt(Analysis.of_decisions(decided))

    def _agree(self, operation: str, batch: Batch, loss_fn: LossFunction | None, lr: float | None = None) -> PassInputs:
        """Look up the batch, agree with the other ranks on a pass, and copy the batch to the device."""
        comm, attention = self._flow.comm, self._flow.attention
        batch, shared = attention.share(batch, loss_fn)
        try:
            known = self.known.look_up(batch, loss_fn)
            as_loss(loss_fn).check(known.rows, self._micro_rows)
            as_loss(loss_fn).open(comm, self._flow.device.ledger)
        except ConfigError as error:
            agree_on_pass(comm, RankBatch(operation, error_message=str(error)))  # raises on all ranks
            raise
        own = RankBatch.of(operation, batch, known.rows, self._micro_rows, loss_fn is not None, shared)
        own = replace(
            own,
            is_new=known.is_new,
            is_known=known.result is not None,
            is_claim=known.kind in (self.known.claims or ()),
            modes=self.known.modes,
            lr=lr,
        )
        plan = agree_on_pass(comm, own)
        attention.begin_pass(plan.needs_mask)
        batch = map_tensors(lambda tensor: tensor.clone() if tensor.is_inference() else tensor, batch)
        device_batch = map_tensors(self._flow.device.copy_to_device, batch)
        labels, result = host_labels(batch), known.result or TrialResult()
        learned = result.rule, result.head, known.form
        return PassInputs(plan, device_batch, loss_fn, labels, *learned, shared, self._num_passes)

    def _prepare(self, inputs: PassInputs, departed: bool | None) -> PassInputs:
        """Return the inputs for a pass, after the recording and the checks of a new kind of batch."""
        flow = self._flow
        with self._recovery.given_up_on_error():
            is_recorded = inputs.plan.is_new or departed is not None
            if is_recorded:
                inputs = self._record(inputs, departed)
            else:
                flow.slots.compute_after_resident()
            is_due = self._is_check_due(inputs, is_recorded)
            if (is_due or inputs.plan.has_claims) and self.known.claims is not None and not is_recorded:
                if self._refutes(inputs):
                    inputs, is_recorded = self._record(inputs, departed), True
                else:
                    self.trial_runs.accept(inputs)
                is_due = self._is_check_due(inputs, is_recorded)
            if is_due or inputs.plan.has_other_values or departed is not None:
                self._flow.begin_stage("comparing the engine with plain PyTorch")
                self.equivalence.check(inputs, self._take_sample(inputs))
                self.trial_runs.forget_traffic()
                form = BatchForm.of(inputs.batch, self.known.rows)  # the trial used another rank's sample
                inputs = replace(inputs, form=form)
            if is_recorded and flow.attention.check(flow, inputs.head, inputs.shared):
                self.trial_runs.forget_traffic()
            flow.attention.begin_pass(inputs.plan.needs_mask)
            self._check_parts(inputs)
            if is_recorded or is_due:
                self._flow.begin_stage("running the first pass")
            self.trial_runs.end()
        return inputs

    def _is_check_due(self, inputs: PassInputs, is_recorded: bool) -> bool:
        is_used = is_recorded or inputs.is_training or self.known.claims is not None
        return is_used and not self.known.has_checked(inputs, has_chunks=self.losses.chunk_tokens(inputs) > 0)

    def _take_sample(self, inputs: PassInputs) -> Batch:
        """Return rows for an equivalence check, and prepare for one. Collective."""
        self._flow.updates.flush()
        sample = self.trial_runs.take_sample(inputs)
        self.method.begin_trial()
        return sample

    def _refutes(self, inputs: PassInputs) -> bool:
        """Check results of another engine on a few rows. Return True, without these results, after a difference."""
        difference = self.equivalence.find_difference(inputs, self._take_sample(inputs))
        difference = difference or self.trial_runs.find_other_rule(inputs)
        self.trial_runs.forget_traffic()
        return self._forget_claims(difference)

    def _forget_claims(self, difference: str) -> bool:
        if difference:
            warn(
                "the analysis given to Engine(), or that of the checkpoint, does not hold for this model: "
                f"{difference}. The model is analysed again."
            )
            self.trial_runs.reset({})
            self.known.forget()
            self._flow.execution_mode.adopt(ExecutionMode())
        return bool(difference)

    def prepare_call(self, call: ModelCall, is_new: bool) -> None:
        """Record and check a call in the caller's own loop, or check the recording of another engine. Collective."""
        trial_runs, known = self.trial_runs, self.known
        samples = trial_runs.samples.call_samples(call)
        if not self._flow.comm.any(is_new, "recording of a call"):
            difference = self.equivalence.find_difference_of_call(samples)
            trial_runs.forget_traffic()
            if not self._forget_claims(difference):
                (known.claims or set()).discard(known.signature_of_call(call))
                return
        trial_runs.on_call(call, partial(self.equivalence.check_call, samples))

    def _record(self, inputs: PassInputs, departed: bool | None) -> PassInputs:
        """Record calls on a few rows of the batch; return the inputs with the trial results."""
        flow, mode = self._flow, self._flow.execution_mode
        self._flow.begin_stage("recording the model on a few rows")
        flow.updates.flush()
        flow.slots.compute_after_resident()
        flow.attention.begin_pass(inputs.plan.needs_mask or departed is not None)  # a trial may drop masks
        inputs = self.trial_runs.on_batch(inputs, departed)
        if mode.cut == "units" and flow.comm.any(not self.splits, "splitting of batches"):
            mode.change(cut="calls")
        self._check_parts(inputs)
        return inputs

    def _check_parts(self, inputs: PassInputs) -> None:
        """Stop splitting batches if the rows, or the losses of the parts, do not allow it."""
        has_losses = self._num_passes > 1 or self._flow.execution_mode.cut == "calls"
        obstacle = inputs.form.obstacle
        if has_losses:
            obstacle = obstacle or inputs.rule.obstacle or as_loss(inputs.loss_fn).obstacle
        if obstacle and (self._micro_rows is not None or self._num_passes > 1):
            self._stay_whole(obstacle)

    @property
    def splits(self) -> bool:
        """True if, so far, every unit gives equal results for a batch split in rows."""
        variants = [variant for unit in self._flow.units if not unit.resident for variant in unit.variants.values()]
        return all(variant.splits for variant in variants if variant.is_compared)

    def _stay_whole(self, obstacle: str) -> None:
        """Stop splitting batches: the model does not run on a few rows alone, or the loss has other weights there."""
        if self._flow.execution_mode.cut != "whole":
            before = copy(self._flow.execution_mode)
            self._flow.execution_mode.change(cut="whole")
            warn(
                f"micro_batch_size is {self._micro_rows or 'none'}, passes {self._num_passes}, but the batch cannot be "
                f"split by rows: {obstacle}. From here on {self._flow.execution_mode.describe_changes(before)}."
            )

    def _run_with_retries(self, run: Callable[[PassInputs], _Result], inputs: PassInputs) -> _Result:
        """Prepare and run a pass; after an unrecorded unit call, record the call and repeat both with equal draws.

        Examples of new calls: the first batch with a padding mask, a longer sequence that fills a window. The recording
        uses full-length rows of the batch, from one rank or several. If no few rows show the new call, batches are no
        longer split. The pass also runs again after an out-of-memory error, without the spare device memory lent to
        slots. A failed pass leaves modules and generators unchanged.
        """
        flow = self._flow
        before = self._take_snapshot()
        departed, num_departures = None, 0
        step_number = flow.runner.step_number

        while True:
            try:
                result = run(self._prepare(inputs, departed))
                if isinstance(result, StepResult) and result.skipped:
                    before.put_back(has_generators=False)
                return result
            except BaseException as error:
                if self._recovery.torn or flow.runner.step_number != step_number:  # at least one update is done
                    raise
                before.put_back()
                if isinstance(error, UnrecordedCallError):
                    departed, num_departures = error.is_own, num_departures + 1
                    if num_departures == _MOST_DEPARTURES and flow.execution_mode.cut == "units":
                        flow.execution_mode.change(cut="calls")
                elif isinstance(error, PartsDifferError):
                    self._stay_whole(str(error))
                elif not isinstance(error, DoesNotFitError | torch.OutOfMemoryError):
                    raise
                elif not self._give_back_memory(error):
                    if isinstance(error, torch.OutOfMemoryError):
                        raise _memory_error(error) from error
                    raise

    def _take_snapshot(self) -> Snapshot:
        """Return a snapshot of generators and modules, with all buffers except those in units recorded without a
        change of a buffer.
        """
        flow = self._flow
        inside = {module for unit in flow.units if not unit.resident and unit.variants for module in unit.modules}
        buffers = set(buffers_of([module for module in self._modules if module not in inside]))
        for unit in flow.units:
            buffers.update(*(variant.buffers for variant in unit.variants.values()))
        notes = [place for unit in flow.units for place in unit.mutable_attributes]
        ignores = flow.runner.is_weight
        return Snapshot(flow.device, ignores, self._modules, buffers, notes, settle=flow.settle)

    def _give_back_memory(self, error: BaseException) -> bool:
        flow = self._flow
        with self._recovery.working():
            if flow.comm.world.size > 1:  # the other ranks had room and are further on
                return False
            if isinstance(error, DoesNotFitError):
                return flow.spare_memory.give_back()
            # There was room, but fragmented, or too small for the temporaries of this batch.
            return flow.spare_memory.retreat() or flow.runner.saved.policy.retreat()
