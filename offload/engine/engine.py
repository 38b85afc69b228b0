"""The engine: one training step over streamed units."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from offload.checkpoint.export import export_model
from offload.engine.assemble import Assembly, assemble
from offload.engine.head import ChunkedHead
from offload.engine.learned import DepartedError
from offload.engine.loss import (
    IGNORED,
    Batch,
    LossFunction,
    LossRule,
    check_batch,
    run_loss,
    select_inputs,
    split_rows,
)
from offload.engine.rehearse import Rehearsal, in_eval_mode
from offload.errors import ConfigError, NonFiniteError, OffloadError, TornError
from offload.optim.adamw import AdamW
from offload.optim.clip import clip_coefficient, total_norm
from offload.optim.update import update_region
from offload.partition.layout import Region
from offload.sections import parse_size
from offload.telemetry.counters import Counters
from offload.tiers.placement import Placement

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class StepResult:
    """What a step gives: the loss (0-dim fp32 CPU tensor), the norm of the gradients before clipping, the target
    tokens, and whether the update was skipped for a gradient that is not finite. `tokens` is None in own loops.
    """

    loss: torch.Tensor
    grad_norm: float
    tokens: int | None
    skipped: bool


class Engine:
    """Trains `model` with its states on the tiers that `placement` says; docs/design.md, section Engine, has every
    argument.

    The model is consumed: its parameters move into the engine, unit by unit. `fill(name, module)`, where given, is
    called right before a unit's parameters are taken, and may write them (so that a model need never be whole in
    memory).
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
        debug: bool = False,
        head_chunk_bytes: int | str | None = "256MiB",
        fill: Callable[[str, nn.Module], None] | None = None,
    ) -> None:
        _check(precision, ("fp32", "bf16"), "train.precision")
        _check(clip, ("auto", "deferred"), "train.clip")
        _check(on_nonfinite, ("stop", "skip"), "train.on_nonfinite")
        _check(recompute, ("always", "never", "auto"), "train.recompute")
        _check(prefetch, ("auto", 0), "offload.prefetch")
        _check(zero_stage, (0, 1, 2, 3), "offload.zero_stage")
        if throttle:
            raise ConfigError("offload.throttle: this version has no lanes to throttle yet; leave it out.")
        if micro_batch_size is not None and (type(micro_batch_size) is not int or micro_batch_size < 1):
            raise ConfigError(f"train.micro_batch_size is {micro_batch_size!r}; it must be a whole number, at least 1.")
        if max_grad_norm is not None and not (isinstance(max_grad_norm, int | float) and 0 <= max_grad_norm < math.inf):
            raise ConfigError(f"train.max_grad_norm is {max_grad_norm!r}; a positive number, or none for no clipping.")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            raise ConfigError(
                f"WORLD_SIZE is {os.environ['WORLD_SIZE']}, and this version trains on one rank: leave torchrun out."
            )
        self.model = model
        self.optimizer = optimizer or AdamW()
        self.lr = self.optimizer.lr
        self.counters = Counters()
        self._max_grad_norm = max_grad_norm or None
        self._skips = on_nonfinite == "skip"
        self._micro_batch_size = micro_batch_size
        # The update waits for the norm, or for the certainty that every gradient is finite; else it runs as gradients
        # land.
        self._waits = self._max_grad_norm is not None or self._skips
        self._parts: Assembly = assemble(
            model,
            optimizer=self.optimizer,
            placement=placement or Placement(),
            precision=precision,
            waits=self._waits,
            splits=micro_batch_size is not None,
            recompute=recompute,
            counters=self.counters,
            seed=seed,
            debug=debug,
            fill=fill,
        )
        self.device = self._parts.device.torch_device
        self._flow = self._parts.gradients
        self._head_chunk_bytes = parse_size(head_chunk_bytes, "train.head_chunk_bytes")
        self._head: ChunkedHead | None = None
        self._losses: list[torch.Tensor] = []
        self._is_open = False  # a step of an own loop has begun
        self._is_updating = False
        self._torn: str | None = None
        self._is_ours = False
        self._rehearsal = Rehearsal(model, self._parts, self.counters, self._as_ours)
        self._hook = model.register_forward_pre_hook(self._before_own_forward, with_kwargs=True)

    # -- a step ----------------------------------------------------------------------------------------------

    def step(self, batch: Batch, loss_fn: LossFunction | None = None) -> StepResult:
        """Train on this rank's rows of a batch (tensors [batch, sequence]; labels unshifted, -100 ignored):
        forward, backward, update.
        """
        self._check_usable()
        if self._losses:
            raise ConfigError(
                "engine.step was called in the middle of an own loop's step, whose gradients it would lose: call "
                "engine.update() first."
            )
        self._is_open = False  # a forward of an own loop that had no backward is dropped
        batch = self._bring(batch)
        self._rehearsal.forget_other_modes()
        return self._twice(lambda whole: self._step_on(batch, loss_fn, whole))

    def _step_on(self, batch: Batch, loss_fn: LossFunction | None, whole: bool) -> StepResult:
        rule = self._rehearsed(batch, loss_fn, whole)
        tokens = rule.targets(batch)
        if not tokens and loss_fn is None:
            raise ConfigError(
                f"no label of the batch is a target: all {batch['labels'].numel()} are {IGNORED} or first in their row."
            )
        with self._step():
            loss = torch.zeros((), dtype=torch.float32)
            self._flow.landed = None if self._waits or self._flow.accumulates else self._update
            for part_loss in self._losses_of(batch, rule, tokens, loss_fn):
                if part_loss.requires_grad:
                    part_loss.backward()
                loss += part_loss.detach().to("cpu", torch.float32)
            norm, skipped = self._apply()
        return StepResult(loss, norm, tokens, skipped)

    def evaluate(self, batch: Batch, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """Return the loss that `step` would report, in eval mode and without a trace: no gradients, counters and
        generators untouched.
        """
        self._check_usable()
        batch = self._bring(batch)
        return self._twice(lambda whole: self._evaluate_on(batch, loss_fn, whole))

    def _evaluate_on(self, batch: Batch, loss_fn: LossFunction | None, whole: bool) -> torch.Tensor:
        rule = self._rehearsed(batch, loss_fn, whole)
        counted = {field.name: getattr(self.counters, field.name) for field in fields(self.counters)}
        random = self._parts.device.random_state()
        try:
            with in_eval_mode(self.model), torch.no_grad():
                total = torch.zeros((), dtype=torch.float32)
                for part_loss in self._losses_of(batch, rule, rule.targets(batch), loss_fn):
                    total += part_loss.to("cpu", torch.float32)
                return total
        finally:
            for name, value in counted.items():
                setattr(self.counters, name, value)
            self._parts.device.set_random_state(random)

    def backward(self, loss: torch.Tensor) -> None:
        """Own loops: add the gradients of `loss`, as given."""
        self._check_usable()
        self._open_own_step()  # the units may have been called one by one
        try:
            loss.backward()
        except BaseException:
            self._give_up()
            raise
        self._losses.append(loss.detach())

    def update(self) -> StepResult:
        """Own loops: clip, update, and return the mean of the losses since the last update."""
        self._check_usable()
        if not self._losses:
            raise ConfigError(
                "engine.update() was called with no engine.backward(loss) before it: there is nothing to update from."
            )
        loss = torch.stack([value.to("cpu", torch.float32) for value in self._losses]).mean()
        try:
            norm, skipped = self._apply()
        except BaseException:
            self._give_up()
            raise
        self._losses.clear()
        self._is_open = False
        return StepResult(loss, norm, None, skipped)

    # -- states ----------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield fresh fp32 CPU copies of the master weights under the model's names, in torch's order, tied names
        once.
        """
        self._check_usable()
        yield from self._parts.store.named()

    @property
    def allocations(self) -> list[tuple[str, str, int]]:
        """Return what is held: (tier, name, bytes)."""
        ledgers = (self._parts.device.ledger, self._parts.host)
        return [(ledger.tier, name, size) for ledger in ledgers for name, size in ledger.allocations.items()]

    def export(self, path: str | Path) -> None:
        """Write the model as a Hugging Face folder: configuration and safetensors, in the dtype in which the
        device uses each weight.
        """
        self._check_usable()
        with self._parts.unchanged_config():
            export_model(self.model, self._parts.store, self._parts.indices(), Path(path))

    def close(self, restore: bool = False) -> None:
        """Free every tier. The model is left without weights, or gets them back in their original dtype with
        `restore`.
        """
        if self._parts.closed:
            return
        self._hook.remove()
        self._parts.close(restore)

    # -- within a step ---------------------------------------------------------------------------------------

    @contextmanager
    def _step(self) -> Iterator[None]:
        self.counters.begin_step()
        self._parts.stream.begin_step()
        try:
            yield
        except BaseException:
            self._give_up()
            raise

    @contextmanager
    def _as_ours(self) -> Iterator[None]:
        """The model's forward is called by the engine, not by an own loop."""
        before, self._is_ours = self._is_ours, True
        try:
            yield
        finally:
            self._is_ours = before

    def _losses_of(
        self, batch: Batch, rule: LossRule, tokens: int, loss_fn: LossFunction | None
    ) -> Iterator[torch.Tensor]:
        """Yield the loss in parts that add up to the mean over the batch's target tokens.

        The units cut the batch themselves where they can (the model is called once, and its weights stream once);
        otherwise the model is called on one micro-batch after the other.
        """
        rows = check_batch(batch)
        micro = min(self._micro_batch_size or rows, rows)
        if micro == rows or self._splits:
            with self._as_ours(), self._parts.stream.micro_batches(rows, micro):
                columns = self._head_columns(batch, loss_fn)
                if columns is not None:
                    yield self._chunked_loss(batch, columns, tokens)
                    return
                yield run_loss(self.model, batch, loss_fn)
            return
        for part in split_rows(batch, micro):
            share, extra = 1.0, {}
            if loss_fn is None and rule.takes_count:
                extra["num_items_in_batch"] = tokens
            else:
                share = rule.targets(part) / tokens
                if not share:
                    continue
            with self._as_ours():
                loss = run_loss(self.model, part, loss_fn, **extra)
            yield loss * share if share != 1.0 else loss

    def _head_columns(self, batch: Batch, loss_fn: LossFunction | None) -> int | None:
        """Return how many columns of the batch a chunk of the head takes, or None where the logits are made whole."""
        if self._head is None or loss_fn is not None or self._head_chunk_bytes is None:
            return None
        rows, length = batch["labels"].shape
        columns = max(1, self._head_chunk_bytes // (rows * self._head.vocabulary * 4))
        return columns if columns < length else None

    def _chunked_loss(self, batch: Batch, columns: int, tokens: int) -> torch.Tensor:
        """Run the model up to its head, then the head in chunks, forward and backward; return the loss.

        The backward of the units below runs here too: the loss that comes back has nothing left to do.
        """
        assert self._head is not None
        stream = self._parts.stream
        output = self._head.base_output(lambda: self.model(**select_inputs(self.model, batch, False)))
        hidden = output["last_hidden_state"]
        gradient = torch.zeros_like(hidden, requires_grad=False) if hidden.requires_grad else None
        total = torch.zeros((), dtype=torch.float32)
        with stream.whole_batch(), self._flow.repeated(self._parts.regions):
            for loss, leaf, span in self._head.losses(output, batch, columns, tokens):
                if loss.requires_grad:  # the head may be all that trains, or frozen over units that do
                    loss.backward()
                if gradient is not None and leaf.grad is not None:
                    gradient[:, span] = leaf.grad
                total += loss.detach().to("cpu", torch.float32)
        if gradient is not None:
            hidden.backward(gradient)
        return total

    @property
    def _splits(self) -> bool:
        """True where every unit gives the same when the batch is cut in rows."""
        pages = [page for unit in self._parts.units if not unit.resident for page in unit.known.values()]
        return all(page.splits for page in pages)

    def _apply(self) -> tuple[float, bool]:
        """Finish the gradients, clip, update; return the norm and whether the update was skipped."""
        self._flow.finish()
        norm = total_norm(self._flow.squares)
        if not math.isfinite(norm):
            if self._skips:
                return norm, True
            self._refuse_non_finite()
        if self._flow.landed is None:
            scale = clip_coefficient(norm, self._max_grad_norm)
            for state in self._parts.store.states:
                if state.gradients is not None:
                    self._update(state.region, state.gradients, scale)
        self._parts.slots.refresh()
        self._is_updating = False
        self._parts.stream.end_step()
        return norm, False

    def _update(self, region: Region, gradients: torch.Tensor, scale: float = 1.0) -> None:
        touched = self._flow.touched[region.index]
        if not any(touched):
            return
        if any(not math.isfinite(self._flow.squares[index]) for index in region.parameters):
            self._refuse_non_finite()
        self._is_updating = True
        self._parts.slots.invalidate()
        non_finite = update_region(
            self._parts.store[region], gradients, touched, self.optimizer, self._parts.infos, lr=self.lr, scale=scale
        )
        if non_finite:
            raise NonFiniteError(
                f"{non_finite} weights of unit {region.name} are no longer finite after the update with lr "
                f"{self.lr:g}: the step is too large. Lower --optimizer.lr, and go on from the last checkpoint."
            )

    def _refuse_non_finite(self) -> None:
        bad = [info for info in self._parts.infos if not math.isfinite(self._flow.squares[info.index])]
        units = {i: region.name for region in self._parts.regions for i in region.parameters}
        raise NonFiniteError(
            f"the gradient of {bad[0].name} in unit {units[bad[0].index]} is not finite ({len(bad)} of "
            f"{len(self._parts.infos)} parameters). Lower --optimizer.lr or look at the data of this step; "
            "--train.on_nonfinite skip goes on without such steps."
        )

    def _give_up(self) -> None:
        """An exception ended the step: nothing of it stays, or, where some units are updated already, nothing may
        follow.
        """
        if self._is_updating:
            self._torn = "a step failed after some units were updated and before the others were"
        self._is_updating = False
        self._is_open = False
        self._losses.clear()
        self._parts.stream.reset()

    def _check_usable(self) -> None:
        if self._parts.closed:
            raise OffloadError("the engine is closed.")
        if self._torn:
            raise TornError(f"{self._torn}: the states belong to no step. Load the last checkpoint, or start over.")

    # -- before the first step -------------------------------------------------------------------------------

    def _bring(self, batch: Batch) -> Batch:
        check_batch(batch)
        return {key: value.to(self.device) for key, value in batch.items()}

    def _rehearsed(self, batch: Batch, loss_fn: LossFunction | None, whole: bool) -> LossRule:
        """Learn on a few rows of a batch what the step relies on; return what was found about the loss."""
        rule, self._head = self._rehearsal.on_batch(batch, loss_fn, whole)
        if self._micro_batch_size is not None and not self._splits:
            self._parts.accumulate()
        return rule

    def _twice(self, run: Callable[[bool], _Result]) -> _Result:
        """Run; where a unit is called as it was not recorded (a mask that came with padding, a window that a longer
        sequence fills), record on rows of this batch in their whole length, and run again from the same random state.
        """
        random = self._parts.device.random_state()
        try:
            return run(False)
        except DepartedError:
            self._parts.device.set_random_state(random)
        try:
            return run(True)
        except DepartedError:
            raise OffloadError(
                "the model calls its units in another way for some rows of this batch than for others, so that it "
                "cannot be cut in micro-batches. Leave --train.micro_batch_size out."
            ) from None

    def _before_own_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Own loops call the model directly: record on the first call's own arguments, and make room for sums of
        gradients.
        """
        if self._is_ours or not torch.is_grad_enabled():
            return
        self._check_usable()
        self._rehearsal.forget_other_modes()
        self._rehearsal.on_call(lambda: module(*args, **kwargs), args, kwargs)
        self._open_own_step()

    def _open_own_step(self) -> None:
        self._flow.landed = None
        self._parts.accumulate()
        if not self._is_open:
            self._is_open = True
            self.counters.begin_step()
            self._parts.stream.begin_step()


def _check(value: object, allowed: tuple[object, ...], key: str) -> None:
    if value not in allowed:
        names = ", ".join(str(item) for item in allowed)
        raise ConfigError(f"{key} is {value!r}; this version allows {names}.")
