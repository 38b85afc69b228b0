"""Codecs for frozen weights: exact bytes, and decoded values equal to a plain computation.

Covers all pieces, dtypes, and in-place decoding over the records.
"""

from __future__ import annotations

from hashlib import sha256

import pytest
import torch
from torch import Tensor

from offload.extras.quant import codecs as quant_codecs
from offload.extras.quant.casts import to_fp8
from offload.extras.quant.codecs import Nf4Codec
from offload.layout import codecs
from offload.layout.codecs import CODECS, QuantizedCodec, decoded
from tests.layout.dequantised import PLAIN
from tests.threads import torch_threads

CODES = """
0ec8521fda7410ec9531fdb7420eda631feb8521fda7310ec9521fdb7420ed9631feb8521fda6310ec9521fdb7420ec9631feb8420fda631
0ec9521fdb7410ec9631feb8420fda6310ec8521fdb7410ec9631feb8420eda6310ec8521fdb7410ec9631feb8420eda6310ec8521fda741
0ec9531feb7420eda6310ec8521fda7410ec9531fdb7420eda631fec8521fda7310ec9521fdb7420ed9631feb8521fda6310ec9521fdb742
0ed9631feb8420fda6310ec9521fdb7410ec9631feb8420fda6310ec9521fdb7410ec9631feb8420eda6310ec8521fdb7410ec9631feb842
"""
SIZES, SCALES = "00172ea0d0e6fe", "49b2b93f49b2f83f"
"""bitsandbytes 0.50.2 on a CPU for `some_weights`: magnitude codes, scale and mean."""


def some_weights() -> Tensor:
    place = torch.arange(448)
    return (place * 7919 % 1009 - 504).float() / 1024 * (1 + place // 64)


def more_weights() -> Tensor:
    place = torch.arange(1 << 18)
    return (place * 7919 % 1009 - 504).float() / 1024 * (1 + place // 64 * 31 % 97)


def weights(numel: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    drawn = torch.randn(numel, generator=torch.Generator().manual_seed(seed)) * 0.02
    drawn[: numel // 4] *= 10
    return drawn.to(dtype)


def records_of(codec: QuantizedCodec, values: Tensor, piece: int = codecs.PIECE_NUMEL) -> Tensor:
    """Return the records for a whole parameter, uint8 [n, bytes]."""
    stretches = list(codec.encoded(values.split(piece)))
    assert [begin for begin, *_ in stretches] == [0, *(end for _, end, _ in stretches[:-1])]
    assert stretches[-1][1] == len(values)
    return torch.cat([rests for *_, rests in stretches]).view(-1, codec.record_bytes)


def parts(records: Tensor, numel: int) -> tuple[bytes, bytes, bytes]:
    """Return (codes, magnitude codes, scales in the first record) as bytes."""
    codes, sizes = (records[:, span].reshape(-1) for span in (slice(8192), slice(8192, 8448)))
    its = codes[: -(-numel // 2)], sizes[: -(-numel // 64)], records[0, 8448:]
    return tuple(part.numpy().tobytes() for part in its)  # type: ignore[return-value]


def test_nf4_makes_the_bytes_that_it_is_known_by() -> None:
    codes, sizes, scales = parts(records_of(Nf4Codec(), some_weights()), 448)
    assert codes.hex() == CODES.replace("\n", "")
    assert (sizes.hex(), scales.hex()) == (SIZES, SCALES)
    more = parts(records_of(Nf4Codec(), more_weights()), 1 << 18)
    assert [sha256(part).hexdigest()[:16] for part in more[:2]] == ["1b31e9434bf26a09", "218dcb399e8b18aa"]


@pytest.mark.parametrize(
    ("numel", "dtype"),
    [
        (64, torch.float32),
        (4096, torch.bfloat16),
        (16384 * 3 + 64 * 7, torch.float16),
        ((1 << 20) + 97, torch.float32),
        pytest.param((5 << 20) + 1, torch.bfloat16, marks=pytest.mark.slow),  # takes a second
    ],
)
def test_nf4_is_that_of_bitsandbytes(numel: int, dtype: torch.dtype) -> None:
    functional = pytest.importorskip("bitsandbytes.functional", reason="bitsandbytes is not installed")
    values = weights(numel, dtype)
    values[:64] = 0
    codes, state = functional.quantize_4bit(
        values.view(1, -1), blocksize=64, compress_statistics=True, quant_type="nf4"
    )
    records = records_of(Nf4Codec(), values)
    known = (codes, state.absmax, torch.stack([state.state2.absmax[0], state.offset]))
    assert parts(records, numel) == tuple(part.numpy().tobytes() for part in known)
    assert torch.equal(records[:, 8448:8452].contiguous().view(torch.float32).view(-1), state.state2.absmax)
    assert torch.equal(decoded(Nf4Codec(), values, dtype), functional.dequantize_4bit(codes, state).view(-1))


@pytest.mark.parametrize("name", PLAIN)
def test_what_codes_stand_for_is_what_plain_arithmetic_gives(name: str) -> None:
    """Exact in int8 and fp8. In nf4 the last bits of dynamic map numbers can differ. 16-bit results are rounded."""
    for numel in (4096, 16384 + 128, 50_001):
        values = weights(numel, seed=numel)
        found, wanted = decoded(CODECS[name], values, torch.float32), PLAIN[name](values)
        torch.testing.assert_close(found, wanted, rtol=1e-6 if name == "nf4" else 0, atol=0)
        for dtype in (torch.bfloat16, torch.float16):
            assert torch.equal(decoded(CODECS[name], values, dtype), found.to(dtype))


def test_decoded_fp8_weights_are_cast_to_the_codes_of_the_weights() -> None:
    """For all mantissas of a largest magnitude, and weights at and between all codes.

    Break: another scale than that of the cast.
    """
    numbers = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float() / 448
    sizes = torch.cat([numbers, -numbers, (numbers[1:] + numbers[:-1]) / 2])
    for mantissa in range(128):
        values = (sizes * (128 + mantissa) * 2.0 ** (mantissa % 40 - 37)).bfloat16().view(4, -1)
        read = decoded(CODECS["fp8"], values.flatten(), torch.bfloat16).view_as(values)
        for found, wanted in zip(to_fp8(read, by_row=False), to_fp8(values, by_row=False), strict=True):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), mantissa


@pytest.mark.parametrize("name", PLAIN)
def test_records_are_the_same_by_any_pieces_and_threads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codec, values = CODECS[name], weights(3 * 16384 + 999)
    assert isinstance(codec, QuantizedCodec)
    whole = records_of(codec, values)
    assert torch.equal(records_of(codec, values, piece=16384), whole)
    seen = decoded(codec, values, torch.float32)
    monkeypatch.setattr(codecs, "PIECE_NUMEL", 16384)
    assert torch.equal(decoded(codec, values, torch.float32), seen)
    place = slice(16384 + 5, 2 * 16384 + 77)
    assert torch.equal(codec.read(whole.view(-1), place, torch.float32), seen[place])
    with torch_threads(3):
        assert torch.equal(records_of(codec, values), whole)


def test_a_mean_is_the_same_by_any_number_of_threads() -> None:
    values, found = weights(1 << 20).abs(), set()
    for number in (1, 2, 3):
        with torch_threads(number):
            found.add(quant_codecs._mean(values).item())
    assert len(found) == 1


def test_no_table_hangs_on_what_torch_makes_by_default() -> None:
    tables = quant_codecs.nf4_levels, quant_codecs.dynamic_map, quant_codecs._nf4_tables
    known = [make().clone() for make in tables]
    for make in tables:
        make.cache_clear()
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(torch.bfloat16)
        with torch.device("meta"):
            for make, wanted in zip(tables, known, strict=True):
                assert torch.equal(make(), wanted)
    finally:
        torch.set_default_dtype(before)


def test_blocks_of_zeros_are_zeros() -> None:
    values = weights(16384)
    values[:256] = 0
    for name in PLAIN:
        assert not decoded(CODECS[name], values, torch.float32)[:256].any()
        assert not decoded(CODECS[name], torch.zeros(4096), torch.float32).any()
