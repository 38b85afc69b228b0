"""Real ranks for tests: processes with torchrun variables, and their results."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests import forks
from tests.forks import PATIENCE_S, ROOT
from tests.ports import free_port, rank_variables


@dataclass
class Rank:
    """A process with the output in a file."""

    process: subprocess.Popen[bytes] | forks.Forked
    path: Path

    @property
    def output(self) -> str:
        return self.path.read_text()

    def wait_for(self, text: str, timeout_s: float = PATIENCE_S) -> None:
        """Wait until the rank has printed `text`."""
        deadline = time.monotonic() + timeout_s
        while text not in self.output:
            assert self.process.poll() is None, f"ended without {text!r}: {self.output}"
            assert time.monotonic() < deadline, f"no {text!r} in time: {self.output}"
            time.sleep(0.02)

    def end(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end. Return the exit code."""
        return self.process.wait(timeout_s)


@contextmanager
def ranks(folder: Path, size: int, *arguments: str, **environment: str) -> Iterator[list[Rank]]:
    """Start `python -m tests.distributed.ranks_child ARGUMENTS` in `size` ranks. Kill all at the end."""
    common, port = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, free_port()
    started: list[Rank] = []
    try:
        for rank in range(size):
            path = folder / f"rank-{rank}"
            with path.open("wb") as file:
                process = forks.start(
                    ["-u", "-m", "tests.distributed.ranks_child", *arguments],
                    env=common | rank_variables(rank, size, port) | environment,
                    stdout=file,
                    stderr=subprocess.STDOUT,
                    rank=rank,
                )
            started.append(Rank(process, path))
        yield started
    finally:
        for one in started:
            if one.process.poll() is None:
                one.process.send_signal(signal.SIGKILL)  # also ends a stopped process
                one.process.wait()
