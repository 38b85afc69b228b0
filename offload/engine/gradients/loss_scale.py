"""Loss scales: a factor on the loss keeps small gradients above the range of fp16 (Micikevicius et al.,
arXiv:1710.03740). The update divides by the factor.
"""

from __future__ import annotations

from collections.abc import Mapping

from offload.doors import Door
from offload.errors import ConfigError, NonFiniteError

FIRST = 2.0**16
"""Scale of the first step. This and the numbers below are the rule of `torch.amp.GradScaler`. All scales are powers of
two, so that neither the factor nor the division rounds.
"""
GROWTH = 2.0
BACKOFF = 0.5
INTERVAL = 2000
"""Steps with finite gradients before a growth."""
_LEAST = 2.0**-14
_MOST = 2.0**127


class LossScale:
    """No scale: the gradients are those of the loss. Base class of all scales.

    `value`: factor on the loss in the next backward. `skips`: steps with non-finite gradients are skipped.
    """

    value = 1.0
    skips = False

    def adjust(self, is_finite: bool) -> None:
        """Choose the next value after a step. `is_finite`: all gradients of all ranks were finite."""

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint, JSON."""
        return {}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Take over the state from a checkpoint; other keys are ignored."""

    def check_own_loop(self) -> None:
        """Raise ConfigError if a loop with its own calls of `loss.backward()` would train without the scale."""


class DynamicScale(LossScale):
    """Halves the scale after a step with non-finite gradients, and doubles it after 2000 other steps."""

    skips = True

    def __init__(self) -> None:
        self.value = FIRST
        self._num_finite = 0
        """Steps since the last change."""

    def adjust(self, is_finite: bool) -> None:
        """Choose the next value after a step. Raises NonFiniteError if no scale helps."""
        if not is_finite:
            self.value *= BACKOFF
            self._num_finite = 0
            if self.value < _LEAST:
                raise NonFiniteError(
                    f"the gradients are not finite in fp16 with any loss scale, down to {self.value:g}: a weight or an "
                    "activation may be too large for fp16. Compute in bf16 or fp32 (--train.precision), or lower "
                    "--optimizer.lr and resume from an earlier checkpoint."
                )
            return
        self._num_finite += 1
        if self._num_finite == INTERVAL:
            self.value = min(self.value * GROWTH, _MOST)
            self._num_finite = 0

    def state_dict(self) -> dict[str, float]:
        return {"loss_scale": self.value, "finite_steps": self._num_finite}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        self.value = float(state.get("loss_scale", FIRST))
        self._num_finite = int(state.get("finite_steps", 0))

    def check_own_loop(self) -> None:
        raise ConfigError(
            "precision is fp16, and a training loop of your own calls loss.backward() without the loss scale that fp16 "
            "needs: call engine.step(batch), or compute in fp32 or bf16 (precision='fp32')."
        )


LOSS_SCALES: Door[type[LossScale]] = Door("loss scale", {"fp32": LossScale, "bf16": LossScale, "fp16": DynamicScale})
"""Loss scales by compute dtype."""
