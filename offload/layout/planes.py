"""The planes of a region's states: flat arrays with an element for each weight. Which there are is decided by the
precision and by the update rule, which hands its own down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from offload.errors import ConfigError

MASTER = ("weights", "low")
"""What the master weights are made of; `low` only where they are split."""
CUT_FROM = {"parameters": 3, "gradients": 2, "optimizer": 1}
"""The kinds of states, each with the ZeRO stage from which on it is cut."""


@dataclass(frozen=True)
class Plane:
    """One of a region's arrays, of at least 2 bytes an element, so that a shard is whole pages on disk. `kind`, one of
    `CUT_FROM`, says with what it is placed and cut.
    """

    name: str
    dtype: torch.dtype
    kind: str = "optimizer"

    @property
    def width(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize

    @property
    def cut_from(self) -> int:
        """The ZeRO stage from which on each rank holds its own range alone."""
        return CUT_FROM[self.kind]


def table(compute: str, moments: Sequence[Plane]) -> tuple[Plane, ...]:
    """Return all planes that there may be of weights used as "bf16" or "fp32", with the `moments` of an update rule, in
    the order in which they lie in a record on disk: what is changed together is neighbours, and what is read alone
    comes first.

    `weights` is what travels: the bf16 high half, or the fp32 master; `low` the low half of a split master; `gradients`
    what waits for the norm of one backward pass.
    """
    travels = torch.bfloat16 if compute == "bf16" else torch.float32
    made = (
        Plane("weights", travels, "parameters"),
        Plane("low", torch.int16),
        *moments,
        Plane("gradients", travels, "gradients"),
    )
    names = [plane.name for plane in made]
    wrong = [plane.name for plane in moments if plane.width < 2 or names.count(plane.name) > 1]
    if wrong:
        raise ConfigError(
            f"the update rule has a plane {wrong[0]}, which cannot be: each has a name of its own, beside weights, low "
            "and gradients, and at least 2 bytes an element."
        )
    return made
