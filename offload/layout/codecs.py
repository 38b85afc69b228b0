"""How weights rest and travel: as they are, or as codes in few bits with scales, in records of equal length that are
decoded where the weights are used. Pure.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor

from offload.native import codes as kernels
from offload.native.kernels import join

PIECE_NUMEL = 1 << 20
"""Weights that are decoded at once, a multiple of every codec's block: what they take beside is that of so many."""
LEAST_NUMEL = 4096
"""A parameter of fewer weights rests as it is: codes would save next to nothing of the model."""
_LEAST_SCALE = 1e-38
_GRID = 65535

Stretches = Iterator[tuple[int, int, Tensor]]
"""Elements `begin` to `end` of a parameter, and what rests of them, flat."""


class Codec:
    """Weights rest, travel and are used as they are."""

    name = "exact"
    """As settings call it."""
    block = 1
    """How many neighbouring weights of a parameter have a record together."""

    def __repr__(self) -> str:
        return self.name

    def at_rest(self, dtype: torch.dtype) -> tuple[torch.dtype, int]:
        """Return the dtype of what rests of weights that are used in `dtype`, and the elements of a record."""
        return dtype, 1

    def takes(self, dtype: torch.dtype) -> tuple[torch.dtype, int, int]:
        """Return what `encoded` is given of weights in `dtype`: in what dtype, and of how many how many elements."""
        return dtype, 1, 1

    def encoded(self, pieces: Iterable[Tensor]) -> Stretches:
        """Yield what rests of a parameter whose weights come in pieces, flat, in any float dtype. All pieces but the
        last are of a multiple of `block`.
        """
        end = 0
        for piece in pieces:
            begin, end = end, end + piece.numel()
            yield begin, end, piece

    def read(self, rests: Tensor, place: slice, dtype: torch.dtype) -> Tensor:  # noqa: ARG002
        """Return the weights at a place of what rests, on the CPU, fresh unless they are there, as they are used."""
        return rests[place].cpu()

    def workspace_bytes(self, numel: int) -> int:  # noqa: ARG002
        """Return the bytes that decoding of so many weights takes beside them."""
        return 0


EXACT = Codec()


class Coded(Codec, ABC):
    """A codec whose records are codes and scales: uint8 [`record_bytes`], of `block` weights each."""

    record_bytes: int
    """Bytes of a record."""
    between_bytes: int
    """Bytes a weight that torch's operations write, and read again, on the way from records to weights."""

    def at_rest(self, dtype: torch.dtype) -> tuple[torch.dtype, int]:  # noqa: ARG002
        return torch.uint8, self.record_bytes

    def read(self, rests: Tensor, place: slice, dtype: torch.dtype) -> Tensor:
        first, last = place.start // self.block, -(-place.stop // self.block)
        records = rests[first * self.record_bytes : last * self.record_bytes].cpu()
        found = torch.empty((last - first) * self.block, dtype=dtype, device="cpu")
        self.decode(records, found, self.workspace(found.numel()))
        return found[place.start - first * self.block : place.stop - first * self.block]

    def workspace(self, numel: int) -> Tensor:
        """Return memory of the CPU with which so many weights are decoded."""
        memory = torch.empty(self.workspace_bytes(numel), dtype=torch.uint8, device="cpu")
        memory[: self.tables.nbytes] = self.tables
        return memory

    @property
    @abstractmethod
    def tables(self) -> Tensor:
        """What a workspace begins with, wherever it is: uint8 [n], n a multiple of 512."""

    @abstractmethod
    def decode(self, records: Tensor, out: Tensor, workspace: Tensor) -> None:
        """Decode records, flat, to weights `out`, flat, in any float dtype, on one device. The records may lie at the
        end of `out`: pieces are decoded from the first on, and no record is overwritten before it was read.
        """


class WholeNumbers(Coded):
    """Whole numbers of -`most` to `most` times that part of the largest magnitude of 128 neighbours. A record is the
    codes of the numbers, and then the scale, fp32.
    """

    block = 128
    most: int
    """The largest number."""

    def encoded(self, pieces: Iterable[Tensor]) -> Stretches:
        end = 0
        for piece in pieces:
            begin, end = end, end + piece.numel()
            yield begin, end, self._records(_as_fp32(piece))

    def encode_rest(self, values: Tensor, error: Tensor, out: Tensor) -> None:
        """Make the records `out` of values, fp32 or bf16 [n], and their error, bf16 [n], on one device, and leave in
        `error` what the records lack of both; n is a multiple of `block`. A block of values that are all 0 leaves its
        error, and of one that is not finite the error is 0.
        """
        if kernels.have_kernels(values):
            kernels.encode_rest(self.name, values, error, out)
            return
        step = PIECE_NUMEL // self.block * self.record_bytes
        for piece, rest, records in zip(
            values.split(PIECE_NUMEL), error.split(PIECE_NUMEL), out.split(step), strict=True
        ):
            waits = (piece.view(-1, self.block) == 0).all(1, keepdim=True)
            both = torch.where(waits, 0, (piece.float() + rest.float()).view(-1, self.block))
            records.copy_(self._records(both.view(-1)))
            its = records.view(-1, self.record_bytes)
            stands_for = self._numbers(its) * its[:, -4:].view(torch.float32)
            lacks = torch.where(stands_for.isfinite(), both - stands_for, 0).to(torch.bfloat16)
            rest.copy_(torch.where(waits, rest.view(-1, self.block), lacks).view(-1))

    def workspace_bytes(self, numel: int) -> int:
        return min(numel, PIECE_NUMEL) // self.block * self.record_bytes

    @property
    def tables(self) -> Tensor:
        return torch.empty(0, dtype=torch.uint8, device="cpu")

    def decode(self, records: Tensor, out: Tensor, workspace: Tensor) -> None:
        if kernels.have_kernels(out):
            kernels.decode(self.name, records, out)
            return
        for its, weights in _pieces(self, records, out):
            its = workspace[: its.numel()].view(its.shape).copy_(its)  # over which the weights may lie
            torch.mul(self._numbers(its), its[:, -4:].view(torch.float32), out=weights.view(-1, 128))  # and rounded

    def _records(self, values: Tensor) -> Tensor:
        """Return the records of values, fp32, flat."""
        weights = _in_blocks(values, self.block)
        scale = weights.abs().amax(1, keepdim=True).div_(self.most)
        numbers = weights.div_(scale.clamp(min=_LEAST_SCALE)).round_().clamp_(-self.most, self.most).to(torch.int8)
        return torch.cat([self._codes(numbers), scale.view(torch.uint8)], 1).view(-1)

    @abstractmethod
    def _codes(self, numbers: Tensor) -> Tensor:
        """Return the codes, uint8 [records, bytes], of numbers, int8 [records, 128]."""

    @abstractmethod
    def _numbers(self, records: Tensor) -> Tensor:
        """Return the numbers, int8 [records, 128], of records, uint8 [records, bytes]."""


class Int8(WholeNumbers):
    """Whole numbers of -127 to 127, each a code of a byte."""

    name, record_bytes, between_bytes = "int8", 132, 2
    most = 127

    def encode(self, weights: Tensor, low: Tensor | None, out: Tensor) -> None:
        """Make the records `out` of master weights, flat, on one device; `low`: their low half, if they have one."""
        if kernels.have_kernels(weights):
            kernels.encode_int8(weights, low, out)
            return
        lows = [None] * len(weights.split(PIECE_NUMEL)) if low is None else low.split(PIECE_NUMEL)
        step = PIECE_NUMEL // self.block * self.record_bytes
        for piece, below, records in zip(weights.split(PIECE_NUMEL), lows, out.split(step), strict=True):
            records.copy_(self._records(piece.float() if below is None else join(piece, below)))

    def _records(self, values: Tensor) -> Tensor:
        return kernels.encode_int8(values) if kernels.have_kernels(values) else super()._records(values)

    def _codes(self, numbers: Tensor) -> Tensor:
        return numbers.view(torch.uint8)

    def _numbers(self, records: Tensor) -> Tensor:
        return records[:, :128].view(torch.int8)


class Int4(WholeNumbers):
    """Whole numbers of -7 to 7, whose codes are 8 more, two in a byte with the first one in its upper half."""

    name, record_bytes, between_bytes = "int4", 68, 4
    most = 7

    def _codes(self, numbers: Tensor) -> Tensor:
        codes = (numbers.view(torch.uint8) + 8) & 15
        return codes[:, ::2] << 4 | codes[:, 1::2]

    def _numbers(self, records: Tensor) -> Tensor:
        pairs = records[:, :64]
        return torch.stack([pairs >> 4, pairs & 15], 2).view(-1, 128).view(torch.int8) - 8


class Nf4(Coded):
    """NormalFloat with double quantisation (QLoRA, arXiv:2305.14314, section 3), as bitsandbytes has it: each of 64
    neighbours is one of 16 quantiles of a normal distribution times their largest magnitude; of these magnitudes, less
    the parameter's mean of them, 256 neighbours are numbers of the signed dynamic map of 8 bits (arXiv:2110.02861)
    times the largest of theirs.

    A record is of 16,384 weights: their codes, two in a byte with the first one in its upper half; the 256 codes of
    their magnitudes; the largest of these and the mean of the parameter's, fp32.
    """

    name, block, record_bytes, between_bytes = "nf4", 1 << 14, 8192 + 256 + 8, 12

    def encoded(self, pieces: Iterable[Tensor]) -> Stretches:
        codes, sizes, numel = [], [], 0
        for piece in pieces:
            numel += piece.numel()
            its, most = _levels_of(_as_fp32(piece))
            codes.append(its)
            sizes.append(most)
        of_sizes, most, mean = _sizes_encoded(torch.cat(sizes))
        parts = (
            _in_blocks(torch.cat(codes), 8192),
            of_sizes,
            most.view(torch.uint8),
            mean.view(1, 1).view(torch.uint8).expand(len(most), 4),
        )
        yield 0, numel, torch.cat(parts, 1).view(-1)

    def workspace_bytes(self, numel: int) -> int:
        numel = min(numel, PIECE_NUMEL)
        return self.tables.nbytes + 6 * numel + numel // 8

    @property
    def tables(self) -> Tensor:
        return _nf4_tables()

    def decode(self, records: Tensor, out: Tensor, workspace: Tensor) -> None:
        if kernels.have_kernels(out):
            kernels.decode(self.name, records, out, nf4_levels(), dynamic_map())
            return
        pairs, numbers = workspace[:2048].view(torch.int64), workspace[2048:3072].view(torch.float32)
        memory = workspace[3072:]
        for its, weights in _pieces(self, records, out):
            numel = weights.numel()
            decoded, codes, sizes, of_sizes = (
                part.view(dtype)
                for part, dtype in zip(
                    memory[: 6 * numel + numel // 8].split([4 * numel, 2 * numel, numel // 16, numel // 16]),
                    (torch.float32, torch.int32, torch.float32, torch.int32),
                    strict=True,
                )
            )
            most, mean = its[:, 8448:8452].view(torch.float32), its[:, 8452:].view(torch.float32)
            of_sizes.view(-1, 256).copy_(its[:, 8192:8448])
            torch.index_select(numbers, 0, of_sizes, out=sizes)
            sizes.view(-1, 256).mul_(most).add_(mean)
            codes.view(-1, 8192).copy_(its[:, :8192])
            torch.index_select(pairs, 0, codes, out=decoded.view(torch.int64))
            torch.mul(decoded.view(-1, 64), sizes.view(-1, 1), out=weights.view(-1, 64))  # in fp32, and rounded


def decoded(codec: Codec, weights: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what the device sees of a whole parameter, flat, on the CPU, in the dtype in which it is used."""
    rests = torch.cat([stretch for *_, stretch in codec.encoded(weights.split(PIECE_NUMEL))])
    return codec.read(rests, slice(0, weights.numel()), dtype).to(dtype)


INT8 = Int8()
"""The codec in which trained weights travel that do not travel as they are."""
CODECS: dict[str, Codec] = {codec.name: codec for codec in (EXACT, INT8, Nf4())}
"""The codecs of weights, as settings call them."""
GRADIENT_CODECS: dict[str, Codec] = {codec.name: codec for codec in (EXACT, INT8, Int4())}
"""Those of gradients between replicas."""


def _pieces(codec: Coded, records: Tensor, out: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield records [n, bytes] and the weights that they are decoded to, from the first on."""
    its, step = records.view(-1, codec.record_bytes), PIECE_NUMEL // codec.block
    return zip(its.split(step), out.split(PIECE_NUMEL), strict=True)


def _as_fp32(piece: Tensor) -> Tensor:
    """Return weights in fp32 on the CPU."""
    return piece.cpu().float().contiguous()


def _in_blocks(values: Tensor, block: int) -> Tensor:
    """Return fresh blocks [n, block] of values, flat, floats as fp32; what is missing of the last is 0."""
    values = values.float() if values.is_floating_point() else values
    return torch.nn.functional.pad(values, (0, -values.numel() % block)).view(-1, block).clone()


def _levels_of(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of values, fp32, flat, two in a byte, and the largest magnitudes of their blocks of 64, fp32. A
    last block that is not whole is divided by its own, and the others are multiplied with the inverse.
    """
    if kernels.have_kernels(values):
        return kernels.encode_nf4(values, _borders(nf4_levels()))
    whole = values.numel() // 64 * 64
    most = values[:whole].view(-1, 64).abs().amax(1)
    scaled = (values[:whole].view(-1, 64) * most.clamp(min=_LEAST_SCALE).reciprocal().view(-1, 1)).view(-1)
    if whole < values.numel():
        last = values[whole:].abs().amax().clamp(min=_LEAST_SCALE).view(1)
        most, scaled = torch.cat([most, last]), torch.cat([scaled, values[whole:] / last])
    scaled = torch.nn.functional.pad(scaled.clamp_(-1, 1), (0, values.numel() % 2))
    codes = torch.bucketize(scaled, _borders(nf4_levels()), out_int32=True)
    return codes[::2].bitwise_left_shift_(4).bitwise_or_(codes[1::2]).to(torch.uint8), most


def _sizes_encoded(sizes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the codes of magnitudes, fp32 [n]: uint8 [blocks, 256]; the scales of the blocks, fp32 [blocks, 1]; and
    the mean, which was taken off first. bitsandbytes takes the nearest number of a grid of 65,536 between -1 and 1, on
    a CPU, and of that the nearest of the map; on a GPU that of the magnitude, of which one in 500 is another one.
    """
    mean = _mean(sizes)
    blocks = _in_blocks(sizes - mean, 256)
    most = blocks.abs().amax(1, keepdim=True)
    on_grid = (blocks / most).add_(1).mul_(_GRID / 2).add_(0.5).floor_().mul_(2 / _GRID).sub_(1)
    codes = torch.bucketize(on_grid, _borders(dynamic_map()), out_int32=True).to(torch.uint8)
    return codes.masked_fill_(most == 0, 0), most, mean


def _mean(values: Tensor) -> Tensor:
    """Return the mean of values, fp32 [n], by the sum of one thread: torch shares out rows, and not what is in one."""
    return values.expand(2, -1).mean(1)[0]


@cache
def nf4_levels() -> Tensor:
    """Return the 16 numbers of NormalFloat, fp32 (QLoRA, appendix E)."""
    below = [1.0, 0.6961928009986877, 0.5250730514526367, 0.39491748809814453]
    below += [0.28444138169288635, 0.18477343022823334, 0.09105003625154495]
    above = [0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224]
    above += [0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
    return torch.tensor([*(-size for size in below), 0.0, *above], dtype=torch.float32, device="cpu")


@cache
def dynamic_map() -> Tensor:
    """Return the 256 numbers of the signed dynamic map, fp32: seven levels, each ten times the one before, of 1, 2, 4
    ... 64 numbers at equal distances on either side, and 0 and 1 (arXiv:2110.02861, section 2).
    """
    found = [0.0, 1.0]
    for level in range(7):
        borders = torch.linspace(0.1, 1, (1 << level) + 1, dtype=torch.float32, device="cpu")
        sizes = ((borders[:-1] + borders[1:]) / 2 * 10.0 ** (level - 6)).tolist()
        found += [*sizes, *(-size for size in sizes)]
    return torch.tensor(sorted(found), dtype=torch.float32, device="cpu")


def _borders(numbers: Tensor) -> Tensor:
    """Return what lies between neighbours: a value on a border belongs to the lower one."""
    return (numbers[:-1] + numbers[1:]) / 2


@cache
def _nf4_tables() -> Tensor:
    """Return both numbers that a byte of codes stands for, fp32 [256, 2], and the dynamic map, as bytes."""
    byte: Any = torch.arange(256, device="cpu")
    pairs = torch.stack([nf4_levels()[byte >> 4], nf4_levels()[byte & 15]], 1)
    return torch.cat([pairs.view(-1), dynamic_map()]).view(torch.uint8)
