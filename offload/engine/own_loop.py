"""Training loops that call the model themselves and pass the losses to the engine."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from offload.engine.entries import Entries, ModelCall
from offload.engine.flow import Flow
from offload.engine.lent_gradients import LentGradients
from offload.engine.loss.batch_agreement import RankBatch, agree_on_pass
from offload.engine.methods.result import StepResult
from offload.engine.steps import Steps
from offload.engine.units.call import is_unit
from offload.engine.units.recompute_policy import saved_tensors_watched
from offload.errors import ConfigError, warn
from offload.layout.regions import ParameterInfo
from offload.optim.update import clip_coefficient
from offload.planning.settings import Settings, check_max_grad_norm


class OwnLoop:
    """A step with any number of forwards and backwards, called from outside."""

    def __init__(self, flow: Flow, steps: Steps, settings: Settings) -> None:
        self._flow = flow
        self._recovery = flow.recovery
        self._steps = steps
        self.losses: list[torch.Tensor] = []
        self.is_open = False  # a step has begun
        self._limit: float | None = None
        """Norm to which the next update clips, from `clip`; infinite: no (further) clipping."""
        self._norm: float | None = None  # before the first `clip` of the step
        self._lent = LentGradients(flow)
        cuts = ("micro_batch_size", settings.micro_batch_size, None), ("passes", settings.passes, 1)
        self._unused = " and ".join(f"{name} {value}" for name, value, default in cuts if value != default)
        self._entries = Entries(flow.model, flow.units, flow.runner, self._before_forward)

    def holds_gradients(self) -> bool:
        """Return whether a step has gradients, from `backward` or from a plain loss.backward()."""
        return bool(self.losses) or (self.is_open and self._flow.gradients.measures.has_any)

    def has_gradients(self) -> bool:
        """Return whether the step has gradients on any rank, also gradients set to zero. Collective.

        Raises ConfigError if gradients of the last step are not cleared (see `LentGradients`).
        """
        self._recovery.recover()
        self._lent.refuse_used()
        return self._flow.comm.any(self.holds_gradients() or self._lent.num_zeros > 0, "gradients")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, if any, and restart the step.

        `set_to_none`: False: parameters with a gradient have one of zero, as in plain PyTorch.
        """
        zeros = []
        if not set_to_none:  # asked before the gradients are dropped
            zeros = self._lent.with_gradients(self.holds_gradients())
        if self._flow.comm.any(self.holds_gradients(), "zero_grad"):
            agree_on_pass(self._flow.comm, RankBatch("zero_grad"))
            self._recovery.give_up()
        self._lent.mark_used(zeros, is_zero=True)
        self._limit = self._norm = None

    def refuse_during_step(self, operation: str) -> None:
        """Raise ConfigError if the step already has gradients: the named call would lose them."""
        if self.holds_gradients():
            raise ConfigError(
                f"{operation} was called during a step of your training loop and would lose its gradients: call "
                "engine.update() first."
            )

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradients of `loss`, as `loss.backward()` does, and keep the loss for `update`."""
        self._steps.method.own_loop()
        self._lent.refuse_used()
        with self._recovery.given_up_on_error():
            self._open_step()  # the script may have called single units
            self._flow.runner.loss_scale.backward(loss, self._flow.runner.is_weight, is_unit)
            self.losses.append(loss.detach())

    def gradient(self, info: ParameterInfo) -> torch.Tensor | None:
        """Return the gradient of a parameter in this step, to read or to change in place: fp32, in the parameter's
        shape, in the memory of the gradients. None: no gradient. The gradients are complete after this call.

        Until `zero_grad`, a used gradient has a stand-in. Raises ConfigError if the gradient is divided over ranks or
        cut.
        """
        self._recovery.recover()
        if not self.holds_gradients():
            return self._lent.used(info)
        self._lent.refuse_used()
        with self._recovery.working():
            gradient = self._lent.lend(info)
            if gradient is not None:
                self._clip_lent()
            return gradient

    def drop_gradient(self, info: ParameterInfo) -> None:
        """Clear the used gradient of a parameter. Raises ConfigError during a step with gradients."""
        if self.holds_gradients():
            raise ConfigError(
                f"the grad of {info.name} was set to None during a step, but its gradients are in the engine and would "
                "stay there. optimizer.zero_grad() or engine.zero_grad() drops all gradients, in place of "
                "model.zero_grad(); parameter.grad.zero_() clears one; requires_grad_(False) before the forward "
                "prevents one."
            )
        self._lent.drop(info)

    def grad_norm(self, operation: str = "grad_norm") -> float:
        """Wait until all gradients are summed over the ranks, and return the global norm, after `clip`."""
        self._require_gradients(operation)
        agree_on_pass(self._flow.comm, RankBatch("grad_norm"))
        with self._recovery.given_up_on_error():
            self._lent.measure_changed()
            norm = self._flow.updates.measure()
            return norm * clip_coefficient(norm, self._limit)

    def clip(self, max_norm: float) -> float:
        """Clip the gradients of this step to a norm, and return the norm before.

        `update` clips, without a pass of its own over the gradients; a gradient that a script reads is clipped at once.
        """
        norm = self.grad_norm("clip_grad_norm")
        if self._norm is None:  # later calls see clipped gradients
            self._norm = norm
        if self._limit is not None:
            max_norm = min(max_norm, self._limit)
        self._limit = max_norm
        if self._lent.has_lent:
            with self._recovery.working():
                self._clip_lent()
        return norm

    def _clip_lent(self) -> None:
        """Scale the gradients in place, as `clip` wants, because a script has some. `update` then scales no more."""
        if self._limit is None or self._limit == math.inf:
            return
        self._lent.measure_changed()
        norm = self._flow.updates.measure()
        factor = clip_coefficient(norm, self._limit)
        if math.isnan(norm):  # as in torch, all gradients become NaN
            factor = norm
        if factor != 1:
            self._lent.scale(factor)
        self._limit = math.inf

    def _limit_of(self, max_grad_norm: float | None) -> float | None:
        """Return the limit for the next update, from the argument of `update` and from `clip`."""
        if self._limit is None:
            return max_grad_norm
        limit = min(self._limit, max_grad_norm or math.inf)
        if limit == math.inf:
            return 0.0  # `updates` takes 0 for no clipping
        return limit

    def update(self, max_grad_norm: float | None = None, until_zero_grad: bool = False) -> StepResult:
        """Clip (to `max_grad_norm`, if given), update, and return the mean loss since the last update, over all ranks.

        NaN if a rank passed no loss to `backward`. `until_zero_grad`: the gradients have to be cleared afterwards.
        """
        self._require_gradients("update")
        check_max_grad_norm(max_grad_norm)
        max_grad_norm = self._limit_of(max_grad_norm)
        self._steps.foreign_writes.check()
        flow, lr = self._flow, self._steps.method.lr
        # The text names all that has to be equal on all ranks.
        operation = "update"
        if max_grad_norm is not None:
            operation += f"(max_grad_norm={max_grad_norm:g})"
        if self._lent.num_zeros:
            operation += f" with {self._lent.num_zeros} gradients set to zero"
        plan = agree_on_pass(flow.comm, RankBatch(operation, lr=lr))
        unknown = torch.full((), math.nan, device=flow.device.torch_device)
        loss = torch.stack([value.to(torch.float32) for value in self.losses or [unknown]]).mean() / len(plan.ranks)
        flow.updates.steer(lr, max_grad_norm)
        with self._recovery.given_up_on_error():
            flow.runner.check_writes()
            self._lent.measure_changed()
            self._lent.add_zeros()
            result = self._steps.method.own_loop().end(loss, None, "own loop")
            if self._norm is not None:  # a script may have read or changed clipped gradients
                result = replace(result, grad_norm=self._norm)
            self.forget()
            self._steps.foreign_writes.note()
            if until_zero_grad:
                self._lent.mark_used(self._lent.with_gradients())
            return result

    def forget(self) -> None:
        """Reset the loop: the step was completed or given up."""
        self.losses.clear()
        self.is_open = False
        self._limit = self._norm = None
        self._entries.forget()
        self._lent.forget()

    def _require_gradients(self, operation: str) -> None:
        self._steps.method.own_loop()
        if not self.has_gradients():
            raise ConfigError(
                f"engine.{operation}() was called without engine.backward(loss) or loss.backward() before it: there "
                "are no gradients."
            )
        if not self.is_open:  # another rank has the gradients
            self._open_step()

    def close(self) -> None:
        """Remove the hooks from the model."""
        self._entries.close()

    def _before_forward(self, call: ModelCall) -> None:
        """Prepare for a call: record new calls on their own arguments, and make room for gradient sums."""
        flow, recovery = self._flow, self._recovery
        trial_runs = self._steps.trial_runs
        _refuse_transforms()
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                self._before_forward(call)
            return
        recovery.recover()
        recovery.check_running()
        flow.snapshot.check(torch.is_grad_enabled())
        with recovery.working():
            flow.updates.flush()
            try:
                flow.slots.compute_after_resident()
            except BaseException:  # only this call fails: the gradients so far are complete
                if flow.comm.world.size == 1:  # several ranks would all have to retry
                    flow.slots.retry()
                raise
            if not torch.is_grad_enabled():
                trial_runs.on_inference(call)
                return
            recovery.check_sound()
            flow.attention.refuse_own_loop()
            self._steps.method.own_loop()
            trial_runs.known.forget_other_modes()
            is_new, is_claim = trial_runs.known.is_new_call(call), trial_runs.known.is_claim(call)
            own = RankBatch(f"own loop {call.name}".rstrip(), is_new=is_new or is_claim)
            if agree_on_pass(flow.comm, own).is_new:
                with saved_tensors_watched(lambda _: None):  # a checkpoint around the call would save tensors of trials
                    self._steps.prepare_call(call, is_new)
            self._open_step()

    def _open_step(self) -> None:
        method = self._steps.method.own_loop()
        self._flow.make_room()
        if self._unused:
            warn(
                f"{self._unused} cut the batch of engine.step, not of a loop that calls the model: give the model "
                "fewer rows at a time, and add gradients up over several calls of backward (gradient accumulation)."
            )
            self._unused = ""
        if not self.is_open:
            self._steps.foreign_writes.check()
            self._flow.spare_memory.give_back()
            method.begin("own loop", sums_backwards=True)
            self.is_open = True


def _refuse_transforms() -> None:
    """Raise ConfigError inside a transform of torch that has to see the operations on the weights."""
    if torch._C._dynamo.eval_frame.get_eval_frame_callback() is not None:
        raise ConfigError(
            "torch.compile was applied to a model in an engine, which it cannot trace: call the uncompiled model."
        )
    if torch._C._functorch.peek_interpreter_stack() is not None or torch.autograd.forward_ad._current_level >= 0:
        raise ConfigError(
            "a model in an engine was called inside a transform of torch.func (grad, vmap, jvp, ...) or in "
            "torch.autograd.forward_ad, which cannot follow weights that come and go: call the model outside, with "
            "loss.backward() for gradients (parameter.grad then has each one in a loop over offload.wrap), one call a "
            "row for gradients of single rows, and a difference of two calls for a directional derivative."
        )
