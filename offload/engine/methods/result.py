"""Step result, and the record for a replay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from offload.errors import ConfigError
from offload.lanes.timeline import LaneTime


class ZerothOrderRecord(NamedTuple):
    """Measurements from a step without gradients. With the weights before the step, they determine the update.

    `engine.replay` takes these records.
    """

    step: int
    """Step number, from 1."""
    seed: int
    """Seed for the directions."""
    slopes: tuple[float, ...]
    """Loss slope along each direction: MeZO's projected gradients. Empty for a skipped step."""
    lr: float | None = None
    """Learning rate; None: the engine's."""
    losses: tuple[tuple[float, float], ...] = ()
    """Losses on both sides of the weights, for each direction. Not needed for a replay."""
    rule: str = ""
    """Update rule fingerprint (`mark`): a replay needs the same rule. Empty: unknown."""
    frozen: tuple[str, ...] = ()
    """Parameters trainable at the start and frozen in this step, by name."""

    def fields(self) -> dict[str, Any]:
        """Return the step's log fields: numbers for one direction, lists for several."""
        plus, minus = ([pair[side] for pair in self.losses] for side in (0, 1))
        lists = {"projected_grad": list(self.slopes), "loss_plus": plus, "loss_minus": minus}
        shown = {name: values[0] if len(values) == 1 else values for name, values in lists.items()}
        frozen = {"frozen": list(self.frozen)} if self.frozen else {}
        return {"seed": self.seed, "lr": self.lr, **shown, "rule": self.rule, **frozen}

    @classmethod
    def of(cls, record: Any) -> ZerothOrderRecord:
        """Return a record from a ZerothOrderRecord, a tuple with three or more fields, or a metrics.jsonl line.

        A line for a skipped step has neither seed nor slopes. Raises ConfigError.
        """
        original = record
        try:
            if isinstance(record, Mapping):
                loss = record.get("loss")  # null in a log: not finite
                skipped = "seed" not in record and (loss is None or not math.isfinite(float(loss)))
                seed, slopes = (0, ()) if skipped else (record["seed"], record["projected_grad"])
                rule, frozen = record.get("rule", ""), tuple(record.get("frozen", ()))
                record = cls(record["step"], seed, slopes, record.get("lr"), rule=rule, frozen=frozen)
            step, seed, slopes, lr = (*record, None)[:4]
            slopes = tuple(map(float, slopes if isinstance(slopes, list | tuple) else [slopes]))
            lr = None if lr is None else float(lr)
            if not all(map(math.isfinite, [*slopes, 0.0 if lr is None else lr])):
                raise ValueError("not finite")
            rule, frozen = getattr(record, "rule", ""), getattr(record, "frozen", ())
            return cls(int(step), int(seed), slopes, lr, rule=rule, frozen=frozen)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"the record is {original!r}; it must be (step, seed, slopes) with finite numbers, the `measured` of "
                "an engine.step result, or a line of metrics.jsonl."
            ) from error


@dataclass(frozen=True)
class StepResult:
    """Result from one step."""

    loss: torch.Tensor
    """0-dim fp32 CPU tensor; NaN in an own loop without losses from `engine.backward`."""
    grad_norm: float
    """Gradient norm before clipping; without gradients, the root mean square of the measured slopes."""
    tokens: int | None
    """Number of targets: labels not ignored, shifted for a causal model, or all numbers for a regression.

    Without labels: the batch's rows; with a loss_fn and only tensors [rows, ...]: the first tensor's elements. None in
    own loops.
    """
    skipped: bool
    """True if the update was skipped for non-finite gradients."""
    corrected: int = 0
    """Number of regions speculative clipping first updated with another coefficient."""
    coarse: bool = False
    """True if a correction was less exact than stated in docs/reference/numerics.md."""
    seconds: float = 0.0
    """Step duration on this thread, in seconds."""
    lanes: Mapping[str, LaneTime] = field(default_factory=dict)
    """For each lane: busy time, and time compute waited for the lane."""
    measured: ZerothOrderRecord | None = None
    """Record for a replay, from a step without gradients; None: the step was skipped."""
