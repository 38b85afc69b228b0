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

from offload.app.telemetry.lasting_output import make_output_last
from offload.errors import ConfigError, OffloadError

Batch = TypeVar("Batch", contravariant=True)
Output = TypeVar("Output", covariant=True)


class BatchEncoder(Protocol, Generic[Batch, Output]):
    """Processes batches independently. Must be picklable."""

    def encode_batch(self, batch: Batch, /) -> Output:
        """Return the result for a batch. Raises OffloadError."""


def encode_ahead(encoder: BatchEncoder[Batch, Output], batches: Iterable[Batch], num_workers: int) -> Generator[Output]:
    """Yield the result for each batch, in order.

    `num_workers`: processes; 0: a thread in this process. Memory holds one batch more than are in progress. Raises the
    errors of `encoder`, and ConfigError if a process ends.
    """
    with ExitStack() as stack:
        # A thread for each worker takes any free one, so a slow batch delays no other.
        workers: queue.SimpleQueue[BatchEncoder[Batch, Output]] = queue.SimpleQueue()
        for _ in range(num_workers):
            workers.put(stack.enter_context(_Worker(encoder)))
        if not num_workers:
            workers.put(encoder)

        def encode_batch(batch: Batch) -> Output:
            worker = workers.get()
            try:
                return worker.encode_batch(batch)
            finally:
                workers.put(worker)

        threads = ThreadPoolExecutor(max(num_workers, 1), "tokenizing")
        # Threads with workers need no wait: the worker's end ends their read.
        stack.callback(threads.shutdown, wait=not num_workers, cancel_futures=True)
        pending: deque[Future[Output]] = deque()
        for batch in batches:
            pending.append(threads.submit(encode_batch, batch))
            # One batch more than in progress: a worker never waits for the next one.
            if len(pending) > max(num_workers, 1):
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()


class _Worker:
    """A process with a separate encoder."""

    def __init__(self, encoder: BatchEncoder[Any, Any]) -> None:
        # One core each: the processes are the parallelism.
        worker_settings = {"TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "offload.extras.data.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, **worker_settings},
        )
        # sent with the first batch: a pipe blocks if nobody reads
        self._unsent_encoder: BatchEncoder[Any, Any] | None = encoder

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

    def encode_batch(self, batch: Any) -> Any:
        """Return the process result for a batch. Raises OffloadError."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        try:
            pickle.dump((self._unsent_encoder, batch), stdin, pickle.HIGHEST_PROTOCOL)
            stdin.flush()
            self._unsent_encoder = None
            result = pickle.load(stdout)
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise ConfigError(
                f"A tokenizer process ended with exit code {self._process.wait()} (a negative code is a signal; -9 "
                "often means too little memory). Set --data.num_workers lower, or to 0 to tokenize in this process."
            ) from error
        if isinstance(result, OffloadError):
            raise result
        return result


def main() -> None:
    """Process batches from stdin until the end. Other output goes to stderr."""
    for number in (signal.SIGINT, signal.SIGHUP):  # the parent process handles these and ends this one
        signal.signal(number, signal.SIG_IGN)
    results = os.fdopen(os.dup(1), "wb")
    # Results have their own descriptor: a print of a library must not come between them.
    os.dup2(2, 1)
    # Nobody may read stderr any more, and a write there must not end the process.
    make_output_last()
    encoder: Any = None
    while True:
        try:
            new_encoder, batch = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        encoder = new_encoder or encoder
        try:
            result = encoder.encode_batch(batch)
        except OffloadError as error:
            result = error
        pickle.dump(result, results, pickle.HIGHEST_PROTOCOL)
        results.flush()


if __name__ == "__main__":
    main()
