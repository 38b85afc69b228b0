"""The engine: one training step over streamed units."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from offload.amounts import Amount, Tell
from offload.arguments import check_types
from offload.distributed.comm import Comm
from offload.distributed.joining import open_comm
from offload.engine.analysis import Analysis
from offload.engine.assemble import MODEL_FORMS, assemble
from offload.engine.compile_wrappers import remove_compile_wrappers
from offload.engine.gradients.loss_scale import LossScale
from offload.engine.loss.batch import Batch
from offload.engine.loss.batch_agreement import RankBatch, agree_on_pass
from offload.engine.loss.loss import LossFunction
from offload.engine.methods.result import StepResult
from offload.engine.own_loop import OwnLoop
from offload.engine.parameter_reads import ParameterReads
from offload.engine.parking import Parking
from offload.engine.state_access import StateAccess
from offload.engine.steps import Steps
from offload.engine.units.attention import ATTENTIONS
from offload.engine.units.residency import check_tensors, refuse_copy, refuse_owned
from offload.errors import ConfigError
from offload.files.sources import Fill
from offload.layout.codecs import Codec
from offload.machine.limits import use_share_of_cores
from offload.optim.rule import UpdateRule, check_number
from offload.planning.settings import Settings, with_settings
from offload.retired import without_retired
from offload.tiers.counters import Counters
from offload.tiers.placement import Placement


class Engine(StateAccess):
    """Trainer for `model`, with the states on the tiers in `placement`.

    `placement` is a Placement or a mapping of Placement fields. The other keywords are `Settings` fields; `settings`
    passes them as one object.

    The engine consumes the model: the parameters move into the engine, unit by unit. `fill(name, module)`, if given, is
    called right before the engine takes a unit's parameters. It writes the parameters, or returns the sources from
    which they are read piece by piece, so no parameter has to be in memory as a whole. Over several ranks one rank
    calls `fill` for each unit. Without `fill` all ranks receive rank 0's weights. `quantized`: codecs for parameters
    quantized in the model files (`BuiltModel.quantized`). `analysis`: `analysis` of an earlier engine over
    the same model with the same settings. The first step then checks these results on a few rows, in place of a
    recording; after a difference, the model is recorded, with a warning.

    Over several ranks (from `comm`, the process group, or the torchrun variables) every call is collective: all ranks
    make the same calls in the same order, each with its own rows.
    """

    @with_settings
    def __init__(
        self,
        model: nn.Module,
        optimizer: UpdateRule | None = None,
        placement: Placement | Mapping[str, Any] | None = None,
        *,
        fill: Fill | None = None,
        quantized: Mapping[nn.Parameter, Codec] | None = None,
        comm: Comm | None = None,
        analysis: Analysis | None = None,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        own = {"model": model, "fill": fill, "quantized": quantized, "comm": comm, "analysis": analysis}
        check_types(Engine.__init__, {**own, "settings": settings})
        positional = {"optimizer": optimizer, "placement": placement}
        options |= {key: value for key, value in positional.items() if value is not None}
        settings = replace(settings or Settings(), **without_retired(options))
        if torch.is_inference_mode_enabled():
            raise ConfigError(
                "Engine() was called under torch.inference_mode, where training is not possible: call it outside."
            )
        refuse_owned(model)
        check_tensors(model, has_fill=fill is not None)
        model = remove_compile_wrappers(model, settings.compile)
        self.model = model
        self.optimizer = settings.optimizer
        self.counters = Counters()
        self._owned_comm: Comm | None = None
        if comm is None:
            self._owned_comm = open_comm(device=settings.device)
        self.comm = comm or self._owned_comm or Comm()
        use_share_of_cores(self.comm.local_rank, self.comm.local_gpus)
        self.comm.claim(self)
        self._form = ExitStack()
        try:
            form_name = "plain"
            if any(map(is_traceable_wrapper_subclass, model.parameters())):
                form_name = "tensors"
            form = MODEL_FORMS[form_name](model, settings, self.comm, fill, quantized)
            settings, self.comm = self._form.enter_context(form)
            self._state = assemble(model, settings, self.counters, fill, self.comm, quantized or {})
        except BaseException as error:
            self._form.close()
            self.comm.release()
            if self._owned_comm is not None:
                self._owned_comm.close(error)
            raise
        self._memory = self._state.memory
        self._weights = self._state.weights
        self._flow = self._state.flow
        self.device = self._memory.device.torch_device
        self._recovery = self._flow.recovery
        self._steps = Steps(self._flow, settings)
        self._own_loop = OwnLoop(self._flow, self._steps, settings)
        self._parking = Parking(self._state, self._steps)
        self._parameter_reads = ParameterReads(self._flow, self._own_loop, self._steps.foreign_writes)
        discard = self._steps.trial_runs.discard_incomplete
        self._recovery.callbacks += [discard, self._flow.spare_memory.give_up, self._own_loop.forget]
        if analysis is not None:
            try:
                self._steps.adopt(analysis)
            except BaseException:
                self.close(restore=True)
                raise

    def __repr__(self) -> str:
        return f"<Engine: {type(self.optimizer).__name__} over {type(self.model).__name__} on {self.device}>"

    def tell_stages(self, tell: Tell) -> None:
        """Call `tell` when a long stage begins: those that a new kind of batch needs before the step, and reads and
        writes of files. `tell` gets a name, and a function for the amount of work done, to call from any thread.
        """
        self._flow.tell = tell

    def amount(self) -> Amount:
        """Return the current place in a pass, and the bytes moved between tiers in this step. Call from any thread."""
        return self._flow.amount()

    def stay(self) -> None:
        """Let the model stand in for the original one in a script.

        The engine lives as long as the model, even without other references; `engine_of` finds the engine. On a single
        rank scripts read parameters that were fp32 as fp32 master weights, also under precision bf16.
        """
        self._flow.ownership.engine = self
        if self.comm.size == 1:
            self._flow.ownership.read_as_given(self._weights.dtypes)
        self._flow.ownership.save_as_given(self.model, self._as_original)

    @contextmanager
    def _as_original(self) -> Iterator[None]:
        """Context in which a script sees the original configuration, and a forward is no step of a loop."""
        with self._flow.caches.with_original_flags(), self._flow.runner.as_engine_calls():
            yield

    # -- a step ----------------------------------------------------------------------------------------------

    def step(self, batch: Batch, loss_fn: LossFunction | None = None) -> StepResult:
        """Train on this rank's rows of a batch: forward, backward, update.

        `batch`: the model's forward arguments by name; labels unshifted, -100 is ignored. `loss_fn(outputs, batch)`
        computes the loss if the model has none, and may use batch entries unknown to the model. It returns a 0-dim
        tensor; with MeZO, any number to minimize.
        """
        self._recovery.check_usable()
        if not torch.is_grad_enabled():
            raise ConfigError(
                "engine.step was called with gradients disabled (torch.no_grad or torch.inference_mode) and cannot "
                "train: call it outside, or call engine.evaluate for a loss."
            )
        self._flow.snapshot.check(trains=True)
        self._flow.snapshot.refuse_all_frozen()
        if self._own_loop.is_open:
            self._own_loop.refuse_during_step("engine.step")
            self._own_loop.forget()  # a forward that had no backward
        with self._recovery.working():
            return self._steps.step(batch, loss_fn)

    def evaluate(self, batch: Batch, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """Return the loss `step` would report, in eval mode and without side effects.

        Computes no gradients; counters and random generators stay unchanged.
        """
        with torch.inference_mode(False):  # inference tensors cannot be used in later steps
            self._recovery.check_usable()
            self._flow.snapshot.check(trains=False)
            with self._recovery.working():
                return self._steps.evaluate(batch, loss_fn)

    def replay(self, records: Iterable[Any]) -> None:
        """Repeat the steps of a MeZO run bit for bit, from the run's initial weights. Collective.

        `records`: in order, `measured` from `step` results, lines of the run's metrics.jsonl, or (step, seed, slopes).
        Needs no batch and runs no forward.

        Raises ConfigError for another rule, other settings, or a missing step. A skipped step needs a record too: the
        metrics.jsonl line, or (step, 0, ()) without slopes.
        """
        self._recovery.check_usable()
        self._settle("replay")
        self._own_loop.refuse_during_step("engine.replay")
        with self.counters.preserve():
            self._steps.replay(records)
            self._flow.runner.weights_changed()

    def backward(self, loss: torch.Tensor) -> None:
        """For own loops: add the gradients of `loss`, as `loss.backward()` does; `update` then returns the loss too."""
        self._recovery.check_usable()
        self._flow.snapshot.check(trains=True)
        self._flow.snapshot.refuse_all_frozen()
        self._own_loop.backward(loss)

    def grad_norm(self) -> float:
        """For own loops: return the gradient norm since the last update, over all ranks, before clipping.

        The gradients are then complete: call `update` next.
        """
        self._recovery.check_usable()
        return self._own_loop.grad_norm()

    def clip_grad_norm(self, max_norm: float) -> float:
        """For own loops: clip the gradients since the last update to a norm, and return the norm before.

        `update` clips, and the gradients are complete: call it next. In a loop over `offload.wrap`, gradients that are
        read in between are clipped. max_norm: above 0; infinite: no clipping.
        """
        self._recovery.check_usable()
        if not max_norm > 0:
            raise ConfigError(f"engine.clip_grad_norm was given max_norm={max_norm!r}; it must be a number above 0.")
        return self._own_loop.clip(float(max_norm))

    def has_gradients(self) -> bool:
        """For own loops: return whether any rank has gradients since the last update. Collective."""
        self._recovery.check_readable()  # a parked engine has none
        return self._own_loop.has_gradients()

    def update(self, max_grad_norm: float | None = None, *, until_zero_grad: bool = False) -> StepResult:
        """For own loops: clip, update, and return the mean loss since the last update, over all ranks.

        max_grad_norm: clipping norm for this step instead of the engine's; 0: no clipping. A plain `loss.backward()`
        can replace `backward`; the loss in the result is then NaN, because the engine does not know the loss.
        until_zero_grad: as after the step of a torch optimizer, the gradients have to be cleared (`zero_grad`) before
        the next ones are used; otherwise ConfigError. Default: the update clears them.
        """
        self._recovery.check_usable()
        return self._own_loop.update(max_grad_norm, until_zero_grad)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """For own loops: drop the gradients since the last update, if any. Collective.

        set_to_none: False: parameters with a gradient have one of zero instead, so the next update decays their weights
        and moments even without another gradient, as in plain PyTorch.
        """
        self._recovery.check_readable()  # a parked engine has none
        self._own_loop.zero_grad(set_to_none)

    def finish(self) -> None:
        """Wait until all work is done: all updates are written, and the first weights for the next step are on the
        device. No other call needs this one; use it to time a step.

        Raises TornError if an update has failed.
        """
        self._recovery.check_usable()
        with self._recovery.working():
            self._weights.updates.flush()
            self._memory.lanes.finish()
        self._recovery.check_sound()

    def park(self) -> None:
        """Give all memory of the device back, between two steps, for example to a sampler. Collective.

        States on the device wait in host memory until `resume`. Meanwhile reads, edits, exports and checkpoints of the
        states work, and nothing can be computed. A parked engine stays as it is.

        Raises DoesNotFitError, before any change, if host memory has no room, and ConfigError in a step of an own loop.
        """
        self._settle("park")
        self._own_loop.refuse_during_step("engine.park")
        if self._own_loop.is_open:
            self._own_loop.forget()  # a forward that had no backward
        self._parking.park()

    def resume(self) -> None:
        """Take the memory of the device again, after `park`. Later steps have the bits of a run without. Collective.

        Without effect on an engine that is not parked. Raises DoesNotFitError if others have taken the memory: the
        engine stays parked, and a later call can succeed.
        """
        self._recovery.check_open()
        self._parking.resume()

    @contextmanager
    def parked(self) -> Iterator[None]:
        """Context between `park` and `resume`."""
        self.park()
        try:
            yield
        finally:
            self.resume()

    @property
    def lr(self) -> float:
        """Learning rate for the next update. Set between steps, equal on all ranks."""
        return self._steps.method.lr

    @lr.setter
    def lr(self, value: float) -> None:
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"engine.lr was set to {value!r}; it must be a number, finite and at least 0.")
        self._steps.method.lr = value

    @property
    def loss_scale(self) -> LossScale:
        """Factor on the gradients inside the model: `value` is that of the next backward, 1 except in fp16."""
        return self._weights.updates.loss_scale

    def tune(self, settings: Mapping[str, Any] | None = None, decays: Mapping[str, float] | None = None) -> None:
        """Change update rule settings and weight decays, from the next update on. Collective.

        `settings`: only the rule's `steered` settings, for example `betas` and `momentum`. `decays`: weight decay by
        parameter name. Call between steps, or before `update`. Raises ConfigError, before any change.
        """
        settings = dict(settings or {})
        decays = dict(decays or {})
        rule = self.optimizer
        refused = next((key for key in settings if key not in rule.steered), None)
        if refused is not None or not rule.has_gradients:
            raise ConfigError(
                f"engine.tune cannot change {refused or 'weight decays'}: besides the learning rate, {rule.title} lets "
                f"only {', '.join(rule.steered) or 'no setting'} change between steps."
            )
        self._recovery.check_usable()
        agree_on_pass(self.comm, RankBatch(f"tune({settings}, {decays})"))
        untyped_rule: Any = rule
        changed = replace(untyped_rule, **settings)
        for info in self._infos_of("engine.tune", decays):
            check_number(f"weight_decay of {info.name}", decays[info.name])
        self._weights.updates.tune(changed, decays)
        self.optimizer = changed

    def set_attention(self, name: str) -> None:
        """Replace the model's attention until `close`, before the first step. Raises ConfigError.

        name: "documents" computes the documents of a row (positions that restart) one by one, without a mask. Rows with
        several documents then round differently from plain PyTorch. "sinks" fuses attention with sinks (gpt-oss).
        "whole" restores the model's own attention.
        """
        flow = self._flow
        if flow.attention.size > 1:
            raise ConfigError(
                f"train.sequence_parallel is {flow.attention.size}, and ranks that share rows have an attention "
                f"of their own: leave out attention {name}, or set --train.sequence_parallel 1."
            )
        kind = ATTENTIONS[name]
        flow.attention.undo()
        flow.attention = kind.open(flow.model, 1, Comm(), self.counters)
        flow.attention.divert()

    def resolve_clip(self, tokens: int) -> str:
        """Decide `clip: auto` for steps with `tokens` tokens on this rank, and return the current mode.

        Deferred if updates are short enough to hide behind a forward, or if one of the first eight steps is clipped;
        otherwise speculative.
        """
        self._recovery.check_open()
        return self._steps.resolve_clip(tokens)

    # -- the end ---------------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._recovery.is_closed

    def close(self, restore: bool = False) -> None:
        """Free every tier.

        With `restore` the model gets the weights back in the original dtype. Otherwise the model has no weights, and
        cannot run, be saved or be trained again.
        """
        if self._recovery.is_closed:
            return
        has_peers = self._flow.runner.has_peers
        if not has_peers:
            self._recovery.recover()
        error = sys.exc_info()[1]  # error in the block for which this call cleans up
        is_sound = error is None and not self._recovery.torn and self._weights.updates.failure() is None
        if is_sound and (restore or (has_peers and self.comm.is_alive)):
            if restore:
                self._steps.foreign_writes.check()
            self._wait_for_updates(f"close(restore={restore})")
        if self._owned_comm is not None and not is_sound:
            self._owned_comm.close(error)
        self._own_loop.close()
        self._steps.method.free()
        self._state.close(restore and (is_sound or not has_peers))
        self._form.close()
        self.comm.release()
        if self._owned_comm is not None:
            self._owned_comm.close()

    def __enter__(self) -> Engine:
        self._recovery.check_open()
        return self

    def __exit__(self, _type: Any, error: BaseException | None, _trace: Any) -> None:
        """Close without `restore`. An error in the block takes precedence over an error in `close`."""
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"Closing the engine failed as well: {failure!r}")

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        refuse_copy("pickle (torch.save) or copy.deepcopy")
