"""The engine: one training step over streamed units."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NoReturn

import torch
from torch import nn

from offload.config.arguments import check_types
from offload.distributed.comm import Comm
from offload.distributed.joining import open_comm
from offload.engine.assemble import assemble
from offload.engine.loss.batch import Batch
from offload.engine.loss.batch_agreement import agree_on_pass
from offload.engine.loss.loss import LossFunction
from offload.engine.methods.result import StepResult
from offload.engine.own_loop import OwnLoop
from offload.engine.reading import Reading
from offload.engine.state_access import StateAccess
from offload.engine.steps import Steps
from offload.engine.units.residency import refuse_copy, refuse_held, refuse_sparse
from offload.engine.units.uncompiled import uncompiled
from offload.errors import ConfigError
from offload.hf.sources import Fill
from offload.layout.codecs import Codec
from offload.machine.cores import use_share_of_cores
from offload.optim.rule import UpdateRule
from offload.planning.settings import Settings, with_settings
from offload.telemetry.counters import Counters
from offload.telemetry.timeline import Span
from offload.tiers.placement import Placement


class Engine(StateAccess):
    """Trains `model` with its states on the tiers that `placement`, a Placement or its fields, says; the other keywords
    are the fields of `Settings`, which may also be given as one.

    The model is consumed: its parameters move into the engine, unit by unit. `fill(name, module)`, where given, is
    called right before a unit's parameters are taken, and may write them, or return from where they are read piece by
    piece (so that no parameter need be whole in memory); over several ranks it is called on one of them for each unit.
    Without it all ranks get rank 0's weights. `quantized`: what its files have in few bits (`BuiltModel.quantized`).

    Over several ranks (those of `comm`, or of the process group, or of torchrun's variables) every call is collective:
    all ranks make the same calls in the same order, each on its own rows.
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
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        check_types(
            Engine.__init__, {"model": model, "fill": fill, "quantized": quantized, "comm": comm, "settings": settings}
        )
        given = {"optimizer": optimizer, "placement": placement}
        options |= {key: value for key, value in given.items() if value is not None}
        settings = replace(settings or Settings(), **options)
        if torch.is_inference_mode_enabled():
            raise ConfigError("Engine was made under torch.inference_mode, which is for no training: make it outside.")
        refuse_held(model)
        refuse_sparse(model)
        model = uncompiled(model, settings.compile)
        self.model, self.optimizer, self.counters = model, settings.optimizer, Counters()
        self._owned_comm = open_comm(device=settings.device) if comm is None else None
        self.comm = comm or self._owned_comm or Comm()
        use_share_of_cores(self.comm.local_rank, self.comm.local_gpus)
        self.comm.claim(self)
        try:
            self._state = assemble(model, settings, self.counters, fill, self.comm, quantized or {})
        except BaseException as error:
            self.comm.release()
            if self._owned_comm is not None:
                self._owned_comm.close(error)
            raise
        self.device = self._state.device.torch_device
        self._recovery = self._state.recovery
        self._steps = Steps(self._state, self.counters, settings)
        self._own_loop = OwnLoop(self._state, self._steps)
        self._reading = Reading(self._state, self.counters, self._own_loop)
        self._recovery.also(self._steps.trial_runs.give_up, self._state.spare_memory.give_up, self._own_loop.forget)

    def __repr__(self) -> str:
        return f"<Engine: {type(self.optimizer).__name__} over {type(self.model).__name__} on {self.device}>"

    def stay(self) -> None:
        """Live as long as the model, although nobody may refer to the engine; `engine_of` finds it."""
        self._state.hold.keep(self)

    # -- a step ----------------------------------------------------------------------------------------------

    def step(self, batch: Batch, loss_fn: LossFunction | None = None) -> StepResult:
        """Train on this rank's rows of a batch (what the model's forward takes, by name; labels unshifted, -100
        ignored): forward, backward, update. `loss_fn(outputs, batch)` gives the loss where the model has none, and may
        use what the model does not take: a 0-dim tensor, or with MeZO any number that is to become small.
        """
        self._recovery.check_usable()
        if not torch.is_grad_enabled():
            raise ConfigError(
                "engine.step was called where gradients are off (torch.no_grad or torch.inference_mode), and would "
                "train nothing: call it outside, or engine.evaluate for a loss."
            )
        self._state.snapshot.check(trains=True)
        self._own_loop.refuse_middle("engine.step")
        self._own_loop.forget()  # a forward that had no backward
        with self._recovery.working():
            return self._steps.step(batch, loss_fn)

    def evaluate(self, batch: Batch, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """Return the loss that `step` would report, in eval mode and without a trace: no gradients, counters and
        generators untouched.
        """
        with torch.inference_mode(False):  # tensors of its kind are good for no later step
            self._recovery.check_usable()
            self._state.snapshot.check(trains=False)
            with self._recovery.working():
                return self._steps.evaluate(batch, loss_fn)

    def replay(self, records: Iterable[Any]) -> None:
        """Make the steps of a run with MeZO again, bit for bit, from the weights that it began with: `records` are what
        `step` returned as `measured`, lines of the run's metrics.jsonl, or (step, seed, slopes), in order. No batch is
        needed, and no pass is made. Collective.

        Raises ConfigError where the rule is another one, or has other settings than the run's, and where a step is
        missing: one that was skipped is told by its line, or by no slopes, (step, 0, ()).
        """
        self._settle("replay")
        self._own_loop.refuse_middle("engine.replay")
        with self.counters.unchanged():
            self._steps.replay(records)
            self._state.weights_changed()

    def backward(self, loss: torch.Tensor) -> None:
        """Own loops: add the gradients of `loss`, as given."""
        self._recovery.check_usable()
        self._state.snapshot.check(trains=True)
        self._own_loop.backward(loss)

    def grad_norm(self) -> float:
        """Own loops: return the norm of the gradients since the last update, over all ranks, before clipping. They are
        complete by that: `update` comes next.
        """
        self._recovery.check_usable()
        return self._own_loop.grad_norm()

    def update(self, max_grad_norm: float | None = None) -> StepResult:
        """Own loops: clip, update, and return the mean of the losses since the last update, over all ranks.

        max_grad_norm: clips this step to another norm than the engine's; 0 for no clipping. A `loss.backward()` of the
        caller's own does instead of `backward`; the loss of the result is NaN then, since nobody told it.
        """
        self._recovery.check_usable()
        return self._own_loop.update(max_grad_norm)

    def zero_grad(self) -> None:
        """Own loops: drop the gradients since the last update, if there are any. Collective."""
        self._recovery.check_usable()
        self._own_loop.zero_grad()

    def finish(self) -> None:
        """Wait until nothing is under way: every update is made and written, and the weights that the next step needs
        first have come up. No other call needs it; it is for whoever measures what a step costs.

        Raises TornError where an update has failed.
        """
        self._recovery.check_usable()
        with self._recovery.working():
            self._state.updates.flush()
            self._state.lanes.finish()
        self._recovery.check_sound()

    @property
    def max_grad_norm(self) -> float | None:
        """The norm to which gradients are clipped, where `update` is told no other; None for no clipping."""
        return self._state.updates.max_norm

    @property
    def clip(self) -> str:
        """How clipped updates are made: deferred or speculative; auto until the first steps have decided it."""
        return self._state.updates.clip

    @property
    def lr(self) -> float:
        """The learning rate of the next update. To be set between steps, on all ranks alike."""
        return self._steps.method.lr

    @lr.setter
    def lr(self, value: float) -> None:
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"engine.lr was set to {value!r}; it must be a number, finite and at least 0.")
        self._steps.method.lr = value

    def tune(self, settings: Mapping[str, Any] | None = None, decays: Mapping[str, float] | None = None) -> None:
        """Let the updates from the next one on go by other settings of the rule (those that are `steered`, such as
        `betas` and `momentum`), and by other weight decays, by the names of parameters. To be called between steps, or
        before `update`. Collective.
        """
        settings, decays, rule = dict(settings or {}), dict(decays or {}), self.optimizer
        wrong = next((key for key in settings if key not in rule.steered), None)
        if wrong is not None or not rule.has_gradients:
            raise ConfigError(
                f"engine.tune was given {wrong or 'weight decays'}: of {rule.title}, "
                f"{', '.join(rule.steered) or 'no setting'} may change from step to step beside the learning rate."
            )
        self._recovery.check_usable()
        agree_on_pass(self.comm, f"tune({settings}, {decays})")
        whole: Any = rule
        changed = replace(whole, **settings)
        self._state.updates.tune(changed, decays)
        self.optimizer = changed

    @property
    def groups(self) -> list[tuple[float, float, list[str]]]:
        """The trained parameters that are updated alike: what multiplies their learning rate, their weight decay, and
        their names. Those whose learning rate is the engine's come first.
        """
        found: dict[tuple[float, float], list[str]] = {}
        for info in self._state.updates.infos:
            if info.trainable:
                found.setdefault((info.lr_scale, info.weight_decay), []).append(info.name)
        return [(*alike, names) for alike, names in sorted(found.items(), key=lambda item: item[0][0] != 1.0)]

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.comm.size

    @property
    def num_steps(self) -> int:
        """How many steps were made, those from before a loaded checkpoint included."""
        return self._state.runner.step_number

    @property
    def prefetch(self) -> int:
        """How many units are fetched ahead at least; what the device's budget leaves makes it more."""
        return self._state.plan.ahead

    @property
    def updates_on(self) -> str:
        """Where states that rest on the host are updated: on the cpu, the device, or both."""
        return self._state.plan.update

    @property
    def head_chunks(self) -> int:
        """In how many chunks the logits of the last loss were made."""
        return self._steps.losses.num_chunks

    @property
    def compiled_graphs(self) -> int:
        """The graphs that torch.compile has made of blocks so far; 0 where `compile` is never."""
        return self._state.runner.forwards.num_graphs

    @property
    def compiled_classes(self) -> frozenset[type]:
        """The classes of blocks that ran compiled, and none of which was refused."""
        return self._state.runner.forwards.compiled

    @property
    def pins(self) -> bool:
        """True where host memory is registered with the device's driver: what travels, as far as the driver takes."""
        return self._state.store.pinned_bytes > 0

    @property
    def overlaps(self) -> bool:
        """True where copies and updates run beside compute."""
        return self._state.lanes.overlap

    @property
    def spans(self) -> list[Span]:
        """What every lane did in the last step."""
        return self._steps.method.spans

    def resolve_clip(self, tokens: int) -> str:
        """Decide `clip: auto` for steps of so many tokens on this rank; return what it is now: deferred, unless updates
        take longer than a forward, behind which they hide, and none of the first eight steps is clipped.
        """
        self._recovery.check_open()
        return self._steps.resolve_clip(tokens)

    @property
    def closed(self) -> bool:
        """True once `close` was called."""
        return self._recovery.is_closed

    def close(self, restore: bool = False) -> None:
        """Free every tier. The model gets its weights back in their original dtype with `restore`; otherwise it is left
        without, and refuses to run, to be saved and to be trained again.
        """
        if self._recovery.is_closed:
            return
        if self.comm.size == 1:
            self._recovery.recover()
        error = sys.exc_info()[1]  # of the block that this call cleans up after
        is_sound = error is None and not self._recovery.torn and self._state.updates.failure() is None
        if is_sound and (restore or (self.comm.size > 1 and self.comm.stands)):
            self._settle(f"close(restore={restore})")
        if self._owned_comm is not None and not is_sound:
            self._owned_comm.close(error)
        self._own_loop.close()
        self._steps.method.free()
        self._state.close(restore and (is_sound or self.comm.size == 1))
        self.comm.release()
        if self._owned_comm is not None:
            self._owned_comm.close()

    def __enter__(self) -> Engine:
        self._recovery.check_open()
        return self

    def __exit__(self, _kind: Any, error: BaseException | None, _trace: Any) -> None:
        """Close, without `restore`; what goes wrong with that does not hide the error of the block."""
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            error.add_note(f"Closing the engine failed as well: {failure!r}")

    def __reduce_ex__(self, _protocol: Any) -> NoReturn:
        refuse_copy("pickle (torch.save) or copy.deepcopy")
