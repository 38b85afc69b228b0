"""Matrices cast to FP8 (arXiv:2209.05433): by torch operations, or on a GPU by kernels compiled at run time
(`csrc/device_fp8.inl`) with the same bits.

A kernel reads a row from device memory once, and finds the scale on the way: three bytes for each element in bf16,
against thirteen of the torch operations. One scale for a matrix takes a second read. Graphs of torch.compile keep the
operations, which are fused there.
"""

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from offload.native.run_time_kernels import THREADS, Launch, Program, RunTimeKernels

LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
LEAST_AMAX = 1e-12
"""Lower limit for the largest absolute value, as in torchao: a row of zeros has a scale, too."""
_MANTISSA_BITS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
_ELEMENTS = {torch.float32: "float", torch.bfloat16: "uint16_t"}
_EACH, _ALIGNMENT = 8, 16  # elements and bytes of a load
_PART_ROWS = 256
"""Rows cast at once by operations into given memory."""
KERNELS = RunTimeKernels(
    "Matrices on {device} are cast to FP8 by torch operations (four times the bytes), because their own kernels do not "
    "work there ({reason}). Results are equal."
)


class ScaledMatrix(NamedTuple):
    """A matrix in FP8."""

    values: Tensor
    """float8 [rows, columns], contiguous."""
    scale: Tensor
    """Factor for the values, fp32 [rows, 1], or [1, 1] for the whole matrix."""


def to_fp8(
    matrix: Tensor, *, by_row: bool, dtype: torch.dtype = torch.float8_e4m3fn, out: ScaledMatrix | None = None
) -> ScaledMatrix:
    """Cast a matrix [rows, columns] to FP8. The largest absolute value (of each row) becomes the largest FP8 number.

    `out`: memory for the result (None: new memory).
    """
    # A graph of torch.compile fuses the operations, and a kernel of ours would break the graph.
    if not torch.compiler.is_compiling() and _can_run(matrix):
        launches = _find_launches(matrix, by_row, dtype)
        if launches is not None:
            return _launch(launches, matrix.contiguous(), by_row, dtype, out)
    if matrix.is_meta:
        return _in_plan(matrix, by_row, dtype)
    return _by_operations(matrix, by_row, dtype, out)


def scale_of(amax: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Return the scale of a matrix or of its rows, given the largest absolute value in fp32."""
    # Divided by a tensor, because GPUs multiply by the reciprocal of a number, with other last bits.
    return amax.clamp(min=LEAST_AMAX) / torch.full_like(amax, LARGEST[dtype])


def _by_operations(matrix: Tensor, by_row: bool, dtype: torch.dtype, out: ScaledMatrix | None = None) -> ScaledMatrix:
    dims: int | tuple[int, int] = (0, 1)
    if by_row:
        dims = 1
    amax = torch.linalg.vector_norm(matrix, math.inf, dim=dims, keepdim=True).float()
    scale = scale_of(amax, dtype)

    def divide(rows: Tensor, divisor: Tensor) -> Tensor:
        return (rows / divisor).to(dtype, memory_format=torch.contiguous_format)

    if out is None:
        return ScaledMatrix(divide(matrix, scale), scale)
    out.scale.copy_(scale)
    # In parts: the quotients are in fp32, and memory that is given has no room for four bytes an element.
    whole = out.values, matrix, scale.expand(len(matrix), 1)
    for values, rows, divisor in zip(*(each.split(_PART_ROWS) for each in whole), strict=True):
        values.copy_(divide(rows, divisor))
    return out


def _in_plan(matrix: Tensor, by_row: bool, dtype: torch.dtype) -> ScaledMatrix:
    """Cast on `meta`, with the bytes that the kernels read and write, and the memory of the torch operations."""
    if by_row:  # the cast finds them itself
        amax = matrix.new_empty(len(matrix), 1)
    else:
        amax = torch.linalg.vector_norm(matrix, math.inf, keepdim=True)
    # Allocated for the count alone: the operations hold a quotient in fp32.
    quotient = matrix.new_empty(matrix.shape, dtype=torch.float32)
    values = matrix.to(dtype, memory_format=torch.contiguous_format)
    del quotient
    return ScaledMatrix(values, amax.float())


# -- kernels -------------------------------------------------------------------------------------------------

_Launches = tuple[Launch, Launch | None]
"""The cast, and the largest absolute values of rows for a matrix with one scale."""


def program(name: str, matrix_dtype: torch.dtype, dtype: torch.dtype, by_row: bool) -> Program:
    """Return the program of the kernel `cast_rows` or `find_amax_of_rows`."""
    values = ""
    if name == "cast_rows":
        values = f", {_MANTISSA_BITS[dtype]}, {str(by_row).lower()}"
    return Program.of('#include "device_fp8.inl"\n', f"{name}<{_ELEMENTS[matrix_dtype]}{values}>")


def _can_run(matrix: Tensor) -> bool:
    """True for a matrix of plain numbers on a device with kernels, in a form that they read."""
    if matrix.is_cpu or matrix.is_meta or type(matrix) not in (Tensor, nn.Parameter):  # subclasses may lack memory
        return False
    # A thread loads eight elements at once, so rows begin at 16 bytes.
    is_fit = matrix.dtype in _ELEMENTS and matrix.shape[1] % _EACH == 0 and matrix.data_ptr() % _ALIGNMENT == 0
    return is_fit and matrix.numel() > 0 and KERNELS.can_run(matrix.device)


def _find_launches(matrix: Tensor, by_row: bool, dtype: torch.dtype) -> _Launches | None:
    key = matrix.dtype, dtype, by_row
    amax_of_rows = None
    if not by_row:
        amax_of_rows = KERNELS.find(
            matrix.device,
            program("find_amax_of_rows", *key),
            partial(_find_wrong_amax, matrix.device, matrix.dtype),
        )
        if amax_of_rows is None:
            return None
    cast = KERNELS.find(
        matrix.device,
        program("cast_rows", *key),
        lambda launch: _find_wrong_cast((launch, amax_of_rows), matrix.device, *key),
    )
    if cast is None:
        return None
    return cast, amax_of_rows


def _launch(
    launches: _Launches, matrix: Tensor, by_row: bool, dtype: torch.dtype, out: ScaledMatrix | None = None
) -> ScaledMatrix:
    cast, amax_of_rows = launches
    rows, columns = matrix.shape
    if out is None:
        num_scales = 1
        if by_row:
            num_scales = rows
        out = ScaledMatrix(
            torch.empty(matrix.shape, dtype=dtype, device=matrix.device),
            torch.empty(num_scales, 1, dtype=torch.float32, device=matrix.device),
        )
    values, scale = out
    amax = scale  # not read: the cast finds the values of rows itself
    if amax_of_rows is not None:
        amax = _find_amax(amax_of_rows, matrix).amax()
    cast(rows * THREADS, [matrix, amax, values, scale, columns, LEAST_AMAX, LARGEST[dtype]])
    return out


def _find_amax(amax_of_rows: Launch, matrix: Tensor) -> Tensor:
    """Return the largest absolute value of each row, fp32 [rows]."""
    rows, columns = matrix.shape
    amax = torch.empty(rows, dtype=torch.float32, device=matrix.device)
    amax_of_rows(rows * THREADS, [matrix, amax, columns])
    return amax


def _find_wrong_amax(device: torch.device, matrix_dtype: torch.dtype, launch: Launch) -> str:
    matrix = _example(matrix_dtype)
    found = _find_amax(launch, matrix.to(device)).cpu()
    if _are_equal(found, matrix.abs().amax(1).float()):
        return ""
    return "other largest values than on the host"


def _find_wrong_cast(
    launches: _Launches, device: torch.device, matrix_dtype: torch.dtype, dtype: torch.dtype, by_row: bool
) -> str:
    """Cast matrices with ordinary and extreme numbers on the device and on the host, and compare."""
    matrix = _example(matrix_dtype)
    for each in (matrix, matrix[3:4], matrix[5:6]):  # under one scale, the largest rows make the others 0 or NaN
        wanted = _by_operations(each, by_row, dtype)
        found = _launch(launches, each.to(device), by_row, dtype)
        if not all(_are_equal(one.cpu().float(), other.float()) for one, other in zip(found, wanted, strict=True)):
            return f"a matrix in {matrix_dtype} gives other numbers in {dtype} than on the host"
    return ""


def _example(dtype: torch.dtype) -> Tensor:
    """Return rows of many exponents and several largest values, small, large, of zeros, and with infinity and NaN, [12,
    columns], on the host.
    """
    rows, columns = 12, 2 * THREADS * _EACH + _EACH
    # The golden ratio in 32 bits: neighbouring products share no pattern, without a random generator.
    words = torch.arange(rows * columns, dtype=torch.int64, device="cpu").mul_(0x9E3779B1).view(rows, columns)
    fractions = words.bitwise_and(0xFFFFFF).double().div_(1 << 24).add_(1)
    signs = 1 - 2 * words.bitwise_right_shift(16).bitwise_and(1)
    matrix = torch.ldexp(signs * fractions, words.bitwise_right_shift(24).remainder(32).neg())
    for row in range(8):  # with short ratios, which lie between two FP8 numbers
        matrix[row].clamp_(-1 - row / 8, 1 + row / 8)
    matrix[1] *= 1e-30
    matrix[2] *= 1e30
    matrix[8] = 0
    matrix[-2, columns // 2] = math.inf
    matrix[-1, -1] = math.nan
    return matrix.to(dtype)


def _are_equal(found: Tensor, wanted: Tensor) -> bool:
    return torch.allclose(found, wanted, rtol=0, atol=0, equal_nan=True)
