"""Watching the process of a run, with a process of a shell in its place."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from benchmarks.real_size import Watch


@pytest.mark.parametrize("work", ["reading the weights", "making room for the weights of a checkpoint"])
def test_memory_of_the_program_is_that_before_the_first_weight(work: str, tmp_path: Path) -> None:
    """A resumed run reads no weights: the checkpoint provides them later."""
    command = ["sh", "-c", f"echo 'plan: at most'; echo '{work} ... (after 0:09)'; exec sleep 600"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    watch = Watch(process, tmp_path, kill_at=work)
    watch.run()
    assert work.startswith(watch.phase)
    assert watch.program_bytes > 0
