"""The planes of a region's states: flat arrays with an element for each weight, or for each block of weights. Which
there are is decided by the precision and by the update rule, which hands its own down.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from offload.errors import ConfigError
from offload.layout.codecs import EXACT, Codec

MASTER = ("weights", "low")
"""What the master weights are made of; `low` only where they are split."""
CODES = "codes"
"""What travels of trained weights in place of them: records that the update makes of the master weights."""
STALE = "shown"
"""The weights of a step earlier, which travel while an update makes the next ones beside a pass."""
CUT_FROM = {"parameters": 3, "sums": 2, "gradients": 2, "optimizer": 1}
"""The kinds of states, each with the ZeRO stage from which on it is cut; `sums`: gradients of several passes, that are
summed over replicas once, after the last."""
OF_A_REPLICA = ("parameters", "sums")
"""The kinds of which each replica has all, where replicas share out the others."""
PARAMETER_ALIGNMENT = 128
"""Elements. A parameter starts on a 256-byte border in bf16 and a 512-byte border in fp32, as GPU kernels like it, and
where a block begins: none lies across two parameters.
"""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""In which the device uses weights; those in fp16 are never trained."""
PAGE_BYTES = 4096
"""A page, and a block of any disk."""


@dataclass(frozen=True)
class Plane:
    """One of a region's flat arrays."""

    name: str
    """The name of the plane, which no other plane of the region has."""
    dtype: torch.dtype
    """The dtype of the elements."""
    kind: str = "optimizer"
    """One of `CUT_FROM`: with which kind of states the plane is placed and cut."""
    block: int = 1
    """How many neighbouring weights have elements together; a divisor of where a parameter starts."""
    width: int = 1
    """How many elements these have."""

    @cached_property
    def label(self) -> str:
        """What it is called in plans, ledgers and reports."""
        of = str(self.dtype).removeprefix("torch.").replace("bfloat16", "bf16")
        is_plain = self.kind != "optimizer" or self.name in MASTER or self.dtype == torch.float32
        return self.name.replace("_", " ") + ("" if is_plain else f" {of}")

    def numel(self, num_weights: int) -> int:
        """Return its elements for so many weights."""
        return -(-num_weights // self.block) * self.width

    def num_bytes(self, num_weights: int) -> int:
        """Return its bytes for so many weights."""
        return self.numel(num_weights) * self.dtype.itemsize

    def disk_bytes(self, num_weights: int) -> int:
        """Return its bytes on disk for so many weights: whole pages."""
        return -(-self.num_bytes(num_weights) // PAGE_BYTES) * PAGE_BYTES

    def cut(self, weights: slice) -> slice:
        """Return the elements of some weights, which begin where a block does."""
        return slice(weights.start // self.block * self.width, self.numel(weights.stop))


@dataclass(frozen=True)
class Factor:
    """A small fp32 array that a rule keeps of each parameter as a whole, in memory wherever the planes are. A parameter
    of more than two dimensions counts as so many matrices of its last two.
    """

    name: str
    """The name of the array, which no plane of the rule has."""
    along: str
    """What the array has an element for: each of the "rows" or "columns" of a matrix, or each of the "elements" of a
    parameter that has neither.
    """

    dtype = torch.float32

    @property
    def label(self) -> str:
        """What it is called in plans, ledgers and reports."""
        return self.name.replace("_", " ")

    def numel(self, shape: Sequence[int]) -> int:
        """Return its elements for a parameter of this shape."""
        if len(shape) < 2:
            return math.prod(shape) if self.along == "elements" else 0
        left_out = {"rows": -1, "columns": -2}.get(self.along)
        if left_out is None:
            return 0
        return math.prod(size for place, size in enumerate(shape, -len(shape)) if place != left_out)


def summed(plane: Plane) -> Plane:
    """Return the plane in which several passes sum gradients up that wait in `plane`."""
    return replace(plane, dtype=torch.float32, kind="sums")


ERROR = Plane("gradient_error", torch.bfloat16)
"""What coded gradients have lacked so far of those that a rank sends to the ranks in its place of other replicas: each
of these ranks has a plane of its own, of the elements that it sums over its replica.
"""


def table(
    compute: str, moments: Sequence[Plane], delays: bool = False, codec: Codec = EXACT, link: Codec = EXACT
) -> tuple[Plane, ...]:
    """Return all planes that there may be of weights used as one of `DTYPES`, with the `moments` of an update rule, in
    the order in which they lie in a record on disk: what is changed together is neighbours, and what is read alone
    comes first. `delays`: updates are made beside a pass, which needs the weights from before.

    `weights` is what travels: the bf16 high half, the fp32 master, or the records of a `codec`; `low` the low half of a
    split master; `gradients` what waits for the norm of one backward pass. With a `link` other than exact, `codes` are
    its records of the master, and travel, while the weights rest where the optimizer's states do.
    """
    used = DTYPES[compute]
    rests, width = codec.at_rest(used)
    coded, link_width = link.at_rest(used)
    made = (
        *([Plane(STALE, used, "parameters")] if delays else ()),
        *([Plane(CODES, coded, "parameters", link.block, link_width)] if link is not EXACT else ()),
        Plane("weights", rests, "parameters" if link is EXACT else "optimizer", codec.block, width),
        Plane("low", torch.int16),
        *moments,
        Plane("gradients", used, "gradients"),
    )
    names = [plane.name for plane in made]
    wrong = [plane.name for plane in moments if names.count(plane.name) > 1 or PARAMETER_ALIGNMENT % plane.block]
    if wrong:
        raise ConfigError(
            f"the update rule has a plane {wrong[0]}, which cannot be: each has a name of its own, beside weights, low "
            f"and gradients, and blocks that {PARAMETER_ALIGNMENT} is a multiple of."
        )
    return made
