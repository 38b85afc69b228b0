"""Integer codecs (int8, int4) and NormalFloat (nf4)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from offload.extras.quant import device_kernels, kernels
from offload.extras.quant.sums import GradientCodec
from offload.layout import codecs
from offload.layout.codecs import EncodedPieces, QuantizedCodec
from offload.native.torch_fallback import widened

_LEAST_SCALE = 1e-38  # a block of zeros has no quotient 0 / 0
_GRID = 65535  # steps between -1 and 1


class IntegerCodec(GradientCodec):
    """Symmetric integer quantization: integers from -`max_integer` to `max_integer`, scaled by the maximum magnitude
    among 128 neighbouring weights. A record has the codes and then the fp32 scale.
    """

    block = 128
    max_integer: int

    def records(self, weights: Tensor) -> Tensor:
        return self._records(_as_fp32(weights))

    def encode_rest(self, values: Tensor, error: Tensor, out: Tensor) -> None:
        if kernels.have_kernels(values):
            kernels.encode_rest(self.name, values, error, out)
            return
        step = codecs.PIECE_NUMEL // self.block * self.record_bytes
        for piece, rest, records in zip(
            values.split(codecs.PIECE_NUMEL), error.split(codecs.PIECE_NUMEL), out.split(step), strict=True
        ):
            # No gradient came: the old error waits for one, in place of a change of weights without a reason.
            is_zero = (piece.view(-1, self.block) == 0).all(1, keepdim=True)
            total = torch.where(is_zero, 0, (piece.float() + rest.float()).view(-1, self.block))
            records.copy_(self._records(total.view(-1)))
            rows = records.view(-1, self.record_bytes)
            approximation = self._numbers(rows) * rows[:, -4:].view(torch.float32)
            # An infinity would stay in the error for good, and spoil all later steps.
            new_error = torch.where(approximation.isfinite(), total - approximation, 0).to(torch.bfloat16)
            rest.copy_(torch.where(is_zero, rest.view(-1, self.block), new_error).view(-1))

    def workspace_bytes(self, numel: int) -> int:
        return copy_bytes(self, numel)

    def decode(self, records: Tensor, out: Tensor, workspace: Tensor) -> None:
        if kernels.can_decode(out):
            kernels.decode(self.name, records, out)
            return
        if device_kernels.decode(self, records, out, workspace):
            return
        for copies, weights in copied_pieces(self, records, out, workspace):
            # rounds to the weight dtype
            torch.mul(self._numbers(copies), copies[:, -4:].view(torch.float32), out=weights.view(-1, 128))

    def _records(self, values: Tensor) -> Tensor:
        """Quantize flat fp32 values into records."""
        weights = in_blocks(values, self.block)
        scale = weights.abs().amax(1, keepdim=True).div_(self.max_integer)
        numbers = (
            weights.div_(scale.clamp(min=_LEAST_SCALE))
            .round_()
            .clamp_(-self.max_integer, self.max_integer)
            .to(torch.int8)
        )
        return torch.cat([self._codes(numbers), scale.view(torch.uint8)], 1).view(-1)

    @abstractmethod
    def _codes(self, numbers: Tensor) -> Tensor:
        """Return codes, uint8 [records, bytes], from integers, int8 [records, 128]."""

    @abstractmethod
    def _numbers(self, records: Tensor) -> Tensor:
        """Return integers, int8 [records, 128], from records, uint8 [records, bytes]."""


class Int8Codec(IntegerCodec):
    """Integers from -127 to 127, one byte each."""

    name, record_bytes = "int8", 132
    max_integer = 127

    def encode(self, weights: Tensor, low: Tensor | None, out: Tensor) -> None:
        if kernels.have_kernels(weights):
            kernels.encode_int8(weights, low, out)
            return
        step = codecs.PIECE_NUMEL // self.block * self.record_bytes
        for number, records in enumerate(out.split(step)):
            part = slice(number * codecs.PIECE_NUMEL, (number + 1) * codecs.PIECE_NUMEL)
            records.copy_(self._records(widened(weights, low, part)))

    def _records(self, values: Tensor) -> Tensor:
        if kernels.have_kernels(values):
            return kernels.encode_int8(values)
        return super()._records(values)

    def _codes(self, numbers: Tensor) -> Tensor:
        return numbers.view(torch.uint8)

    def _numbers(self, records: Tensor) -> Tensor:
        return records[:, :128].view(torch.int8)


class Int4Codec(IntegerCodec):
    """Integers from -7 to 7, stored with 8 added, two per byte with the first in the upper half."""

    name, record_bytes = "int4", 68
    max_integer = 7

    def _codes(self, numbers: Tensor) -> Tensor:
        codes = (numbers.view(torch.uint8) + 8) & 15
        return codes[:, ::2] << 4 | codes[:, 1::2]

    def _numbers(self, records: Tensor) -> Tensor:
        pairs = records[:, :64]
        return torch.stack([pairs >> 4, pairs & 15], 2).view(-1, 128).view(torch.int8) - 8


class Nf4Codec(QuantizedCodec):
    """NormalFloat with double quantization (QLoRA, arXiv:2305.14314, section 3), compatible with bitsandbytes.

    64 neighbouring weights share one scale, their largest magnitude. Each weight is one of 16 normal-distribution
    quantiles times the scale. Scales minus their mean over the parameter are quantized too, in blocks of 256: a number
    from the signed dynamic 8-bit map (arXiv:2110.02861) times the largest magnitude in the block.

    A record holds 16,384 weights: their codes, two per byte with the first in the upper half; 256 scale codes; the
    largest magnitude among the centred scales, and the mean scale, both fp32.
    """

    name = "nf4"
    block = 1 << 14
    record_bytes = 8192 + 256 + 8  # codes, codes of scales, two numbers

    def encoded(self, pieces: Iterable[Tensor]) -> EncodedPieces:
        codes = []
        sizes = []
        numel = 0
        for piece in pieces:
            numel += piece.numel()
            piece_codes, maxima = _encode_levels(_as_fp32(piece))
            codes.append(piece_codes)
            sizes.append(maxima)
        # The mean is over all scales of the parameter, so no record is complete before the last piece.
        of_sizes, maxima, mean = _encode_scales(torch.cat(sizes))
        parts = (
            in_blocks(torch.cat(codes), 8192),
            of_sizes,
            maxima.view(torch.uint8),
            mean.view(1, 1).view(torch.uint8).expand(len(maxima), 4),
        )
        yield 0, numel, torch.cat(parts, 1).view(-1)

    def workspace_bytes(self, numel: int) -> int:
        numel = min(numel, codecs.PIECE_NUMEL)
        return self.tables.nbytes + 6 * numel + numel // 8

    @property
    def tables(self) -> Tensor:
        return _nf4_tables()

    def decode(self, records: Tensor, out: Tensor, workspace: Tensor) -> None:
        if kernels.can_decode(out):
            kernels.decode(self.name, records, out, nf4_levels(), dynamic_map())
            return
        if device_kernels.decode(self, records, out, workspace):
            return
        pairs, numbers = workspace[:2048].view(torch.int64), workspace[2048:3072].view(torch.float32)
        memory = workspace[3072:]
        for piece_records, weights in _pieces(self, records, out):
            numel = weights.numel()
            # Positions as int32: `index_select` takes no bytes.
            decoded, codes, sizes, of_sizes = (
                part.view(dtype)
                for part, dtype in zip(
                    memory[: 6 * numel + numel // 8].split([4 * numel, 2 * numel, numel // 16, numel // 16]),
                    (torch.float32, torch.int32, torch.float32, torch.int32),
                    strict=True,
                )
            )
            maxima, mean = piece_records[:, 8448:8452].view(torch.float32), piece_records[:, 8452:].view(torch.float32)
            of_sizes.view(-1, 256).copy_(piece_records[:, 8192:8448])
            torch.index_select(numbers, 0, of_sizes, out=sizes)
            sizes.view(-1, 256).mul_(maxima).add_(mean)
            codes.view(-1, 8192).copy_(piece_records[:, :8192])
            # Both numbers of a byte as one int64: 0.8 G weights a second on a core, 0.5 G by rows of two floats.
            torch.index_select(pairs, 0, codes, out=decoded.view(torch.int64))
            torch.mul(decoded.view(-1, 64), sizes.view(-1, 1), out=weights.view(-1, 64))  # in fp32, then rounded


INT8 = Int8Codec()
INT4 = Int4Codec()
NF4 = Nf4Codec()


def _pieces(codec: QuantizedCodec, records: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield pairs of records [n, bytes] and the weights to decode them into, in order."""
    rows, step = records.view(-1, codec.record_bytes), codecs.PIECE_NUMEL // codec.block
    return zip(rows.split(step), out.split(codecs.PIECE_NUMEL), strict=True)


def copy_bytes(codec: QuantizedCodec, numel: int) -> int:
    """Return the workspace bytes for `copied_pieces`."""
    return min(numel, codecs.PIECE_NUMEL) // codec.block * codec.record_bytes


def copied_pieces(
    codec: QuantizedCodec, records: Tensor, out: Tensor, workspace: Tensor
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield `_pieces` with the records copied into the workspace, because the weights may overwrite them."""
    for piece, weights in _pieces(codec, records, out):
        yield workspace[: piece.numel()].view(piece.shape).copy_(piece), weights


def _as_fp32(piece: Tensor) -> Tensor:
    """Return weights as fp32 on the CPU."""
    return piece.cpu().float().contiguous()


def in_blocks(values: Tensor, block: int) -> Tensor:
    """Copy flat values into blocks [n, block], padded with zeros. Floats become fp32."""
    if values.is_floating_point():
        values = values.float()
    return torch.nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block).clone()


def _encode_levels(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return NF4 codes for flat fp32 values, two per byte, and the block scales, fp32. A partial last block is divided
    by the scale; full blocks are multiplied by the inverse scale.
    """
    if kernels.have_kernels(values):
        return kernels.encode_nf4(values, _borders(nf4_levels()))
    num_full = values.numel() // 64 * 64
    scales = values[:num_full].view(-1, 64).abs().amax(1)
    # Product or quotient as in bitsandbytes: the last bits differ, and with them a code at a border.
    scaled = (values[:num_full].view(-1, 64) * scales.clamp(min=_LEAST_SCALE).reciprocal().view(-1, 1)).view(-1)
    if num_full < values.numel():
        last = values[num_full:].abs().amax().clamp(min=_LEAST_SCALE).view(1)
        scales, scaled = torch.cat([scales, last]), torch.cat([scaled, values[num_full:] / last])
    scaled = torch.nn.functional.pad(scaled.clamp_(-1, 1), (0, values.numel() % 2))
    codes = torch.bucketize(scaled, _borders(nf4_levels()), out_int32=True)
    return codes[::2].bitwise_left_shift_(4).bitwise_or_(codes[1::2]).to(torch.uint8), scales


def _encode_scales(scales: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize `scales`, fp32 [n]. Return codes, uint8 [blocks, 256], block maxima, fp32 [blocks, 1], and the
    mean subtracted before.

    Follows bitsandbytes on a CPU: first round to a grid with 65,536 numbers between -1 and 1, then to the nearest map
    number. bitsandbytes on a GPU rounds to the map directly; one code in 500 differs.
    """
    mean = _mean(scales)
    blocks = in_blocks(scales - mean, 256)
    maxima = blocks.abs().amax(1, keepdim=True)
    on_grid = (blocks / maxima).add_(1).mul_(_GRID / 2).add_(0.5).floor_().mul_(2 / _GRID).sub_(1)
    codes = torch.bucketize(on_grid, _borders(dynamic_map()), out_int32=True).to(torch.uint8)
    # A block without a difference from the mean has index 0 in bitsandbytes, not the index of the number 0.
    return codes.masked_fill_(maxima == 0, 0), maxima, mean


def _mean(values: Tensor) -> Tensor:
    """Return the mean over fp32 [n], summed by one thread: torch splits rows among threads, never one row."""
    return values.expand(2, -1).mean(1)[0]


@cache
def nf4_levels() -> Tensor:
    """Return the 16 NormalFloat numbers, fp32 (QLoRA, appendix E)."""
    below = [1.0, 0.6961928009986877, 0.5250730514526367, 0.39491748809814453]
    below += [0.28444138169288635, 0.18477343022823334, 0.09105003625154495]
    above = [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
    above += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
    return torch.tensor([*(-size for size in below), 0.0, *above], dtype=torch.float32, device="cpu")


@cache
def dynamic_map() -> Tensor:
    """Return the 256 numbers in the signed dynamic map, fp32: 0, 1, and seven levels. Each level is ten times the
    previous one, with 1, 2, 4 ... 64 equidistant numbers per sign (arXiv:2110.02861, section 2).
    """
    levels = [0.0, 1.0]
    for level in range(7):
        borders = torch.linspace(0.1, 1, (1 << level) + 1, dtype=torch.float32, device="cpu")
        sizes = ((borders[:-1] + borders[1:]) / 2 * 10.0 ** (level - 6)).tolist()
        levels += [*sizes, *(-size for size in sizes)]
    return torch.tensor(sorted(levels), dtype=torch.float32, device="cpu")


def _borders(numbers: Tensor) -> Tensor:
    """Return the midpoints between neighbours. A value at a midpoint rounds down."""
    return (numbers[:-1] + numbers[1:]) / 2


@cache
def _nf4_tables() -> Tensor:
    """Return the decoding tables as bytes: both NF4 numbers for each code byte, fp32 [256, 2], and the dynamic map."""
    byte: Any = torch.arange(256, device="cpu")
    pairs = torch.stack([nf4_levels()[byte >> 4], nf4_levels()[byte & 15]], 1)
    return torch.cat([pairs.view(-1), dynamic_map()]).view(torch.uint8)
