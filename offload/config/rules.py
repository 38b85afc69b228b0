"""What the command line offers of each update rule. (The rules themselves need torch, which takes seconds to load.)"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

RuleName = Literal["adamw", "lion", "sgd", "adafactor", "lomo", "adalomo", "muon", "mezo"]


@dataclass(frozen=True)
class Offer:
    """A rule as configurations know it."""

    keys: tuple[str, ...]
    """Of the optimizer section: what it has of that which not all rules have."""
    rate: float = 1.0
    """Its default learning rate, in AdamW's."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    """Other defaults than AdamW's, by whole keys."""
    has_gradients: bool = True
    """Whether a step makes a backward."""


# Whose gradients do not wait for the norm would compute twice to clip them.
_UNCLIPPED = {"optimizer.weight_decay": 0.0, "train.max_grad_norm": None}
OFFERS: Mapping[str, Offer] = {
    "adamw": Offer(("betas", "eps", "states")),
    # By its paper (arXiv:2302.06675, section 5) its learning rate is 3 to 10 times less than AdamW's, and its weight
    # decay as many times more.
    "lion": Offer(("betas", "states"), 0.1, {"optimizer.betas": (0.9, 0.99), "optimizer.weight_decay": 0.1}),
    "sgd": Offer(("momentum",)),
    "adafactor": Offer(("beta2_decay", "d"), 10.0, {"optimizer.weight_decay": 0.0}),
    "lomo": Offer(("clip_value",), 100.0, _UNCLIPPED),
    "adalomo": Offer(("beta2_decay", "d"), 10.0, _UNCLIPPED),
    "muon": Offer(
        ("betas", "eps", "momentum", "nesterov", "ns_steps", "adjust_lr_fn"), 1.0, {"optimizer.weight_decay": 0.1}
    ),
    # Its steps are noisier the wider the model is: its authors (arXiv:2305.17333) take 1e-7 to 1e-6 for large models.
    "mezo": Offer(
        ("eps", "num_perturbations", "layer_fraction", "magnitude_quantile", "master"),
        0.05,
        {**_UNCLIPPED, "optimizer.eps": 1e-3},
        has_gradients=False,
    ),
}
