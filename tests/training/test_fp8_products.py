"""Whole runs with products in FP8."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from offload import parity
from offload.errors import ConfigError
from offload.extras.quant import products
from tests.engine.fp8 import LEAST_SIZE
from tests.training.conftest import SHAPES

FP8 = {"train__matmul": "fp8_rowwise", "train__precision": "auto"}
STEADY = {"optimizer__schedule": "constant", "optimizer__warmup_steps": 0}


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "LEAST_SIZE", LEAST_SIZE)


def losses(lines: list[dict[str, Any]]) -> list[float]:
    return [line["loss"] for line in lines]


def test_a_run_multiplies_in_fp8_resumes_and_is_checked(run: Callable[..., Any]) -> None:
    """The precision follows the products. The exported model, loaded again, multiplies in FP8 for the check. A resumed
    run has the bits of a run without a stop, and other products are refused.
    """
    whole, lines, text = run("whole", train__steps=4, **FP8, **STEADY)
    assert "21 linear layers of blocks multiply in FP8 (fp8_rowwise), emulated in fp32 on this device (slow)" in text
    config = (whole.dir / "config.yaml").read_text()
    assert "matmul: fp8_rowwise" in config
    assert "precision: bf16  # resolved" in config
    assert losses(run("exact", train__steps=4, train__precision="bf16", **STEADY)[1]) != losses(lines)
    run("parts", train__steps=2, checkpoint__every=2, **FP8, **STEADY)
    assert losses(run("parts", train__steps=4, **FP8, **STEADY)[1]) == losses(lines)
    text = r"train.matmul is 'fp8_tensorwise' and was 'fp8_rowwise' in the run.*cannot change this"
    with pytest.raises(ConfigError, match=text):
        run("parts", train__steps=5, **FP8 | {"train__matmul": "fp8_tensorwise"}, **STEADY)


@pytest.mark.parametrize("matmul", ["fp8_rowwise", "fp8_tensorwise"])
def test_parity_multiplies_in_fp8_on_both_sides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], matmul: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    Path("text.txt").write_text("\n".join(f"{number} is a number, {number + 1} the next." for number in range(400)))
    AutoConfig.for_model("llama", vocab_size=384, **SHAPES["llama"]).save_pretrained("shape")
    words = ["--json", "--model.path", "shape/config.json", "--data.source", "text.txt", "--steps", "2"]
    words += ["--data.sequence_length", "32", "--train.batch_size", "4", "--train.matmul", matmul]
    assert parity.main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["bit_equal"], found["notes"]) == (
        True,
        [f"products in {matmul} are made by the same functions on both sides."],
    )
