"""Real ranks for tests: processes with torchrun variables, and their results."""

from __future__ import annotations

import os
import pickle
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any, Generic, TypeVar

from tests import forks
from tests.forks import PATIENCE_S, ROOT
from tests.ports import free_port, rank_variables

W = TypeVar("W", bound="Worker")


@dataclass
class Rank:
    """A process with the output in a file."""

    process: subprocess.Popen[bytes] | forks.Forked
    path: Path

    @property
    def output(self) -> str:
        return self.path.read_text(errors="replace")

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

    def kill(self) -> None:
        """End the process, also a stopped one."""
        self.process.kill()
        self.process.wait()


def start(module: str, arguments: Sequence[str], variables: Mapping[str, str], path: Path, **how: Any) -> Rank:
    """Start `python -m MODULE ARGUMENTS` with the output in the file `path`. how: as for `forks.start`."""
    common = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    common["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with path.open("wb") as file:
        words = ["-u", "-m", module, *arguments]
        process = forks.start(words, env={**common, **variables}, stdout=file, stderr=subprocess.STDOUT, **how)
    return Rank(process, path)


@contextmanager
def ranks(
    folder: Path, size: int, *arguments: str, module: str = "tests.distributed.ranks_child", **environment: str
) -> Iterator[list[Rank]]:
    """Start `python -m MODULE ARGUMENTS` in `size` ranks. Kill all at the end."""
    port = free_port()
    with ExitStack() as stack:
        started = []
        for rank in range(size):
            variables = rank_variables(rank, size, port) | environment
            started.append(start(module, arguments, variables, folder / f"rank-{rank}", rank=rank))
            stack.callback(started[-1].kill)
        yield started


class Worker:
    """A process that takes work from a connection, its standard input."""

    def __init__(self, module: str, *arguments: str, path: Path, **how: Any) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.rank = start(module, arguments, {}, path, stdin=theirs.fileno(), **how)

    def give(self, work: Any) -> None:
        with suppress(OSError):  # a dead process is found when it should reply
            self.connection.send_bytes(pickle.dumps(work))

    def end(self) -> None:
        self.connection.close()
        self.rank.kill()


class Pool(Generic[W]):
    """As many workers as the largest job needs. make: starts one, from (file for the output, rank)."""

    def __init__(self, make: Callable[[Path, int], W]) -> None:
        self._make = make
        self._folder = tempfile.TemporaryDirectory(prefix="offload-workers-")
        self._workers: list[W] = []
        self._num_started = 0

    def first(self, size: int) -> list[W]:
        """Return workers for `size` ranks."""
        while len(self._workers) < size:
            self._num_started += 1
            path = Path(self._folder.name) / f"worker-{self._num_started}"
            self._workers.append(self._make(path, len(self._workers)))
        return self._workers[:size]

    def drop(self, size: int) -> None:
        """End the first workers: a rank that lost another one ends soon."""
        for worker in self._workers[:size]:
            worker.end()
        del self._workers[:size]

    def close(self) -> None:
        self.drop(len(self._workers))
        self._folder.cleanup()
