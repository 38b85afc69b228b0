"""Codecs for model files with quantized weights. File codes and scales are stored and copied unchanged, and decoding
equals the quantization library's dequantization to the bit. Pure functions.

The decoded weights do not depend on the compute dtype: decoding first rounds to the model dtype in the folder, then to
the compute dtype on the device.
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

from offload.errors import ConfigError
from offload.extras.quant import device_kernels, kernels
from offload.extras.quant.codecs import Nf4Codec, nf4_levels
from offload.layout import codecs
from offload.layout.codecs import EncodedPieces, QuantizedCodec


class FileCodec(QuantizedCodec, ABC):
    """Codec with records taken from model files. Weights cannot be encoded."""

    rounds: tuple[torch.dtype, ...]
    """16-bit dtypes for successive rounding after decoding, before use."""

    @property
    @abstractmethod
    def fields(self) -> tuple[int, ...]:
        """Bytes per record part, in order."""

    @cached_property
    def record_bytes(self) -> int:  # type: ignore[override]
        return -(-sum(self.fields) // 4) * 4  # views as fp32 need a multiple

    @property
    def unsaved_reason(self) -> str:
        return f"the model's files store frozen weights as {self.name}"

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return flat records, joined from parts uint8 [n, bytes] and padded."""
        padding = parts[0].new_zeros(len(parts[0]), self.record_bytes - sum(self.fields))
        return torch.cat([*parts, padding], 1).view(-1)

    def reader(self, name: str, source: Any, memory: Any) -> Any:  # noqa: ARG002
        if getattr(source, "codec", None) != self:
            raise ConfigError(
                f"{name} is quantized in the model's files ({self.name}), but its values were changed after loading, "
                "for example by an adapter whose initialization changes the base weights, and changed values cannot be "
                "stored quantized. Leave the parameter unchanged (fill= of the same model), or leave out quantized=."
            )
        return source.records

    def input_format(self, dtype: torch.dtype) -> tuple[torch.dtype, int, int]:  # noqa: ARG002
        return torch.uint8, self.block, self.record_bytes

    def encoded(self, pieces: Iterable[Tensor]) -> EncodedPieces:
        end = 0
        for piece in pieces:
            begin, end = end, end + piece.numel() // self.record_bytes * self.block
            yield begin, end, piece

    def put(self, decoded: Tensor, weights: Tensor, spare: Tensor) -> None:
        """Round decoded fp32 weights in place and copy them to `weights`. `spare`: 2 bytes per weight.

        If only the compute dtype is bf16, rounding follows the split of masters: ties away from zero.
        """
        # The last rounding is the copy itself where the dtypes are equal.
        is_last = self.rounds[-1:] == (weights.dtype,)
        for dtype in self.rounds[: len(self.rounds) - is_last]:
            rounded = spare[: 2 * decoded.numel()].view(dtype).view(decoded.shape)
            decoded.copy_(rounded.copy_(decoded))
        if weights.dtype == torch.bfloat16 and not is_last:
            # In the bits, as masters are split: a halfway case goes away from zero.
            decoded.view(torch.int32).add_(0x8000).bitwise_and_(-0x10000)
        weights.copy_(decoded)


class NumberFormat(ABC):
    """Number format for codes, before multiplication with scales."""

    label: str
    """Format name in messages."""
    bits: int
    tables: Tensor
    """Lookup table for decoding, uint8 [n]."""

    def __repr__(self) -> str:
        return type(self).__name__

    @abstractmethod
    def put(self, codes: Tensor, out: Tensor, tables: Tensor, spare: Tensor) -> None:
        """Decode codes, uint8 [n, bytes], to `out`, fp32 [n, codes]. `spare`: 2 bytes per code."""


@dataclass(frozen=True)
class ByteNumbers(NumberFormat):
    """One number per byte: E4M3 (fp8 with a 4-bit exponent, arXiv:2209.05433) or an integer."""

    label: str
    dtype: torch.dtype
    offset: int = 0
    """Integer added before storage."""

    bits, tables = 8, torch.empty(0, dtype=torch.uint8, device="cpu")

    def put(self, codes: Tensor, out: Tensor, tables: Tensor, spare: Tensor) -> None:  # noqa: ARG002
        out.copy_(codes.view(self.dtype))
        if self.offset:
            out.sub_(self.offset)


class OffsetInt4(NumberFormat):
    """Integers from -8 to 7, stored with 8 added, two per byte with the first in the lower half."""

    label = "int4"
    bits = 4
    tables = torch.empty(0, dtype=torch.uint8, device="cpu")

    def put(self, codes: Tensor, out: Tensor, tables: Tensor, spare: Tensor) -> None:  # noqa: ARG002
        # Into given memory: a temporary on a device would be outside of the plan.
        half = spare[: codes.numel()].view(codes.shape)
        out[:, 0::2].copy_(torch.bitwise_and(codes, 15, out=half))
        out[:, 1::2].copy_(torch.bitwise_right_shift(codes, 4, out=half))
        out.sub_(8)


class LevelTable(NumberFormat):
    """Table with 16 numbers, fp32 [16], two codes per byte. `first_is_low`: the first code is the lower half."""

    label, bits = "levels", 4

    def __init__(self, levels: Tensor, *, first_is_low: bool) -> None:
        byte: Any = torch.arange(256, device="cpu")
        halves = byte >> 4, byte & 15
        if first_is_low:
            halves = byte & 15, byte >> 4
        self.tables = torch.stack([levels[half] for half in halves], 1).view(torch.uint8).view(-1)

    def put(self, codes: Tensor, out: Tensor, tables: Tensor, spare: Tensor) -> None:
        # Both numbers of a byte are one integer of eight bytes: twice as fast as rows of two floats.
        places = spare[: 4 * codes.numel()].view(torch.int32)
        places.view(codes.shape).copy_(codes)
        torch.index_select(tables.view(torch.int64), 0, places, out=out.view(torch.int64).view(-1))


FLOAT8, INT8 = ByteNumbers("fp8", torch.float8_e4m3fn), ByteNumbers("int8", torch.int8)
PACKED8, INT4 = ByteNumbers("int8", torch.uint8, offset=128), OffsetInt4()
NF4 = LevelTable(nf4_levels(), first_is_low=False)
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP4 = LevelTable(torch.tensor([*_FP4, *(-size for size in _FP4)], dtype=torch.float32, device="cpu"), first_is_low=True)
"""fp4 with a 2-bit exponent (E2M1, OCP Microscaling Formats 1.0, section 5.3.3)."""


@dataclass(frozen=True)
class TiledCodec(FileCodec):
    """Quantized matrix with one scale per tile. A record holds the scales and then the codes for `rows` neighbouring
    rows; missing rows in the last record are 0.
    """

    label: str
    """Format name in messages."""
    numbers: NumberFormat
    rows: int
    """Rows per record, a multiple of the tile rows."""
    width: int
    """Matrix columns, an even number."""
    tile: tuple[int, int]
    """Rows and columns per scale. The last tile in a row may have fewer columns."""
    scale: torch.dtype
    rounds: tuple[torch.dtype, ...] = ()

    @property
    def name(self) -> str:  # type: ignore[override]
        return self.label

    @cached_property
    def block(self) -> int:  # type: ignore[override]
        return self.rows * self.width

    @property
    def between_bytes(self) -> int:  # type: ignore[override]
        """Intermediate bytes per weight during decoding: fp32 numbers, twice, and table positions or half bytes."""
        return 16 if self.numbers.bits == 8 else 20

    @cached_property
    def scales(self) -> tuple[int, int]:
        """Scale rows and columns per record."""
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
        for piece_records, weights in pieces:
            scales, codes = piece_records[:, : self.fields[0]], piece_records[:, self.fields[0] : sum(self.fields)]
            values, spare = _room(memory, weights.numel())
            self.numbers.put(codes, values.view(len(piece_records), -1), tables, spare)
            self._multiply(values, scales.view(self.scale).unflatten(1, self.scales).unsqueeze(2))
            self.put(values, weights, spare)

    def _multiply(self, values: Tensor, scales: Tensor) -> None:
        """Multiply flat record values in place by scales [records, rows, 1, columns]."""
        # Full tiles in one product. A narrower last tile needs another.
        whole = self.width // self.tile[1]
        values = values.view(len(scales), self.scales[0], self.tile[0], self.width)
        begin = whole * self.tile[1]
        values[..., :begin].unflatten(-1, (whole, self.tile[1])).mul_(scales[..., :whole, None])
        if begin < self.width:
            values[..., begin:].mul_(scales[..., whole:])


@dataclass(frozen=True)
class Mxfp4Codec(FileCodec):
    """Stack of fp4 matrices with one shared exponent per 32 neighbours (OCP Microscaling Formats 1.0), stored
    transposed like the gpt-oss experts. A record is one matrix: exponents, then codes, column by column.
    """

    rows: int
    """Matrix rows, a multiple of 32: the quantized column length."""
    columns: int
    rounds: tuple[torch.dtype, ...] = ()

    name, between_bytes = "mxfp4", 1  # the record is copied

    @cached_property
    def block(self) -> int:  # type: ignore[override]
        return self.rows * self.columns

    @cached_property
    def fields(self) -> tuple[int, ...]:
        return self.block // 32, self.block // 2

    @property
    def tables(self) -> Tensor:
        return _mxfp4_tables()

    @property
    def _at_once(self) -> int:
        """Columns decoded at once."""
        return min(self.columns, max(1, codecs.PIECE_NUMEL // self.rows))

    def workspace_bytes(self, numel: int) -> int:
        numel = self._at_once * self.rows
        return self.tables.nbytes + -(-self.record_bytes // 8) * 8 + 6 * numel + numel // 4

    def decode(self, records: Tensor, out: Tensor, workspace: Tensor) -> None:
        parts = [2048, 1024, -(-self.record_bytes // 8) * 8]  # both tables, and a record
        pairs, powers, record_memory, memory = workspace.split([*parts, len(workspace) - sum(parts)])
        # The host would need more time for the transpose than the disk for the read, so files keep their order.
        record = record_memory[: self.record_bytes]
        for stored_record, weights in zip(records.split(self.record_bytes), out.split(self.block), strict=True):
            record.copy_(stored_record)  # a copy: the weights may overwrite the record, and in another order
            exponents, codes = (part.view(self.columns, -1) for part in record[: sum(self.fields)].split(self.fields))
            if torch.float16 not in self.rounds:  # bf16 has all numbers: nothing rounds
                matrix = weights.view(self.rows, self.columns)
                if device_kernels.decode_mxfp4(exponents, codes, matrix):
                    continue
                if kernels.can_decode(out):
                    kernels.decode_mxfp4(exponents, codes, matrix)
                    continue
            for begin in range(0, self.columns, self._at_once):
                columns = slice(begin, min(begin + self._at_once, self.columns))
                num_columns = columns.stop - columns.start
                values, spare = _room(memory, num_columns * self.rows)
                self._put(codes[columns], exponents[columns], values, pairs, powers, memory)
                target = weights.view(self.rows, self.columns)[:, columns]
                self.put(values.view(num_columns, self.rows).T, target, spare)

    def _put(
        self, codes: Tensor, exponents: Tensor, values: Tensor, pairs: Tensor, powers: Tensor, memory: Tensor
    ) -> None:
        """Decode some columns to `values`, fp32."""
        FP4.put(codes, values.view(len(codes), -1), pairs, memory[4 * values.numel() :])
        places, scales = memory[6 * values.numel() :][: exponents.numel() * 8].chunk(2)
        places.view(torch.int32).view(exponents.shape).copy_(exponents)
        torch.index_select(powers.view(torch.float32), 0, places.view(torch.int32), out=scales.view(torch.float32))
        values.view(-1, 32).mul_(scales.view(torch.float32).view(-1, 1))


@dataclass(frozen=True)
class BitsandbytesNf4Codec(FileCodec):
    """`Nf4Codec` with double quantization, in the bitsandbytes file format."""

    rounds: tuple[torch.dtype, ...] = ()

    name, block = "nf4", Nf4Codec.block

    @property
    def fields(self) -> tuple[int, ...]:
        return 8192, 256, 4, 4

    @property
    def tables(self) -> Tensor:
        return _PLAIN.tables

    def workspace_bytes(self, numel: int) -> int:
        return _PLAIN.workspace_bytes(numel) + 6 * min(numel, codecs.PIECE_NUMEL)

    def decode(self, records: Tensor, out: Tensor, workspace: Tensor) -> None:
        # The decoder rounds once at most: to the dtype of its target.
        if self.rounds == (out.dtype,) or (not self.rounds and out.dtype == torch.float32):
            _PLAIN.decode(records, out, workspace)
            return
        used, step = _PLAIN.workspace_bytes(out.numel()), codecs.PIECE_NUMEL // self.block
        for record, weights in zip(records.split(step * self.record_bytes), out.split(codecs.PIECE_NUMEL), strict=True):
            values, spare = _room(workspace[used:], weights.numel())
            _PLAIN.decode(record, values, workspace[:used])
            self.put(values, weights, spare)


_PLAIN = Nf4Codec()


def rounding(*dtypes: torch.dtype) -> tuple[torch.dtype, ...]:
    """Return the 16-bit dtypes among successive `dtypes`, without repetitions: each one rounds."""
    roundings: list[torch.dtype] = []
    for dtype in dtypes:
        if dtype.itemsize == 2 and roundings[-1:] != [dtype]:
            roundings.append(dtype)
    return tuple(roundings)


def _room(memory: Tensor, numel: int) -> Iterator[Tensor]:
    """Return two views of `memory`: fp32 [numel] and uint8 [2 * numel]."""
    return iter((memory[: 4 * numel].view(torch.float32), memory[4 * numel : 6 * numel]))


@cache
def _mxfp4_tables() -> Tensor:
    """Return the decoding tables as bytes: both numbers for each code byte, doubled, and all powers of two, halved,
    fp32 [256]. The factors keep all powers finite.
    """
    powers = torch.tensor([2.0 ** (exponent - 128) for exponent in range(256)], dtype=torch.float64, device="cpu")
    return torch.cat([FP4.tables.view(torch.float32).mul(2), powers.float()]).view(torch.uint8)
