"""Forks processes that save in a loop, for a test that kills them.

The children are forked after the torch import, because separate imports would take minutes. Reads lines `FOLDER
FIRST_STEP DIES_AT EXCHANGES` and answers each with a process id, then with the wait status at the end of the process.
Each process writes a line to FOLDER.log before and after each save.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from offload.app.checkpoint_folder import Checkpoints
from offload.checkpoint import writer
from offload.files import atomic_folder
from tests.checkpoint.states import save

CALLS = ("open", "mkdir", "rename", "replace", "unlink", "rmdir", "fsync", "pwrite")


def die_at(count: int) -> None:
    """Kill this process with SIGKILL directly before system call `count` with a change on disk."""
    numbers = itertools.count()

    def counted(call: Callable) -> Callable:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if next(numbers) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **kwargs)

        return wrapped

    for name in CALLS:
        setattr(os, name, counted(getattr(os, name)))
    writer._sync = writer.aiofiles.os.wrap(os.fsync)
    atomic_folder._exchange = counted(atomic_folder._exchange)


def loop(folder: Path, first: int, dies_at: int, exchanges: bool) -> None:
    if not exchanges:
        atomic_folder._exchange = lambda one, other: False
    if dies_at >= 0:
        die_at(dies_at)
    checkpoints = Checkpoints(folder)
    log = os.fdopen(os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND), "w")
    checkpoints.clear()
    for step in itertools.count(first):
        for _ in range(2):  # the second save replaces the first
            print("begin", step, file=log, flush=True)
            save(checkpoints, step, keep=2)
            print("end", step, file=log, flush=True)
        if dies_at >= 0:
            return


def main() -> None:
    torch.set_num_threads(1)
    for line in sys.stdin:
        folder, first, dies_at, exchanges = line.split()
        pid = os.fork()
        if not pid:
            os.close(0)
            loop(Path(folder), int(first), int(dies_at), exchanges == "True")
            os._exit(0)
        print(pid, flush=True)
        print(os.waitpid(pid, 0)[1], flush=True)


if __name__ == "__main__":
    main()
