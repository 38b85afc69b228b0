"""Settings and defaults for each update rule. The rules themselves need torch, and loading torch takes seconds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RuleName = Literal["adamw", "lion", "sgd", "adafactor", "lomo", "adalomo", "muon", "mezo"]


@dataclass(frozen=True)
class RuleSettings:
    """Settings and default values of one update rule."""

    keys: tuple[str, ...]
    """Keys in the optimizer section supported by this rule but not by every rule."""
    rate: float = 1.0
    """Default learning rate relative to AdamW."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Defaults different from AdamW, by full key ("optimizer.betas")."""
    has_gradients: bool = True
    """True if a step runs a backward pass."""


# Rules without stored gradients would need a second backward to clip by norm, so clipping is off by default.
_UNCLIPPED = {"optimizer.weight_decay": 0.0, "train.max_grad_norm": None}
RULE_SETTINGS: Mapping[str, RuleSettings] = {
    "adamw": RuleSettings(("betas", "eps", "states", "reset_every")),
    # The paper (arXiv:2302.06675, section 5) recommends a learning rate 3 to 10 times smaller than for AdamW, and a
    # weight decay larger by the same factor.
    "lion": RuleSettings(
        ("betas", "states", "reset_every"), 0.1, {"optimizer.betas": (0.9, 0.99), "optimizer.weight_decay": 0.1}
    ),
    "sgd": RuleSettings(("momentum", "reset_every")),
    "adafactor": RuleSettings(("beta2_decay", "d", "reset_every"), 10.0, {"optimizer.weight_decay": 0.0}),
    "lomo": RuleSettings(("clip_value",), 100.0, _UNCLIPPED),
    "adalomo": RuleSettings(("beta2_decay", "d", "reset_every"), 10.0, _UNCLIPPED),
    "muon": RuleSettings(
        ("betas", "eps", "momentum", "nesterov", "ns_steps", "adjust_lr_fn", "reset_every"),
        1.0,
        {"optimizer.weight_decay": 0.1},
    ),
    # Step noise grows with model width: the authors (arXiv:2305.17333) use 1e-7 to 1e-6 for large models.
    "mezo": RuleSettings(
        ("eps", "num_perturbations", "layer_fraction", "magnitude_quantile", "master"),
        0.05,
        {**_UNCLIPPED, "optimizer.eps": 1e-3},
        has_gradients=False,
    ),
}
