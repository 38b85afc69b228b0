"""Forks processes that run `offload.train WORDS`, from one that has imported what these import, which takes most of
their start. Reads lines of JSON: {"words": [...], "env": {...}, "cwd": ..., "log": ...} is answered with a process id,
and a process id with its exit code, null while it runs.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import transformers.models.gpt2.modeling_gpt2

import offload.trainer  # noqa: F401
from offload.cli import run_command
from offload.train import main as train


def become(words: list[str], env: dict[str, str], cwd: str, log: str) -> None:
    """Be the command from here on, in this process."""
    os.setsid()
    os.chdir(cwd)
    os.environ.update(env)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(out, number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    run_command(train, words)


def answer(asked: Any) -> int | None:
    if isinstance(asked, dict):
        pid = os.fork()
        if not pid:
            become(**asked)
        return pid
    pid, status = os.waitpid(asked, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def main() -> None:
    assert transformers.models.gpt2.modeling_gpt2
    assert len(list(Path("/proc/self/task").iterdir())) == 1, "a thread would not be there after a fork"
    torch.set_num_threads(1)
    with Path(f"/dev/fd/{sys.stdin.fileno()}").open() as lines:
        for line in lines:
            print(json.dumps(answer(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
