"""Run progress: steps, losses, best evaluation, time."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from offload.app.config.sections import TrainSection
from offload.engine.methods.result import StepResult


@dataclass
class Best:
    """The evaluation with the lowest loss, and the evaluations since."""

    loss: float | None = None
    """Lowest loss. None: no evaluation yet."""
    step: int | None = None
    """Step of the lowest loss. None: no evaluation yet."""
    mark: float | None = None
    """Reference loss for early stopping, to be beaten by `train.early_stopping_min_delta`. None: no evaluation yet."""
    num_since: int = 0
    """Evaluations since `mark` was set."""

    def record(self, loss: float, step: int, min_delta: float) -> None:
        """Record an evaluation after a step. A NaN loss is never better."""
        lowest = math.inf if self.loss is None else self.loss
        if loss < lowest:
            self.loss = loss
            self.step = step
        self.num_since += 1
        goal = math.inf if self.mark is None else self.mark - min_delta
        if loss < goal:
            self.mark = loss
            self.num_since = 0


class RunProgress:
    """Run counters, from the start or resume point on.

    - num_done, num_skipped, num_coarse: steps in the whole run, earlier processes included.
    - loss: last step. eval_loss: last evaluation, after step `eval_step`. None before the first.
    - best: best evaluation.
    - num_tokens: tokens in all steps, without padding.
    """

    def __init__(self, meta: Mapping[str, Any] | None, train: TrainSection) -> None:
        """`meta`: the `state_dict` stored in the checkpoint to resume from. None: a new run."""
        saved = meta or {"step": 0, "seconds": 0.0, "loss": math.nan, "eval_loss": None, "num_coarse": 0}
        self.first_step = int(saved["step"])
        self.num_done = self.first_step
        self.num_tokens = int(saved.get("tokens", 0))  # not in checkpoints of earlier versions, as others below
        self.num_coarse = saved["num_coarse"]
        self.num_skipped = int(saved.get("skipped", 0))
        self.loss = saved["loss"]
        self.eval_loss = saved["eval_loss"]
        self.eval_step: int | None = saved.get("eval_step")
        self.best = Best(**saved.get("best", {}))
        self.last: Mapping[str, Any] = {}
        """metrics.jsonl fields for the last step in this process."""
        self._train = train
        # Seconds of earlier processes, start of this process, and seconds of preparation in this process.
        self._before_s = saved["seconds"]
        self._started_s = time.monotonic()
        self._preparation_s = 0.0

    def count_step(self, fields: Mapping[str, Any], result: StepResult) -> None:
        if self.num_done == self.first_step:  # the trials of the model come once
            self._preparation_s = max(0.0, fields["step_seconds"] - result.seconds)
        self.num_tokens = fields["tokens_seen"]
        self.num_done += 1
        self.loss = fields["loss"]
        self.last = fields
        self.num_coarse += result.coarse
        self.num_skipped += result.skipped

    def record_evaluation(self, loss: float) -> None:
        """Record an evaluation after the last step."""
        self.eval_step = self.num_done
        self.eval_loss = loss
        self.best.record(loss, self.num_done, self._train.early_stopping_min_delta)

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint state, as a JSON object."""
        return {
            "step": self.num_done,
            "seconds": self.elapsed_s,
            "loss": self.loss,
            "eval_loss": self.eval_loss,
            "eval_step": self.eval_step,
            "best": asdict(self.best),
            "tokens": self.num_tokens,
            "num_coarse": self.num_coarse,
            "skipped": self.num_skipped,
        }

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run's first step began, without times when no process trained."""
        return self._before_s + time.monotonic() - self._started_s

    @property
    def end_reason(self) -> str:
        """Return the reason to end before the last step. Empty: continue. At least one step is always made."""
        limit, patience = self._train.max_seconds, self._train.early_stopping_patience
        best = self.best
        if patience is not None and best.num_since >= patience:
            lower = "lower"
            if self._train.early_stopping_min_delta:
                lower += f" by {self._train.early_stopping_min_delta:g}"
            since = f"none of {best.num_since} evaluations since was {lower} (train.early_stopping_patience)"
            if best.mark is None:
                return since
            return f"the eval loss was {best.mark:.4f} once, and {since}"
        # A run makes at least one step, however long the start took.
        is_late = self.num_done > 0 and limit is not None and self.elapsed_s >= limit
        if is_late:
            return f"train.max_seconds, {limit:g} s, has passed"
        return ""

    @property
    def eta_s(self) -> float | None:
        """Estimated seconds to the end: by step count or time limit, whichever comes first. None: no limit.

        The trials before the first step are left out of the mean time of a step.
        """
        ends = []
        if self._train.max_seconds is not None:
            ends.append(self._train.max_seconds - self.elapsed_s)
        if self._train.steps is not None:
            in_steps_s = self.elapsed_s - self._before_s - self._preparation_s  # of this process: machines differ
            a_step = in_steps_s / (self.num_done - self.first_step)
            ends.append((self._train.steps - self.num_done) * a_step)
        if not ends:
            return None
        return max(0.0, min(ends))
