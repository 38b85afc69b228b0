"""Where a parameter's values come from: one tensor of a file, or several that are stacked or fused. All are read by
ranges of the flat parameter, so that a rank can read its share alone. Of what the files have in few bits the records
can be read as well.
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

_BLOCK_NUMEL = 1 << 22  # elements of a parameter that are converted, compared or averaged at once


class Source(Protocol):
    """The values of one parameter, in the dtype and shape that it has in the model."""

    dtype: torch.dtype
    shape: Shape

    def read(self, begin: int, end: int) -> torch.Tensor:
        """Return elements `begin` to `end` of the flat parameter, fresh. Raises DiskError."""

    def over(self, again: Again) -> Source:
        """Return the same values out of the same files as somebody else reads them. Raises ConfigError, DiskError."""


Again = Callable[[TensorFile], TensorFile]
"""Returns a file as another reads it."""


@runtime_checkable
class SourceInCodes(Source, Protocol):
    """A parameter that files have in few bits: `read` gives what the codes stand for."""

    codec: Quantized
    """The codec of the files."""

    def records(self, begin: int, end: int) -> torch.Tensor:
        """Return the records of elements `begin`, where a record begins, to `end` of the flat parameter, flat. Raises
        DiskError.
        """


Fill = Callable[[str, nn.Module], Mapping[nn.Parameter, Source] | None]
"""Called with a module and its name just before its parameters are taken: gives them their values, or says where those
of some are to be read.
"""


@dataclass
class Whole:
    """A parameter that is one tensor of a file."""

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
    """A parameter that is one weight in codes."""

    file: TensorInCodes

    @property
    def codec(self) -> Quantized:
        return self.file.codec

    def records(self, begin: int, end: int) -> torch.Tensor:
        return self.file.records(begin, end)


@dataclass
class Held:
    """A parameter whose values are in memory."""

    values: torch.Tensor

    def __post_init__(self) -> None:
        self.dtype, self.shape = self.values.dtype, tuple(self.values.shape)

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self.values.reshape(-1)[begin:end].clone()

    def over(self, again: Again) -> Held:  # noqa: ARG002
        return self


@dataclass
class Grown:
    """A parameter with more rows than its tensor: the others are the mean of those, summed in fp64."""

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
    """A parameter whose rows are tensors of the files, such as a layer's experts: only rows that are asked for are
    read. One of which a part was asked for stays until its end was, since it is read in pieces, one behind the other.
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
    """A parameter whose rows are put together of weights in codes: of the records as of the weights' own rows."""

    codec: Quantized
    _open: Mapping[int, torch.Tensor] = field(default_factory=dict, repr=False, kw_only=True)

    @classmethod
    def of(cls, stacked: Stacked) -> StackedInCodes | None:
        """Return the same parameter in codes; None where its records are not those of its tensors, one behind the
        other.
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
        """Return the records of a row, flat: put together as the weights are, whose rows they stand for."""
        weights = (self.files[key] for key in self.conversion.row_sources(row))
        matrices = (each.matrix() for each in weights if isinstance(each, TensorInCodes))
        return self.conversion.make_row(row, matrices).reshape(-1)


@dataclass
class Fused:
    """A parameter that is made of several tensors, or one of several that are made of a tensor: to read a part is to
    make all of it.
    """

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
    """What was taken out of a weight: the product of two matrices."""

    left: torch.Tensor
    """The scaled B, fp32, [out, rank]."""
    right: torch.Tensor
    """The A, fp32, [rank, in]."""
    transposed: bool
    """True where the weight is [in, out]."""

    def product(self) -> torch.Tensor:
        """Return what was taken out, fp32, in the shape of the weight."""
        product = self.left @ self.right
        return product.T if self.transposed else product

    def out_of(self, weight: torch.Tensor) -> torch.Tensor:
        """Return what is left of a weight, in its dtype: by PEFT's operations, so that the bits are PEFT's."""
        return (weight.to(torch.float32) - self.product()).to(weight.dtype)


@dataclass
class Residual:
    """What is left of a parameter. A range of it is read out of the whole, since parts of a product may have other last
    bits; the whole stays until its end was read.
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
