"""Codecs for quantized model files: in-place decoding over the records, in pieces, for every code."""

from __future__ import annotations

import pytest
import torch
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from offload.extras.quant.file_codecs import (
    FLOAT8,
    INT4,
    INT8,
    NF4,
    PACKED8,
    BitsandbytesNf4Codec,
    FileCodec,
    Mxfp4Codec,
    TiledCodec,
    rounding,
)
from offload.layout import codecs

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CODECS: dict[str, FileCodec] = {
    "fp8": TiledCodec("fp8", FLOAT8, 32, 80, (32, 32), FP32, (BF16,)),
    "int8": TiledCodec("int8", INT8, 16, 96, (1, 96), BF16, (BF16,)),
    "packed int8": TiledCodec("int8", PACKED8, 16, 96, (1, 32), FP16, (FP16, BF16)),
    "int4": TiledCodec("int4", INT4, 16, 64, (1, 32), BF16, (BF16,)),
    "nf4": BitsandbytesNf4Codec((BF16,)),
    "nf4 single": TiledCodec("nf4", NF4, 256, 64, (1, 64), FP32, ()),
    "mxfp4": Mxfp4Codec(64, 96, (BF16,)),
}


def records_of(codec: FileCodec, num: int) -> torch.Tensor:
    """Return records with random bits but finite scales."""
    torch.manual_seed(1)
    parts = [torch.randint(0, 256, (num, size), dtype=torch.uint8) for size in codec.fields]
    if isinstance(codec, TiledCodec):
        parts[0] = torch.rand(num, codec.fields[0] // codec.scale.itemsize).to(codec.scale).view(torch.uint8)
    if isinstance(codec, BitsandbytesNf4Codec):
        parts[2:] = [torch.rand(num, 1).view(torch.uint8) for _ in range(2)]
    return codec.join(parts)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("name", CODECS)
def test_records_may_lie_where_their_weights_are_to_be(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    codec, num = CODECS[name], 5
    records, numel = records_of(codec, num), num * codec.block
    apart = torch.empty(numel, dtype=dtype)
    codec.decode(records, apart, codec.workspace(numel))
    monkeypatch.setattr(codecs, "PIECE_NUMEL", 16384 if name == "nf4" else 2000)
    over = torch.empty(numel, dtype=dtype)
    end = over.view(torch.uint8)[-records.nbytes :]
    end.copy_(records)
    codec.decode(end, over, codec.workspace(numel))
    assert torch.equal(over.nan_to_num(), apart.nan_to_num())
    if codec.rounds[-1:] == (BF16,) and dtype == FP32:
        assert torch.equal(apart.nan_to_num(), apart.to(BF16).to(FP32).nan_to_num())


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
def test_mxfp4_is_transformers_own_for_every_exponent(dtype: torch.dtype) -> None:
    """All exponents except the last, a NaN."""
    torch.manual_seed(0)
    blocks = torch.randint(0, 256, (2, 85, 3, 16), dtype=torch.uint8)
    exponents = torch.arange(2 * 85 * 3).remainder(255).to(torch.uint8).view(2, 85, 3)
    codec = Mxfp4Codec(96, 85, rounding(dtype))
    records = codec.join([part.reshape(2, -1) for part in (exponents, blocks)])
    found = codec.read(records, slice(0, 2 * codec.block), dtype).view(2, 96, 85)
    assert torch.equal(found, convert_moe_packed_tensors(blocks, exponents, dtype=dtype))


def test_what_is_bf16_in_compute_alone_is_rounded_as_masters_are_split() -> None:
    """1.00390625 is a tie in bf16: rounded away from zero, but to even in a bf16 folder."""
    tie = torch.full((1, 16), 1.00390625, dtype=FP32)
    for rounds, wanted in (((), 1.0078125), ((FP16,), 1.0078125), ((BF16,), 1.0)):
        codec = TiledCodec("int8", INT8, 16, 16, (1, 16), FP32, rounds)
        records = codec.join([tie.view(torch.uint8), torch.ones(1, 256, dtype=torch.uint8)])
        assert codec.read(records, slice(0, 256), BF16).float().unique().tolist() == [wanted]
