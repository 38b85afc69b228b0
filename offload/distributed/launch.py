"""`--gpus N`: one process for each rank on this machine, started and watched by torchrun's own agent.

torchrun's agent works in a thread here, while the main thread keeps the signals: the agent would end the ranks after 30
seconds, and these may have a step to finish and a model to save.
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

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""What is passed on to the ranks, each of which has a session of its own, out of reach of the terminal's Ctrl-C."""
_LAUNCHER = "OFFLOAD_LAUNCHER"  # the variable by which a rank knows the process that started it
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
LOOK_S = 0.05
"""How often the main thread looks for signals to pass on, and for the end."""


def launch(
    module: str, words: Sequence[str], num_ranks: int, *, debug: bool = False, say: Callable[[str], None] = print
) -> int:
    """Run `python -m MODULE WORDS` in `num_ranks` processes with torchrun's variables; return the exit code of all.

    The first signal is passed on once to every rank, and so is the second; a third one kills what is left. SIGUSR1,
    which asks for a checkpoint, goes to rank 0 alone.
    debug: torchrun's own log is shown. say: prints a line.

    Raises ConfigError: there are GPUs, but fewer. RankLostError: all ranks were killed. OffloadError: none was started.
    """
    _check_gpus(num_ranks, say)
    # torchrun would set 1. As PyTorch does, a rank takes its share of the cores, unless the user says something else.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // num_ranks)))
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # of connections that close while others end
    os.environ[_LAUNCHER] = str(os.getpid())
    with tempfile.TemporaryDirectory(prefix="offload-torchrun-") as folder:
        agent = _Agent(module, words, num_ranks, Path(folder))
        before = {number: signal.signal(number, agent.on_signal) for number in SIGNALS}
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
    """Be told to stop, and save, when the process that started this rank is gone, however it ended: a rank of its own
    would train on, out of everybody's sight. Returns whether this is a rank that `launch` started.
    """
    launcher = os.environ.pop(_LAUNCHER, None)
    if launcher is not None and sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if str(os.getppid()) != launcher:  # it was gone before
            raise KeyboardInterrupt
    return launcher is not None


def exit_code(codes: Mapping[int, int], *, is_interrupted: bool) -> int:
    """Return the project's exit code for those of the ranks that failed (below 0: ended by that signal).

    When one rank fails the others end with 1, or are ended, and which of them torchrun sees first is a matter of luck;
    so the code that says most is taken. Raises RankLostError where none of them could say why.
    """
    found = set(codes.values())
    for code in (ConfigError.exit_code, DoesNotFitError.exit_code):
        if code in found:
            return code
    interrupted = InterruptedRun.exit_code
    killed = all(code < 0 for code in found)
    if found and (found == {interrupted} or (is_interrupted and (interrupted in found or killed))):
        return interrupted
    if found and killed:
        rank = min(codes)
        names = ", ".join(f"rank {rank} by {signal.Signals(-code).name}" for rank, code in sorted(codes.items()))
        raise RankLostError(f"All ranks were ended from outside: {names}; the machine may be out of memory.", rank)
    return OffloadError.exit_code if found else 0


def _check_gpus(num_ranks: int, say: Callable[[str], None]) -> None:
    from offload.accelerators import accelerators

    found = len(accelerators())
    if not found:
        say(f"note: no GPU is found here; the {num_ranks} ranks share the CPU.")
    elif found < num_ranks:
        raise ConfigError(
            f"--gpus is {num_ranks}, and this machine has {found} that this process may use; set --gpus to {found} or "
            "less."
        )


class _Agent:
    """torchrun's agent in a thread, and the signals that came for the ranks."""

    def __init__(self, module: str, words: Sequence[str], num_ranks: int, folder: Path) -> None:
        self.codes: dict[int, int] = {}
        self.error: Exception | None = None
        self.received: list[int] = []
        self._wants_save = False
        self._words = ["-m", module, *(word.replace("$", "$$") for word in words)]  # torchrun fills in ${local_rank}
        self._config = _config(num_ranks, folder)
        self._num_sent: Counter[int] = Counter()
        self._thread = threading.Thread(target=self._run, name="torchrun", daemon=True)

    def on_signal(self, number: int, _frame: Any) -> None:
        self.received.append(number)

    def on_save(self, _number: int, _frame: Any) -> None:
        self._wants_save = True

    def run(self) -> None:
        """Return when all ranks are gone."""
        self._thread.start()
        while self._thread.is_alive():
            self._thread.join(LOOK_S)
            if self.received:
                self._pass_on(psutil.Process().children())
            if self._wants_save:
                self._wants_save = False
                self._ask_to_save(psutil.Process().children())

    def _pass_on(self, ranks: Iterable[psutil.Process]) -> None:
        """Give every rank the next of the signals that it did not get yet, also one that started after they came. (Of
        two at once it would see one.)
        """
        for rank in ranks:
            sent = self._num_sent[rank.pid]
            if sent < len(self.received):
                self._num_sent[rank.pid] += 1
                with suppress(psutil.NoSuchProcess):
                    rank.send_signal(self.received[sent] if sent < 2 else signal.SIGKILL)

    def _ask_to_save(self, ranks: Iterable[psutil.Process]) -> None:
        for rank in ranks:
            with suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                if rank.environ().get("RANK") == "0":
                    rank.send_signal(signal.SIGUSR1)

    def _run(self) -> None:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
        from torch.distributed.launcher.api import elastic_launch

        # Of this thread, and so of the ranks, until these are ready (config/command_line.py): a signal that comes while
        # Python starts would end them with a traceback.
        signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, signal.SIGUSR1))
        try:
            elastic_launch(self._config, sys.executable)(*self._words)
        except ChildFailedError as error:
            self.codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except Exception as error:
            self.error = error


def _config(num_ranks: int, folder: Path) -> Any:
    """Return what `torchrun --standalone --nproc-per-node N` makes of its command line."""
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
        logs_specs=DefaultLogsSpecs(log_dir=str(folder)),  # where nothing is redirected to
    )
    if hasattr(config, "numa_options"):
        config.numa_options = None  # offload/machine/cores.py shares out the cores
    return config
