"""Ctrl-C and SIGTERM while a model trains: the first asks for a stop after the step, the second leaves at once. SIGUSR1
asks for a checkpoint after the step.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

from offload.distributed.comm import Comm

_IS_LAUNCHED = "TORCHELASTIC_RUN_ID"  # of torchrun's ranks, and of those of `--gpus`
_ONE_AND_THE_SAME_S = 1.0


class StopSignals:
    """`requested` turns true at the first signal to stop after `begin`; any before it, and a second one, raises
    KeyboardInterrupt wherever the program is. `take_save` is true once after SIGUSR1.

    Signals can only be caught in the main thread; in another one this never turns true. `say` prints a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self.requested = self._wants_save = False
        self.name = ""
        self._say = say
        self._waits = self._is_deaf = self._is_agreed = self._is_told = False
        self._before: dict[int, Any] = {}
        self._last = (0, -math.inf)  # signal, and when it came

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._on_signal)
            self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_save)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            # A rank that leaves is told by torchrun to leave, too: that may come until its process is gone.
            signal.signal(number, signal.SIG_IGN if self._is_deaf and number == signal.SIGTERM else handler)

    def begin(self) -> None:
        """From now on there is something to save, and the first signal asks for it."""
        self._waits = True

    def ignore(self) -> None:
        """This process is on its way out, for another reason."""
        self._is_deaf = True

    def is_agreed(self, comm: Comm) -> bool:
        """Tell, alike on all ranks, whether one of them was asked to stop. Collective; `name` is set on all."""
        if not comm.any(self.requested, "requests to stop"):
            return False
        self.agree(comm)
        return True

    def agree(self, comm: Comm) -> None:
        """One of the ranks was asked to stop, and so are all. Collective."""
        if not self._is_agreed:
            names = comm.gather_objects(self.name, "name of the signal")
            self._is_agreed = True
            rank, name = next((rank, name) for rank, name in enumerate(names) if name)
            if not self._is_told:
                self._say(f"{name} (rank {rank}): saving; once more to leave at once.")
            self.requested, self.name = True, name

    def take_save(self) -> bool:
        """Return whether a checkpoint was asked for since this was called last."""
        wants, self._wants_save = self._wants_save, False
        return wants

    def _on_save(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_deaf:
            return
        self._wants_save = self._waits
        self._tell("SIGUSR1: saving after this step." if self._waits else "SIGUSR1: there is nothing to save now.")

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()  # on a line of its own: no signal comes between looking at the last one and noting this
        before, self._last = self._last, (number, now)
        if self._is_deaf:
            return
        if _IS_LAUNCHED in os.environ and number == before[0] and self._last[1] - before[1] < _ONE_AND_THE_SAME_S:
            return  # told to all processes of the job, and passed on by the launcher
        if not self._waits:
            raise KeyboardInterrupt
        self._waits = False  # one that came to another rank does not count: the same one may be on its way to this
        was_requested, self.requested = self.requested, True
        self.name = self.name or signal.Signals(number).name
        # torchrun ends the others by SIGTERM when a rank is gone, which may come before that is seen: then nothing is
        # saved. Where it is somebody's wish, `agree` says so.
        if not was_requested and not (_IS_LAUNCHED in os.environ and number == signal.SIGTERM):
            self._is_told = self._tell(f"{self.name}: finishing this step, then saving; once more to leave at once.")

    def _tell(self, text: str) -> bool:
        """Print a line from a handler; return whether it could be. A signal that comes within a write of the program's
        own finds the stream taken: it fails as a reentrant call, which is not to end the run.
        """
        try:
            self._say(text)
        except RuntimeError:
            return False
        return True
