"""Kernels for quantized weights against the same operations in torch, bit for bit.

tests/layout/test_codecs.py describes the record format.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from offload.errors import ConfigError
from offload.extras.quant import kernels as codes
from offload.extras.quant.codecs import IntegerCodec, _borders, dynamic_map, nf4_levels
from offload.extras.quant.file_codecs import Mxfp4Codec
from offload.layout.codecs import CODECS, GRADIENT_CODECS, QuantizedCodec
from offload.native import kernels
from tests.native.states import ISAS, same_bits

NAMES = ["int8", "int4", "nf4"]
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
TABLES = {"int8": (), "int4": (), "nf4": (nf4_levels(), dynamic_map())}


def values(numel: int, seed: int, kind: str = "normal") -> Tensor:
    """Return weights by kind: normal, extreme magnitudes and zeros, values on code borders, or non-finite values."""
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 0.02
    if kind == "wild":
        drawn *= torch.tensor(10.0).pow(torch.arange(numel) % 77 - 38)
        drawn[::5] = 0
    elif kind == "borders":
        drawn = torch.cat([nf4_levels(), _borders(nf4_levels()), torch.arange(-127, 128) / 254]).repeat(
            numel // 286 + 1
        )
        drawn = drawn[:numel].clone()
    elif kind == "broken" and numel:
        drawn[seed % numel] = torch.tensor([torch.nan, torch.inf, -torch.inf])[seed % 3]
    return drawn


def codec_of(name: str) -> QuantizedCodec:
    codec = {**CODECS, **GRADIENT_CODECS}[name]
    assert isinstance(codec, QuantizedCodec)
    return codec


def in_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codes, "_core", None)


def made_in_torch(name: str, weights: Tensor) -> Tensor:
    with pytest.MonkeyPatch.context() as patch:
        in_torch(patch)
        return torch.cat([records for *_, records in codec_of(name).encoded([weights])])


def decoded_in_torch(name: str, records: Tensor, dtype: torch.dtype) -> Tensor:
    codec = codec_of(name)
    out = torch.empty(records.numel() // codec.record_bytes * codec.block, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        in_torch(patch)
        codec.decode(records, out, codec.workspace(out.numel()))
    return out


@pytest.fixture(autouse=True)
def kernels_are_there() -> None:
    if codes._core is None:
        pytest.skip("the C++ kernels were not built")


@pytest.mark.parametrize("isa", ISAS)
@given(
    numel=st.integers(1, 40_000),
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["normal", "wild", "borders", "broken"]),
    threads=st.integers(1, 3),
)
def test_codes_are_those_of_torch(isa: str, numel: int, seed: int, kind: str, threads: int) -> None:
    """A non-finite element (`broken`) spoils the same single block in both implementations."""
    weights, how = values(numel, seed, kind), {"threads": threads, "isa": isa}
    records = codes.encode_int8(weights, **how)
    assert torch.equal(records, made_in_torch("int8", weights))
    hi, low = kernels.split(weights)
    if kind != "broken":  # NaN cannot be split
        assert torch.equal(codes.encode_int8(hi, low, torch.empty_like(records), **how), records)
    assert torch.equal(codes.encode_int8(hi, **how), made_in_torch("int8", hi))
    pairs, sizes = codes.encode_nf4(weights, _borders(nf4_levels()), **how)
    record = made_in_torch("nf4", weights).view(-1, 8456)
    assert torch.equal(pairs, record[:, :8192].reshape(-1)[: len(pairs)])
    blocks = weights.abs().split(64)
    least = [*(block.amax() for block in blocks[:-1]), blocks[-1].amax().clamp(min=1e-38 if numel % 64 else 0)]
    assert same_bits(sizes, torch.stack(least))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", ["int8", "int4"])
@given(
    num_records=st.integers(1, 300),
    seed=st.integers(0, 1000),
    kind=st.sampled_from(["normal", "wild", "borders", "broken"]),
    threads=st.integers(1, 3),
    is_short=st.booleans(),
)
def test_records_and_the_error_that_is_left_are_those_of_torch(
    isa: str, name: str, num_records: int, seed: int, kind: str, threads: int, is_short: bool
) -> None:
    """Record plus new error equals value plus old error, up to the rounding of the error.

    A zero block keeps the error. A non-finite block has zero error afterwards.
    """
    codec, block = codec_of(name), seed % num_records
    assert isinstance(codec, IntegerCodec)
    drawn = values(128 * num_records, seed, kind).to(torch.bfloat16 if is_short else torch.float32)
    drawn[128 * block : 128 * block + 128] = 0 if kind != "broken" else torch.inf
    before = values(128 * num_records, seed + 1, "wild" if kind == "wild" else "normal").bfloat16()
    error, expected = before.clone(), before.clone()
    records = torch.empty(num_records * codec.record_bytes, dtype=torch.uint8)
    codes.encode_rest(name, drawn, error, records, threads=threads, isa=isa)
    with pytest.MonkeyPatch.context() as patch:
        in_torch(patch)
        made = torch.empty_like(records)
        codec.encode_rest(drawn, expected, made)
    finite = decoded_in_torch(name, made, torch.float32).isfinite().view(-1, 128).all(1)
    same = records.view(num_records, -1), made.view(num_records, -1)
    assert torch.equal(same[0][finite], same[1][finite])
    assert not decoded_in_torch(name, records, torch.float32).view(-1, 128)[~finite].isfinite().any()
    assert same_bits(error, expected)
    left = torch.zeros(128).bfloat16() if kind == "broken" else before.view(-1, 128)[block]
    assert same_bits(error.view(-1, 128)[block], left)
    if kind == "normal":
        stands_for = decoded_in_torch(name, records, torch.float32).double() + error.double()
        wanted = drawn.double() + before.double()
        torch.testing.assert_close(stands_for, wanted, rtol=0, atol=2e-4 if name == "int4" else 1e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", NAMES)
@given(num_records=st.integers(1, 5), seed=st.integers(0, 1000), threads=st.integers(1, 3), dtype=DTYPES)
def test_weights_are_those_of_torch(
    isa: str, name: str, num_records: int, seed: int, threads: int, dtype: torch.dtype
) -> None:
    """Random bytes include non-finite scales. Decoding also works in place over the records."""
    codec = codec_of(name)
    drawn = torch.Generator().manual_seed(seed)
    records = torch.randint(256, (num_records * codec.record_bytes,), generator=drawn, dtype=torch.uint8)
    expected = decoded_in_torch(name, records, dtype)
    run = partial(codes.decode, name, threads=threads, isa=isa)
    out = torch.empty_like(expected)
    run(records, out, *TABLES[name])
    assert same_bits(out, expected)
    end = out.view(torch.uint8)[-len(records) :]
    end.copy_(records)
    run(end, out, *TABLES[name])
    assert same_bits(out, expected)


def test_records_and_weights_have_to_match() -> None:
    with pytest.raises(ConfigError, match="records has 132 bytes and out has 256 elements; one record of int8 has"):
        codes.decode("int8", torch.zeros(132, dtype=torch.uint8), torch.zeros(256))
    with pytest.raises(ConfigError, match="out has dtype float64"):
        codes.decode("int8", torch.zeros(132, dtype=torch.uint8), torch.zeros(128, dtype=torch.float64))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("columns", [1, 33, 64, 100])
def test_mxfp4_matrices_have_the_bits_of_torch(isa: str, dtype: torch.dtype, columns: int) -> None:
    """All 256 exponents, more than one task, columns beside the vectors."""
    rows, generator = 32 * 11, torch.Generator().manual_seed(columns)
    exponents = torch.randint(0, 256, (columns, rows // 32), dtype=torch.uint8, generator=generator)
    numbers = torch.randint(0, 256, (columns, rows // 2), dtype=torch.uint8, generator=generator)
    codec = Mxfp4Codec(rows, columns)
    records = codec.join([exponents.view(1, -1), numbers.view(1, -1)])
    wanted, found = torch.empty(codec.block, dtype=dtype), torch.empty(rows, columns, dtype=dtype)
    with pytest.MonkeyPatch.context() as patch:
        in_torch(patch)
        codec.decode(records, wanted, codec.workspace(codec.block))
    for threads in (1, 3):
        codes.decode_mxfp4(exponents, numbers, found.fill_(7), threads=threads, isa=isa)
        assert same_bits(found.view(-1), wanted)
