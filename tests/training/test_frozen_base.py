"""A frozen base in a quantized format or read from the model files: resident memory and disk use in a whole run.

The benchmark measures the same with 1.2 G parameters.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from benchmarks import frozen_base
from tests.integrations.plain import needs

needs("peft")

MIB = 1 << 20
SHAPE = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 10, "num_attention_heads": 16}
"""Shape of a model with 260 MiB in bf16 and 24.5 MiB per block."""
NOISE_BYTES = 60 * MIB
"""Allowed extra process memory for larger activation tensors, in bytes."""


@pytest.mark.slow  # quick versions: engine/test_frozen_weights.py and test_model_files.py, with memory ledgers
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_run_has_the_memory_of_its_budgets_and_copies_nothing(tmp_path: Path) -> None:
    for result in frozen_base.measure(tmp_path, SHAPE, 64 * MIB, steps=2):
        found = result.details
        assert found["device_peak_bytes"] <= found["device_budget_bytes"], result.name
        assert found["host_peak_bytes"] <= found["host_budget_bytes"] < 90 * MIB, result.name
        assert result.value * MIB <= found["host_budget_bytes"] + NOISE_BYTES < 0.6 * 2 * found["parameters"]
        assert found["disk_nameless_bytes"] == 0
        assert found["disk_written_bytes"] < 0.1 * 2 * found["parameters"]
        assert len(found["losses"]) == 2
        assert any("not loaded again" in line for line in found["said"]), "that would have all of it in memory"
