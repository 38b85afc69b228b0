"""Plans of runs with products in FP8."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.harness import RESULTS
from offload.app.config.config import Config
from offload.errors import ConfigError
from offload.extras.plan.forecast import Forecaster
from offload.extras.plan.machine_files import builtin_names, read_machine
from offload.extras.plan.op_counter import OpCounter
from offload.extras.plan.timing import compute_seconds, kernel_seconds
from offload.extras.plan.workload import NO_WORK, Cost, Workload
from offload.extras.quant import products
from offload.extras.quant.casts import ScaledMatrix, to_fp8
from offload.extras.quant.weight_codes import PRODUCT
from offload.machine.hardware import FP8_GAINS
from offload.planning.settings import Settings

FP8 = torch.float8_e4m3fn
TOKENS, LAYERS, WIDTH, INNER = 512, 8, 512, 1376
"""Two rows of 256 tokens, and the sizes of the preset "small"."""


def configure(matmul: str) -> Config:
    values: dict[str, Any] = {"model.preset": "small", "data.sequence_length": 256, "train.batch_size": 2}
    return Config.load(None, values | {"data.source": "builtin:stdlib", "train.matmul": matmul})


def workload(forecaster: Forecaster, matmul: str) -> Workload:
    found = forecaster.predict(configure(matmul), read_machine("h100"))
    work = forecaster._workload(found.config, found.prepared, 1)
    assert isinstance(work, Workload)
    return work


@pytest.mark.parametrize(("matmul", "num_products", "gain"), [("fp8_rowwise", 2, 1.71), ("fp8_tensorwise", 3, 1.78)])
def test_products_of_blocks_are_planned_at_the_rate_of_fp8(
    monkeypatch: pytest.MonkeyPatch, matmul: str, num_products: int, gain: float
) -> None:
    """The result and the input gradient, and one scale per matrix also the weight gradient. Casts move bytes."""
    monkeypatch.setattr(products, "LEAST_SIZE", WIDTH)
    forecaster = Forecaster(configure("precision"), 1)
    fp8, exact = workload(forecaster, matmul), workload(forecaster, "precision")
    flops = [sum(call.forward.fp8_flops + call.backward.fp8_flops for call in work.calls) for work in (fp8, exact)]
    assert flops == [num_products * 2 * TOKENS * LAYERS * (4 * WIDTH**2 + 3 * WIDTH * INNER), 0]
    totals = [sum(call.forward.flops + call.backward.flops for call in work.calls) for work in (fp8, exact)]
    assert totals[0] == totals[1]
    moved = [sum(call.forward.moved_bytes + call.backward.moved_bytes for call in work.calls) for work in (fp8, exact)]
    assert moved[0] > moved[1]
    rates = read_machine("h100").rates
    settings = Settings(precision="bf16", matmul=matmul)
    seconds = [kernel_seconds(Cost(1e12, 0.0, 1, fp8_flops=part), settings, rates)[0] for part in (0.0, 1e12)]
    assert seconds[0] / seconds[1] == pytest.approx(gain)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_the_gain_of_a_recipe_is_what_an_h200_measured(recipe: str) -> None:
    """Break: the 2 of data sheets, or 1.9."""
    stored = json.loads((RESULTS / "gpu-nvidia-h200.json").read_text())
    rates = {each["name"]: each["value"] for each in stored["results"]}
    names = [name for name in rates if name.startswith("fp8 product") and name.endswith(f", {recipe}")]
    gains = [rates[name] / rates[name.replace("fp8", "bf16").partition(",")[0]] for name in names]
    assert len(gains) == 4
    assert statistics.geometric_mean(gains) == pytest.approx(FP8_GAINS[f"fp8_{recipe}"], rel=0.003)
    for machine in map(read_machine, builtin_names()):
        if "fp8" in machine.rates.flops_per_s:
            bf16 = machine.rates.flops("bf16")
            assert machine.rates.fp8_flops(f"fp8_{recipe}", "bf16") == pytest.approx(
                FP8_GAINS[f"fp8_{recipe}"] * bf16, rel=0.001
            ), machine.name


@pytest.mark.parametrize(("by_row", "num_bytes"), [(True, 3), (False, 5)])
def test_a_cast_moves_the_bytes_of_its_kernel_and_takes_the_memory_of_its_operations(
    by_row: bool, num_bytes: int
) -> None:
    """Two bytes to read, for one scale twice, and one to write; the quotient is in fp32."""
    rows, columns = 64, 1024
    matrix, counter = torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"), OpCounter()
    with counter:
        cast = to_fp8(matrix, by_row=by_row)
    assert (cast.values.shape, cast.values.dtype) == (matrix.shape, torch.float8_e4m3fn)
    assert (cast.scale.shape, cast.scale.dtype) == ((rows, 1) if by_row else (1, 1), torch.float32)
    assert counter.cost.moved_bytes == pytest.approx(num_bytes * matrix.numel(), rel=0.01)
    assert counter.peak_bytes == pytest.approx(5 * matrix.numel(), rel=0.01)


@pytest.mark.parametrize(
    ("by_row", "is_transposed", "num_bytes"), [(True, False, 3), (False, False, 5), (True, True, 7)]
)
def test_a_weight_is_cast_once_for_all_micro_batches(by_row: bool, is_transposed: bool, num_bytes: int) -> None:
    """Breaks: the cast counted for each micro-batch, or the product read bf16 weights."""
    weight, counter = torch.empty(1024, 2048, dtype=torch.bfloat16, device="meta"), OpCounter()
    columns = weight.shape[1 - is_transposed]
    matrix = ScaledMatrix(
        *(torch.empty(64, n, dtype=d, device="meta") for n, d in ((columns, FP8), (1, torch.float32)))
    )
    with counter:
        result = PRODUCT(*matrix, weight, by_row, is_transposed)
    cost = counter.cost
    assert (result.shape, result.dtype) == ((64, weight.shape[int(is_transposed)]), torch.bfloat16)
    assert cost.flops == cost.fp8_flops == 2 * 64 * weight.numel()
    assert cost.num_bytes == matrix.values.nbytes + matrix.scale.nbytes + weight.numel() + result.nbytes
    assert cost.once_bytes == num_bytes * weight.numel()
    machine, work = read_machine("h100"), replace(NO_WORK, is_block=True)
    settings = Settings(compile="always")
    four, one = (compute_seconds(work, [cost], n, settings, machine)[0] for n in (4, 1))
    once_s = cost.once_bytes / machine.rates.elementwise
    assert four - once_s == pytest.approx(4 * (one - once_s))


def test_machines_without_fp8_are_refused() -> None:
    text = r"fp8_rowwise, but RTX 3090 has no rate for FP8 products.*--train.matmul precision.*rates.flops_per_s.fp8"
    with pytest.raises(ConfigError, match=text):
        Forecaster(configure("fp8_rowwise"), 1).predict(configure("fp8_rowwise"), read_machine("rtx-3090"))
