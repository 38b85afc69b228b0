"""Resident memory of a whole process: the states, one unit and `CONSTANT_BYTES`."""

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
"""Scratch memory of kernels and allocator, and objects built by transformers. Measured: 35 to 60 MiB."""
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
        """14 bytes per parameter in bf16 with clipping, a slot and a gradient buffer for one unit, and unit weights
        during initialization.
        """
        found = measure("filled", tmp_path)
        states = 14 * found["total"]
        one_unit = (2 + 2 + 4) * found["largest"]  # slot, gradients, and fp32 values before the copy to the store
        assert found["peak"] <= states + one_unit + CONSTANT_BYTES
        assert found["peak"] >= 0.9 * states, "the measurement measured something else"

    @pytest.mark.slow  # quick run: the test above, and the ledgers
    def test_a_model_that_is_given_away_is_never_twice_in_memory(self, tmp_path: Path) -> None:
        """The 4 bytes per parameter are freed before the 14 bytes of states are all in use. 50 steps add nothing; one
        leaked unit output per step would add 6 MiB.
        """
        found = measure("loaded", tmp_path)
        states, model = 14 * found["total"], 4 * found["total"]
        assert found["built"] >= 0.9 * model, "the measurement measured something else"
        assert found["peak"] <= states + 4 * found["largest"] + CONSTANT_BYTES
        assert found["grown"] <= 2 * MIB

    @pytest.mark.slow  # quick run: test_frozen_weights.py counts allocations
    def test_a_base_in_few_bits_is_never_there_in_full_width(self, tmp_path: Path) -> None:
        """The peak is the ledger total, plus fp32 values for one unit during initialization."""
        found = measure("coded", tmp_path)
        assert found["cpu"] < 0.35 * 2 * found["total"], "embeddings and head are as they were"
        assert found["peak"] <= found["cpu"] + found["device"] + 4 * found["largest"] + CONSTANT_BYTES
        assert found["cpu"] + found["device"] + 4 * found["largest"] + CONSTANT_BYTES < 0.75 * 2 * found["total"]

    @pytest.mark.slow  # quick run: test_model_files.py counts allocations
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

    @pytest.mark.slow  # quick run: test_nvme.py counts allocations
    def test_states_of_a_gibibyte_train_in_64_mebibytes(self, tmp_path: Path) -> None:
        """Device memory (also RAM on a CPU) and host rings stay within the budgets. Initialization adds the values of
        one unit.
        """
        found = measure("disk", tmp_path)
        assert found["nvme"] > 1 << 30
        assert found["host"] <= 64 * MIB
        assert found["peak"] <= found["device"] + 64 * MIB + 50 * MIB + CONSTANT_BYTES
        assert all(0 < loss < 20 for loss in found["losses"])
        assert [path.name for path in tmp_path.iterdir()] == ["config.json"], "the files have no names"
