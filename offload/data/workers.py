"""Encodes batches ahead of the consumer, in a thread or in worker processes.

`tokenizers` already uses all cores. The Python work is serial: rendering templates and locating answers is a quarter of
the time for conversations. Worker processes run this part in parallel. They start by module name, not by fork, because
a fork copies thread locks in their current state, and not by `multiprocessing`, because that would run the user's
script again.
"""

from __future__ import annotations

import os
import pickle
import queue
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, Generic, Protocol, TypeVar

from offload.errors import ConfigError, OffloadError

Batch = TypeVar("Batch", contravariant=True)
Made = TypeVar("Made", covariant=True)


class Maker(Protocol, Generic[Batch, Made]):
    """Processes batches independently. Must be picklable."""

    def make(self, batch: Batch, /) -> Made:
        """Return the result for a batch. Raises OffloadError."""


def made_ahead(maker: Maker[Batch, Made], batches: Iterable[Batch], num_workers: int) -> Generator[Made]:
    """Yield the result for each batch, in order.

    `num_workers`: processes; 0: a thread in this process. Memory holds one batch more than are in progress. Raises the
    errors of `maker`, and ConfigError if a process ends.
    """
    with ExitStack() as stack:
        workers: queue.SimpleQueue[Maker[Batch, Made]] = queue.SimpleQueue()
        for _ in range(num_workers):
            workers.put(stack.enter_context(_Worker(maker)))
        if not num_workers:
            workers.put(maker)

        def make(batch: Batch) -> Made:
            worker = workers.get()
            try:
                return worker.make(batch)
            finally:
                workers.put(worker)

        threads = ThreadPoolExecutor(max(num_workers, 1), "tokenizing")
        stack.callback(threads.shutdown, wait=not num_workers, cancel_futures=True)
        pending: deque[Future[Made]] = deque()
        for batch in batches:
            pending.append(threads.submit(make, batch))
            if len(pending) > max(num_workers, 1):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class _Worker:
    """A process with a separate maker."""

    def __init__(self, maker: Maker[Any, Any]) -> None:
        own = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "offload.data.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **own},
        )
        self._to_send: Maker[Any, Any] | None = maker  # sent with the first batch: a pipe blocks if nobody reads

    def __enter__(self) -> _Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            try:
                stream.close()
            except OSError:  # unread input
                pass

    def make(self, batch: Any) -> Any:
        """Return the process result for a batch. Raises OffloadError."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            pickle.dump((self._to_send, batch), stdin, pickle.HIGHEST_PROTOCOL)
            stdin.flush()
            self._to_send = None
            made = pickle.load(stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise ConfigError(
                f"A tokenizer process ended with exit code {self._process.wait()} (a negative code is a signal; -9 "
                "often means too little memory). Set --data.num_workers lower, or to 0 to tokenize in this process."
            ) from error
        if isinstance(made, OffloadError):
            raise made
        return made


def main() -> None:
    """Process batches from stdin until the end. Other output goes to stderr."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles the interrupt and ends this one
    results = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    maker: Any = None
    while True:
        try:
            sent, batch = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        maker = sent or maker
        try:
            made = maker.make(batch)
        except OffloadError as error:
            made = error
        pickle.dump(made, results, pickle.HIGHEST_PROTOCOL)
        results.flush()


if __name__ == "__main__":
    main()
