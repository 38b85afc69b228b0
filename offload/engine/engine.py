"""The engine: one training step over streamed units."""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import torch
import xxhash
from torch import nn

from offload.checkpoint.reader import Reader
from offload.config.arguments import check_types
from offload.distributed.comm import Comm
from offload.distributed.joining import open_comm
from offload.distributed.outcome import as_one
from offload.engine.assemble import assemble
from offload.engine.checkpoints import Saving, check_contents, load_states
from offload.engine.exporting import export_model
from offload.engine.loss.batch import Batch
from offload.engine.loss.batch_agreement import agree_on_pass
from offload.engine.loss.loss import LossFunction
from offload.engine.methods.result import StepResult
from offload.engine.own_loop import OwnLoop
from offload.engine.reading import Reading
from offload.engine.steps import Steps
from offload.engine.units.residency import refuse_compiled, refuse_copy, refuse_held, refuse_sparse
from offload.errors import ConfigError, nearest
from offload.hf.safetensors_file import reader
from offload.hf.sources import Fill
from offload.hf.write import SHARD_BYTES
from offload.layout.regions import ParameterInfo
from offload.machine.cores import use_share_of_cores
from offload.optim.rule import UpdateRule
from offload.planning.settings import Settings, with_settings
from offload.telemetry.counters import Counters
from offload.telemetry.timeline import Span
from offload.tiers.placement import Placement

_Json = Mapping[str, Any] | None
_Files = Mapping[str, bytes] | None
_MARKED = 4096
"""Elements of each parameter by which weights are told from others."""


class Engine:
    """Trains `model` with its states on the tiers that `placement` says; the other keywords are the fields of
    `Settings`, which may also be given as one.

    The model is consumed: its parameters move into the engine, unit by unit. `fill(name, module)`, where given, is
    called right before a unit's parameters are taken, and may write them, or return from where they are read piece by
    piece (so that neither a model nor a parameter need ever be whole in memory); over several ranks it is called on one
    of them for each unit. Without it all ranks get rank 0's weights.

    Over several ranks (those of `comm`, or of the process group, or of torchrun's variables) every call is collective:
    all ranks make the same calls in the same order, each on its own rows.
    """

    @with_settings
    def __init__(
        self,
        model: nn.Module,
        optimizer: UpdateRule | None = None,
        placement: Placement | None = None,
        *,
        fill: Fill | None = None,
        comm: Comm | None = None,
        settings: Settings | None = None,
        **options: Any,
    ) -> None:
        check_types(Engine.__init__, {"model": model, "fill": fill, "comm": comm, "settings": settings})
        given = {"optimizer": optimizer, "placement": placement}
        options |= {key: value for key, value in given.items() if value is not None}
        settings = replace(settings or Settings(), **options)
        if torch.is_inference_mode_enabled():
            raise ConfigError("Engine was made under torch.inference_mode, which is for no training: make it outside.")
        refuse_held(model)
        refuse_compiled(model)
        refuse_sparse(model)
        self.model, self.optimizer, self.counters = model, settings.optimizer, Counters()
        self._owned_comm = open_comm(device=settings.device) if comm is None else None
        self.comm = comm or self._owned_comm or Comm()
        use_share_of_cores(self.comm.local_rank, self.comm.local_size)
        self.comm.claim(self)
        try:
            self._state = assemble(model, settings, self.counters, fill, self.comm)
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

    def _settle(self, operation: str) -> None:
        """Let every update that is on its way arrive, before the host reads the states. Collective."""
        self._recovery.check_usable()
        agree_on_pass(self.comm, operation)
        with self._recovery.working():
            self._state.updates.flush()
            self._state.lanes.drain_updates()
            if self.comm.size > 1:
                self._state.lanes.finish()

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
        """How clipped updates are made: deferred or speculative; auto until the first step, or `resolve_clip`."""
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
        """Where states that rest on the host are updated: on the cpu, or the device."""
        return self._state.plan.update

    @property
    def update_device(self) -> torch.device:
        """Where updates are computed, of states that rest there or stream to it."""
        state = self._state
        is_device = "device" in (state.plan.update, state.plan.tiers[1])
        return state.device.torch_device if is_device else torch.device("cpu")

    @property
    def head_chunks(self) -> int:
        """In how many chunks the logits of the last loss were made."""
        return self._steps.losses.num_chunks

    @property
    def pins(self) -> bool:
        """True where the host's memory is registered with the device's driver."""
        return self._state.device.pinning is not None

    @property
    def overlaps(self) -> bool:
        """True where copies and updates run beside compute."""
        return self._state.lanes.overlap

    @property
    def spans(self) -> list[Span]:
        """What every lane did in the last step."""
        return self._steps.method.spans

    def resolve_clip(self, tokens: int) -> str:
        """Decide `clip: auto` for steps of so many tokens on this rank, once and for all; return what it is now.

        Deferred, unless the update of all states, none of them on disk, takes longer than a forward pass, behind which
        it would hide.
        """
        self._recovery.check_open()
        return self._steps.resolve_clip(tokens)

    # -- states ----------------------------------------------------------------------------------------------

    def named_parameters(self, trained_only: bool = False) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield fresh fp32 CPU copies of the master weights under the model's names, in torch's order, tied names
        once; all of them, or those that were not frozen at `Engine()`. Collective: all ranks ask for all of them.
        """
        self._settle("named_parameters")
        for info in self._state.infos:
            if trained_only and not info.trainable:
                continue
            if self.comm.size > 1:  # a step may have been made since the last one was asked for
                self._state.lanes.finish()
            with self._recovery.working(), self.counters.unchanged():
                value = self._state.store.read(info.index)
            yield info.name, value

    def edit(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield parameters to be changed in place, for merges, resets and averages:

            for name, value in engine.edit():
                value.mul_(0.5)

        Each is an fp32 copy of the master weights on the CPU, in its shape, and is written back when the loop goes on.
        Moments stay as they are. Collective: all ranks ask for the same, and those of rank 0 are written.

        names: of the parameters, as `named_parameters` has them; None for all.

        Raises ConfigError for a name that there is none of, and for values that are not finite, which are not written.
        """
        infos = {info.name: info for info in self._state.infos}
        wanted = list(infos if names is None else names)
        unknown = next((name for name in wanted if name not in infos), None)
        if unknown is not None:
            raise ConfigError(f"engine.edit was asked for {unknown!r}{nearest(unknown, infos)}, which is no parameter.")
        self._own_loop.refuse_middle("engine.edit")
        self._settle(f"edit({', '.join(wanted)})")
        self.catch_up()
        return self._edited([infos[name] for name in wanted])

    def _edited(self, infos: Iterable[ParameterInfo]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield each parameter, and write it back. Between two of them anything may be called: nothing is stale."""
        state = self._state
        for info in infos:
            self._settle(f"edit of {info.name}")
            with self._recovery.working(), self.counters.unchanged():
                value = state.store.read(info.index)
            yield info.name, value
            self._settle(f"edit of {info.name}")
            if num_wrong := value.numel() - int(value.isfinite().sum()):
                raise ConfigError(
                    f"engine.edit was left {num_wrong} of {value.numel()} values of {info.name} that are not finite; "
                    "they were not written."
                )
            with self._recovery.working(), self.counters.unchanged():
                state.store.write(info.index, reader(value), value.dtype, source=0)
                state.lanes.drain_updates()  # a disk that fails is found out here
                state.weights_changed(region for region in state.regions if info.index in region.parameters)

    def weights_mark(self) -> str:
        """Return 16 hexadecimal digits that tell the weights from others: of each parameter the name, and the first
        few thousand of its fp32 master weights. Collective.
        """
        self._settle("weights_mark")
        found = xxhash.xxh64()
        for info in self._state.infos:
            if self.comm.size > 1:
                self._state.lanes.finish()
            with self._recovery.working(), self.counters.unchanged():
                value = self._state.store.read_range(info.index, 0, min(info.numel, _MARKED))
            found.update(info.name.encode())
            found.update(value.numpy().tobytes())
        return found.hexdigest()

    @property
    def allocations(self) -> list[tuple[str, str, int]]:
        """Return what is held: (tier, name, bytes)."""
        if self._recovery.is_idle:
            with self._recovery.working():
                self._state.runner.collect()
        ledgers = (self._state.device.ledger, self._state.host, self._state.nvme_ledger)
        return [(ledger.tier, name, size) for ledger in ledgers for name, size in ledger.allocations.items()]

    def export(
        self,
        path: str | Path,
        dtype: torch.dtype | None = None,
        shard_bytes: int = SHARD_BYTES,
        files: Mapping[str, bytes] | None = None,
        replace: bool = False,
    ) -> None:
        """Write the model as a Hugging Face folder: configuration, as it was given, and safetensors, piece by piece.
        Collective; rank 0 writes. The folder is there whole, or not at all.

        dtype: None for that in which the device uses each weight; float32 gives the master weights, bit for bit.
        shard_bytes: of a file of weights at most. files: rank 0's, by name, go with it, such as those of its
        tokenizer. replace: an earlier export gives way.

        Raises, on all ranks, ConfigError or DiskError.
        """
        self._recovery.check_open()
        self._state.snapshot.check(trains=False)
        self._settle("export")
        with self._recovery.working(), self.counters.unchanged():
            export_model(self._state, Path(path), dtype, shard_bytes, files or {}, replace)

    def save_checkpoint(
        self, path: str | Path, meta: _Json = None, files: _Files = None, *, trained_only: bool = False
    ) -> None:
        """Write all states to a folder, from which any number of ranks with any placement can go on. Collective. What
        was there before stays until the new one is complete; `meta` (for JSON) is given back by `load_checkpoint`, and
        `files` (rank 0's, by name) lie beside the model's configuration, such as those of its tokenizer. With
        `trained_only` it lacks what was frozen at `Engine()`, and only an engine that has the same there can load it.

        Raises, on all ranks, DiskError or ConfigError, after which training can go on.
        """
        how = {"copies": False, "trained_only": trained_only}
        with self._saving("save_checkpoint", path, meta, files, **how) as saving, self._recovery.working():
            saving.finish()

    def begin_checkpoint(self, path: str | Path, meta: _Json = None, files: _Files = None) -> Saving:
        """Begin what `save_checkpoint` does: all states are copied into host memory that is left over (of the budget,
        or half of what is free without one), and are on their way to the disk when this returns. What has no room there
        is waited for. Steps may follow; the checkpoint is there once `finish` of what this returns has returned, which
        is collective as well, and comes before `close`. It `is_done` (on this rank) when `finish` need not wait;
        `abort` gives it up.

        Raises as `save_checkpoint`; what the disk refuses later is raised by `finish`, on all ranks.
        """
        return self._saving("begin_checkpoint", path, meta, files, copies=True)

    def _saving(self, name: str, path: str | Path, meta: _Json, files: _Files, **how: bool) -> Saving:
        self._own_loop.refuse_middle(f"engine.{name}")
        self._settle(name)
        with self._recovery.working(), self.counters.unchanged():
            return Saving(self._state, Path(path), self._steps.decided, meta or {}, files, **how)

    def load_checkpoint(self, path: str | Path, *, reset: bool = False) -> dict[str, Any]:
        """Take all states from a folder that `save_checkpoint` wrote; return its meta. Collective. A torn engine is
        sound again. With `reset` the states of an update rule that is not this engine's, or of another width, are left
        out: this one's begin anew.

        Raises:
            CheckpointError: on all ranks; the folder is damaged. Where its data are, the engine is torn.
            ConfigError: on all ranks; it is another model's, or, without `reset`, another rule's.
        """
        self._recovery.check_open()
        agree_on_pass(self.comm, "load_checkpoint")
        self._recovery.recover()
        self._state.lanes.finish()
        with self._recovery.working(), ExitStack() as opened:
            opened.enter_context(self.counters.unchanged())
            with as_one(self.comm, "opening of the checkpoint"):
                reader = opened.enter_context(Reader(Path(path)))
                anew = check_contents(self._state, reader, may_reset=reset)
            if anew and self.comm.rank == 0:
                warnings.warn(f"{path} holds the states of another update rule: this one's begin anew.", stacklevel=2)
            self._recovery.tear(f"{path} was read in part")
            self._steps.method.forget()
            self._state.store.forgive()
            self._state.lanes.forget_failures()
            with as_one(self.comm, "reading of the checkpoint"):
                decided, meta = load_states(self._state, reader, anew=anew)
                self._state.lanes.drain_updates()  # what fails on its way to the disk fails the load
            self._state.weights_changed()
            self._state.slots.settle()
        self._steps.decide_again(decided)
        self._state.lanes.settle()
        self._recovery.mend()
        self._own_loop.forget()
        return meta

    def catch_up(self) -> None:
        """Let what is computed next see the newest weights. It is for the end of a run whose updates come late: between
        its steps an evaluation sees the weights that the next step would compute with. Collective.
        """
        self._settle("catch_up")
        with self._recovery.working(), self.counters.unchanged():
            self._state.updates.catch_up()
            self._state.weights_changed()

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
