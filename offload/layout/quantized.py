"""Codecs of weights that a model's folder has in few bits already: what rests and travels are the codes and scales of
the files, and what they are decoded to is the library's own dequantisation, to the bit. Pure.

The weights of such a folder are one model, whatever it is trained in: codes are decoded to the dtype that the folder
gives its model, and only then to the dtype in which the device computes.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor

from offload.layout import codecs
from offload.layout.codecs import Coded, Nf4, Stretches, nf4_levels


class Quantized(Coded, ABC):
    """A codec whose records the files have. There is no way from weights to records."""

    rounds: tuple[torch.dtype, ...]
    """The 16-bit dtypes to which decoded weights are rounded, one after the other, before they are computed with."""

    @property
    @abstractmethod
    def fields(self) -> tuple[int, ...]:
        """The bytes that a record has of each of its parts, in their order."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return records, flat, of what there is of their parts: each uint8 [n, bytes]."""
        padding = parts[0].new_zeros(len(parts[0]), self.record_bytes - sum(self.fields))
        return torch.cat([*parts, padding], 1).view(-1)

    def takes(self, dtype: torch.dtype) -> tuple[torch.dtype, int, int]:  # noqa: ARG002
        return torch.uint8, self.block, self.record_bytes

    def encoded(self, pieces: Iterable[Tensor]) -> Stretches:
        """Yield records, which come in pieces, as they are."""
        end = 0
        for piece in pieces:
            begin, end = end, end + piece.numel() // self.record_bytes * self.block
            yield begin, end, piece

    def put(self, decoded: Tensor, weights: Tensor, spare: Tensor) -> None:
        """Round decoded weights, fp32, in place, and copy them to `weights`; `spare`: 2 bytes for each. What is bf16 in
        compute alone is rounded to it as masters are split, halves away from zero.
        """
        is_last = self.rounds[-1:] == (weights.dtype,)
        for dtype in self.rounds[: len(self.rounds) - is_last]:
            rounded = spare[: 2 * decoded.numel()].view(dtype).view(decoded.shape)
            decoded.copy_(rounded.copy_(decoded))
        if weights.dtype == torch.bfloat16 and not is_last:
            decoded.view(torch.int32).add_(0x8000).bitwise_and_(-0x10000)
        weights.copy_(decoded)


class Numbers(ABC):
    """What codes stand for before they are multiplied with their scales."""

    said: str
    """What people call them."""
    bits: int
    """Of a code."""
    tables: Tensor
    """What the decoding of such codes looks up: uint8 [n]."""

    def __repr__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def put(self, codes: Tensor, out: Tensor, tables: Tensor, spare: Tensor) -> None:
        """Write what codes, uint8 [n, bytes], stand for to `out`, fp32 [n, codes]. `spare`: 2 bytes for each code."""


class Float8(Numbers):
    """fp8 with four bits of exponent (E4M3, arXiv:2209.05433)."""

    said, bits, tables = "fp8", 8, torch.empty(0, dtype=torch.uint8, device="cpu")

    def put(self, codes: Tensor, out: Tensor, tables: Tensor, spare: Tensor) -> None:  # noqa: ARG002
        out.copy_(codes.view(torch.float8_e4m3fn))


class Int8(Numbers):
    """Whole numbers of 8 bits."""

    said, bits, tables = "int8", 8, torch.empty(0, dtype=torch.uint8, device="cpu")

    def put(self, codes: Tensor, out: Tensor, tables: Tensor, spare: Tensor) -> None:  # noqa: ARG002
        out.copy_(codes.view(torch.int8))


class Packed8(Numbers):
    """Whole numbers of -128 to 127, stored with 128 added."""

    said, bits, tables = "int8", 8, torch.empty(0, dtype=torch.uint8, device="cpu")

    def put(self, codes: Tensor, out: Tensor, tables: Tensor, spare: Tensor) -> None:  # noqa: ARG002
        out.copy_(codes).sub_(128)


class Int4(Numbers):
    """Whole numbers of -8 to 7, stored with 8 added, two in a byte, the first one in its lower half."""

    said, bits, tables = "int4", 4, torch.empty(0, dtype=torch.uint8, device="cpu")

    def put(self, codes: Tensor, out: Tensor, tables: Tensor, spare: Tensor) -> None:  # noqa: ARG002
        half = spare[: codes.numel()].view(codes.shape)
        out[:, 0::2].copy_(torch.bitwise_and(codes, 15, out=half))
        out[:, 1::2].copy_(torch.bitwise_right_shift(codes, 4, out=half))
        out.sub_(8)


class Levels(Numbers):
    """One of 16 numbers, fp32 [16], two codes in a byte; `first_is_low`: the first one in its lower half."""

    said, bits = "levels", 4

    def __init__(self, levels: Tensor, *, first_is_low: bool) -> None:
        byte: Any = torch.arange(256, device="cpu")
        halves = (byte & 15, byte >> 4) if first_is_low else (byte >> 4, byte & 15)
        self.tables = torch.stack([levels[half] for half in halves], 1).view(torch.uint8).view(-1)

    def put(self, codes: Tensor, out: Tensor, tables: Tensor, spare: Tensor) -> None:
        places = spare[: 4 * codes.numel()].view(torch.int32)
        places.view(codes.shape).copy_(codes)
        torch.index_select(tables.view(torch.int64), 0, places, out=out.view(torch.int64).view(-1))


FLOAT8, INT8, PACKED8, INT4 = Float8(), Int8(), Packed8(), Int4()
NF4 = Levels(nf4_levels(), first_is_low=False)
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = Levels(torch.tensor([*_FP4, *(-size for size in _FP4)], dtype=torch.float32, device="cpu"), first_is_low=True)
"""fp4 with two bits of exponent (E2M1, OCP Microscaling Formats 1.0, section 5.3.3)."""


@dataclass(frozen=True)
class Grid(Quantized):
    """A matrix in codes, with a scale for each tile of it. A record has the scales, and then the codes, of so many
    neighbouring rows; rows that are missing of the last record are 0.
    """

    said: str
    """What people call the format."""
    numbers: Numbers
    """What codes stand for."""
    rows: int
    """The rows of a record: a multiple of those of a tile."""
    width: int
    """The columns of the matrix, an even number."""
    tile: tuple[int, int]
    """The rows and columns that have a scale together; the last tile of a row may have fewer columns."""
    scale: torch.dtype
    """The dtype of scales."""
    rounds: tuple[torch.dtype, ...] = ()
    """The dtypes to which weights are rounded, as of `Quantized`."""

    @property
    def name(self) -> str:  # type: ignore[override]
        """What people call the format."""
        return self.said

    @cached_property
    def block(self) -> int:  # type: ignore[override]
        """The weights of a record."""
        return self.rows * self.width

    @cached_property
    def record_bytes(self) -> int:  # type: ignore[override]
        """Bytes of a record."""
        return -(-sum(self.fields) // 4) * 4

    @property
    def between_bytes(self) -> int:  # type: ignore[override]
        """Bytes a weight between records and weights: numbers in fp32, twice, and places of a table or halves."""
        return 16 if self.numbers.bits == 8 else 20

    @cached_property
    def scales(self) -> tuple[int, int]:
        """The rows and columns of the scales of a record."""
        return self.rows // self.tile[0], -(-self.width // self.tile[1])

    @cached_property
    def fields(self) -> tuple[int, ...]:
        return math.prod(self.scales) * self.scale.itemsize, self.block * self.numbers.bits // 8

    @property
    def tables(self) -> Tensor:
        return self.numbers.tables

    def workspace_bytes(self, numel: int) -> int:
        return self.tables.nbytes + 6 * self.block * min(-(-numel // self.block), self._at_once)

    @property
    def _at_once(self) -> int:
        return max(1, codecs.PIECE_NUMEL // self.block)

    def decode(self, records: Tensor, out: Tensor, workspace: Tensor) -> None:
        tables, memory = workspace[: self.tables.nbytes], workspace[self.tables.nbytes :]
        step = self._at_once
        pieces = zip(records.view(-1, self.record_bytes).split(step), out.split(step * self.block), strict=True)
        for its, weights in pieces:
            scales, codes = its[:, : self.fields[0]], its[:, self.fields[0] : sum(self.fields)]
            values, spare = _room(memory, weights.numel())
            self.numbers.put(codes, values.view(len(its), -1), tables, spare)
            self._multiply(values, scales.view(self.scale).unflatten(1, self.scales).unsqueeze(2))
            self.put(values, weights, spare)

    def _multiply(self, values: Tensor, scales: Tensor) -> None:
        """Multiply the values of records, flat, in place, with their scales [records, rows, 1, columns]."""
        whole = self.width // self.tile[1]
        values = values.view(len(scales), self.scales[0], self.tile[0], self.width)
        begin = whole * self.tile[1]
        values[..., :begin].unflatten(-1, (whole, self.tile[1])).mul_(scales[..., :whole, None])
        if begin < self.width:
            values[..., begin:].mul_(scales[..., whole:])


@dataclass(frozen=True)
class Mxfp4(Quantized):
    """A stack of matrices in fp4 with a shared exponent for 32 neighbours (OCP Microscaling Formats 1.0), each stored
    the other way round, as gpt-oss has its experts. A record is one matrix: the exponents and the codes of its columns.
    """

    rows: int
    """The rows of a matrix, a multiple of 32: the length of a column in codes."""
    columns: int
    """The columns of a matrix."""
    rounds: tuple[torch.dtype, ...] = ()
    """The dtypes to which weights are rounded, as of `Quantized`."""

    name, between_bytes = "mxfp4", 20

    @cached_property
    def block(self) -> int:  # type: ignore[override]
        """The weights of a record."""
        return self.rows * self.columns

    @cached_property
    def record_bytes(self) -> int:  # type: ignore[override]
        """Bytes of a record."""
        return -(-sum(self.fields) // 4) * 4

    @cached_property
    def fields(self) -> tuple[int, ...]:
        return self.block // 32, self.block // 2

    @property
    def tables(self) -> Tensor:
        return _mxfp4_tables()

    @property
    def _at_once(self) -> int:
        """Columns that are decoded at once."""
        return min(self.columns, max(1, codecs.PIECE_NUMEL // self.rows))

    def workspace_bytes(self, numel: int) -> int:
        numel = self._at_once * self.rows
        return self.tables.nbytes + -(-self.record_bytes // 8) * 8 + 6 * numel + numel // 4

    def decode(self, records: Tensor, out: Tensor, workspace: Tensor) -> None:
        parts = [2048, 1024, -(-self.record_bytes // 8) * 8]
        pairs, powers, kept, memory = workspace.split([*parts, len(workspace) - sum(parts)])
        record = kept[: self.record_bytes]
        for its, weights in zip(records.split(self.record_bytes), out.split(self.block), strict=True):
            record.copy_(its)  # which may lie where the weights are written, and these are not written in its order
            exponents, codes = (part.view(self.columns, -1) for part in record[: sum(self.fields)].split(self.fields))
            for begin in range(0, self.columns, self._at_once):
                here = slice(begin, min(begin + self._at_once, self.columns))
                num_columns = here.stop - here.start
                values, spare = _room(memory, num_columns * self.rows)
                self._put(codes[here], exponents[here], values, pairs, powers, memory)
                target = weights.view(self.rows, self.columns)[:, here]
                self.put(values.view(num_columns, self.rows).T, target, spare)

    def _put(
        self, codes: Tensor, exponents: Tensor, values: Tensor, pairs: Tensor, powers: Tensor, memory: Tensor
    ) -> None:
        """Write the numbers of some columns to `values`, fp32."""
        FP4.put(codes, values.view(len(codes), -1), pairs, memory[4 * values.numel() :])
        places, scales = memory[6 * values.numel() :][: exponents.numel() * 8].chunk(2)
        places.view(torch.int32).view(exponents.shape).copy_(exponents)
        torch.index_select(powers.view(torch.float32), 0, places.view(torch.int32), out=scales.view(torch.float32))
        values.view(-1, 32).mul_(scales.view(torch.float32).view(-1, 1))


@dataclass(frozen=True)
class StoredNf4(Quantized):
    """`Nf4` with double quantisation, as bitsandbytes saves it."""

    rounds: tuple[torch.dtype, ...] = ()
    """The dtypes to which weights are rounded, as of `Quantized`."""

    name, block, record_bytes, between_bytes = "nf4", Nf4.block, Nf4.record_bytes, Nf4.between_bytes

    @property
    def fields(self) -> tuple[int, ...]:
        return 8192, 256, 4, 4

    @property
    def tables(self) -> Tensor:
        return _PLAIN.tables

    def workspace_bytes(self, numel: int) -> int:
        return _PLAIN.workspace_bytes(numel) + 6 * min(numel, codecs.PIECE_NUMEL)

    def decode(self, records: Tensor, out: Tensor, workspace: Tensor) -> None:
        if self.rounds == (out.dtype,) or (not self.rounds and out.dtype == torch.float32):
            _PLAIN.decode(records, out, workspace)
            return
        used, step = _PLAIN.workspace_bytes(out.numel()), codecs.PIECE_NUMEL // self.block
        for its, weights in zip(records.split(step * self.record_bytes), out.split(codecs.PIECE_NUMEL), strict=True):
            values, spare = _room(workspace[used:], weights.numel())
            _PLAIN.decode(its, values, workspace[:used])
            self.put(values, weights, spare)


_PLAIN = Nf4()


def rounding(*dtypes: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return those of some dtypes, in which weights are one after the other, that round them."""
    found: list[torch.dtype] = []
    for dtype in dtypes:
        if dtype.itemsize == 2 and found[-1:] != [dtype]:
            found.append(dtype)
    return tuple(found)


def _room(memory: Tensor, numel: int) -> Iterator[Tensor]:
    """Return room for so many weights, fp32, and two bytes for each."""
    return iter((memory[: 4 * numel].view(torch.float32), memory[4 * numel : 6 * numel]))


@cache
def _mxfp4_tables() -> Tensor:
    """Return twice what bytes of codes stand for, and half of the powers of two that exponents stand for, fp32 [256],
    which are finite, as bytes.
    """
    powers = torch.tensor([2.0 ** (exponent - 128) for exponent in range(256)], dtype=torch.float64, device="cpu")
    return torch.cat([FP4.tables.view(torch.float32).mul(2), powers.float()]).view(torch.uint8)
