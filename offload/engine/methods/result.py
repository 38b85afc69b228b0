"""What a step gives, and what of it makes its update again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from offload.engine.gradients.noise import GradientNoise
from offload.errors import ConfigError
from offload.telemetry.timeline import LaneTime


class ZerothOrderRecord(NamedTuple):
    """What a step by forward passes alone has measured. With the weights from before it, the step follows from that:
    `engine.replay` takes these.
    """

    step: int
    """Its number, counted from 1."""
    seed: int
    """Of its directions."""
    slopes: tuple[float, ...]
    """How steep the loss is along each of them: MeZO's projected gradients. None for a step that was skipped."""
    lr: float | None = None
    """Its learning rate; None for the engine's."""
    losses: tuple[tuple[float, float], ...] = ()
    """On both sides of the weights, along each direction. A replay does not ask for them."""
    rule: str = ""
    """Of the rule that made it its `mark`, without which a replay would be another run; empty where nobody knows."""
    frozen: tuple[str, ...] = ()
    """The names of parameters that were trained at first and were frozen in this step."""

    def fields(self) -> dict[str, Any]:
        """Return what a record of the step has of it: numbers for one direction, lists for several."""
        plus, minus = ([pair[side] for pair in self.losses] for side in (0, 1))
        lists = {"projected_grad": list(self.slopes), "loss_plus": plus, "loss_minus": minus}
        shown = {name: values[0] if len(values) == 1 else values for name, values in lists.items()}
        frozen = {"frozen": list(self.frozen)} if self.frozen else {}
        return {"seed": self.seed, "lr": self.lr, **shown, "rule": self.rule, **frozen}

    @classmethod
    def of(cls, record: Any) -> ZerothOrderRecord:
        """Return what a record says: one of these, the first three or more of its fields, or a line of a run's
        metrics.jsonl, which has neither seed nor slopes where the step was skipped. Raises ConfigError.
        """
        told = record
        try:
            if isinstance(record, Mapping):
                skipped = "seed" not in record and not math.isfinite(_number(record.get("loss")))
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
                f"a record is {told!r}; a step is replayed from (step, seed, slopes) in finite numbers, from what "
                "engine.step returned as `measured`, or from a line of metrics.jsonl."
            ) from error


def _number(value: Any) -> float:
    """Return a number of a log, in which those that are not finite are null."""
    return math.nan if value is None else float(value)


@dataclass(frozen=True)
class StepResult:
    """What a step gives."""

    loss: torch.Tensor
    """0-dim fp32 CPU tensor; NaN in an own loop whose losses `engine.backward` was not given."""
    grad_norm: float
    """The norm of the gradients before clipping; without gradients the root mean square of the slopes that were
    measured.
    """
    tokens: int | None
    """The targets: labels that are not ignored, of a causal model after the shift, or all numbers of a regression.
    Without labels the rows of the batch; with a loss_fn and nothing but tensors [rows, ...] the elements of the first.
    None in own loops."""
    skipped: bool
    """Whether the update was skipped for a gradient that is not finite."""
    corrected: int = 0
    """How many regions speculative clipping had updated with another coefficient than the true one."""
    coarse: bool = False
    """One of them was too far off for the correction to be as exact as docs/reference/numerics.md says."""
    seconds: float = 0.0
    """Of the step on this thread."""
    lanes: Mapping[str, LaneTime] = field(default_factory=dict)
    """How long each lane was busy in it, and how long compute waited for it."""
    noise: GradientNoise | None = None
    """With `noise_scale`: how the gradients of micro-batches and ranks scatter; None where it is not known exactly."""
    measured: ZerothOrderRecord | None = None
    """Of a step without gradients: what it measured, from which its update follows. None where it was skipped."""
