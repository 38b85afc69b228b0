"""Whether an engine's states belong to a step: what is given up, what is torn, and what is refused for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from offload.engine.loss.batch_agreement import meet
from offload.engine.state import EngineState
from offload.engine.units.undo import Where
from offload.errors import OffloadError, TornError


class Recovery:
    """Ends what fails or is interrupted, so that nothing of it stays, or nothing may follow.

    `torn`: why the states belong to no step, if they do not. `on_give_up`: what others do when a step is given up, in
    this order.
    """

    def __init__(self, state: EngineState) -> None:
        self._state = state
        self.torn: str | None = None
        self.on_give_up: list[Callable[[], None]] = []
        self._is_busy = False  # between two calls: one was interrupted, and has to be given up
        state.router.give_up = self.give_up

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Within, an exception ends the step: nothing of it stays, or, where some units are updated already, nothing
        may follow.
        """
        self._is_busy, with_grad = True, torch.is_grad_enabled()
        try:
            yield
        except BaseException:
            torch.set_grad_enabled(with_grad)  # an interrupt may have come right before torch's own way out
            self.give_up()
            raise
        self._is_busy = False

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within, the engine works on its states for somebody. An exception leaves all in order; an interrupt, which
        may come at any line, does not, and the next call gives up what is under way.
        """
        self._is_busy, with_grad = True, torch.is_grad_enabled()
        try:
            yield
        except BaseException as error:
            torch.set_grad_enabled(with_grad)  # an interrupt may have come right before torch's own way out
            self._is_busy = not isinstance(error, Exception)
            raise
        self._is_busy = False

    def give_up(self) -> None:
        """End what is under way; where some units are updated already, nothing may follow. An interrupt may come here
        as well: then the next call begins anew with it.
        """
        state = self._state
        self._is_busy = True
        self.torn = state.updates.give_up() or self.torn
        state.store.reset()
        state.executor.forget()
        # Over ranks nothing was given up, and the others may be elsewhere; what is torn is of no use on the device.
        if state.comm.size == 1 and not self.torn:
            state.slots.refresh()  # what stays may have been on its way
        state.runner.reset()
        for unit in state.units:
            unit.drop_gradients()
            unit.rest()
        for also in self.on_give_up:
            also()
        self._is_busy = False

    @property
    def is_idle(self) -> bool:
        """True where nothing was interrupted, or has failed half done."""
        return not self._is_busy and self._state.undo.where not in (Where.ENGINE, Where.FAILED)

    @property
    def has_failed(self) -> bool:
        """True where nobody is at work, and a pass has failed half done, which the next call gives up."""
        return not self._is_busy and self._state.undo.where is Where.FAILED

    def recover(self) -> None:
        """Give up what an interrupt has left half done."""
        if not self.is_idle:
            self.give_up()

    def check_open(self) -> None:
        """Raise OffloadError where the engine is closed."""
        if self._state.closed:
            raise OffloadError("the engine is closed: its states are gone. Make a new one.")

    def check_usable(self) -> None:
        """Raise OffloadError where the engine is closed, TornError where its states belong to no step."""
        self.check_open()
        self.recover()
        self.check_sound()

    def check_sound(self) -> None:
        """Raise TornError where the states belong to no step."""
        self.torn = self.torn or self._state.updates.failure()
        if self.torn:
            raise TornError(f"{self.torn}: the states belong to no step. Load the last checkpoint, or start over.")

    def settle(self, operation: str) -> None:
        """Let every update that is on its way arrive, before the host reads the states. Collective."""
        self.check_usable()
        meet(self._state.comm, operation)
        self._state.updates.flush()
        self._state.lanes.drain_updates()
        if self._state.comm.size > 1:
            self._state.lanes.finish()
