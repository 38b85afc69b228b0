"""Record of a step without gradients, for a replay."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from offload.errors import ConfigError


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
        fields: dict[str, Any] = {"seed": self.seed, "lr": self.lr, **shown, "rule": self.rule}
        if self.frozen:
            fields["frozen"] = list(self.frozen)
        return fields

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
                seed = 0
                slopes: Any = ()
                if not skipped:
                    seed, slopes = record["seed"], record["projected_grad"]
                rule, frozen = record.get("rule", ""), tuple(record.get("frozen", ()))
                record = cls(record["step"], seed, slopes, record.get("lr"), rule=rule, frozen=frozen)
            step, seed, slopes, lr = (*record, None)[:4]  # a tuple of three has no learning rate
            if not isinstance(slopes, list | tuple):  # one direction
                slopes = [slopes]
            slopes = tuple(map(float, slopes))
            if lr is not None:
                lr = float(lr)
            if not all(math.isfinite(number) for number in (*slopes, lr or 0.0)):
                raise ValueError("not finite")
            rule, frozen = getattr(record, "rule", ""), getattr(record, "frozen", ())
            return cls(int(step), int(seed), slopes, lr, rule=rule, frozen=frozen)
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError(
                f"the record is {original!r}; it must be (step, seed, slopes) with finite numbers, the `measured` of "
                "an engine.step result, or a line of metrics.jsonl."
            ) from error
