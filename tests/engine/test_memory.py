"""Resident memory of a whole process: the states, one unit, and a constant that is stated here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

MIB = 1 << 20
CONSTANT_BYTES = 90 * MIB
"""Kernels' scratch memory, the allocator's, what transformers builds for a model: measured: 35 to 60 MiB."""
ROOT = Path(__file__).parents[2]


def measure(mode: str, folder: Path) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.engine.memory_child", mode, str(folder)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    return json.loads(run.stdout.splitlines()[-1])


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
class TestResidentMemory:
    @pytest.mark.slow
    def test_training_holds_the_states_and_one_unit(self, tmp_path: Path) -> None:
        """14 bytes a parameter in bf16 with clipping; the slot and the gradient buffer of one unit; that unit's
        weights while they are made."""
        found = measure("filled", tmp_path)
        states = 14 * found["total"]
        one_unit = (2 + 2 + 4) * found["largest"]  # slot, gradients, and fp32 values on their way into the store
        assert found["peak"] <= states + one_unit + CONSTANT_BYTES
        assert found["peak"] >= 0.9 * states, "the measurement measured something else"

    @pytest.mark.slow  # in the quick run: the test above, and what the ledgers hold
    def test_a_model_that_is_given_away_is_never_twice_in_memory(self, tmp_path: Path) -> None:
        """Its 4 bytes a parameter are gone by the time the states, 14 bytes, are all in use. 50 steps add nothing to
        that: one unit's output that stayed behind in each would be 6 MiB."""
        found = measure("loaded", tmp_path)
        states, model = 14 * found["total"], 4 * found["total"]
        assert found["built"] >= 0.9 * model, "the measurement measured something else"
        assert found["peak"] <= states + 4 * found["largest"] + CONSTANT_BYTES
        assert found["grown"] <= 2 * MIB

    @pytest.mark.slow  # in the quick run: test_frozen_weights.py, which counts what the engine holds
    def test_a_base_in_few_bits_is_never_there_in_full_width(self, tmp_path: Path) -> None:
        """What the ledgers have, and one unit's fp32 values while they are made."""
        found = measure("coded", tmp_path)
        assert found["cpu"] < 0.35 * 2 * found["total"], "embeddings and head are as they were"
        assert found["peak"] <= found["cpu"] + found["device"] + 4 * found["largest"] + CONSTANT_BYTES
        assert found["cpu"] + found["device"] + 4 * found["largest"] + CONSTANT_BYTES < 0.75 * 2 * found["total"]

    @pytest.mark.slow  # in the quick run: test_model_files.py, which counts what the engine holds
    def test_a_base_in_its_own_files_is_in_no_memory_and_not_copied(self, tmp_path: Path) -> None:
        measure("made", tmp_path)
        before = {path.name: path.stat() for path in tmp_path.iterdir()}
        found = measure("files", tmp_path)
        assert found["cpu"] <= 0.1 * 2 * found["total"]
        assert found["nvme"] == 0
        assert found["peak"] <= found["cpu"] + found["device"] + CONSTANT_BYTES < 0.75 * 2 * found["total"]
        assert 0 < found["read"] <= 2 * 2 * found["total"]
        after = {path.name: path.stat() for path in tmp_path.iterdir()}
        assert {n: (s.st_size, s.st_mtime_ns) for n, s in after.items()} == {
            n: (s.st_size, s.st_mtime_ns) for n, s in before.items()
        }

    @pytest.mark.slow  # in the quick run: test_nvme.py, which counts what the engine holds
    def test_states_of_a_gibibyte_train_in_64_mebibytes(self, tmp_path: Path) -> None:
        """The device, which is memory too on a CPU, and the host's rings, within their budgets; one unit's values while
        they are made."""
        found = measure("disk", tmp_path)
        assert found["nvme"] > 1 << 30
        assert found["host"] <= 64 * MIB
        assert found["peak"] <= found["device"] + 64 * MIB + 50 * MIB + CONSTANT_BYTES
        assert all(0 < loss < 20 for loss in found["losses"])
        assert [path.name for path in tmp_path.iterdir()] == ["config.json"], "the files have no names"
