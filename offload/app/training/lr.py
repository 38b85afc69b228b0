"""Learning-rate schedules as pure functions of the step."""

from __future__ import annotations

import math

WSD_DECAY_SHARE = 0.2  # between the 10% and 20% reported as sufficient in arXiv:2405.18392


def learning_rate(step: int, *, base: float, schedule: str, warmup_steps: int, num_steps: int | None) -> float:
    """Return the learning rate for `step` (counted from 0); `num_steps`: total, or None if unknown.

    The rate rises linearly over the first `warmup_steps` and ends at `base`. Afterwards:
    - `constant` stays;
    - `linear` and `cosine` fall to 0, reached one step after the last;
    - `wsd` (warmup, stable, decay; arXiv:2404.06395) stays, then falls linearly over the last fifth.
    Only `constant` works without `num_steps`.
    """
    if step < warmup_steps:
        return base * ((step + 1) / warmup_steps)
    if schedule == "constant":
        return base
    if num_steps is None:
        raise ValueError(f"the schedule {schedule!r} needs the number of steps")
    first = warmup_steps
    if schedule == "wsd":
        first = max(warmup_steps, num_steps - max(1, round(num_steps * WSD_DECAY_SHARE)))
    fraction_done = min(1.0, max(0.0, (step - first) / max(1, num_steps - first)))
    if schedule in ("linear", "wsd"):
        return base * (1.0 - fraction_done)
    if schedule == "cosine":
        return base * 0.5 * (1.0 + math.cos(math.pi * fraction_done))
    raise ValueError(f"no schedule is called {schedule!r}")


def restart_factor(step: int, *, every: int, warmup_steps: int | None) -> float:
    """Return the learning-rate factor for `step` (counted from 0) when training restarts every `every` steps.

    The factor rises from 0 over the first steps of each cycle except the first, as in ReLoRA
    (arXiv:2307.05695, section 3). every: 0 for no restarts. warmup_steps: None for 1/20 cycle, at most 100.
    """
    if warmup_steps is None:
        warmup_steps = min(100, every // 20)
    if not every or step < every or step % every >= warmup_steps:
        return 1.0
    return (step % every + 1) / warmup_steps
