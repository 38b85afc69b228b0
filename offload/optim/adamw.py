"""The AdamW update rule: what the user sets, and which parameter it applies to how."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from offload.errors import ConfigError, nearest

_GROUP_KEYS = ("lr_scale", "weight_decay")


@dataclass(frozen=True)
class AdamW:
    """Decoupled weight decay Adam (Loshchilov & Hutter, arXiv:1711.05101, algorithm 2), as `torch.optim.AdamW` computes
    it.

    `groups` is a sequence of (regular expression, {"lr_scale": x, "weight_decay": y}); the first expression that
    `re.search` finds in a parameter's name decides, and a key that it leaves out keeps its default. Parameters with
    fewer than two dimensions (biases, norms) are not decayed unless `decay_1d`, or unless their group sets
    `weight_decay`.

    The defaults are torch's. Those of the command line are others: `optimizer.betas` is (0.9, 0.95) there, and the
    learning rate goes by the kind of weights.
    """

    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01
    decay_1d: bool = False
    groups: tuple[tuple[str, Mapping[str, float]], ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "betas", tuple(self.betas))
        object.__setattr__(self, "groups", tuple((pattern, dict(values)) for pattern, values in self.groups))
        if len(self.betas) != 2 or not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ConfigError(f"optimizer.betas is {self.betas}; each of the two lies in [0, 1).")
        for key in ("lr", "eps", "weight_decay"):
            if not getattr(self, key) >= 0.0:
                raise ConfigError(f"optimizer.{key} is {getattr(self, key)}; it cannot be negative.")
        for pattern, values in self.groups:
            try:
                re.compile(pattern)
            except re.error as error:
                raise ConfigError(f"optimizer.groups: {pattern!r} is no regular expression: {error}.") from error
            for key in values:
                if key not in _GROUP_KEYS:
                    raise ConfigError(
                        f"optimizer.groups[{pattern!r}]: unknown key {key!r}{nearest(key, _GROUP_KEYS)}; allowed: "
                        f"lr_scale, weight_decay."
                    )

    def settings(self, name: str, num_dimensions: int) -> tuple[float, float]:
        """Return (learning-rate multiplier, weight decay) of the parameter called `name`."""
        decay = self.weight_decay if num_dimensions >= 2 or self.decay_1d else 0.0
        for pattern, values in self.groups:
            if re.search(pattern, name):
                return values.get("lr_scale", 1.0), values.get("weight_decay", decay)
        return 1.0, decay
