"""Signals during training.

Ctrl-C, SIGTERM or SIGHUP: the first stops after the step, the second exits at once. SIGUSR1: save a checkpoint after
the step. A second SIGHUP changes nothing: a closed terminal sends one, and the shell another.
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

from offload.amounts import Measure, unmeasured
from offload.distributed.comm import Comm
from offload.interrupts import STOP_SIGNALS, is_wanted

_IS_LAUNCHED = "TORCHELASTIC_RUN_ID"  # set for ranks started by torchrun or `--gpus`
_DUPLICATE_S = 1.0
_SAVING = "SIGUSR1: saving after this step."


class StopSignals:
    """Stop and save requests from signals.

    The first stop signal after `begin` sets `requested`. Earlier ones, and a second one, raise KeyboardInterrupt at any
    point in the program. `take_save` returns True once after SIGUSR1. Python handles signals in the main thread only:
    in another thread nothing is ever requested. `say` prints a line.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        # A stop: name of the signal, printed, known on all ranks.
        self.requested = False
        self.name = ""
        self._is_announced = False
        self._is_agreed = False
        # A checkpoint on request.
        self._wants_save = False
        self._is_save_announced = False
        # How a signal counts now, and how far the step is.
        self._waits = False
        self._measure: Measure = unmeasured
        self._is_ignoring = False
        self._before: dict[int, Any] = {}
        self._last = (0, -math.inf)  # last signal and its time

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in filter(is_wanted, STOP_SIGNALS):
                self._before[number] = signal.signal(number, self._on_signal)
            self._before[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, self._on_save)
        return self

    def __exit__(self, *error: Any) -> None:
        for number, handler in self._before.items():
            # torchrun also sends SIGTERM to a leaving rank, any time until the process is gone.
            if self._is_ignoring and number == signal.SIGTERM:
                handler = signal.SIG_IGN
            signal.signal(number, handler)

    def begin(self, measure: Measure = unmeasured) -> None:
        """From now on there are states to save: the first signal requests a stop. `measure`: of a step."""
        self._measure = measure
        self._waits = True

    def ignore(self) -> None:
        """Ignore signals, because this process already exits for another reason."""
        self._is_ignoring = True

    def is_agreed(self, comm: Comm) -> bool:
        """Apply a stop request of one rank to all ranks. Return False if no rank has one. Collective."""
        if self._is_agreed:
            return True
        names = comm.gather_objects(self.name, "requests to stop")
        self._is_agreed = any(names)
        if self._is_agreed:
            rank, name = next((rank, name) for rank, name in enumerate(names) if name)
            if not self._is_announced:
                self._say(f"{name} (rank {rank}): saving; once more to leave at once.")
            self.requested, self.name = True, name
        return self._is_agreed

    def take_save(self) -> bool:
        """Return whether a checkpoint was requested since the last call."""
        wants, self._wants_save = self._wants_save, False  # one line: a signal between two lines would be lost
        if wants and not self._is_save_announced:
            self._say(_SAVING)
        return wants

    def _on_save(self, _number: int, _frame: FrameType | None) -> None:
        if self._is_ignoring:
            return
        self._wants_save = self._waits
        text = _SAVING
        if not self._waits:
            text = "SIGUSR1: there is nothing to save now."
        self._is_save_announced = self._announce(text)

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        now = time.monotonic()  # own line, so no signal comes between read and store below
        before, self._last = self._last, (number, now)
        if self._is_ignoring or (self.requested and number == signal.SIGHUP):
            return
        if _IS_LAUNCHED in os.environ and number == before[0] and self._last[1] - before[1] < _DUPLICATE_S:
            return  # sent to the whole job and passed on by the launcher
        if not self._waits:
            raise KeyboardInterrupt
        self._waits = False  # Not set by other ranks' signals: the same signal may still be on the way here.
        was_requested, self.requested = self.requested, True
        self.name = self.name or signal.Signals(number).name
        # When a rank is gone, torchrun sends SIGTERM to the others, maybe before they notice. Then nothing is saved, so
        # print nothing here. If a user sent the signal, `is_agreed` prints the message.
        if not was_requested and not (_IS_LAUNCHED in os.environ and number == signal.SIGTERM):
            place = self._measure().place
            at = f" ({place})" if place else ""
            self._is_announced = self._announce(
                f"{self.name}: finishing this step{at}, then saving; once more to leave at once."
            )

    def _announce(self, text: str) -> bool:
        """Print a line from a signal handler. Return False if not possible.

        A signal during a write to the same stream fails as a reentrant call, which must not end the run.
        """
        try:
            self._say(text)
        except RuntimeError:
            return False
        return True
