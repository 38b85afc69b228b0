"""Matrices cast to FP8 by kernels: bits of the torch operations, and few launches."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from offload import Engine
from offload.extras.quant import casts, products
from offload.extras.quant.casts import ScaledMatrix, to_fp8
from offload.native import kernels
from tests.accelerator.control import Control
from tests.cases.models import build, llama, tokens
from tests.engine.compare import assert_same, weights
from tests.engine.fp8 import LEAST_SIZE, rounded

pytestmark = [
    pytest.mark.accelerator,
    pytest.mark.usefixtures("sim"),
    pytest.mark.filterwarnings("error:.*cast to FP8 by torch operations"),
    pytest.mark.skipif(not kernels.is_native(), reason="there is no source"),
]

DTYPES = [torch.bfloat16, torch.float32]
FORMATS = [torch.float8_e4m3fn, torch.float8_e5m2]
BY_ROW = pytest.mark.parametrize("by_row", [True, False], ids=["row", "matrix"])


def every_number(dtype: torch.dtype) -> Tensor:
    """Return rows with every finite number of bf16 (in fp32: one beside each), from the smallest row to the largest."""
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    numbers = numbers[numbers.isfinite()].double().sort(stable=True).values
    numbers = numbers[numbers.abs().argsort(stable=True)][: 1024 * 63]
    return (numbers * (1 + (dtype == torch.float32) * 2.0**-20)).to(dtype).view(-1, 1024)


def same_bits(found: ScaledMatrix, wanted: ScaledMatrix) -> bool:
    values = torch.equal(found.values.cpu().view(torch.uint8), wanted.values.view(torch.uint8))
    return values and torch.equal(found.scale.cpu(), wanted.scale) and found.values.is_contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format_", FORMATS)
@BY_ROW
def test_bits_are_those_of_the_operations(by_row: bool, format_: torch.dtype, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    numbers = torch.randn(33, 4104, generator=random) * torch.logspace(-20, 3, 33)[:, None]
    numbers[5] = 0
    for matrix in (every_number(dtype), numbers.to(dtype), numbers[-1:, :16].to(dtype)):
        wanted = to_fp8(matrix, by_row=by_row, dtype=format_)
        assert same_bits(to_fp8(matrix.to("sim"), by_row=by_row, dtype=format_), wanted)
        values, scale = rounded(matrix, 1 if by_row else None, format_)  # written apart
        assert torch.equal(wanted.values.float(), values)
        assert torch.equal(wanted.scale.view(-1), scale.view(-1))


@pytest.mark.parametrize("format_", FORMATS)
@BY_ROW
def test_infinity_and_nan_are_seen(by_row: bool, format_: torch.dtype) -> None:
    for bad in (torch.nan, torch.inf, -torch.inf):
        matrix = torch.ones(3, 64, dtype=torch.bfloat16)
        matrix[1, 63] = bad
        found, wanted = (to_fp8(each, by_row=by_row, dtype=format_) for each in (matrix.to("sim"), matrix))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one.cpu().float(), other.float(), rtol=0, atol=0, equal_nan=True)
        assert found.values.cpu().float()[1].isnan().any()


def launches(sim: Control, matrix: Tensor, by_row: bool) -> int:
    sim.reset_counters()
    to_fp8(matrix, by_row=by_row)
    assert sim.counters()["waits"] == 0
    return sim.counters()["launches"]


def test_one_launch_casts_a_matrix_by_row(sim: Control, monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = torch.randn(16, 128, dtype=torch.bfloat16).to("sim")
    for by_row in (True, False):
        to_fp8(matrix, by_row=by_row)  # the first use compiles and compares
    assert launches(sim, matrix, True) == 1
    assert launches(sim, matrix, False) == 3
    assert launches(sim, matrix.t(), True) == 2, "a transposed matrix is copied first"
    with monkeypatch.context() as patch:
        patch.setattr(casts, "_can_run", lambda matrix: False)
        assert launches(sim, matrix, True) >= 5


@pytest.mark.parametrize("matmul", ["fp8_rowwise", "fp8_tensorwise"])
def test_a_step_has_the_bits_of_casts_by_operations(sim: Control, matmul: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_SIZE", LEAST_SIZE)

    def trained() -> tuple[list[float], dict[str, Tensor], int]:
        with Engine(build(llama), precision="bf16", matmul=matmul, debug=1) as engine:
            engine.step(tokens(0))
            engine.finish()
            sim.reset_counters()
            losses = [engine.step(tokens(seed)).loss.item() for seed in (1, 2)]
            engine.finish()
            return losses, weights(engine), sim.counters()["launches"]

    losses, found, fused = trained()
    monkeypatch.setattr(casts, "_can_run", lambda matrix: False)
    wanted_losses, wanted, apart = trained()
    assert losses == wanted_losses
    assert_same(found, wanted)
    print("launches of two steps", fused, apart)
    # In a step weights, inputs (forward and recomputation) and gradients.
    num_casts, num_spared = (30 + 16 + 10, 3) if matmul == "fp8_rowwise" else (20 + 16 + 10, 1)
    assert fused < apart - 2 * num_casts * num_spared


def test_other_matrices_are_cast_by_operations(sim: Control) -> None:
    """Rows with a number of elements not divisible by 8, other dtypes, and rows off the borders of a load."""
    for matrix in (torch.ones(4, 12), torch.ones(4, 64, dtype=torch.float64)):
        assert launches(sim, matrix.to("sim"), True) >= 5
        assert same_bits(to_fp8(matrix.to("sim"), by_row=True), to_fp8(matrix, by_row=True))
    assert launches(sim, torch.ones(257, device="sim")[1:].view(4, 64), True) >= 5
