"""Decoding on a GPU in few kernel launches, compiled at run time (`csrc/device_codes.inl`): int8, int4 and nf4 to
float32 or bfloat16. Other codecs and dtypes, and devices without run-time compilation, decode by torch operations.
Before first use a kernel must reproduce the host's bits on records with all codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from offload.accelerators import open_accelerator
from offload.errors import warn
from offload.layout.codecs import QuantizedCodec
from offload.native.core import core

_KERNELS = {
    "int8": "decode_whole_on_device<8, {}>",
    "int4": "decode_whole_on_device<4, {}>",
    "nf4": "decode_nf4_on_device<{}>",
}
_ELEMENTS = {torch.float32: "float", torch.bfloat16: "uint16_t"}
_THREADS, _EACH = 256, 8  # threads per block; weights per thread
_Kernel = Callable[..., None]
_refused: dict[torch.device, str] = {}
"""Devices without compiled kernels, with the reason."""


def decode(codec: QuantizedCodec, records: Tensor, out: Tensor, workspace: Tensor) -> bool:
    """Run `codec.decode` by kernels, with the same arguments. Returns False if no kernel exists."""
    if core is None or out.is_cpu or out.device in _refused:
        return False  # sources are installed only together with the C++ kernels
    if codec.name not in _KERNELS or out.dtype not in _ELEMENTS or not out.numel():
        return False
    if records.data_ptr() % 4 or out.data_ptr() % 16:
        return False
    kernel = _checked_kernel(codec, out.device, out.dtype)
    if kernel is None:
        return False
    num_table_bytes = codec.tables.nbytes
    for stretch, weights in _stretches(codec, records, out, workspace[num_table_bytes:]):
        _launch(kernel, codec, stretch, weights, workspace[:num_table_bytes])
    return True


def _stretches(codec: QuantizedCodec, records: Tensor, out: Tensor, spare: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (records, weights) for each launch, in order.

    Records may lie at the end of `out`. A launch then takes as many as have weights in front of all unread records: a
    fixed share of the rest. The last records, as soon as they have room in `spare`, are copied there first.
    """
    width, weight_bytes = codec.record_bytes, codec.block * out.itemsize
    distance, begin = records.data_ptr() - out.data_ptr(), 0
    if -records.nbytes < distance < out.nbytes:
        while records.nbytes - begin * width > spare.nbytes:
            end = (distance + begin * width) // weight_bytes
            yield records[begin * width : end * width], out[begin * codec.block : end * codec.block]
            begin = end
        records = spare[: records.nbytes - begin * width].copy_(records[begin * width :])
    yield records, out[begin * codec.block :]


def _launch(kernel: _Kernel, codec: QuantizedCodec, records: Tensor, out: Tensor, tables: Tensor) -> None:
    device = open_accelerator(out.device)
    arguments = [records, tables if len(tables) else records, out, records.nbytes // codec.record_bytes]
    with device.module.device(out.device):
        grid = -(-out.numel() // (_THREADS * _EACH))
        kernel((grid, 1, 1), (_THREADS, 1, 1), arguments, stream=device.current_stream())


def program(codec: str, dtype: torch.dtype) -> tuple[str, str, list[str]]:
    """Return (source, C++ kernel name, compiler options)."""
    assert core is not None
    assert core.__file__ is not None
    name = f"offload::{_KERNELS[codec].format(_ELEMENTS[dtype])}"
    folder = Path(core.__file__).with_name("csrc")
    return '#include "device_codes.inl"\n', name, ["-std=c++17", f"-I{folder}"]


@cache
def _checked_kernel(codec: QuantizedCodec, device: torch.device, dtype: torch.dtype) -> _Kernel | None:
    """Return a kernel with verified bits on this device, or None. In bf16, rounding can hide a wrong product: the
    float32 kernel is verified too.
    """
    if dtype != torch.float32 and _checked_kernel(codec, device, torch.float32) is None:
        return None
    try:
        kernel = open_accelerator(device).compile_kernel(*program(codec.name, dtype))
        if kernel is not None and not _equals_host(kernel, codec, device, dtype):
            raise RuntimeError(f"{codec.name} gives other weights than on the host")
    except Exception as error:  # from a compiler, a driver, or an old torch
        _refused[device] = f"{type(error).__name__}: {error}"
        warn(
            f"Quantized weights on {device} are decoded by torch operations (several launches for every million), "
            f"because their own kernel does not work there ({_refused[device][:300]}). Results are equal."
        )
        return None
    return kernel


def _equals_host(kernel: _Kernel, codec: QuantizedCodec, device: torch.device, dtype: torch.dtype) -> bool:
    """Decode some records with arbitrary codes on the device and on the host, and compare. Waits for the device."""
    num_records = max(2, 2048 // codec.block)
    words = torch.arange(num_records * codec.record_bytes, dtype=torch.int64, device="cpu").mul_(0x9E3779B1)
    records = words.bitwise_right_shift_(16).to(torch.uint8)
    scales = torch.arange(1, 2 * num_records + 1, dtype=torch.float32, device="cpu").sin_()  # at the end of a record
    records.view(num_records, -1)[:, -8:] = scales.view(num_records, 2).view(torch.uint8)
    wanted = torch.empty(num_records * codec.block, dtype=dtype, device="cpu")
    codec.decode(records, wanted, codec.workspace(len(wanted)))
    found = torch.empty_like(wanted, device=device)
    _launch(kernel, codec, records.to(device), found, codec.tables.to(device))
    return torch.allclose(found.cpu(), wanted, rtol=0, atol=0, equal_nan=True)
