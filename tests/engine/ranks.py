"""Ranks for the engine tests: a process pool for jobs, and separate processes for tests in which a rank dies."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any

from tests import accelerator, forks
from tests.distributed.ranks import ROOT, Rank
from tests.ports import free_port

TIMEOUT_S = 3 * forks.PATIENCE_S
"""Timeout of a job in seconds. The watchdog of the ranks ends a hanging exchange earlier and names the rank (see
ranks_child).
"""


class JobError(AssertionError):
    """A job failed on some ranks. The message has each error."""


def run(size: int, job: Callable[..., Any], *, timeout_s: float = TIMEOUT_S, **arguments: Any) -> list[Any]:
    """Call `job(**arguments)` in `size` processes with torchrun's variables. Return the results by rank.

    `job` is a module-level function. The processes come from a pool that lives until the tests end. After a failed job
    the pool replaces the processes.

    Raises:
        JobError: on a rank the job raised, the process ended, or `timeout_s` seconds passed.
    """
    return _pool().run(size, job, timeout_s, arguments)


@contextmanager
def processes(folder: Path, size: int, *arguments: str, **environment: str) -> Iterator[list[Rank]]:
    """Run `python -m tests.engine.ranks_child ARGUMENTS` on `size` ranks. All processes are killed on exit."""
    port = free_port()
    with ExitStack() as stack:
        started = []
        for rank in range(size):
            variables = _torchrun(rank, size, port) | environment
            started.append(_start(arguments, variables, folder / f"rank-{rank}", rank))
            stack.callback(_kill, started[-1])
        yield started


class _Worker:
    """A pool process."""

    def __init__(self, path: Path, number: int) -> None:
        self.connection, theirs = Pipe()
        with theirs:
            self.rank = _start(["serve"], {}, path, number, stdin=theirs.fileno())

    def give(self, work: Any) -> None:
        with suppress(OSError):  # `take` reports a dead process
            self.connection.send_bytes(pickle.dumps(work))

    def take(self, deadline: float) -> tuple[Any, str | None]:
        """Return the result of the job, or an error text."""
        try:
            if not self.connection.poll(max(0.0, deadline - time.monotonic())):
                self.rank.process.send_signal(signal.SIGUSR1)  # prints the stacks of all threads
                time.sleep(0.5)
                return None, f"has not returned in time:\n{self.rank.output[-4000:]}"
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            code = self.rank.end()
            return None, f"its process ended with {code}:\n{self.rank.output[-4000:]}"

    def end(self) -> None:
        self.connection.close()
        _kill(self.rank)


class _Pool:
    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="offload-ranks-")
        self._workers: list[_Worker] = []
        self._num_started = 0

    def run(self, size: int, job: Callable[..., Any], timeout_s: float, arguments: Mapping[str, Any]) -> list[Any]:
        while len(self._workers) < size:
            self._num_started += 1
            self._workers.append(_Worker(Path(self._folder.name) / f"worker-{self._num_started}", len(self._workers)))
        working, port, deadline = self._workers[:size], free_port(), time.monotonic() + timeout_s
        for rank, worker in enumerate(working):
            delays = {accelerator.JITTER: os.environ.get(accelerator.JITTER, "")}  # not the value at process start
            worker.give((_torchrun(rank, size, port) | delays, job, arguments))
        replies = [worker.take(deadline) for worker in working]
        wrong = {rank: error for rank, (_, error) in enumerate(replies) if error is not None}
        if wrong:
            for worker in working:  # the other ranks are about to end
                worker.end()
            del self._workers[:size]
            told = "\n".join(f"-- rank {rank} of {size} {error}" for rank, error in wrong.items())
            raise JobError(f"{job.__name__} failed:\n{told}")
        return [result for result, _ in replies]

    def close(self) -> None:
        for worker in self._workers:
            worker.end()
        self._folder.cleanup()


@cache
def _pool() -> _Pool:
    pool = _Pool()
    atexit.register(pool.close)
    return pool


def _torchrun(rank: int, size: int, port: int) -> dict[str, str]:
    """Return the variables that torchrun sets."""
    local = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size, "MASTER_PORT": port}
    return {name: str(value) for name, value in local.items()} | {"MASTER_ADDR": "127.0.0.1"}


def _start(arguments: Sequence[str], variables: Mapping[str, str], path: Path, rank: int, **how: Any) -> Rank:
    common = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    common["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with path.open("wb") as file:
        process = forks.start(
            ["-u", "-m", "tests.engine.ranks_child", *arguments],
            env={**common, **variables},
            stdout=file,
            stderr=subprocess.STDOUT,
            rank=rank,
            **how,
        )
    return Rank(process, path)


def _kill(rank: Rank) -> None:
    if rank.process.poll() is None:
        rank.process.send_signal(signal.SIGKILL)  # SIGKILL also ends a stopped process
        rank.process.wait()


def serve(connection: Connection) -> None:
    """Run jobs from the connection until the pool closes it."""
    import traceback

    import torch.distributed as dist

    while True:
        try:
            variables, job, arguments = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        os.environ.update(variables)
        accelerator.load_if_told()
        try:
            reply = job(**arguments), None
            assert not dist.is_initialized(), "the job left a process group, over which the next one would meet"
        except BaseException as error:
            reply = None, "".join(traceback.format_exception(error))
        connection.send_bytes(pickle.dumps(reply))
