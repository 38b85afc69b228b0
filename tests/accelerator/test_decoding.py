"""Quantized weights decoded by kernels: bits of the host and of torch operations, and few launches at any size."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload.extras.quant import device_kernels
from offload.extras.quant.codecs import INT4, INT8, NF4
from offload.extras.quant.file_codecs import BitsandbytesNf4Codec, Mxfp4Codec
from offload.extras.quant.fp8_codec import FP8
from offload.layout import codecs
from offload.layout.codecs import QuantizedCodec
from offload.native import kernels
from tests.accelerator.control import Control
from tests.engine.compare import same_bits

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.usefixtures("sim"),
    pytest.mark.filterwarnings("error:.*decoded by torch operations"),
    pytest.mark.skipif(not kernels.is_native(), reason="there is no source"),
]

CODECS: dict[str, QuantizedCodec] = {
    "int8": INT8,
    "int4": INT4,
    "fp8": FP8,
    "nf4": NF4,
    "bitsandbytes nf4": BitsandbytesNf4Codec((torch.bfloat16,)),
}
DTYPES = [torch.bfloat16, torch.float32]
MILLION = 1 << 20


def records_of(codec: QuantizedCodec, num_records: int) -> Tensor:
    """Return records with all codes and finite scales, uint8 [num_records * record_bytes]."""
    random = torch.Generator().manual_seed(num_records)
    records = torch.randint(0, 256, (num_records, codec.record_bytes), dtype=torch.uint8, generator=random)
    num_scales = 2 if "nf4" in codec.name else 1
    scales = torch.randn(num_records, num_scales, generator=random)
    scales *= 10.0 ** (torch.arange(num_records)[:, None] % 60 - 30)
    if codec is FP8:
        records[records & 127 == 127] = 126  # no NaN
    records[:, -4 * num_scales :] = scales.view(torch.uint8)
    return records.view(-1)


def on_host(codec: QuantizedCodec, records: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(records.numel() // codec.record_bytes * codec.block, dtype=dtype)
    codec.decode(records, out, codec.workspace(len(out)))
    return out


def in_slot(codec: QuantizedCodec, records: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return (records, weights, workspace) on the device, with the records at the end of the weights."""
    out = torch.empty(records.numel() // codec.record_bytes * codec.block, dtype=dtype, device="sim")
    end = out.view(torch.uint8)[-records.numel() :]
    end.copy_(records)
    return end, out, codec.workspace(len(out)).to("sim")


def decoded_in_slot(codec: QuantizedCodec, records: Tensor, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return the weights on the host, decoded over their records on the device."""
    end, out, workspace = in_slot(codec, records, dtype)
    codec.decode(end, out, workspace)
    return out.cpu()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", CODECS)
def test_bits_are_the_hosts_and_those_of_torchs_operations(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(codecs, "PIECE_NUMEL", 16384)  # little room for records, so decoding takes several launches
    codec = CODECS[name]
    for num_records in (1, 2, 7, 101) if codec.block > 128 else (1, 15, 129, 20_011):
        records = records_of(codec, num_records)
        wanted = on_host(codec, records, dtype)
        assert not wanted.isnan().any()
        num_codes = 254 if codec is FP8 else 256
        assert num_records < 100 or len(records.view(num_records, -1)[:, :64].unique()) == num_codes
        for use in (True, False):
            with monkeypatch.context() as patch:
                if not use:
                    patch.setattr(device_kernels, "decode", lambda *given: False)
                apart = torch.full((len(wanted),), torch.nan, dtype=dtype, device="sim")
                codec.decode(records.to("sim"), apart, codec.workspace(len(apart)).to("sim"))
                assert same_bits(apart.cpu(), wanted), (num_records, use)
                assert same_bits(decoded_in_slot(codec, records, dtype), wanted), (num_records, use)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize("shape", [(64, 33), (96, 4), (32, 1)])
def test_mxfp4_matrices_take_a_copy_and_a_launch(
    sim: Control, shape: tuple[int, int], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break: read the two halves in a byte in the other order. Codes at odd places leave torch's operations."""
    codec = Mxfp4Codec(*shape)
    random = torch.Generator().manual_seed(0)
    records = torch.randint(0, 256, (3 * codec.record_bytes,), dtype=torch.uint8, generator=random)
    wanted = on_host(codec, records, dtype)
    decoded_in_slot(codec, records, dtype)  # the first use compiles and compares
    given = in_slot(codec, records, dtype)
    sim.reset_counters()
    codec.decode(*given)
    is_aligned = shape[0] * shape[1] // 32 % 4 == 0
    assert (sim.counters()["launches"] == 3 * 2) == is_aligned
    assert same_bits(given[1].cpu(), wanted)
    monkeypatch.setattr(device_kernels, "decode_mxfp4", lambda *given: False)
    assert same_bits(decoded_in_slot(codec, records, dtype), wanted)


def launches(sim: Control, codec: QuantizedCodec, numel: int, dtype: torch.dtype) -> int:
    """Return the launches for decoding in a slot, without computing."""
    sim.set_computing(False)
    try:
        given = in_slot(codec, torch.empty(numel // codec.block * codec.record_bytes, dtype=torch.uint8), dtype)
        sim.reset_counters()
        codec.decode(*given)
        assert sim.counters()["waits"] == 0
        return sim.counters()["launches"]
    finally:
        sim.set_computing(True)


@pytest.mark.parametrize(("name", "most"), [("int8", 9), ("int4", 6), ("fp8", 9), ("nf4", 4)])
def test_launches_hardly_grow_with_the_weights(
    sim: Control, name: str, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec = CODECS[name]
    decoded_in_slot(codec, records_of(codec, 1))  # the first use compiles and compares
    assert launches(sim, codec, MILLION, torch.bfloat16) == 2  # records aside, then all weights
    assert launches(sim, codec, 64 * MILLION, torch.bfloat16) <= most
    monkeypatch.setattr(device_kernels, "decode", lambda *given: False)
    assert launches(sim, codec, 64 * MILLION, torch.bfloat16) >= 128
