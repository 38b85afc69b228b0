"""Whether an engine's states belong to a step: what is given up, what is torn, and what is refused for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from offload.distributed.comm import Comm
from offload.engine.gradients.updates import Updates
from offload.engine.units.runner import UnitRunner
from offload.engine.units.unit import Unit
from offload.errors import OffloadError, TornError
from offload.interrupts import interrupts
from offload.schedule.execute import Executor
from offload.tiers.slots import Slots
from offload.tiers.store import Store


class Recovery:
    """Ends what fails or is interrupted, so that nothing of it stays, or nothing may follow.

    `torn`: why the states belong to no step, if they do not. `is_closed`: the states are gone.
    """

    def __init__(
        self,
        store: Store,
        slots: Slots,
        executor: Executor,
        updates: Updates,
        runner: UnitRunner,
        units: Sequence[Unit],
        comm: Comm,
    ) -> None:
        self._store, self._slots, self._executor = store, slots, executor
        self._updates, self._runner, self._units, self._comm = updates, runner, units, comm
        self.torn: str | None = None
        self._num_forced = interrupts.num_forced
        self.is_closed = False
        self._also: list[Callable[[], None]] = []
        self._depth = 0  # of work

    def also(self, *give_up: Callable[[], None]) -> None:
        """Have these called when a step is given up, in this order."""
        self._also += give_up

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within, the engine works on its states for somebody, and interrupts come at borders. An exception leaves all
        in order.
        """
        with interrupts:
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Within, an exception ends the step: nothing of it stays, or, where some units are updated already, nothing
        may follow.
        """
        with self.working():
            try:
                yield
            except BaseException:
                self.give_up()
                raise

    def give_up(self) -> None:
        """End what is under way; where some units are updated already, nothing may follow."""
        with interrupts, interrupts.firm():
            self.torn = self._updates.give_up() or self.torn
            self._store.reset()
            self._executor.forget()
            # Over ranks nothing was given up, and the others may be elsewhere; what is torn is of no use on the device.
            if self._comm.size == 1 and not self.torn:
                self._slots.refresh()  # what stays may have been on its way
            self._runner.reset()
            for unit in self._units:
                unit.drop_gradients()
                unit.rest()
            for give_up in self._also:
                give_up()

    @property
    def is_idle(self) -> bool:
        """True where the engine is not at work, and nothing has failed half done."""
        return not (self._depth or self._runner.is_at_work or self._runner.has_failed)

    def recover(self) -> None:
        """Give up a pass that has failed half done, in a call around which there was nothing of the engine's: a forward
        or a `loss.backward()` of the caller's own.
        """
        if self._runner.has_failed and not self._depth:
            self.give_up()

    def check_open(self) -> None:
        """Raise OffloadError where the engine is closed."""
        if self.is_closed:
            raise OffloadError("the engine is closed: its states are gone. Make a new one.")

    def check_usable(self) -> None:
        """Raise OffloadError where the engine is closed, TornError where its states belong to no step."""
        self.check_open()
        self.recover()
        self.check_sound()

    def check_sound(self) -> None:
        """Raise TornError where the states belong to no step."""
        self.torn = self.torn or self._updates.failure()
        if interrupts.num_forced > self._num_forced:
            self.torn = self.torn or "a second interrupt came in the middle of the first one's way out"
        if self.torn:
            raise TornError(f"{self.torn}: the states belong to no step. Load the last checkpoint, or start over.")

    def mend(self) -> None:
        """All states were written anew."""
        self._updates.mend()
        self.torn, self._num_forced = None, interrupts.num_forced

    def tear(self, why: str) -> None:
        """The states belong to no step until `mend`."""
        self.torn = why

    def close(self) -> None:
        """The states are gone."""
        self.is_closed = True
