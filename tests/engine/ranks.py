"""Ranks for the engine tests: a process pool for jobs, and separate processes for tests in which a rank dies."""

from __future__ import annotations

import atexit
import os
import pickle
import signal
import time
from collections.abc import Callable, Mapping
from functools import cache, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests import accelerator, forks
from tests.distributed.ranks import Pool, Worker, ranks
from tests.ports import free_port, rank_variables

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


processes = partial(ranks, module="tests.engine.ranks_child")
"""Runs `python -m tests.engine.ranks_child ARGUMENTS` on ranks."""


class _Worker(Worker):
    """A pool process."""

    def __init__(self, path: Path, number: int) -> None:
        super().__init__("tests.engine.ranks_child", "serve", path=path, rank=number)

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


class _Pool(Pool[_Worker]):
    def run(self, size: int, job: Callable[..., Any], timeout_s: float, arguments: Mapping[str, Any]) -> list[Any]:
        working, port, deadline = self.first(size), free_port(), time.monotonic() + timeout_s
        for rank, worker in enumerate(working):
            delays = {accelerator.JITTER: os.environ.get(accelerator.JITTER, "")}  # not the value at process start
            worker.give((rank_variables(rank, size, port) | delays, job, arguments))
        replies = [worker.take(deadline) for worker in working]
        wrong = {rank: error for rank, (_, error) in enumerate(replies) if error is not None}
        if wrong:
            self.drop(size)
            told = "\n".join(f"-- rank {rank} of {size} {error}" for rank, error in wrong.items())
            raise JobError(f"{job.__name__} failed:\n{told}")
        return [result for result, _ in replies]


@cache
def _pool() -> _Pool:
    pool = _Pool(_Worker)
    atexit.register(pool.close)
    return pool


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
