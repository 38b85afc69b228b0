"""C++ kernels for quantized weights. `codecs.py` defines records, codes and scales, and has the same operations in
torch, equal to the bit, for other devices and dtypes and for installations without C++.

Tensors are contiguous, flat and on the CPU. Every function takes `threads` and `isa` (None: default). Results do not
depend on either.
"""

from __future__ import annotations

import torch
from torch import Tensor

from offload.errors import ConfigError
from offload.native.arrays import BF16, BITS16, FLOATS, FP32, FP32_OR_BF16, UINT8, address_of, flat
from offload.native.core import core as _core
from offload.native.kernels import _execution
from offload.native.run_time_kernels import ELEMENTS

_CODECS = {"int8": (8, 128, 132), "int4": (4, 128, 68), "nf4": (0, 1 << 14, 8456)}
"""Codec number for `_core.decode`, weights per record, bytes per record."""


def have_kernels(weights: Tensor) -> bool:
    """Return True if kernels exist for `weights`: float32 or bfloat16 on the CPU."""
    return can_decode(weights) and weights.dtype != torch.float16


def can_decode(out: Tensor) -> bool:
    """Return True if kernels can decode to `out`: float32, bfloat16 or float16 on the CPU."""
    return _core is not None and out.is_cpu and out.dtype in ELEMENTS


def decode(
    codec: str,
    records: Tensor,
    out: Tensor,
    levels: Tensor | None = None,
    numbers: Tensor | None = None,
    *,
    threads: int | None = None,
    isa: str | None = None,
) -> None:
    """Decode records (uint8 [n], "int8", "int4" or "nf4") to `out` (float32, bfloat16 or float16, rounded to nearest,
    ties to even).

    nf4 needs the tables `levels`, float32 [16], and `numbers`, float32 [256]. Records may lie at the end of `out`: one
    thread then decodes in order.
    """
    assert _core is not None
    number, block, width = _CODECS[codec]
    source, num_bytes, _ = flat("records", records, UINT8)
    target, numel, element = flat("out", out, FLOATS)
    num_records, rest = divmod(num_bytes, width)
    # C++ trusts the numbers: a wrong length would write beyond `out`.
    if rest or num_records * block != numel:
        raise ConfigError(
            f"records has {num_bytes} bytes and out has {numel} elements; one record of {codec} has {width} bytes for "
            f"{block} elements."
        )
    if target < source + num_bytes and source < target + out.nbytes:
        threads = 1  # a second thread would write over records still unread by the first
    tables = [address_of("tables", table, FP32) for table in (levels, numbers)]
    _core.decode(number, source, *tables, target, element, num_records, *_execution(threads, isa))


def decode_mxfp4(
    exponents: Tensor, codes: Tensor, out: Tensor, *, threads: int | None = None, isa: str | None = None
) -> None:
    """Decode a matrix of mxfp4, stored column by column, to `out`, a float dtype [rows, columns].

    `exponents`: uint8 [columns, rows / 32], with 127 added. `codes`: uint8 [columns, rows / 2], the first code of a
    byte in the lower half. `out` must not overlap them. All numbers are exact, also in bfloat16.
    """
    assert _core is not None
    rows, columns = out.shape
    target, numel, element = flat("out", out, FLOATS)
    from_exponents = address_of("exponents", exponents, UINT8, numel // 32)
    from_codes = address_of("codes", codes, UINT8, numel // 2)
    _core.decode_mxfp4(from_exponents, from_codes, rows, columns, target, element, *_execution(threads, isa))


def encode_int8(
    weights: Tensor,
    low: Tensor | None = None,
    out: Tensor | None = None,
    *,
    threads: int | None = None,
    isa: str | None = None,
) -> Tensor:
    """Return the int8 records of `weights`, uint8 [n], new or `out`. Weights are float32, bfloat16, or with `low`
    (int16) the upper half of a float32 master.
    """
    assert _core is not None
    _, block, width = _CODECS["int8"]
    dtypes = FP32_OR_BF16
    if low is not None:  # the weights are the high half
        dtypes = BF16
    address, numel, is_bf16 = flat("weights", weights, dtypes)
    below = address_of("low", low, BITS16, numel)
    num_bytes = -(-numel // block) * width  # the last block may be shorter
    if out is None:
        out = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    target = address_of("out", out, UINT8, num_bytes)
    _core.encode_int8(address, below, is_bf16, numel, target, *_execution(threads, isa))
    return out


def encode_rest(
    codec: str,
    values: Tensor,
    error: Tensor,
    out: Tensor,
    *,
    threads: int | None = None,
    isa: str | None = None,
) -> None:
    """Quantize values plus error feedback into `out`, uint8 records ("int8" or "int4"). Store the new error in `error`.

    `values`: float32 or bfloat16 [n]. `error`: bfloat16 [n]. n is a multiple of 128. An all-zero block keeps the old
    error. A non-finite block gets error 0.
    """
    assert _core is not None
    number, block, width = _CODECS[codec]
    source, numel, is_bf16 = flat("values", values, FP32_OR_BF16)
    num_records, rest = divmod(numel, block)
    if rest:
        raise ConfigError(f"values has {numel} elements; it must be a multiple of {block}, the block of {codec}.")
    error_address = address_of("error", error, BF16, numel)
    target = address_of("out", out, UINT8, num_records * width)
    _core.encode_rest(number, source, is_bf16, error_address, target, num_records, *_execution(threads, isa))


def encode_nf4(
    weights: Tensor, borders: Tensor, *, threads: int | None = None, isa: str | None = None
) -> tuple[Tensor, Tensor]:
    """Return nf4 codes and block scales for float32 weights [n]. `borders`, float32 [15], separates the levels.

    Codes: uint8 [ceil(n / 2)], the first code in the upper half byte. Scales: largest magnitude per 64 weights, float32
    [ceil(n / 64)].
    """
    assert _core is not None
    address, numel, _ = flat("weights", weights, FP32)
    between = address_of("borders", borders, FP32, 15)
    pairs = torch.empty(-(-numel // 2), dtype=torch.uint8, device="cpu")
    sizes = torch.empty(-(-numel // 64), dtype=torch.float32, device="cpu")
    _core.encode_nf4(address, numel, between, pairs.data_ptr(), sizes.data_ptr(), *_execution(threads, isa))
    return pairs, sizes
