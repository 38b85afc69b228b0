"""Where a run stands: its steps, its losses, its time."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from offload.config.sections import TrainSection


class RunProgress:
    """Counts from where the run was begun or resumed, which is now.

    `num_done`, `num_coarse`: steps of the run, in this process and before. `loss` is of the last step, `eval_loss` of
    the last evaluation, which was made after `eval_step`; both are None without one.
    """

    def __init__(self, meta: Mapping[str, Any] | None, train: TrainSection) -> None:
        """`meta`: what `state_dict` gave when the checkpoint was made that the run goes on from."""
        known = meta or {"step": 0, "seconds": 0.0, "loss": math.nan, "eval_loss": None, "num_coarse": 0}
        self.num_done = self.first_step = int(known["step"])
        self.loss, self.eval_loss, self.num_coarse = known["loss"], known["eval_loss"], known["num_coarse"]
        self.eval_step: int | None = known.get("eval_step")
        self.last: Mapping[str, Any] = {}
        """The line of metrics.jsonl of the last step that this process made."""
        self._train, self._before_s, self._begun = train, known["seconds"], time.monotonic()

    def step_made(self, fields: Mapping[str, Any], *, is_coarse: bool) -> None:
        """Count a step."""
        self.num_done, self.loss, self.last = self.num_done + 1, fields["loss"], fields
        self.num_coarse += is_coarse

    def evaluated(self, loss: float) -> None:
        """Note an evaluation after the last step."""
        self.eval_step, self.eval_loss = self.num_done, loss

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint needs of it, for JSON."""
        return {
            "step": self.num_done,
            "seconds": self.elapsed_s,
            "loss": self.loss,
            "eval_loss": self.eval_loss,
            "eval_step": self.eval_step,
            "num_coarse": self.num_coarse,
        }

    @property
    def elapsed_s(self) -> float:
        """Seconds since the first step of the run began, but for those when no process of it trained."""
        return self._before_s + time.monotonic() - self._begun

    @property
    def is_late(self) -> bool:
        """True where the time of the run is over, of which one step is made in any case."""
        limit = self._train.max_seconds
        return self.num_done > 0 and limit is not None and self.elapsed_s >= limit

    @property
    def eta_s(self) -> float | None:
        """How many seconds the steps still take: by their number or the time limit, whichever ends first."""
        ends = [] if self._train.max_seconds is None else [self._train.max_seconds - self.elapsed_s]
        if self._train.steps is not None:
            a_step = (self.elapsed_s - self._before_s) / (self.num_done - self.first_step)
            ends.append((self._train.steps - self.num_done) * a_step)
        return max(0.0, min(ends)) if ends else None
