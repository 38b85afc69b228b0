"""Runs of `offload.train` over a few kilobytes of text, in processes that tests can kill.

The processes start like user commands, or are forked from a process with an imported torch.
"""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from safetensors.torch import load_file

from offload.app.checkpoint_folder import Checkpoints
from tests import forks
from tests.lanes.patience import eventually
from tests.ports import free_port, rank_variables
from tests.run_folder import LLAMA, environment, learnt, lines_of, write_text

# About 3 million parameters with dropout: 38 MB of states, slow enough to save for a kill during the save. Batches have
# few tokens: on a CPU without AVX-512, bf16 products take seventy times the fp32 time.
GPT2 = {"model_type": "gpt2", "vocab_size": 384, "n_embd": 256, "n_layer": 4, "n_head": 4, "n_positions": 64}
LARGE = ["--model.path", "gpt2.json", "--train.precision", "bf16", "--train.max_grad_norm", "0.3"]
SMALL = ["--model.path", "llama.json", "--train.precision", "fp32"]
WORDS = [
    *("--data.source", "text.txt", "--data.sequence_length", "8", "--train.batch_size", "4"),
    *("--checkpoint.keep", "2", "--train.log_every", "1000000"),
]
TIERS = {
    "memory": [],
    "nvme": [
        *("--offload.parameters", "nvme", "--offload.optimizer", "nvme", "--offload.gradients", "nvme"),
        *("--offload.nvme_dir", "disk"),
    ],
}


def make_folder(path: Path) -> Path:
    """Write a working directory for the commands. An epoch has about 22 steps, so runs cover several epochs."""
    (path / "gpt2.json").write_text(json.dumps(GPT2))
    (path / "llama.json").write_text(json.dumps(LLAMA))
    write_text(path, 56)
    (path / "disk").mkdir()
    return path


@dataclass
class Commands:
    """Starts `python -m offload.train` like a user, with --gpus for several ranks.

    `begin`: `start_anew` or `start` from tests/forks.py.
    """

    folder: Path
    begin: Callable[..., Any] = forks.start_anew

    def start(self, words: Sequence[str], log: Path, num_ranks: int) -> Processes:
        more = ["--gpus", str(num_ranks)] if num_ranks > 1 else []
        return Processes([command(self.begin, self.folder, [*words, *more], log)], num_ranks)


@dataclass
class Forks:
    """Forks processes with the same command. Several ranks get torchrun variables, without a launcher."""

    folder: Path

    def start(self, words: Sequence[str], log: Path, num_ranks: int) -> Processes:
        port, started = free_port(), []
        for rank in range(num_ranks):
            env = rank_variables(rank, num_ranks, port) if num_ranks > 1 else {}
            started.append(command(forks.start, self.folder, words, log, env, rank=rank))
        return Processes(started, num_ranks)


def command(begin: Any, folder: Path, words: Sequence[str], log: Path, env: Any = (), **how: Any) -> Any:
    with log.open("ab") as stream:
        return begin(
            ["-m", "offload.train", *words],
            cwd=folder,
            env=environment(folder / "cache") | {"OMP_WAIT_POLICY": "PASSIVE"} | dict(env),
            stdout=stream,
            stderr=stream,
            start_new_session=True,
            **how,
        )


def stands_still(pid: int) -> bool:
    """Return whether every thread in a process is stopped."""
    with suppress(OSError):  # the thread can end at any time
        states = [path.read_text().rpartition(") ")[2][0] for path in Path(f"/proc/{pid}/task").glob("*/stat")]
        return set(states) == {"T"}
    return False


@dataclass
class Processes:
    """The started processes: one command (with child processes for several ranks), or one process per rank."""

    started: Sequence[Any]
    num_ranks: int
    stopped: list[int] = field(default_factory=list)

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    def pids(self, rank: int | None = None) -> list[int]:
        """Return the process ids of all ranks, or of one rank."""
        if len(self.started) == self.num_ranks:
            return [each.pid for each in self.started] if rank is None else [self.started[rank].pid]
        parent, ranks = psutil.Process(self.started[0].pid), {}
        for each in parent.children():
            with suppress(psutil.Error):
                ranks[int(each.environ().get("RANK", -1))] = each.pid
        return [parent.pid, *ranks.values()] if rank is None else [ranks[rank]]

    def is_running(self) -> bool:
        return None in [each.poll() for each in self.started]

    def stop(self) -> bool:
        """Stop all processes until `go_on` or a kill. Return whether all are stopped and none has ended."""
        self.stopped = self.pids()
        self._send(signal.SIGSTOP)
        assert eventually(lambda: not self.is_running() or all(map(stands_still, self.stopped)))
        return self.is_running()

    def go_on(self) -> None:
        self._send(signal.SIGCONT)

    def _send(self, number: int) -> None:
        for pid in self.stopped:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        """Kill all running processes."""
        if self.is_running():
            for pid in self.pids():
                os.kill(pid, signal.SIGKILL)

    def codes(self) -> set[int]:
        """Wait for the end. Return the exit codes."""
        assert eventually(lambda: not self.is_running(), forks.MINUTES), "they do not end"
        return {each.poll() for each in self.started}


@dataclass
class Run:
    """A run folder with the training command. `place`: parent of the folder; None: beside the logs."""

    starter: Commands | Forks
    name: str
    words: Sequence[str]
    num_ranks: int = 1
    place: Path | None = None
    logs: list[Path] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return (self.place or self.starter.folder) / self.name

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.path / "checkpoints")

    def start(self) -> Processes:
        """Start the command, with the same words each time."""
        self.logs.append(self.starter.folder / f"{self.name}-{len(self.logs)}.log")
        return self.starter.start([*WORDS, *self.words, "--run.dir", str(self.path)], self.logs[-1], self.num_ranks)

    def said(self) -> str:
        """Return the output from the last start."""
        return self.logs[-1].read_text(errors="replace") if self.logs[-1].exists() else ""

    def errors(self) -> list[str]:
        return [line for line in self.said().splitlines() if line.startswith("offload: ")]

    def learnt(self) -> list[tuple[Any, ...]]:
        """Return the time-independent values in each metrics.jsonl line."""
        return learnt(lines_of(self.path))

    def weights(self) -> Mapping[str, Any]:
        return load_file(self.path / "hf/model.safetensors")
