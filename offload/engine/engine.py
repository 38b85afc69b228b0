"""The engine: one training step over streamed units."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from offload.checkpoint.hf_source import Fill
from offload.checkpoint.hf_write import SHARD_BYTES
from offload.checkpoint.reader import Reader
from offload.engine.assemble import Assembly, assemble
from offload.engine.condition import Condition, Place, places
from offload.engine.drawn import Drawn
from offload.engine.exporting import export_model
from offload.engine.hold import refuse_held, refuse_nan
from offload.engine.learned import DepartedError
from offload.engine.loss import IGNORED, Batch, LossFunction, LossRule
from offload.engine.losses import Losses
from offload.engine.meeting import Pass, meet
from offload.engine.plan import Settings
from offload.engine.rehearse import Rehearsal
from offload.engine.saving import Saving, check_contents, load_states
from offload.engine.undo import Where
from offload.errors import ConfigError, DoesNotFitError, OffloadError, TornError
from offload.lanes.throttle import parse_throttle
from offload.optim.adamw import AdamW
from offload.partition.comm import Alone, Comm
from offload.partition.joining import open_comm
from offload.partition.layout import Region
from offload.partition.outcome import as_one
from offload.planning.cores import use_share_of_cores
from offload.sections import parse_size
from offload.telemetry.counters import Counters
from offload.telemetry.timeline import LaneTime, Span
from offload.tiers.placement import Placement

_Result = TypeVar("_Result")
_MOST_DEPARTURES = 3
"""Of one batch: each is recorded on the rows of one rank, and several ranks may have something new each."""


@dataclass(frozen=True)
class StepResult:
    """What a step gives: the loss (0-dim fp32 CPU tensor), the norm of the gradients before clipping, the target
    tokens, and whether the update was skipped for a gradient that is not finite. `tokens` is None in own loops.

    corrected: how many regions speculative clipping had updated with another coefficient than the true one; coarse: one
    of them was too far off for the correction to be as exact as docs/design.md says. seconds: of the step on this
    thread; lanes: how long each lane was busy in it, and how long compute waited for it.
    """

    loss: torch.Tensor
    grad_norm: float
    tokens: int | None
    skipped: bool
    corrected: int = 0
    coarse: bool = False
    seconds: float = 0.0
    lanes: Mapping[str, LaneTime] = field(default_factory=dict)


class Engine:
    """Trains `model` with its states on the tiers that `placement` says; docs/design.md, section Engine, has every
    argument.

    The model is consumed: its parameters move into the engine, unit by unit. `fill(name, module)`, where given, is
    called right before a unit's parameters are taken, and may write them, or return from where they are read piece by
    piece (so that neither a model nor a parameter need ever be whole in memory); over several ranks it is called on one
    of them for each unit. Without it all ranks get rank 0's weights.

    Over several ranks (those of `comm`, or of the process group, or of torchrun's variables) every call is collective:
    all ranks make the same calls in the same order, each on its own rows.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: AdamW | None = None,
        placement: Placement | None = None,
        precision: str = "fp32",
        max_grad_norm: float | None = 1.0,
        clip: str = "auto",
        on_nonfinite: str = "stop",
        micro_batch_size: int | None = None,
        recompute: str = "always",
        prefetch: str | int = "auto",
        zero_stage: int = 3,
        throttle: Mapping[str, Any] | None = None,
        seed: int = 0,
        debug: bool | int = False,
        head_chunk_bytes: int | str | None = "256MiB",
        fill: Fill | None = None,
        comm: Comm | None = None,
    ) -> None:
        _check(precision, ("fp32", "bf16"), "train.precision")
        _check(clip, ("auto", "deferred", "speculative"), "train.clip")
        _check(on_nonfinite, ("stop", "skip"), "train.on_nonfinite")
        _check(recompute, ("always", "never", "auto"), "train.recompute")
        if prefetch != "auto" and (type(prefetch) is not int or prefetch < 0):
            raise ConfigError(f"offload.prefetch is {prefetch!r}; a number of units, at least 0, or auto.")
        _check(zero_stage, (0, 1, 2, 3), "offload.zero_stage")
        if micro_batch_size is not None and (type(micro_batch_size) is not int or micro_batch_size < 1):
            raise ConfigError(f"train.micro_batch_size is {micro_batch_size!r}; it must be a whole number, at least 1.")
        if max_grad_norm is not None and not (isinstance(max_grad_norm, int | float) and 0 <= max_grad_norm < math.inf):
            raise ConfigError(f"train.max_grad_norm is {max_grad_norm!r}; a positive number, or none for no clipping.")
        if torch.is_inference_mode_enabled():
            raise ConfigError("Engine was made under torch.inference_mode, which is for no training: make it outside.")
        chunk_bytes = parse_size(head_chunk_bytes, "train.head_chunk_bytes")
        refuse_held(model)
        self.model, self._modules = model, list(model.modules())
        self.optimizer = optimizer or AdamW()
        self._lr = self.optimizer.lr
        self.counters = Counters()
        self._micro_batch_size = micro_batch_size
        self._owned_comm = open_comm() if comm is None else None
        self.comm = comm or self._owned_comm or Alone()
        use_share_of_cores(self.comm.local_rank, self.comm.local_size)
        placement = (placement or Placement()).share(self.comm.local_size)
        settings = Settings(
            optimizer=self.optimizer,
            placement=placement,
            precision=precision,
            max_grad_norm=max_grad_norm or None,
            clip="deferred" if on_nonfinite == "skip" or not max_grad_norm else clip,
            skips=on_nonfinite == "skip",
            splits=micro_batch_size is not None,
            recompute=recompute,
            prefetch=prefetch,
            throttle=parse_throttle(throttle),
            zero_stage=zero_stage,
            seed=seed,
            debug=debug,
        )
        self.comm.claim(self)
        try:
            self._parts: Assembly = assemble(model, settings, self.counters, fill, self.comm)
        except BaseException as error:
            self.comm.release()
            if self._owned_comm is not None:
                self._owned_comm.close(error)
            raise
        self.device = self._parts.device.torch_device
        self._flow = self._parts.gradients
        self._updates = self._parts.updates
        self._losses = Losses(model, self._parts, self._as_ours, micro_batch_size, chunk_bytes)
        self._own_losses: list[torch.Tensor] = []
        self._is_open = False  # a step of an own loop has begun
        self._expected: tuple[Hashable, bool] = (None, False)  # the kind of the next step, and whether it wraps
        self.spans: list[Span] = []
        self._torn: str | None = None
        self._is_ours = False
        self._is_busy = False  # between two calls: one was interrupted, and has to be given up
        self._parts.stream.give_up = self._give_up
        self._rehearsal = Rehearsal(model, self._parts, self.counters, self._as_ours)
        self._hook = model.register_forward_pre_hook(self._before_own_forward, with_kwargs=True)

    # -- a step ----------------------------------------------------------------------------------------------

    def step(self, batch: Batch, loss_fn: LossFunction | None = None) -> StepResult:
        """Train on this rank's rows of a batch (tensors [batch, sequence]; labels unshifted, -100 ignored):
        forward, backward, update.
        """
        self._check_usable()
        if not torch.is_grad_enabled():
            raise ConfigError(
                "engine.step was called where gradients are off (torch.no_grad or torch.inference_mode), and would "
                "train nothing: call it outside, or engine.evaluate for a loss."
            )
        self._parts.snapshot.check(trains=True)
        if self._own_losses:
            raise ConfigError(
                "engine.step was called in the middle of an own loop's step, whose gradients it would lose: call "
                "engine.update() first."
            )
        self._is_open = False  # a forward of an own loop that had no backward is dropped
        self._rehearsal.forget_other_modes()
        known = self._meet("step", batch, loss_fn, self.lr)
        batch = self._bring(batch)
        return self._again(lambda departed: self._step_on(batch, known, loss_fn, departed))

    def _step_on(self, batch: Batch, known: Pass, loss_fn: LossFunction | None, departed: bool | None) -> StepResult:
        rule = self._rehearsed(batch, known, loss_fn, departed)
        tokens = known.num_targets(rule)
        if not tokens and loss_fn is None:
            raise ConfigError(
                f"no label of the batch is a target: all {batch['labels'].numel()} are {IGNORED} or first in their row."
            )
        self.resolve_clip(known.num_elements)
        with self._ending():
            self._parts.accumulate(self._micro_batch_size is not None and self._losses.is_plain)
            self._parts.leftover.begin_step(known.num_elements)
            self._begin_step(known.kind)
            loss = torch.zeros((), dtype=torch.float32, device=self.device)
            # Closed now, and not when somebody lets go of a traceback that holds it.
            with closing(self._losses.parts(batch, known, rule, loss_fn)) as part_losses:
                for part_loss in part_losses:
                    if part_loss.requires_grad:
                        part_loss.backward()
                    loss += part_loss.detach().to(torch.float32)
            return self._end_step(loss, tokens, known.kind)

    def evaluate(self, batch: Batch, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """Return the loss that `step` would report, in eval mode and without a trace: no gradients, counters and
        generators untouched.
        """
        with torch.inference_mode(False):  # tensors of its kind are good for no later step
            self._check_usable()
            self._parts.snapshot.check(trains=False)
            known = self._meet("evaluate", batch, loss_fn)
            batch = self._bring(batch)
            return self._again(lambda departed: self._evaluate_on(batch, known, loss_fn, departed))

    def _evaluate_on(
        self, batch: Batch, known: Pass, loss_fn: LossFunction | None, departed: bool | None
    ) -> torch.Tensor:
        rule = self._rehearsed(batch, known, loss_fn, departed)
        executor, undo = self._parts.executor, self._parts.stream.undo
        random = self._parts.device.random_state()
        with (
            self._ending(),
            self.counters.unchanged(),
            undo.afterwards(lambda: self._parts.device.set_random_state(random)),
            undo.in_eval_mode(self.model),
            torch.no_grad(),
        ):
            self._parts.slots.settle()
            executor.begin(known.kind)
            total = torch.zeros((), dtype=torch.float32, device=self.device)
            with closing(self._losses.parts(batch, known, rule, loss_fn)) as part_losses:
                for part_loss in part_losses:
                    total += part_loss.to(torch.float32)
            executor.end()
            self._parts.lanes.timeline.discount("h2d", "nvme_read")
            executor.expect(*self._expected)
            return self._sum(total)

    def backward(self, loss: torch.Tensor) -> None:
        """Own loops: add the gradients of `loss`, as given."""
        self._check_usable()
        self._parts.snapshot.check(trains=True)
        with self._ending():
            self._open_own_step()  # the units may have been called one by one
            loss.backward()
            self._own_losses.append(loss.detach())

    def update(self) -> StepResult:
        """Own loops: clip, update, and return the mean of the losses since the last update, over all ranks."""
        self._check_usable()
        if not self._own_losses:
            raise ConfigError(
                "engine.update() was called with no engine.backward(loss) before it: there is nothing to update from."
            )
        meet(self.comm, "update", lr=self.lr)
        loss = torch.stack([value.to(torch.float32) for value in self._own_losses]).mean() / self.comm.size
        self._updates.lr = self.lr
        with self._ending():
            result = self._end_step(loss, None, "own loop")
            self._own_losses.clear()
            self._is_open = False
            return result

    def finish(self) -> None:
        """Wait until nothing is under way: every update is made and written, and the weights that the next step needs
        first have come up. No other call needs it; it is for whoever measures what a step costs.

        Raises TornError where an update has failed.
        """
        self._check_usable()
        with self._working():
            self._parts.lanes.finish()
        self._check_sound()

    @property
    def clip(self) -> str:
        """How clipped updates are made: deferred or speculative; auto until the first step, or `resolve_clip`."""
        return self._updates.clip

    @property
    def lr(self) -> float:
        """The learning rate of the next update. To be set between steps, on all ranks alike."""
        return self._lr

    @lr.setter
    def lr(self, value: float) -> None:
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise ConfigError(f"engine.lr was set to {value!r}; it must be a number, finite and at least 0.")
        self._lr = value

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.comm.rank

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return self.comm.size

    @property
    def prefetch(self) -> int:
        """How many units are fetched ahead at least; what the device's budget leaves makes it more."""
        return self._parts.plan.ahead

    @property
    def overlaps(self) -> bool:
        """True where copies and updates run beside compute."""
        return self._parts.lanes.overlap

    def resolve_clip(self, tokens: int) -> str:
        """Decide `clip: auto` for steps of so many tokens on this rank, once and for all; return what it is now.

        Deferred, unless AdamW over all states, none of them on disk, takes longer than a forward pass, behind which it
        would hide.
        """
        self._check_open()
        if self._updates.clip == "auto":
            parts = self._parts
            # On disk a correction is a second pass over the states, which costs more than the first one hides.
            waits = not parts.lanes.overlap or bool(parts.plan.layout.planes)
            hides = waits or parts.update_seconds() <= parts.forward_seconds(tokens)
            # Each rank has measured for itself.
            is_late = self.comm.any(not hides, "choice of train.clip")
            self._updates.clip = "speculative" if is_late else "deferred"
        return self._updates.clip

    # -- states ----------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield fresh fp32 CPU copies of the master weights under the model's names, in torch's order, tied names
        once. Collective: all ranks ask for all of them.
        """
        self._settle("named_parameters")
        for info in self._parts.infos:
            if self.comm.size > 1:  # a step may have been made since the last one was asked for
                self._parts.lanes.finish()
            with self._working(), self.counters.unchanged():
                value = self._parts.store.read(info.index)
            yield info.name, value

    @property
    def allocations(self) -> list[tuple[str, str, int]]:
        """Return what is held: (tier, name, bytes)."""
        if not self._is_busy and self._parts.stream.where is not Where.ENGINE:
            with self._working():
                self._parts.stream.collect()
        ledgers = (self._parts.device.ledger, self._parts.host, self._parts.nvme_ledger)
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
        self._check_open()
        self._parts.snapshot.check(trains=False)
        self._settle("export")
        with self._working(), self.counters.unchanged():
            export_model(self._parts, Path(path), dtype, shard_bytes, files or {}, replace)

    def save_checkpoint(
        self, path: str | Path, meta: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> None:
        """Write all states to a folder, from which any number of ranks with any placement can go on. Collective. What
        was there before stays until the new one is complete; `meta` (for JSON) is given back by `load_checkpoint`, and
        `files` (rank 0's, by name) lie beside the model's configuration, such as those of its tokenizer.

        Raises, on all ranks, DiskError or ConfigError, after which training can go on.
        """
        with self._saving("save_checkpoint", path, meta, files, copies=False) as saving, self._working():
            saving.finish()

    def begin_checkpoint(
        self, path: str | Path, meta: Mapping[str, Any] | None = None, files: Mapping[str, bytes] | None = None
    ) -> Saving:
        """Begin what `save_checkpoint` does: all states are copied into host memory that is left over (of the budget,
        or half of what is free without one), and are on their way to the disk when this returns. What has no room there
        is waited for. Steps may follow; the checkpoint is there once `finish` of what this returns has returned, which
        is collective as well, and comes before `close`. It `is_done` (on this rank) when `finish` need not wait;
        `abort` gives it up.

        Raises as `save_checkpoint`; what the disk refuses later is raised by `finish`, on all ranks.
        """
        return self._saving("begin_checkpoint", path, meta, files, copies=True)

    def _saving(
        self,
        name: str,
        path: str | Path,
        meta: Mapping[str, Any] | None,
        files: Mapping[str, bytes] | None,
        *,
        copies: bool,
    ) -> Saving:
        if self._own_losses:
            raise ConfigError(f"engine.{name} was called in the middle of an own loop's step: update first.")
        self._settle(name)
        with self._working(), self.counters.unchanged():
            return Saving(self._parts, Path(path), self._decided(), meta or {}, files, copies=copies)

    def load_checkpoint(self, path: str | Path) -> dict[str, Any]:
        """Take all states from a folder that `save_checkpoint` wrote; return its meta. Collective. A torn engine is
        sound again.

        Raises:
            CheckpointError: on all ranks; the folder is damaged. Where its data are, the engine is torn.
            ConfigError: on all ranks; it is another model's.
        """
        self._check_open()
        meet(self.comm, "load_checkpoint")
        self._recover()
        self._parts.lanes.finish()
        with self._working(), ExitStack() as opened:
            opened.enter_context(self.counters.unchanged())
            with as_one(self.comm, "opening of the checkpoint"):
                reader = opened.enter_context(Reader(Path(path)))
                check_contents(self._parts, reader)
            self._torn = f"{path} was read in part"
            self._parts.store.forgive()
            self._parts.lanes.forget_failures()
            with as_one(self.comm, "reading of the checkpoint"):
                decided, meta = load_states(self._parts, reader)
                self._parts.lanes.drain_updates()  # what fails on its way to the disk fails the load
            self._parts.executor.forget()
            self._parts.stream.claims.weights_change()
            self._parts.slots.refresh(always=True)
        if self._updates.clip == "auto":
            self._updates.clip = decided["clip"]
        self._rehearsal.begin_again(decided.get("losses", {}))
        self._losses.is_plain = decided.get("plain", False)
        self._parts.lanes.settle()
        self._updates.is_updating, self._torn, self._is_open = False, None, False
        self._own_losses.clear()
        return meta

    def close(self, restore: bool = False) -> None:
        """Free every tier. The model gets its weights back in their original dtype with `restore`; otherwise it is left
        without, and refuses to run, to be saved and to be trained again.
        """
        if self._parts.closed:
            return
        if self.comm.size == 1:
            self._recover()
        error = sys.exc_info()[1]  # of the block that this call cleans up after
        is_sound = error is None and not self._torn and self._updates.failure() is None
        if is_sound and (restore or (self.comm.size > 1 and self.comm.stands)):
            self._settle(f"close(restore={restore})")
        if self._owned_comm is not None and not is_sound:
            self._owned_comm.close(error)
        self._hook.remove()
        self._parts.close(restore and (is_sound or self.comm.size == 1))
        self.comm.release()
        if self._owned_comm is not None:
            self._owned_comm.close()

    def __enter__(self) -> Engine:
        self._check_open()
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
        refuse_nan("pickle (torch.save) or copy.deepcopy")

    # -- within a step ---------------------------------------------------------------------------------------

    @contextmanager
    def _ending(self) -> Iterator[None]:
        """Within, an exception ends the step: nothing of it stays, or, where some units are updated already, nothing
        may follow.
        """
        self._is_busy, with_grad = True, torch.is_grad_enabled()
        try:
            yield
        except BaseException:
            torch.set_grad_enabled(with_grad)  # an interrupt may have come right before torch's own way out
            self._give_up()
            raise
        self._is_busy = False

    @contextmanager
    def _working(self) -> Iterator[None]:
        """Within, the engine works on its states for somebody. An exception leaves all in order; an interrupt, which
        may come at any line, does not, and the next call gives up what is under way.
        """
        self._is_busy, with_grad = True, torch.is_grad_enabled()
        try:
            yield
        except BaseException as error:
            torch.set_grad_enabled(with_grad)  # an interrupt may have come right before torch's own way out
            self._is_busy = not isinstance(error, Exception)
            raise
        self._is_busy = False

    def _give_up(self) -> None:
        """End what is under way; where some units are updated already, nothing may follow. An interrupt may come here
        as well: then the next call begins anew with it.
        """
        self._is_busy = True
        self._torn = self._updates.give_up() or self._torn
        self._parts.store.reset()
        self._parts.executor.forget()
        # Over ranks nothing was given up, and the others may be elsewhere; what is torn is of no use on the device.
        if self.comm.size == 1 and not self._torn:
            self._parts.slots.refresh()  # what stays may have been on its way
        self._parts.stream.reset()
        for unit in self._parts.units:
            unit.drop_gradients()
            unit.rest()
        self._rehearsal.give_up()
        self._parts.leftover.give_up()
        self._is_open = self._is_ours = False
        self._own_losses.clear()
        self._is_busy = False

    def _decided(self) -> dict[str, Any]:
        """Return what was decided once and for all, and changes bits."""
        return {"clip": self._updates.clip, "plain": self._losses.is_plain, "losses": self._rehearsal.decided}

    def _begin_step(self, kind: Hashable, waits: bool = False) -> None:
        self._parts.lanes.timeline.begin_step()
        self.counters.begin_step()
        self._parts.stream.begin_step()
        self._updates.begin_step(self.lr, waits or self._flow.accumulates)
        self._parts.executor.begin(kind, wraps=self._updates.is_immediate)

    def _end_step(self, loss: torch.Tensor, tokens: int | None, kind: Hashable) -> StepResult:
        """Finish the gradients, clip, update, and start on the next step's weights."""
        parts = self._parts
        first = parts.executor.first_uses()

        def rank(region: Region) -> float:
            if parts.slots.is_resident(region):
                return -1  # the step begins with it
            return min(first.get(parts.slots.cargo_of(unit.regions), math.inf) for unit in parts.users[region.index])

        def go_on() -> None:
            parts.stream.end_step()
            parts.executor.end()
            if tokens is not None:  # own loops hold as many graphs at once as they like: nothing is ever left over
                parts.leftover.end_step()
            parts.executor.expect(*self._expected)

        self._expected = kind, self._updates.is_immediate
        applied = self._updates.apply(rank, go_on)
        loss = self._sum(loss)
        seconds, lanes, self.spans = parts.lanes.end_step()
        return StepResult(
            loss,
            applied.norm,
            tokens,
            skipped=applied.skipped,
            corrected=applied.num_corrected,
            coarse=applied.is_coarse,
            seconds=seconds,
            lanes=lanes,
        )

    def _meet(self, operation: str, batch: Batch, loss_fn: LossFunction | None, lr: float | None = None) -> Pass:
        is_new = partial(self._rehearsal.is_new, batch, loss_fn)
        return meet(self.comm, operation, batch, self._micro_batch_size, loss_fn is not None, is_new, lr)

    def _sum(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the sum of what each rank has of a loss, on the CPU."""
        loss = loss.cpu()
        if self.comm.size > 1:
            loss = torch.tensor(self.comm.sum_in_order([float(loss)], "loss")[0], dtype=torch.float32)
        return loss

    def _settle(self, operation: str = "read the states") -> None:
        """Let every update that is on its way arrive, before the host reads the states. Collective."""
        self._check_usable()
        meet(self.comm, operation)
        self._parts.lanes.drain_updates()
        if self.comm.size > 1:
            self._parts.lanes.finish()

    @contextmanager
    def _as_ours(self) -> Iterator[None]:
        """The model's forward is called by the engine, not by an own loop."""
        before = self._is_ours

        def restore() -> None:
            self._is_ours = before

        with self._parts.stream.undo.afterwards(restore):
            self._is_ours = True
            yield

    def _check_open(self) -> None:
        if self._parts.closed:
            raise OffloadError("the engine is closed: its states are gone. Make a new one.")

    def _check_usable(self) -> None:
        self._check_open()
        self._recover()
        self._check_sound()

    def _check_sound(self) -> None:
        self._torn = self._torn or self._updates.failure()
        if self._torn:
            raise TornError(f"{self._torn}: the states belong to no step. Load the last checkpoint, or start over.")

    def _recover(self) -> None:
        """Give up what an interrupt has left half done."""
        if self._is_busy or self._parts.stream.where is Where.ENGINE:
            self._give_up()

    # -- before the first step -------------------------------------------------------------------------------

    def _bring(self, batch: Batch) -> Batch:
        normal = {key: value.clone() if value.is_inference() else value for key, value in batch.items()}
        return {key: value.to(self.device) for key, value in normal.items()}

    def _rehearsed(self, batch: Batch, known: Pass, loss_fn: LossFunction | None, departed: bool | None) -> LossRule:
        """Learn on a few rows of a batch what the step relies on; return what was found about the loss."""
        with self._ending():
            self._parts.slots.settle()
            rule, self._losses.head = self._rehearsal.on_batch(batch, loss_fn, known.is_new, departed)
            if not self._losses.is_plain and (known.is_new or departed is not None):
                self._losses.is_plain = self.comm.any(not self._losses.splits, "whether batches can be cut")
            self._rehearsal.is_complete = True
        return rule

    def _again(self, run: Callable[[bool | None], _Result]) -> _Result:
        """Run; where a unit is called as it was not recorded (a mask that came with padding, a window that a longer
        sequence fills), on one rank or several, record on rows of such a batch in their whole length, and run again
        from the same random state. Where no few rows show what the batch does, it is not cut any more. Likewise where
        units that had found room on the device were in the way. What fails leaves modules and generators as they were.
        """
        random, departed, num_departures = self._parts.device.random_state(), None, 0
        condition, drawn = Condition(self._modules, self._may_move()), Drawn.so_far()
        step_number = self._parts.stream.step_number

        while True:
            try:
                result = run(departed)
                if isinstance(result, StepResult) and result.skipped:
                    condition.put_back()
                return result
            except BaseException as error:
                if self._torn or self._parts.stream.step_number != step_number:  # it is done, in part or all of it
                    raise
                self._parts.device.set_random_state(random)
                drawn.put_back()
                condition.put_back()
                if isinstance(error, DepartedError):
                    departed, num_departures = error.is_own, num_departures + 1
                    self._losses.is_plain |= num_departures == _MOST_DEPARTURES
                elif not isinstance(error, DoesNotFitError | torch.OutOfMemoryError) or not self._gives_back():
                    raise

    def _may_move(self) -> set[Place]:
        """Return the buffers that a pass may move: all but those of units that were seen not to."""
        recorded = [unit for unit in self._parts.units if not unit.resident and unit.known]
        still = {place for unit in recorded for place in places(unit.modules)}
        still -= {place for unit in self._parts.units for page in unit.known.values() for place in page.buffers}
        return places(self._modules) - still

    def _gives_back(self) -> bool:
        with self._working():  # the other ranks had room, and are further by now
            return self.comm.size == 1 and self._parts.leftover.give_back()

    def _before_own_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Own loops call the model directly: record on the first call's own arguments, and make room for sums of
        gradients.
        """
        if self._is_ours:
            return
        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False), torch.no_grad():
                self._before_own_forward(module, args, kwargs)
            return
        self._recover()
        self._parts.snapshot.check(torch.is_grad_enabled())
        with self._working():
            self._parts.slots.settle()
            if not torch.is_grad_enabled():
                return
            self._check_sound()
            self._rehearsal.forget_other_modes()
            if meet(self.comm, "own loop", is_new=lambda: self._rehearsal.is_new_call(args, kwargs)).is_new:
                self._rehearsal.on_call(lambda: module(*args, **kwargs), args, kwargs)
            self._open_own_step()

    def _open_own_step(self) -> None:
        self._parts.accumulate()
        if not self._is_open:
            self._parts.leftover.give_back()
            self._begin_step("own loop", waits=True)
            self._is_open = True


def _check(value: object, allowed: tuple[object, ...], key: str) -> None:
    if value not in allowed:
        names = ", ".join(str(item) for item in allowed)
        raise ConfigError(f"{key} is {value!r}; this version allows {names}.")
