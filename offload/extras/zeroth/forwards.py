"""Training without a backward: two forwards along each random direction, then an update from the loss differences."""

from __future__ import annotations

import math
from typing import Any, NoReturn

import torch

from offload.engine.gradients.policies import SKIPS
from offload.engine.loss.batch_agreement import PassInputs
from offload.engine.methods.method import Method
from offload.engine.methods.result import StepResult
from offload.engine.units.unit import Unit
from offload.errors import ConfigError, NonFiniteError
from offload.extras.zeroth.interleaved import InterleavedForwards
from offload.extras.zeroth.mezo import MeZO
from offload.extras.zeroth.perturbed import PerturbedWeights
from offload.extras.zeroth.record import ZerothOrderRecord
from offload.extras.zeroth.slot_updates import SlotUpdates
from offload.extras.zeroth.update import ZerothOrderUpdate


class Forwards(Method):
    """MeZO with interleaved passes. Each rank computes its own rows; the ranks exchange only the losses."""

    _rule: MeZO

    def prepare(self) -> None:
        host = self._host
        self._pending = SlotUpdates(host.store, host.slots, host.deferred_updates, host.lanes, host.device)
        self.descent = ZerothOrderUpdate(host, self._rule, self._pending)
        self._perturbed = PerturbedWeights(host, self._rule, self._settings.seed)
        self._interleaved = InterleavedForwards(host, self._pending, self._perturbed)

    def step(self, inputs: PassInputs) -> StepResult:
        host, schedule_key = self._host, inputs.plan.schedule_key
        host.lanes.timeline.begin_step()
        host.counters.begin_step()
        host.runner.begin_step()
        number = host.runner.step_number
        host.updates.begin_step(self.lr, True, number)
        host.executor.begin(schedule_key)
        self.begin_trial()
        passes = torch.stack(self.trial(inputs))
        self._pending.check()
        # The host waits here, for two numbers a direction.
        values = self.sum(*host.device.copy_to_host(passes)().tolist())
        losses = list(zip(values[::2], values[1::2], strict=True))  # on both sides of the weights, by direction
        slopes = self._rule.slopes(losses)
        measured = ZerothOrderRecord(
            number + 1, self._settings.seed, tuple(slopes), self.lr, tuple(losses), self._rule.mark, self.descent.frozen
        )
        skipped = not all(math.isfinite(loss) for pair in losses for loss in pair)
        if skipped and not self._settings.skips:
            advice = host.store.values.explain_nonfinite(
                f"Lower --optimizer.lr or --optimizer.eps, or check the data of this step; {SKIPS}"
            )
            pairs = ", ".join(f"{plus:g} and {minus:g}" for plus, minus in losses)
            raise NonFiniteError(f"the losses of step {number + 1} at the two perturbed weights are {pairs}. {advice}")
        self.expected = schedule_key, False
        if skipped:
            self._start_fetches(is_batch=True)
        else:
            self.descent.update(measured, self._perturbed.thresholds, self._first_use())
            self._start_updates(is_batch=True)
        mean = sum(loss for pair in losses for loss in pair) / (2 * len(losses))
        slope = math.sqrt(sum(slope * slope for slope in slopes) / len(slopes))
        record: ZerothOrderRecord | None = measured
        if skipped:  # there is nothing to replay
            record = None
        return self._finish(mean, slope, inputs.num_targets, skipped=skipped, measured=record)

    def trial(self, inputs: PassInputs, chunk_tokens: int | None = None) -> list[torch.Tensor]:
        return self._interleaved.run(lambda: self._losses.total(inputs, chunk_tokens), self.num_passes)

    def begin_trial(self) -> None:
        number = self._host.runner.step_number + 1
        # The passes perturb the blocks of this step alone; all are fetched.
        self._perturbed.begin(number, self.descent.touched(number, self._settings.seed, self.descent.frozen))

    def install_weights(self, unit: Unit, number: int) -> None:
        self._perturbed.enter(unit, number)

    @property
    def num_passes(self) -> int:  # type: ignore[override]
        return 2 * self._rule.num_directions

    def forget(self) -> None:
        self._pending.forget()

    def own_loop(self) -> NoReturn:
        raise ConfigError(
            f"{self._rule.title} trains with forward passes only and has no gradients: call engine.step(batch, "
            "loss_fn) instead of a forward, engine.backward and engine.update; loss_fn may return any number to "
            "minimize. For outputs call the model under torch.no_grad(), for a loss engine.evaluate."
        )

    def replay(self, record: Any) -> None:
        host, measured = self._host, ZerothOrderRecord.of(record)
        num_steps = host.runner.step_number
        if measured.step != num_steps + 1:
            raise ConfigError(
                f"the record is of step {measured.step}, but {num_steps} steps are done and step {num_steps + 1} is "
                "next: a replay starts with the weights before the first step and takes each step once, in order. For "
                f"a skipped step pass its line of metrics.jsonl, or no slopes: ({num_steps + 1}, 0, ())."
            )
        if not measured.slopes:
            host.runner.step_number = measured.step
            return
        if len(measured.slopes) != self._rule.num_directions:
            raise ConfigError(
                f"the record of step {measured.step} has {len(measured.slopes)} slopes, but "
                f"optimizer.num_perturbations is {self._rule.num_directions}: use the MeZO settings of the recorded "
                "run."
            )
        if measured.rule not in ("", self._rule.mark):
            raise ConfigError(
                f"step {measured.step} was recorded with other MeZO settings than {self._rule}: replay a run with "
                "changed settings in parts, each from a checkpoint and with the settings of that part."
            )
        if measured.lr is None:
            measured = measured._replace(lr=self.lr)
        self.descent.update(measured, {}, lambda region: region.index)
        host.runner.step_number = measured.step
        host.updates.start()

    def free(self) -> None:
        self._interleaved.free()
        self._perturbed.free()
