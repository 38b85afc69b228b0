"""Decoding on a GPU in few kernel launches, compiled at run time (`csrc/device_codes.inl`): int8, int4, fp8, nf4 and
mxfp4 to float32, bfloat16 or float16. Other codecs, and devices without run-time compilation, decode by torch
operations. Before first use a kernel must reproduce the host's bits on records with all codes.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from offload.extras.quant import kernels
from offload.layout.codecs import QuantizedCodec
from offload.native.run_time_kernels import ELEMENTS, Launch, Program, RunTimeKernels

_NAMES = {
    "int8": "decode_whole_on_device<8, {}>",
    "int4": "decode_whole_on_device<4, {}>",
    "fp8": "decode_fp8_on_device<{}>",
    "nf4": "decode_nf4_on_device<{}>",
    "mxfp4": "decode_mxfp4_on_device<{}>",
}
_EACH = 8  # weights per thread
KERNELS = RunTimeKernels(
    "Quantized weights on {device} are decoded by torch operations (several launches for every million), because their "
    "own kernel does not work there ({reason}). Results are equal."
)


def decode(codec: QuantizedCodec, records: Tensor, out: Tensor, workspace: Tensor) -> bool:
    """Run `codec.decode` by kernels, with the same arguments. Returns False if no kernel exists."""
    if out.is_cpu or not KERNELS.can_run(out.device):
        return False
    if codec.name not in _NAMES or out.dtype not in ELEMENTS or not out.numel():
        return False
    # Scales are read as floats, and weights are written 16 bytes at a time.
    if records.data_ptr() % 4 or out.data_ptr() % 16:
        return False
    launch = None
    for dtype in dict.fromkeys((torch.float32, out.dtype)):  # in bf16, rounding can hide a wrong product
        find_difference = partial(_find_difference, codec, out.device, dtype)
        launch = KERNELS.find(out.device, program(codec.name, dtype), find_difference)
        if launch is None:
            return False
    assert launch is not None
    num_table_bytes = codec.tables.nbytes
    for stretch, weights in _stretches(codec, records, out, workspace[num_table_bytes:]):
        _launch(launch, codec, stretch, weights, workspace[:num_table_bytes])
    return True


def decode_mxfp4(exponents: Tensor, codes: Tensor, out: Tensor) -> bool:
    """Run `kernels.decode_mxfp4` in one launch, with the same arguments. Returns False if no kernel exists."""
    if out.is_cpu or not KERNELS.can_run(out.device) or out.dtype not in ELEMENTS or codes.data_ptr() % 4:
        return False
    find_difference = partial(_find_difference_in_matrix, out.device, out.dtype)
    launch = KERNELS.find(out.device, program("mxfp4", out.dtype), find_difference)
    if launch is None:
        return False
    _launch_over_matrix(launch, exponents, codes, out)
    return True


def _launch_over_matrix(launch: Launch, exponents: Tensor, codes: Tensor, out: Tensor) -> None:
    rows, columns = out.shape
    launch(exponents.numel(), [exponents, codes, out, columns, rows // 32])


def _find_difference_in_matrix(device: torch.device, dtype: torch.dtype, launch: Launch) -> str:
    """Decode a matrix with each exponent and arbitrary codes on the device and on the host, and compare. Waits for the
    device.
    """
    exponents = torch.arange(256, dtype=torch.uint8, device="cpu").view(64, 4)  # columns, and blocks in a column
    codes = torch.arange(64 * 64, dtype=torch.int64, device="cpu").mul_(0x9E3779B1).bitwise_right_shift_(16)
    codes = codes.to(torch.uint8).view(64, 64)
    wanted = torch.empty(128, 64, dtype=dtype, device="cpu")
    kernels.decode_mxfp4(exponents, codes, wanted)
    found = torch.empty_like(wanted, device=device)
    _launch_over_matrix(launch, exponents.to(device), codes.to(device), found)
    return "" if torch.equal(found.cpu(), wanted) else "mxfp4 gives other weights than on the host"


def _stretches(codec: QuantizedCodec, records: Tensor, out: Tensor, spare: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (records, weights) for each launch, in order.

    Records may lie at the end of `out`. A launch then takes as many as have weights in front of all unread records: a
    fixed share of the rest. The last records, as soon as they have room in `spare`, are copied there first.
    """
    width, weight_bytes = codec.record_bytes, codec.block * out.itemsize
    distance, begin = records.data_ptr() - out.data_ptr(), 0
    if -records.nbytes < distance < out.nbytes:
        while records.nbytes - begin * width > spare.nbytes:
            # One launch for all would write over records still unread by other blocks of threads.
            end = (distance + begin * width) // weight_bytes
            yield records[begin * width : end * width], out[begin * codec.block : end * codec.block]
            begin = end
        records = spare[: records.nbytes - begin * width].copy_(records[begin * width :])
    yield records, out[begin * codec.block :]


def _launch(launch: Launch, codec: QuantizedCodec, records: Tensor, out: Tensor, tables: Tensor) -> None:
    if not len(tables):  # in a place unused by the kernel
        tables = records
    launch(-(-out.numel() // _EACH), [records, tables, out, records.nbytes // codec.record_bytes])


def program(codec: str, dtype: torch.dtype) -> Program:
    """Return the program that decodes records of a codec to `dtype`."""
    return Program.of('#include "device_codes.inl"\n', _NAMES[codec].format(ELEMENTS[dtype]))


def _find_difference(codec: QuantizedCodec, device: torch.device, dtype: torch.dtype, launch: Launch) -> str:
    """Decode some records with arbitrary codes on the device and on the host, and compare. Waits for the device."""
    num_records = max(2, 2048 // codec.block)
    # Codes without a random generator: torch's generator must not move.
    words = torch.arange(num_records * codec.record_bytes, dtype=torch.int64, device="cpu").mul_(0x9E3779B1)
    records = words.bitwise_right_shift_(16).to(torch.uint8)
    scales = torch.arange(1, 2 * num_records + 1, dtype=torch.float32, device="cpu").sin_()  # at the end of a record
    records.view(num_records, -1)[:, -8:] = scales.view(num_records, 2).view(torch.uint8)
    wanted = torch.empty(num_records * codec.block, dtype=dtype, device="cpu")
    codec.decode(records, wanted, codec.workspace(len(wanted)))
    found = torch.empty_like(wanted, device=device)
    _launch(launch, codec, records.to(device), found, codec.tables.to(device))
    if torch.allclose(found.cpu(), wanted, rtol=0, atol=0, equal_nan=True):
        return ""
    return f"{codec.name} gives other weights than on the host"
