"""`offload.parity` with both sides on the simulated accelerator."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from offload import parity
from tests.matrix import quick
from tests.run_folder import write_shape, write_text
from tests.training.conftest import SHAPES

pytestmark = [pytest.mark.accelerator, pytest.mark.usefixtures("sim")]

HOST = ("--offload.parameters", "cpu", "--offload.optimizer", "cpu", "--offload.device_memory", "16MiB")


UNCLIPPED = ("--train.max_grad_norm", "none")
CASES = {
    "updates on the host": ((*UNCLIPPED, "--offload.update", "cpu", *HOST), True),
    "updates on the device": ((*UNCLIPPED, "--offload.update", "device", *HOST), True),
    "fp32": ((*UNCLIPPED, "--train.precision", "fp32"), True),
    "clipped": (("--offload.update", "cpu", *HOST), False),
}
"""Settings, and whether both sides should have the same bits."""


@pytest.mark.parametrize("name", quick(CASES, ["updates on the device", "clipped"]))
def test_an_accelerator_has_the_bits_of_plain_pytorch_on_it(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    settings, is_judged_by_bits = CASES[name]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    write_text(tmp_path)
    write_shape(tmp_path / "shape", **SHAPES["llama"])
    words = ["--model.path", "shape/config.json", "--data.source", "text.txt", "--data.sequence_length", "32", "--json"]
    assert parity.main([*words, "--train.batch_size", "4", "--optimizer.warmup_steps", "0", *settings]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["tolerance"] is None) is is_judged_by_bits
    assert found["weights"]["differing_elements"] == 0
    assert [step["loss"]["offloaded"] == step["loss"]["resident"] for step in found["steps"]] == [True] * 3
    assert found["norm_within"] == 1e-7
