"""The engine: one training step over streamed units."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoint.export import export_model
from offload.engine.assemble import Assembly, assemble
from offload.engine.loss import (
    IGNORED,
    Batch,
    LossFunction,
    LossRule,
    check_batch,
    find_loss,
    probe_loss,
    select_inputs,
    split_rows,
)
from offload.engine.record import Recording, RestartRecording
from offload.errors import ConfigError, NonFiniteError, OffloadError, TornError
from offload.optim.adamw import AdamW
from offload.optim.clip import clip_coefficient, total_norm
from offload.optim.update import update_region
from offload.partition.layout import Region
from offload.telemetry.counters import Counters
from offload.tiers.placement import Placement

_RECORDING_ROWS = 2
_RECORDING_TOKENS = 16


@dataclass(frozen=True)
class StepResult:
    """What a step gives: the loss (0-dim fp32 CPU tensor), the norm of the gradients before clipping, the target tokens, and whether the
    update was skipped for a gradient that is not finite. `tokens` is None in own loops."""

    loss: torch.Tensor
    grad_norm: float
    tokens: int | None
    skipped: bool


class Engine:
    """Trains `model` with its states on the tiers that `placement` says; see DESIGN.md, section 7, for every argument.

    The model is consumed: its parameters move into the engine, unit by unit. `fill(name, module)`, where given, is called right before a
    unit's parameters are taken, and may write them (so that a model need never be whole in memory).
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
        fill: Callable[[str, nn.Module], None] | None = None,
    ) -> None:
        _check(precision, ("fp32", "bf16"), "train.precision")
        _check(clip, ("auto", "deferred"), "train.clip")
        _check(on_nonfinite, ("stop", "skip"), "train.on_nonfinite")
        _check(recompute, ("always", "auto"), "train.recompute")
        _check(prefetch, ("auto", 0), "offload.prefetch")
        _check(zero_stage, (0, 1, 2, 3), "offload.zero_stage")
        if throttle:
            raise ConfigError("offload.throttle: this version has no lanes to throttle yet; leave it out.")
        if micro_batch_size is not None and micro_batch_size < 1:
            raise ConfigError(f"train.micro_batch_size is {micro_batch_size}; at least 1 row is needed.")
        self.model = model
        self.optimizer = optimizer or AdamW()
        self.lr = self.optimizer.lr
        self.counters = Counters()
        self._max_grad_norm = max_grad_norm or None
        self._skips = on_nonfinite == "skip"
        self._micro_batch_size = micro_batch_size
        # The update waits for the norm, or for the certainty that every gradient is finite; else it runs as gradients land.
        self._waits = self._max_grad_norm is not None or self._skips
        self._parts: Assembly = assemble(
            model,
            optimizer=self.optimizer,
            placement=placement or Placement(),
            precision=precision,
            waits=self._waits,
            accumulates=micro_batch_size is not None,
            counters=self.counters,
            debug=debug,
            fill=fill,
        )
        self.device = self._parts.device.torch_device
        self._flow = self._parts.gradients
        self._rule: LossRule | None = None
        self._losses: list[torch.Tensor] = []
        self._is_open = False  # a step of an own loop has begun
        self._is_updating = False
        self._torn: str | None = None
        self._is_ours = False
        self._hook = model.register_forward_pre_hook(self._before_own_forward, with_kwargs=True)

    # -- a step -----------------------------------------------------------------------------------------------------------------------

    def step(self, batch: Batch, loss_fn: LossFunction | None = None) -> StepResult:
        """Train on this rank's rows of a batch (tensors [batch, sequence]; labels unshifted, -100 ignored): forward, backward, update."""
        self._check_usable()
        batch = self._bring(batch)
        rule = self._record_batch(batch, loss_fn)
        tokens = rule.targets(batch)
        if not tokens and loss_fn is None:
            raise ConfigError(f"no label of the batch is a target: all {batch['labels'].numel()} are {IGNORED} or first in their row.")
        with self._step():
            loss = torch.zeros((), dtype=torch.float32)
            self._flow.landed = None if self._waits or self._flow.accumulates else self._update
            for part_loss in self._losses_of(batch, rule, tokens, loss_fn):
                part_loss.backward()
                loss += part_loss.detach().to("cpu", torch.float32)
            norm, skipped = self._apply()
        return StepResult(loss, norm, tokens, skipped)

    def evaluate(self, batch: Batch, loss_fn: LossFunction | None = None) -> torch.Tensor:
        """Return the loss that `step` would report, in eval mode and without a trace: no gradients, counters and generators untouched."""
        self._check_usable()
        batch = self._bring(batch)
        rule = self._record_batch(batch, loss_fn)
        counted = {field.name: getattr(self.counters, field.name) for field in fields(self.counters)}
        random = self._parts.device.random_state()
        try:
            with self._in_eval_mode(), torch.no_grad():
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
            raise ConfigError("engine.update() was called with no engine.backward(loss) before it: there is nothing to update from.")
        loss = torch.stack([value.to("cpu", torch.float32) for value in self._losses]).mean()
        try:
            norm, skipped = self._apply()
        except BaseException:
            self._give_up()
            raise
        self._losses.clear()
        self._is_open = False
        return StepResult(loss, norm, None, skipped)

    # -- states -----------------------------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield fresh fp32 CPU copies of the master weights under the model's names, in torch's order, tied names once."""
        self._check_usable()
        yield from self._parts.store.named()

    @property
    def allocations(self) -> list[tuple[str, str, int]]:
        """Return what is held: (tier, name, bytes)."""
        ledgers = (self._parts.device.ledger, self._parts.host)
        return [(ledger.tier, name, size) for ledger in ledgers for name, size in ledger.allocations.items()]

    def export(self, path: str | Path) -> None:
        """Write the model as a Hugging Face folder: configuration and safetensors, in the dtype in which the device uses each weight."""
        self._check_usable()
        with self._parts.unchanged_config():
            export_model(self.model, self._parts.store, {id(p): i for i, p in self._parts.standing.items()}, Path(path))

    def close(self, restore: bool = False) -> None:
        """Free every tier. The model is left without weights, or gets them back in their original dtype with `restore`."""
        if self._parts.closed:
            return
        self._hook.remove()
        self._parts.close(restore)

    # -- within a step ----------------------------------------------------------------------------------------------------------------

    @contextmanager
    def _step(self) -> Iterator[None]:
        self.counters.begin_step()
        self._flow.begin_step()
        try:
            with self._as_ours():
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

    def _losses_of(self, batch: Batch, rule: LossRule, tokens: int, loss_fn: LossFunction | None) -> Iterator[torch.Tensor]:
        """Yield each micro-batch's part of the loss; the parts add up to the mean over the batch's target tokens."""
        rows = check_batch(batch)
        for part in split_rows(batch, self._micro_batch_size):
            share, extra = 1.0, {}
            if check_batch(part) < rows:
                if loss_fn is None and rule.takes_count:
                    extra["num_items_in_batch"] = tokens
                else:
                    share = rule.targets(part) / tokens
                    if not share:
                        continue
            with self._as_ours():
                outputs = self.model(**select_inputs(self.model, part, loss_fn is not None), **extra)
                loss = loss_fn(outputs, part) if loss_fn else find_loss(outputs)
            yield loss if share == 1.0 else loss * share

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
                f"{non_finite} weights of unit {region.name} are no longer finite after the update with lr {self.lr:g}: the step is too "
                f"large. Lower --optimizer.lr, and go on from the last checkpoint."
            )

    def _refuse_non_finite(self) -> None:
        bad = [info for info in self._parts.infos if not math.isfinite(self._flow.squares[info.index])]
        units = {i: region.name for region in self._parts.regions for i in region.parameters}
        raise NonFiniteError(
            f"the gradient of {bad[0].name} in unit {units[bad[0].index]} is not finite ({len(bad)} of {len(self._parts.infos)} "
            f"parameters). Lower --optimizer.lr or look at the data of this step; --train.on_nonfinite skip goes on without such steps."
        )

    def _give_up(self) -> None:
        """An exception ended the step: nothing of it stays, or, where some units are updated already, nothing may follow."""
        if self._is_updating:
            self._torn = "a step failed after some units were updated and before the others were"
        self._is_updating = False
        self._is_open = False
        self._losses.clear()
        self._parts.stream.reset()
        self._flow.begin_step()

    def _check_usable(self) -> None:
        if self._parts.closed:
            raise OffloadError("the engine is closed.")
        if self._torn:
            raise TornError(f"{self._torn}: the states belong to no step. Load the last checkpoint, or start over.")

    # -- before the first step --------------------------------------------------------------------------------------------------------

    def _bring(self, batch: Batch) -> Batch:
        check_batch(batch)
        return {key: value.to(self.device) for key, value in batch.items()}

    def _record_batch(self, batch: Batch, loss_fn: LossFunction | None) -> LossRule:
        """Record on a few rows and tokens of the first batch; return what was found about the loss."""
        if self._rule is None:
            sample: dict[str, torch.Tensor] = {key: value[:_RECORDING_ROWS] for key, value in batch.items()}
            shapes = {tuple(value.shape) for value in batch.values()}
            if hasattr(self.model, "config") and len(shapes) == 1 and len(next(iter(shapes))) == 2:
                sample = {key: value[:, :_RECORDING_TOKENS].contiguous() for key, value in sample.items()}

            def run(inputs: Batch, **extra: Any) -> Any:
                return self.model(**select_inputs(self.model, inputs, loss_fn is not None), **extra)

            def loss_of() -> Any:
                outputs = run(sample)
                return loss_fn(outputs, sample) if loss_fn else find_loss(outputs)

            self._record(loss_of)
            with self._unseen(), self._in_eval_mode(), torch.no_grad():  # dropout would blur the comparison
                self._rule = probe_loss(self.model, sample, run) if loss_fn is None else LossRule()
        return self._rule

    def _before_own_forward(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Own loops call the model directly: record on the first call's own arguments, and make room for sums of gradients."""
        if self._is_ours or not torch.is_grad_enabled():
            return
        self._check_usable()
        if not self._parts.recorded:
            self._record(lambda: module(*args, **kwargs))
        self._flow.landed = None
        self._parts.accumulate()
        if not self._is_open:
            self._is_open = True
            self.counters.begin_step()
            self._flow.begin_step()

    def _record(self, run: Callable[[], Any]) -> None:
        """Run the recording pass, again with one more resident unit each time a unit is read from outside."""
        if self._parts.recorded:
            return
        while True:
            recording = Recording(self._parts.units, self._parts.stream)
            try:
                with self._unseen(), self._recording(recording), torch.enable_grad(), recording.reads():
                    results = run()
            except ConfigError:
                raise
            except Exception as error:  # noqa: BLE001 - with NaN in place of weights anything may fail; the next pass has the weights
                if not recording.outside_readers:
                    raise error from None
            else:
                if not recording.outside_readers:
                    recording.finish(results)
                    break
            self._parts.make_resident(recording.outside_readers)
        self._parts.recorded = True

    @contextmanager
    def _recording(self, recording: Recording) -> Iterator[None]:
        self._parts.stream.recording = recording
        try:
            yield
        finally:
            self._parts.stream.recording = None

    @contextmanager
    def _in_eval_mode(self) -> Iterator[None]:
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode

    @contextmanager
    def _unseen(self) -> Iterator[None]:
        """Leave buffers and generators as they were."""
        buffers = [(buffer, buffer.clone()) for buffer in self.model.buffers()]
        random = self._parts.device.random_state()
        try:
            with self._as_ours():
                yield
        finally:
            self._parts.device.set_random_state(random)
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)


def _check(value: object, allowed: tuple[object, ...], key: str) -> None:
    if value not in allowed:
        names = ", ".join(str(item) for item in allowed)
        raise ConfigError(f"{key} is {value!r}; this version allows {names}.")

