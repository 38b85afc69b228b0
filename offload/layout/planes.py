"""Planes: flat arrays over a region, with one element per weight or per weight block. Precision and update rule decide
the planes of a region; the update rule passes its own planes as `moments`.
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
"""Planes for master weights. `low` exists only for split masters."""
WHOLE_MASTER = "master"
"""Name in plans for the plane `low` with whole fp32 weights."""
CODES = "codes"
"""Quantized trainable weights for copies: records made from the master weights by the update."""
STALE = "shown"
"""Weights from the previous step, for copies while an update computes the next weights during a pass."""
CUT_FROM = {"parameters": 3, "sums": 2, "gradients": 2, "optimizer": 1}
"""State kinds, with the lowest ZeRO stage that partitions them. `sums`: gradients accumulated over several passes and
reduced over replicas once, after the last pass.
"""
OF_A_REPLICA = ("parameters", "sums")
"""State kinds with a complete copy per replica, even where replicas share the other states."""
PARAMETER_ALIGNMENT = 128
"""Elements. A parameter starts at a 256-byte border in bf16 and a 512-byte border in fp32, for fast GPU kernels, and at
a block start, so no block spans two parameters.
"""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
"""Dtypes for weights on the device."""
_LOWS = {"bf16": torch.int16, "fp16": torch.float32}
"""Dtypes of the plane `low` beside such weights, see `offload.native.kernels.split`."""
PAGE_BYTES = 4096
"""Page size in bytes, and a block size valid for any disk."""


@dataclass(frozen=True)
class Plane:
    """Flat array over a region."""

    name: str
    """Unique name within the region."""
    dtype: torch.dtype
    """Element dtype."""
    state: str = "optimizer"
    """State kind, a key in `CUT_FROM`: defines placement and partitioning."""
    block: int = 1
    """Neighbouring weights with common elements. Must divide `PARAMETER_ALIGNMENT`."""
    width: int = 1
    """Elements per block."""

    @cached_property
    def label(self) -> str:
        """Name in plans, ledgers and reports."""
        of = str(self.dtype).removeprefix("torch.").replace("bfloat16", "bf16")
        name = self.name.replace("_", " ")
        if self.name == "low" and self.dtype == torch.float32:  # beside fp16
            name = WHOLE_MASTER
        # The dtype tells moments of two precisions apart, in a run with both.
        if self.state == "optimizer" and self.name not in MASTER and self.dtype != torch.float32:
            name += f" {of}"
        return name

    def numel(self, num_weights: int) -> int:
        """Return the number of elements for `num_weights`."""
        return -(-num_weights // self.block) * self.width

    def num_bytes(self, num_weights: int) -> int:
        """Return the bytes for `num_weights`."""
        return self.numel(num_weights) * self.dtype.itemsize

    def disk_bytes(self, num_weights: int) -> int:
        """Return the bytes on disk for `num_weights`, in whole pages."""
        return -(-self.num_bytes(num_weights) // PAGE_BYTES) * PAGE_BYTES

    def cut(self, weights: slice) -> slice:
        """Return the elements of all blocks with a weight in the slice `weights`."""
        # Whole blocks on either side: a block with one of the weights is needed.
        return slice(weights.start // self.block * self.width, self.numel(weights.stop))


@dataclass(frozen=True)
class Factor:
    """Small fp32 array per whole parameter, kept by an update rule, always in host or device memory. A parameter with
    more than two dimensions counts as a stack of matrices.
    """

    name: str
    """Array name, different from all plane names in the rule."""
    along: str
    """One element per row ("rows") or column ("columns") of a matrix, or per element ("elements") for a parameter with
    fewer than two dimensions.
    """

    dtype = torch.float32

    @property
    def label(self) -> str:
        """Name in plans, ledgers and reports."""
        return self.name.replace("_", " ")

    def numel(self, shape: Sequence[int]) -> int:
        """Return the number of elements in this plane for a parameter with `shape`."""
        if len(shape) < 2:
            if self.along != "elements":
                return 0
            return math.prod(shape)
        # Dimensions in front count matrices, and each matrix has separate factors.
        left_out = {"rows": -1, "columns": -2}.get(self.along)  # the dimension without elements of its own
        if left_out is None:
            return 0
        return math.prod(size for place, size in enumerate(shape, -len(shape)) if place != left_out)


def summed(plane: Plane) -> Plane:
    """Return the fp32 plane for gradient accumulation over several passes, made from the `gradients` plane."""
    return replace(plane, dtype=torch.float32, state="sums")


ERROR = Plane("gradient_error", torch.bfloat16)
"""Quantization error feedback for gradients between replicas, bf16: the accumulated error in gradients from this rank
to ranks at the same position in other replicas. Every rank has a plane for the elements it reduces over the replica.
"""


def table(
    compute: str, moments: Sequence[Plane], delays: bool = False, codec: Codec = EXACT, link: Codec = EXACT
) -> tuple[Plane, ...]:
    """Return all possible planes for weights with dtype `compute` (a key in `DTYPES`), in record order on disk: planes
    changed together are neighbours, and planes read alone come first.

    `moments` are the update rule's planes. `delays`: updates run during a pass, and the pass needs the previous
    weights. Raises ConfigError for a duplicate name or an invalid block in `moments`.

    `weights` is the plane for copies: the bf16 high half, the fp32 master, a copy of the master in fp16, or `codec`
    records. `low` is the low half of a split master, or the fp32 master beside fp16. `gradients` stores gradients until
    the norm over the backward pass is known. With a `link` other than exact, copies use `codes`, the master weights as
    `link` records, and `weights` is stored with the optimizer states.
    """
    used = DTYPES[compute]
    stored_dtype, width = codec.storage_format(used)
    codes_dtype, link_width = link.storage_format(used)
    planes = []
    if delays:
        planes.append(Plane(STALE, used, "parameters"))
    state = "parameters"
    if link.decodes:
        planes.append(Plane(CODES, codes_dtype, "parameters", link.block, link_width))
        state = "optimizer"  # beside codes, only updates read the weights
    planes += [
        Plane("weights", stored_dtype, state, codec.block, width),
        Plane("low", _LOWS.get(compute, torch.int16)),
        *moments,
        Plane("gradients", used, "gradients"),
    ]
    names = [plane.name for plane in planes]
    # A block over two parameters would mix their moments.
    wrong = [plane.name for plane in moments if names.count(plane.name) > 1 or PARAMETER_ALIGNMENT % plane.block]
    if wrong:
        raise ConfigError(
            f"the update rule has an invalid plane {wrong[0]}: plane names must be unique and differ from weights, low "
            f"and gradients, and plane blocks must divide {PARAMETER_ALIGNMENT}."
        )
    return tuple(planes)
