"""Flat regions: parameter layout in flat arrays (ZeRO, arXiv:1910.02054, section 5). Pure functions from shapes to
offsets.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import accumulate, groupby, islice, pairwise
from typing import NamedTuple

import torch

from offload.layout.codecs import EXACT, LEAST_NUMEL, Codec
from offload.layout.planes import CODES, DTYPES, MASTER, STALE, Factor, Plane

SHARD_MULTIPLE = 2048
"""Elements. A shard of a 2-byte plane then fills whole pages."""

SCRATCH_BYTES = 32 << 20
"""Maximum device memory per rank for gradient pieces during their reduction."""


@dataclass(frozen=True)
class ParameterInfo:
    """One model parameter. Tied names count once."""

    index: int
    """Position in the torch parameter order."""
    name: str
    """First parameter name in the model."""
    shape: tuple[int, ...]
    """Parameter shape."""
    trainable: bool
    """True for a trainable parameter."""
    compute: str
    """Dtype on the device, a key in `DTYPES`."""
    bf16_source: bool
    """True if the model file has bf16 values. A frozen parameter then needs no low half."""
    lr_scale: float = 1.0
    """Factor on the learning rate."""
    weight_decay: float = 0.0
    """Weight decay."""
    rule: int = 0
    """Update rule index in the optimizer's `parts`."""
    codec: Codec = EXACT
    """Storage format for a frozen parameter. Trainable parameters are stored as `EXACT`."""
    link: Codec = EXACT
    """Copy format for a trainable parameter. A frozen parameter is copied in the storage format."""
    by_expert: bool = False
    """True for a stack of experts: one matrix or vector per element of the first dimension."""
    companion: str = ""
    """Beginning of the names of the companion with this parameter; empty: the trained model."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def is_vector(self) -> bool:
        """True for a vector, or one vector per expert, such as the biases of experts."""
        return len(self.shape) < 2 + self.by_expert

    @property
    def can_be_quantized(self) -> bool:
        """True for matrices worth a quantized format. Vectors and small parameters stay exact."""
        return not self.is_vector and self.numel >= LEAST_NUMEL  # others have few bytes, or suffer most

    @property
    def is_quantized(self) -> bool:
        """True if the weights are stored quantized."""
        return self.codec.decodes


class Piece(NamedTuple):
    """Contiguous elements of one parameter inside a region (flat storage for parameters updated together).

    Most parameters are one piece; a layer cut into row blocks and a stack of streamed experts have several.
    """

    parameter: int
    """Parameter index in the model."""
    begin: int
    """First element in the flat parameter."""
    shape: tuple[int, ...]
    """Shape of these elements in the model."""

    @classmethod
    def whole(cls, info: ParameterInfo) -> Piece:
        """Return a piece with all parameter elements."""
        return cls(info.index, 0, info.shape)

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        """End element in the flat parameter (exclusive)."""
        return self.begin + self.numel


@dataclass(frozen=True, eq=False)
class Region:
    """Flat buffer with parameter pieces that are copied and updated together. Pieces with equal learning-rate factor
    and weight decay are neighbours, so one kernel call serves them.
    """

    index: int
    """Region index."""
    name: str
    """Name in plans, errors and timelines: the unit names."""
    compute: str
    """Weight dtype on the device, a key in `DTYPES`."""
    trainable: bool
    """True for trainable parameters."""
    has_low: bool
    """True if the weights have a separate plane `low`. Both together are fp32 weights."""
    pieces: tuple[Piece, ...]
    """Parameter pieces in buffer order."""
    offsets: tuple[int, ...]
    """Start element for each piece. A piece that begins inside a quantization block of the parameter begins at the
    same element of a block here: a block over the border of two pieces is stored with both.
    """
    numel: int
    """Elements in the buffer, with the padding between pieces."""
    units: tuple[str, ...]
    """Names of all units with these parameters; more than one for tied weights."""
    table: tuple[Plane, ...]
    """All possible planes. The property `planes` has the existing ones."""
    rule: int = 0
    """Update rule index."""
    factors: tuple[Factor, ...] = ()
    """Factors stored by the update rule for each whole parameter."""
    by_matrix: bool = False
    """True if the update rule needs whole parameters. No rank range and no tile then splits a parameter."""
    codec: Codec = EXACT
    """Storage format for the weights."""
    link: Codec = EXACT
    """Copy format for the weights, if they are stored as `EXACT`."""

    @cached_property
    def kind(self) -> object:
        """The same object for all regions that differ only in their names and in the parameters of their pieces."""
        shapes = tuple(piece.shape for piece in self.pieces)
        layout = shapes, self.offsets, self.numel, len(self.units)
        storage = self.compute, self.trainable, self.has_low, self.table, self.codec, self.link
        return _kind(layout, storage, self.rule, self.factors, self.by_matrix)

    @cached_property
    def parameters(self) -> tuple[int, ...]:
        """Parameter index for each piece."""
        return tuple(piece.parameter for piece in self.pieces)

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        """Elements per piece."""
        return tuple(piece.numel for piece in self.pieces)

    @cached_property
    def dtype(self) -> torch.dtype:
        """Weight dtype in use."""
        return DTYPES[self.compute]

    @property
    def is_short(self) -> bool:
        """True if weights and gradients have 16 bits."""
        return self.compute != "fp32"

    @cached_property
    def planes(self) -> tuple[Plane, ...]:
        """Existing planes: all for a trainable region, the master weights for a frozen one."""
        present = [p for p in self.table if self.has_low or p.name != "low"]
        # A frozen region is never updated: no moments, no gradients.
        return tuple(p for p in present if self.trainable or p.name in MASTER)

    @cached_property
    def states(self) -> tuple[Plane, ...]:
        """Persistent planes: all except gradients."""
        return tuple(plane for plane in self.planes if plane.state != "gradients")

    @cached_property
    def by_name(self) -> Mapping[str, Plane]:
        """All possible planes by name."""
        return {plane.name: plane for plane in self.table}

    def plane(self, name: str) -> Plane:
        """Return the plane `name` from the table."""
        return self.by_name[name]

    @cached_property
    def weight_bytes(self) -> int:
        """Weight bytes on the device, in the dtype of use."""
        return self.dtype.itemsize * self.numel

    @property
    def travels(self) -> Codec:
        """Weight format in copies."""
        if CODES in self.by_name:
            return self.link
        return self.codec

    @cached_property
    def is_stored_as_used(self) -> bool:
        """True if copies have the format in use: no decoding after a copy."""
        return not self.travels.decodes

    @cached_property
    def travelling(self) -> Plane:
        """Plane for H2D copies and for the gather among ranks."""
        if CODES in self.by_name:
            return self.plane(CODES)
        return self.plane("weights")

    @cached_property
    def travelling_bytes(self) -> int:
        """Bytes in the travelling plane."""
        return self.travelling.num_bytes(self.numel)

    def stored_view(self, weights: torch.Tensor) -> torch.Tensor:
        """Return the copy target for stored data: the end of the device weights `weights`, so records need no extra
        memory. Exact weights fill all of `weights`.
        """
        return weights.view(torch.uint8)[-self.travelling_bytes :].view(self.travelling.dtype)

    def factor_spans(self, factor: Factor) -> list[slice]:
        """Return the slice for each piece, by position, in the factor array."""
        # Without padding: factors are small, and only torch reads them.
        ends = list(accumulate((factor.numel(piece.shape) for piece in self.pieces), initial=0))
        return [slice(begin, end) for begin, end in pairwise(ends)]

    def factor_numel(self, factor: Factor) -> int:
        """Return the number of elements in the factor array."""
        return sum(factor.numel(piece.shape) for piece in self.pieces)

    def update_bytes(self, numel: int) -> int:
        """Return the bytes read and written in states for an update with `numel` elements, without the gradient.

        The delayed weights (`STALE`) replace the weights as source, so they add nothing. Codes are only written, after
        a second read of the master weights.
        """
        num_bytes = self._update_bytes.get(numel)
        if num_bytes is None:
            sizes = {plane.name: plane.num_bytes(numel) for plane in self.states if plane.name != STALE}
            num_bytes = 2 * sum(sizes.values())  # read and written, each plane once
            if CODES in sizes:
                num_bytes += sum(sizes.get(name, 0) for name in MASTER) - sizes[CODES]
            self._update_bytes[numel] = num_bytes
        return num_bytes

    @cached_property
    def _update_bytes(self) -> dict[int, int]:
        return {}  # keyed by tile elements; queried in every step


@cache
def _kind(*_properties: Hashable) -> object:
    """Return an object for these properties: quick to compare, unlike them."""
    return object()


def alike(
    regions: Iterable[Region], by: Callable[[Region], Hashable] = lambda _region: None
) -> list[tuple[Region, int]]:
    """Return a region of each kind, with the number of such regions: experts are many and alike.

    by: keeps regions with different results apart.
    """
    regions = list(regions)
    keys = [(region.kind, by(region)) for region in regions]
    examples = dict(zip(keys, regions, strict=True))
    return [(examples[key], count) for key, count in Counter(keys).items()]


def without_repeats(
    regions: Iterable[Region], most: int, by: Callable[[Region], Hashable] = lambda _region: None
) -> list[Region]:
    """Return the regions with at most `most` neighbours of one kind: a window of `most` regions sees no more of them.

    by: as in `alike`.
    """
    runs = groupby(regions, key=lambda region: (region.kind, by(region)))
    return [region for _, run in runs for region in islice(run, most)]


def align(size: int, multiple: int) -> int:
    """Round `size` up to a multiple of `multiple`."""
    return -(-size // multiple) * multiple
