"""Sources for parameter values: one file tensor, or several, stacked or fused.

All are read by flat element ranges, so a rank reads only its shard. For quantized files the records can be read too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import torch
from torch import nn

from offload.hf.names import Conversion, Shape
from offload.hf.quantized import TensorInCodes
from offload.hf.safetensors_file import TensorFile
from offload.layout.quantized import Quantized

_BLOCK_NUMEL = 1 << 22  # elements converted, compared or averaged at once


class Source(Protocol):
    """Values for one parameter, in the model dtype and shape."""

    dtype: torch.dtype
    shape: Shape

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return a new tensor with flat elements `begin` to `end`. Raises DiskError."""

    def over(self, again: Again) -> Source:
        """Return the same values from reopened files. Raises ConfigError, DiskError."""


Again = Callable[[TensorFile], TensorFile]
"""Returns the reopened file."""


@runtime_checkable
class SourceInCodes(Source, Protocol):
    """A parameter stored quantized in files. `read` returns dequantized values."""

    codec: Quantized
    """Codec in the files."""

    def records(self, begin: int, end: int) -> torch.Tensor:
        """Return the records for flat elements `begin` to `end`, uint8, flat.

        `begin` must be the start of a record. Raises DiskError.
        """


Fill = Callable[[str, nn.Module], Mapping[nn.Parameter, Source] | None]
"""Called with a name and module just before the parameters are taken. Fills them, or returns sources for some."""


@dataclass
class Whole:
    """A parameter stored as one file tensor."""

    file: TensorFile | TensorInCodes
    key: str
    shape: Shape
    dtype: torch.dtype

    def read(self, begin: int, end: int) -> torch.Tensor:
        if self.file.entries[self.key].dtype == self.dtype:
            return self.file.read(self.key, begin, end)
        found = torch.empty(end - begin, dtype=self.dtype)
        for low, high in _blocks(end - begin, 1):
            found[low:high] = self.file.read(self.key, begin + low, begin + high)
        return found

    def over(self, again: Again) -> Whole:
        return replace(self, file=_file_again(self.file, again))


@dataclass
class WholeInCodes(Whole):
    """A parameter stored as one quantized weight."""

    file: TensorInCodes

    @property
    def codec(self) -> Quantized:
        return self.file.codec

    def records(self, begin: int, end: int) -> torch.Tensor:
        return self.file.records(begin, end)


@dataclass
class Held:
    """A parameter with values in memory."""

    values: torch.Tensor

    def __post_init__(self) -> None:
        self.dtype, self.shape = self.values.dtype, tuple(self.values.shape)

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self.values.reshape(-1)[begin:end].clone()

    def over(self, again: Again) -> Held:  # noqa: ARG002
        return self


@dataclass
class Grown:
    """A parameter with more rows than its file tensor.

    Each added row is the mean of the stored rows, summed in fp64.
    """

    begun: Whole
    shape: Shape
    _mean: torch.Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        return self.begun.dtype

    @dtype.setter
    def dtype(self, dtype: torch.dtype) -> None:
        self.begun.dtype = dtype

    def read(self, begin: int, end: int) -> torch.Tensor:
        known = math.prod(self.begun.shape)
        parts = [self.begun.read(begin, min(end, known))] if begin < known else []
        if end > known:
            mean = self._row()
            begin = max(begin, known)
            first, last = begin // len(mean), -(-end // len(mean))
            rows = mean.repeat(last - first)
            parts.append(rows[begin - first * len(mean) : end - first * len(mean)])
        return torch.cat(parts) if len(parts) > 1 else parts[0]

    def over(self, again: Again) -> Grown:
        return replace(self, begun=self.begun.over(again))

    def _row(self) -> torch.Tensor:
        if self._mean is None:
            rows = self.begun.shape[0]
            width = math.prod(self.begun.shape) // rows
            total = torch.zeros(width, dtype=torch.float64)
            for begin, end in _blocks(rows, width):
                total += self.begun.read(begin * width, end * width).view(-1, width).sum(0, dtype=torch.float64)
            self._mean = (total / rows).float().to(self.dtype)
        return self._mean


@dataclass
class Stacked:
    """A parameter stacked from file tensors, for example experts. Only requested rows are read.

    A partly read row stays cached until a read reaches its end, because a row is read in consecutive pieces.
    """

    files: Mapping[str, TensorFile | TensorInCodes]
    conversion: Conversion
    shape: Shape
    dtype: torch.dtype
    _begun: Mapping[int, torch.Tensor] = field(default_factory=dict, repr=False, kw_only=True)

    def read(self, begin: int, end: int) -> torch.Tensor:
        found = torch.empty(end - begin, dtype=self.dtype)
        width = math.prod(self.shape[1:])
        for row in range(begin // width, -(-end // width)) if width else ():
            begun = self._begun
            value = begun[row] if row in begun else self._make(row)
            low, high = max(begin, row * width), min(end, (row + 1) * width)
            found[low - begin : high - begin] = value[low - row * width : high - row * width]
            self._begun = {row: value} if high < (row + 1) * width else {}
        return found

    def over(self, again: Again) -> Stacked:
        return replace(self, files=_again(self.files, self.conversion, again))

    def _make(self, row: int) -> torch.Tensor:
        tensors = (_tensor(self.files[key], key, self.dtype) for key in self.conversion.row_sources(row))
        return self.conversion.make_row(row, tensors).reshape(-1)


@dataclass
class StackedInCodes(Stacked):
    """A parameter stacked from quantized weights. Records are combined the same way as weight rows."""

    codec: Quantized
    _open: Mapping[int, torch.Tensor] = field(default_factory=dict, repr=False, kw_only=True)

    @classmethod
    def of(cls, stacked: Stacked) -> StackedInCodes | None:
        """Return the quantized version of a stacked parameter.

        None: the tensors have no common codec, or their records do not simply follow each other.
        """
        weights = [stacked.files[key] for key in stacked.conversion.sources]
        (codec, *others) = {each.codec if isinstance(each, TensorInCodes) else None for each in weights}
        if codec is None or others or not stacked.conversion.joins_rows:
            return None
        sizes = (math.prod(entry.shape) for each in weights for entry in each.entries.values())
        is_whole = not any(size % codec.block for size in sizes)
        return cls(stacked.files, stacked.conversion, stacked.shape, stacked.dtype, codec) if is_whole else None

    def records(self, begin: int, end: int) -> torch.Tensor:
        width, found = math.prod(self.shape[1:]), []
        for row in range(begin // width, -(-end // width)):
            records = self._open[row] if row in self._open else self._records_of(row)
            low, high = (min(max(each - row * width, 0), width) // self.codec.block for each in (begin, end))
            found.append(records[low * self.codec.record_bytes : high * self.codec.record_bytes])
            self._open = {row: records} if high * self.codec.block < width else {}
        return torch.cat(found)

    def _records_of(self, row: int) -> torch.Tensor:
        """Return the records for a row, flat, combined like the weights they represent."""
        weights = (self.files[key] for key in self.conversion.row_sources(row))
        matrices = (each.matrix() for each in weights if isinstance(each, TensorInCodes))
        return self.conversion.make_row(row, matrices).reshape(-1)


@dataclass
class Fused:
    """A parameter fused from several tensors, or one of several made from a tensor. Any read converts everything."""

    files: Mapping[str, TensorFile | TensorInCodes]
    conversion: Conversion
    name: str
    shape: Shape
    dtype: torch.dtype

    def convert(self) -> dict[str, torch.Tensor]:
        return self.conversion.run(_tensor(self.files[key], key, self.dtype) for key in self.conversion.sources)

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self.convert()[self.name].reshape(-1)[begin:end].clone()

    def over(self, again: Again) -> Fused:
        return replace(self, files=_again(self.files, self.conversion, again))


def _file_again(file: TensorFile | TensorInCodes, again: Again) -> TensorFile | TensorInCodes:
    return file.over(again) if isinstance(file, TensorInCodes) else again(file)


@dataclass(frozen=True)
class Removed:
    """A product of two matrices subtracted from a weight."""

    left: torch.Tensor
    """Scaled B, fp32 [out, rank]."""
    right: torch.Tensor
    """A, fp32 [rank, in]."""
    transposed: bool
    """True if the weight is [in, out]."""

    def product(self) -> torch.Tensor:
        """Return the product, fp32, in the weight shape."""
        product = self.left @ self.right
        return product.T if self.transposed else product

    def out_of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight minus the product, in the weight dtype, with PEFT's operations for equal bits."""
        return (weight.to(torch.float32) - self.product()).to(weight.dtype)


@dataclass
class Residual:
    """A parameter minus the removed product.

    A range is cut from the whole result, because a partial product may differ in the last bits. The result stays cached
    until a read reaches the end.
    """

    base: Source
    removed: Removed
    _made: torch.Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.shape = self.base.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.base.dtype

    @dtype.setter
    def dtype(self, dtype: torch.dtype) -> None:
        self.base.dtype = dtype

    def read(self, begin: int, end: int) -> torch.Tensor:
        numel = math.prod(self.shape)
        made, self._made = self._made, None
        if made is None:
            made = self.removed.out_of(self.base.read(0, numel).view(self.shape)).reshape(-1)
        if end < numel:
            self._made = made
        return made[begin:end].clone()

    def over(self, again: Again) -> Residual:
        return Residual(self.base.over(again), self.removed)


def _again(
    files: Mapping[str, TensorFile | TensorInCodes], conversion: Conversion, again: Again
) -> Mapping[str, TensorFile | TensorInCodes]:
    return {key: _file_again(files[key], again) for key in conversion.sources}


def _tensor(file: TensorFile | TensorInCodes, key: str, dtype: torch.dtype) -> torch.Tensor:
    return file.read(key).view(file.entries[key].shape).to(dtype)


def _blocks(rows: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, _BLOCK_NUMEL // max(1, width))
    return ((begin, min(begin + step, rows)) for begin in range(0, rows, step))


def are_equal(one: Source, other: Source) -> bool:
    numel = math.prod(one.shape)
    return one.shape == other.shape and all(
        torch.equal(one.read(begin, end), other.read(begin, end)) for begin, end in _blocks(numel, 1)
    )
