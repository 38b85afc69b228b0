"""Whole runs with products in FP8."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from offload.errors import ConfigError
from offload.extras.quant import products
from tests.engine.fp8 import LEAST_SIZE
from tests.run_folder import cut, losses

FP8 = {"train__matmul": "fp8_rowwise", "train__precision": "auto"}
STEADY = {"optimizer__schedule": "constant", "optimizer__warmup_steps": 0}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_SIZE", LEAST_SIZE)


def test_a_run_multiplies_in_fp8_resumes_and_is_checked(run: Callable[..., Any]) -> None:
    """The precision follows the products. The exported model, loaded again, multiplies in FP8 for the check. A resumed
    run has the bits of a run without a stop, and other products are refused.
    """
    whole, _, text = run("whole", train__steps=4, checkpoint__every=2, **FP8, **STEADY)
    assert "21 linear layers of blocks multiply in FP8 (fp8_rowwise), emulated in fp32 on this device (slow)" in text
    config = (whole.dir / "config.yaml").read_text()
    assert "matmul: fp8_rowwise" in config
    assert "precision: bf16  # resolved" in config
    cut(whole.dir, "parts", 4)
    assert losses(run("parts", train__steps=4, **FP8, **STEADY)[0].dir) == losses(whole.dir)
    text = r"train.matmul is 'fp8_tensorwise' and was 'fp8_rowwise' in the run.*cannot change this"
    with pytest.raises(ConfigError, match=text):
        run("parts", train__steps=5, **FP8 | {"train__matmul": "fp8_tensorwise"}, **STEADY)
