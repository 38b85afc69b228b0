"""`--gpus N`: starts one process per rank on this machine, through the torchrun agent.

The agent runs in a thread, and the main thread handles signals: the agent would kill the ranks after 30 seconds, too
early for ranks with a step to finish and a model to save.
"""

from __future__ import annotations

import ctypes
import logging
import os
import signal
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from offload.errors import ConfigError, DoesNotFitError, InterruptedRun, OffloadError, RankLostError
from offload.interrupts import STOP_SIGNALS, is_wanted
from offload.system import threads_within_quota

_LAUNCHER = "OFFLOAD_LAUNCHER"  # process id of the launcher, in the environment of each rank
_PR_SET_PDEATHSIG = 1  # from linux/prctl.h
LOOK_S = 0.05
"""Seconds between two checks of the main thread for signals and for the end."""


def launch(
    module: str, words: Sequence[str], num_ranks: int, *, debug: bool = False, say: Callable[[str], None] = print
) -> int:
    """Run `python -m MODULE WORDS` in `num_ranks` processes with torchrun variables. Return the common exit code.

    Stop signals are forwarded, because each rank has a separate session: the first and the second once to every rank; a
    third kills all remaining ranks. SIGUSR1, a request for a checkpoint, goes to rank 0 only. debug: show the torchrun
    log. say: prints a line.

    Raises ConfigError: this machine has GPUs, but too few. RankLostError: all ranks were killed. OffloadError: torchrun
    started no rank.
    """
    from offload.accelerators import accelerators

    num_gpus = len(accelerators())
    if not num_gpus:
        say(f"note: no GPU is found here; the {num_ranks} ranks share the CPU.")
    elif num_gpus < num_ranks:
        raise ConfigError(
            f"--gpus is {num_ranks}, but this process can use {num_gpus} on this machine; set --gpus to {num_gpus} or "
            "less."
        )
    # torchrun would set 1. Like PyTorch, a rank takes a share of the cores, unless the user sets OMP_NUM_THREADS.
    num_cores = len(os.sched_getaffinity(0))
    os.environ.setdefault("OMP_NUM_THREADS", str(threads_within_quota(max(1, num_cores // num_ranks), num_ranks)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # silences messages about connections closed at exit
    # By this number a rank sees whether the launcher is dead already.
    os.environ[_LAUNCHER] = str(os.getpid())
    with tempfile.TemporaryDirectory(prefix="offload-torchrun-") as folder:
        agent = _Agent(module, words, num_ranks, Path(folder))
        before = {number: signal.signal(number, agent.on_signal) for number in filter(is_wanted, STOP_SIGNALS)}
        before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, agent.on_save)
        if not debug:
            logging.disable(logging.CRITICAL)
        try:
            agent.run()
        finally:
            logging.disable(logging.NOTSET)
            for number, handler in before.items():
                signal.signal(number, handler)
    if agent.error is not None:
        raise OffloadError(f"torchrun could not run {num_ranks} ranks: {type(agent.error).__name__}: {agent.error}")
    return exit_code(agent.codes, is_interrupted=bool(agent.received))


def end_with_launcher() -> bool:
    """Request SIGTERM (stop and save) for this process when the launcher dies: otherwise an orphan rank trains on,
    unseen. Return True if `launch` started this rank.
    """
    launcher = os.environ.pop(_LAUNCHER, None)
    if launcher is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if str(os.getppid()) != launcher:  # the launcher died before prctl
            raise KeyboardInterrupt
    return launcher is not None


def exit_code(codes: Mapping[int, int], *, is_interrupted: bool) -> int:
    """Return the project exit code for the exit codes of failed ranks (negative: killed by this signal number).

    After one failure the other ranks end with 1 or are killed, and torchrun may see any of them first. The most
    specific code wins. Raises RankLostError if all failed ranks were killed from outside.
    """
    exit_codes = set(codes.values())
    for code in (ConfigError.exit_code, DoesNotFitError.exit_code):
        if code in exit_codes:
            return code
    interrupted = InterruptedRun.exit_code
    killed = all(code < 0 for code in exit_codes)
    if exit_codes and (exit_codes == {interrupted} or (is_interrupted and (interrupted in exit_codes or killed))):
        return interrupted
    if exit_codes and killed:
        rank = min(codes)
        names = ", ".join(f"rank {rank} by {signal.Signals(-code).name}" for rank, code in sorted(codes.items()))
        raise RankLostError(f"All ranks were killed from outside: {names}; the machine may be out of memory.", rank)
    if exit_codes:
        return OffloadError.exit_code
    return 0


class _Agent:
    """The torchrun agent in a thread, and the signals to forward."""

    def __init__(self, module: str, words: Sequence[str], num_ranks: int, folder: Path) -> None:
        self.codes: dict[int, int] = {}
        self.error: Exception | None = None
        self.received: list[int] = []
        self._wants_save = False
        # $$, because torchrun expands ${local_rank}
        self._words = ["-m", module, *(word.replace("$", "$$") for word in words)]
        self._config = _config(num_ranks, folder)
        self._num_sent: Counter[int] = Counter()
        self._thread = threading.Thread(target=self._run, name="torchrun", daemon=True)

    def on_signal(self, number: int, _frame: Any) -> None:
        if number != signal.SIGHUP or not self.received:  # a closed terminal sends several
            self.received.append(number)

    def on_save(self, _number: int, _frame: Any) -> None:
        self._wants_save = True

    def run(self) -> None:
        """Return after all ranks have ended."""
        self._thread.start()
        while self._thread.is_alive():
            self._thread.join(LOOK_S)
            # Looked at in each turn: ranks may start after the signal came.
            if self.received:
                self._pass_on(psutil.Process().children())
            if self._wants_save:
                self._wants_save = False
                for rank in psutil.Process().children():
                    with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                        if rank.environ().get("RANK") == "0":
                            rank.send_signal(signal.SIGUSR1)

    def _pass_on(self, ranks: Iterable[psutil.Process]) -> None:
        """Send every rank its next pending signal, also to ranks started after the signal came. One at a time: a rank
        would see two simultaneous signals as one.
        """
        for rank in ranks:
            sent = self._num_sent[rank.pid]
            if sent < len(self.received):
                self._num_sent[rank.pid] += 1
                with suppress(psutil.NoSuchProcess):
                    signal_number = self.received[sent]
                    if sent >= 2:  # asked twice already
                        signal_number = signal.SIGKILL
                    rank.send_signal(signal_number)

    def _run(self) -> None:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        # Blocks signals in this thread, and by inheritance in the ranks until they are ready (config/command_line.py):
        # a signal during Python startup would end a rank with a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, (*STOP_SIGNALS, signal.SIGUSR1))
        try:
            elastic_launch(self._config, sys.executable)(*self._words)
        except ChildFailedError as error:
            self.codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except Exception as error:
            self.error = error


def _config(num_ranks: int, folder: Path) -> Any:
    """Return the configuration of `torchrun --standalone --nproc-per-node N`."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=folder.name,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="127.0.0.1",
        max_restarts=0,
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),  # no output is redirected there
    )
    if hasattr(config, "numa_options"):
        config.numa_options = None  # offload/machine/limits.py assigns the cores
    return config
