"""Sources for parameter values: one file tensor, or several, stacked or fused.

All are read by flat element ranges, so a rank reads only its shard. For quantized files the records can be read too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch

from offload.app.hf.names import Conversion, Shape
from offload.app.hf.quantized import QuantizedTensor
from offload.files.safetensors_file import TensorFile
from offload.files.sources import ReopenFile, Source
from offload.layout.codecs import QuantizedCodec

_BLOCK_NUMEL = 1 << 22  # elements converted, compared or averaged at once


@dataclass
class TensorSource:
    """A parameter stored as one file tensor."""

    file: TensorFile | QuantizedTensor
    key: str
    shape: Shape
    dtype: torch.dtype

    def read(self, begin: int, end: int) -> torch.Tensor:
        if self.file.entries[self.key].dtype == self.dtype:
            return self.file.read(self.key, begin, end)
        values = torch.empty(end - begin, dtype=self.dtype)
        # In blocks: a conversion at once would hold both dtypes.
        for low, high in _blocks(end - begin, 1):
            values[low:high] = self.file.read(self.key, begin + low, begin + high)
        return values

    def reopen_files(self, reopen: ReopenFile) -> TensorSource:
        return replace(self, file=_reopen_file(self.file, reopen))


@dataclass
class QuantizedTensorSource(TensorSource):
    """A parameter stored as one quantized weight."""

    file: QuantizedTensor

    @property
    def codec(self) -> QuantizedCodec:
        return self.file.codec

    def records(self, begin: int, end: int) -> torch.Tensor:
        return self.file.records(begin, end)


@dataclass
class MemorySource:
    """A parameter with values in memory."""

    values: torch.Tensor

    def __post_init__(self) -> None:
        self.dtype = self.values.dtype
        self.shape = tuple(self.values.shape)

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self.values.reshape(-1)[begin:end].clone()  # the caller may change the values

    def reopen_files(self, reopen: ReopenFile) -> MemorySource:  # noqa: ARG002
        return self


@dataclass
class GrownSource:
    """A parameter with more rows than its file tensor.

    Each added row is the mean of the stored rows, summed in fp64.
    """

    stored: TensorSource
    shape: Shape
    _mean: torch.Tensor | None = None

    def __post_init__(self) -> None:
        self.dtype = self.stored.dtype

    def read(self, begin: int, end: int) -> torch.Tensor:
        known = math.prod(self.stored.shape)
        parts = []
        if begin < known:
            parts.append(self.stored.read(begin, min(end, known)))
        if end > known:
            if self._mean is None:  # a pass over all stored rows, once
                rows = self.stored.shape[0]
                width = known // rows
                total = torch.zeros(width, dtype=torch.float64)
                for low, high in _blocks(rows, width):
                    total += self.stored.read(low * width, high * width).view(-1, width).sum(0, dtype=torch.float64)
                self._mean = (total / rows).float().to(self.dtype)
            mean = self._mean
            begin = max(begin, known)
            first, last = begin // len(mean), -(-end // len(mean))
            repeated = mean.repeat(last - first)
            parts.append(repeated[begin - first * len(mean) : end - first * len(mean)])
        if len(parts) > 1:
            return torch.cat(parts)
        return parts[0]

    def reopen_files(self, reopen: ReopenFile) -> GrownSource:
        return replace(self, stored=self.stored.reopen_files(reopen))


@dataclass
class StackedSource:
    """A parameter stacked from file tensors, for example experts. Only requested rows are read.

    A partly read row stays cached until a read reaches its end, because a row is read in consecutive pieces.
    """

    files: Mapping[str, TensorFile | QuantizedTensor]
    conversion: Conversion
    shape: Shape
    dtype: torch.dtype
    _partial_rows: Mapping[int, torch.Tensor] = field(default_factory=dict, repr=False, kw_only=True)

    def read(self, begin: int, end: int) -> torch.Tensor:
        values = torch.empty(end - begin, dtype=self.dtype)
        width = math.prod(self.shape[1:])
        if not width:  # rows without elements
            return values
        for row in range(begin // width, -(-end // width)):
            if (value := self._partial_rows.get(row)) is None:
                tensors = (_tensor(self.files[key], key, self.dtype) for key in self.conversion.row_sources(row))
                value = self.conversion.make_row(row, tensors).reshape(-1)
            low, high = max(begin, row * width), min(end, (row + 1) * width)
            values[low - begin : high - begin] = value[low - row * width : high - row * width]
            # Kept only if a part is left: an expert is large.
            self._partial_rows = {}
            if high < (row + 1) * width:
                self._partial_rows = {row: value}
        return values

    def reopen_files(self, reopen: ReopenFile) -> StackedSource:
        return replace(self, files=_reopen_sources(self.files, self.conversion, reopen))


@dataclass
class QuantizedStackedSource(StackedSource):
    """A parameter stacked from quantized weights. Records are combined the same way as weight rows."""

    codec: QuantizedCodec
    _partial_records: Mapping[int, torch.Tensor] = field(default_factory=dict, repr=False, kw_only=True)

    @classmethod
    def of(cls, stacked: StackedSource) -> QuantizedStackedSource | None:
        """Return the quantized version of a stacked parameter.

        None: the tensors have no common codec, or their records do not simply follow each other.
        """
        weights = [stacked.files[key] for key in stacked.conversion.sources]
        (codec, *others) = {each.codec if isinstance(each, QuantizedTensor) else None for each in weights}
        if codec is None or others or not stacked.conversion.joins_rows:
            return None
        sizes = (math.prod(entry.shape) for each in weights for entry in each.entries.values())
        # A record across two experts would mix them.
        is_whole = not any(size % codec.block for size in sizes)
        if is_whole:
            return cls(stacked.files, stacked.conversion, stacked.shape, stacked.dtype, codec)
        return None

    def records(self, begin: int, end: int) -> torch.Tensor:
        width, pieces = math.prod(self.shape[1:]), []
        for row in range(begin // width, -(-end // width)):
            if (records := self._partial_records.get(row)) is None:
                weights = (self.files[key] for key in self.conversion.row_sources(row))
                matrices = (each.matrix() for each in weights if isinstance(each, QuantizedTensor))
                records = self.conversion.make_row(row, matrices).reshape(-1)
            low, high = (min(max(each - row * width, 0), width) // self.codec.block for each in (begin, end))
            pieces.append(records[low * self.codec.record_bytes : high * self.codec.record_bytes])
            self._partial_records = {}
            if high * self.codec.block < width:
                self._partial_records = {row: records}
        return torch.cat(pieces)


@dataclass
class FusedSource:
    """A parameter fused from several tensors, or one of several made from a tensor. Any read converts everything."""

    files: Mapping[str, TensorFile | QuantizedTensor]
    conversion: Conversion
    name: str
    shape: Shape
    dtype: torch.dtype

    def convert(self) -> dict[str, torch.Tensor]:
        return self.conversion.run(_tensor(self.files[key], key, self.dtype) for key in self.conversion.sources)

    def read(self, begin: int, end: int) -> torch.Tensor:
        return self.convert()[self.name].reshape(-1)[begin:end].clone()  # without the rest in memory

    def reopen_files(self, reopen: ReopenFile) -> FusedSource:
        return replace(self, files=_reopen_sources(self.files, self.conversion, reopen))


def _reopen_file(file: TensorFile | QuantizedTensor, reopen: ReopenFile) -> TensorFile | QuantizedTensor:
    if isinstance(file, QuantizedTensor):
        return file.reopen_files(reopen)
    return reopen(file)


@dataclass(frozen=True)
class RemovedProduct:
    """The initial product of a LoRA adapter, B A, subtracted from the base weight: the model starts unchanged."""

    left: torch.Tensor
    """Scaled B, fp32 [out, rank]."""
    right: torch.Tensor
    """A, fp32 [rank, in]."""
    transposed: bool
    """True if the weight is [in, out]."""

    def product(self) -> torch.Tensor:
        """Return the product, fp32, in the weight shape."""
        product = self.left @ self.right
        if self.transposed:
            return product.T
        return product

    def subtract_from(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight minus the product, in the weight dtype, with PEFT's operations for equal bits."""
        return (weight.to(torch.float32) - self.product()).to(weight.dtype)


@dataclass
class ResidualSource:
    """A parameter minus the removed product.

    A range is cut from the whole result, because a partial product may differ in the last bits. The result stays cached
    until a read reaches the end.
    """

    base: Source
    removed: RemovedProduct
    _cache: torch.Tensor | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        self.shape = self.base.shape
        self.dtype = self.base.dtype

    def read(self, begin: int, end: int) -> torch.Tensor:
        numel = math.prod(self.shape)
        values = self._cache
        self._cache = None
        if values is None:
            values = self.removed.subtract_from(self.base.read(0, numel).view(self.shape)).reshape(-1)
        if end < numel:
            self._cache = values
        return values[begin:end].clone()

    def reopen_files(self, reopen: ReopenFile) -> ResidualSource:
        return ResidualSource(self.base.reopen_files(reopen), self.removed)


def _reopen_sources(
    files: Mapping[str, TensorFile | QuantizedTensor], conversion: Conversion, reopen: ReopenFile
) -> Mapping[str, TensorFile | QuantizedTensor]:
    return {key: _reopen_file(files[key], reopen) for key in conversion.sources}


def _tensor(file: TensorFile | QuantizedTensor, key: str, dtype: torch.dtype) -> torch.Tensor:
    return file.read(key).view(file.entries[key].shape).to(dtype)


def _blocks(rows: int, width: int) -> Iterator[tuple[int, int]]:
    step = max(1, _BLOCK_NUMEL // max(1, width))
    return ((begin, min(begin + step, rows)) for begin in range(0, rows, step))


def are_equal(one: Source, other: Source) -> bool:
    numel = math.prod(one.shape)
    return one.shape == other.shape and all(
        torch.equal(one.read(begin, end), other.read(begin, end)) for begin, end in _blocks(numel, 1)
    )
