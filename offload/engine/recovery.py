"""Recovery after failures and interrupts: the engine gives up a step, or marks the states as torn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from offload.engine.gradients.updates import Updates
from offload.engine.units.runner import UnitRunner
from offload.engine.units.unit import Unit
from offload.errors import OffloadError, TornError
from offload.interrupts import interrupts
from offload.schedule.execute import Executor
from offload.tiers.slots import Slots
from offload.tiers.store import Store


class Recovery:
    """Ends failed or interrupted work without side effects, or else blocks further steps.

    `torn`: reason if the states belong to no step; None: they are sound. `is_closed`: the states are freed.
    `is_parked`: no memory of the device is held, so nothing can be computed.
    """

    def __init__(
        self,
        store: Store,
        slots: Slots,
        executor: Executor,
        updates: Updates,
        runner: UnitRunner,
        units: Sequence[Unit],
    ) -> None:
        self._store = store
        self._slots = slots
        self._executor = executor
        self._updates = updates
        self._runner = runner
        self._units = units
        self.torn: str | None = None
        self._num_forced = interrupts.num_forced
        self.is_closed = False
        self.is_parked = False
        self.callbacks: list[Callable[[], None]] = []
        """Called at the end of `give_up`, in this order."""
        self._depth = 0  # nesting of `working`

    @contextmanager
    def working(self) -> Iterator[None]:
        """Context for work on the states. Interrupts are deferred to safe points. An exception leaves the states in
        order.
        """
        with interrupts:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    @contextmanager
    def given_up_on_error(self) -> Iterator[None]:
        """Context in which an exception ends the step: all effects are undone, or, after the first unit update, the
        states are torn.
        """
        with self.working():
            try:
                yield
            except BaseException:
                self.give_up()
                raise

    def give_up(self) -> None:
        """Cancel pending work. If some units are already updated, the states are torn."""
        with interrupts, interrupts.uninterrupted():
            self.torn = self._updates.give_up() or self.torn
            self._store.reset()
            self._executor.forget()
            # Several ranks: nothing was given up together, and the others may be elsewhere. Torn weights are useless on
            # the device.
            if not (self._runner.has_peers or self.torn):
                self._slots.refresh()  # copies of resident weights may have been in progress
            self._runner.reset()
            for unit in self._units:
                unit.drop_gradients()
                unit.install_placeholders()
            for give_up in self.callbacks:
                give_up()

    @property
    def is_idle(self) -> bool:
        """True if the engine is not busy and no pass has failed halfway."""
        return not (self._depth or self._runner.is_at_work or self._runner.has_failed)

    def recover(self) -> None:
        """Give up a pass that failed halfway outside the engine's calls, in a forward or `loss.backward()` of the
        script.
        """
        if self._runner.has_failed and not self._depth:
            self.give_up()

    def check_open(self) -> None:
        """Raise OffloadError if the engine is closed."""
        if self.is_closed:
            raise OffloadError("the engine is closed and its states are freed: create a new one.")

    def check_running(self) -> None:
        """Raise OffloadError if the engine is parked."""
        if self.is_parked:
            raise OffloadError("the engine is parked, without memory on the device: call engine.resume().")

    def check_readable(self) -> None:
        """Raise OffloadError if the engine is closed, TornError if the states belong to no step."""
        self.check_open()
        self.recover()
        self.check_sound()

    def check_usable(self) -> None:
        """Raise like `check_readable`, and OffloadError if the engine is parked."""
        self.check_open()
        self.check_running()
        self.check_readable()

    def check_sound(self) -> None:
        """Raise TornError if an interrupted step left weights and optimizer states of different steps."""
        self.torn = self.torn or self._updates.failure()
        if interrupts.num_forced > self._num_forced:
            self.torn = self.torn or "a second interrupt stopped the cleanup after the first one"
        if self.torn:
            raise TornError(
                f"{self.torn}: the states are from different steps and unusable. Load the last checkpoint, or start "
                "over."
            )

    def mark_sound(self) -> None:
        """Mark the states as sound: all were written again."""
        self._updates.mark_sound()
        self.torn, self._num_forced = None, interrupts.num_forced
