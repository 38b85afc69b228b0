"""Passes in turn: order, ends, and no thread left over."""

from __future__ import annotations

import itertools
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import FrameType
from typing import Any

import pytest

from offload.extras.zeroth import lockstep as lockstep_module
from offload.extras.zeroth.lockstep import Lockstep
from offload.interrupts import interrupts
from tests.forks import PATIENCE_S


class Told(Exception):
    """Raised on purpose."""


def by_turns(
    num_passes: int, lengths: list[int], failing: tuple[int, int] | None = None
) -> tuple[list[str], list[str]]:
    """Run passes with these numbers of turns. Return (notes in order, switches from pass to pass)."""
    noted, switches = [], []
    lockstep: Lockstep[int] = Lockstep(lambda leaves, comes: switches.append(f"{leaves}{comes}"))

    def run(length: int) -> int:
        own = lockstep.current
        for turn in range(length):
            assert lockstep.current == own
            noted.append(f"{own}{'abcdef'[turn]}")
            if (own, turn) == failing:
                raise Told
            try:
                lockstep.turn()
            except BaseException:
                noted.append(f"{own}!")
                raise
        return own

    passes = [lambda length=length: run(length) for length in lengths[:num_passes]]
    try:
        assert lockstep.run(passes) == list(range(num_passes))
    except Told:
        noted.append("told")
    ended(lockstep)
    return noted, switches


def ended(lockstep: Lockstep[Any]) -> None:
    """Assert that no pass is running and no thread is left."""
    lockstep.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("pass ")]


def test_threads_are_used_again_and_end_with_who_has_them() -> None:
    lockstep: Lockstep[int] = Lockstep(lambda leaves, comes: None)
    ran = [lockstep.run([threading.get_ident] * count) for count in (2, 3, 2)]
    assert [ran[1][:2], ran[1][:2]] == [ran[0], ran[2]]
    assert len(set(ran[1])) == 3
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("pass ")]
    assert len(threads) == 2
    del lockstep
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()


def test_each_goes_on_to_its_next_turn() -> None:
    noted, switches = by_turns(2, [3, 3])
    assert noted == ["0a", "1a", "0b", "1b", "0c", "1c"]
    assert switches == ["01", "10", "01", "10", "01", "10", "01"]
    assert by_turns(3, [1, 1, 1])[0] == ["0a", "1a", "2a"]
    assert by_turns(1, [2]) == (["0a", "0b"], [])


def test_one_may_be_longer_than_the_others() -> None:
    assert by_turns(2, [1, 4])[0] == ["0a", "1a", "1b", "1c", "1d"]
    assert by_turns(3, [4, 1, 2])[0] == ["0a", "1a", "2a", "0b", "2b", "0c", "0d"]


@pytest.mark.parametrize("failing", [(0, 0), (0, 1), (1, 0), (2, 1)])
def test_a_failure_ends_all_of_them_one_by_one(failing: tuple[int, int]) -> None:
    noted, _ = by_turns(3, [3, 3, 3], failing)
    assert noted[-1] == "told"
    begun = {name[0] for name in noted[:-1]}
    assert {name for name in noted if name.endswith("!")} == {f"{own}!" for own in begun - {str(failing[0])}}


def test_an_interrupt_while_another_pass_runs_ends_all_at_a_border() -> None:
    """The main thread receives the signal while waiting for a turn; the running pass detects the interrupt."""
    noted: list[str] = []
    lockstep: Lockstep[None] = Lockstep(lambda leaves, comes: None)

    def first() -> None:
        try:
            lockstep.turn()
        finally:
            noted.append("first")

    def second() -> None:
        until = time.monotonic() + PATIENCE_S
        try:
            while time.monotonic() < until:
                # Python handles a signal shortly before a wait only at the next turn of the main thread, or at the next
                # signal.
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
                for _ in range(1000):
                    interrupts.check()
                    time.sleep(0.001)
        finally:
            noted.append("second")

    with pytest.raises(KeyboardInterrupt), interrupts:
        lockstep.run([first, second])
    assert noted == ["second", "first"]
    assert len(lockstep.run([lambda: None] * 2)) == 2
    ended(lockstep)


@pytest.mark.parametrize("line", ["submit", "wait", "leave"])
def test_an_exception_at_any_line_of_the_main_thread_leaves_none_behind(
    line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The exception comes between submissions, at the end, or during a switch. Break: wait without
    `interrupts.check`.
    """
    lockstep: Lockstep[int] = Lockstep(lambda leaves, comes: None)
    place: Any = {"submit": ThreadPoolExecutor, "wait": lockstep_module, "leave": lockstep}[line]
    name, calls = "_leave" if line == "leave" else line, itertools.count()
    own = getattr(place, name)

    def interrupted(*args: Any) -> Any:
        if threading.current_thread() is threading.main_thread() and next(calls) == 1:
            raise KeyboardInterrupt
        return own(*args)

    def one() -> int:
        lockstep.turn()
        return 1

    lockstep.run([one] * 3)
    monkeypatch.setattr(place, name, interrupted)
    for _ in range(2):
        with suppress(KeyboardInterrupt):
            lockstep.run([one] * 3)
    monkeypatch.undo()
    assert lockstep.run([one] * 3) == [1, 1, 1]
    ended(lockstep)


@pytest.fixture
def signals_outside_are_lost() -> Iterator[None]:
    """A handler that raises KeyboardInterrupt only for engine work: a late signal does not end the test itself."""

    def raise_inside(number: int, frame: FrameType | None) -> None:
        if interrupts._depth:
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, raise_inside)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("signals_outside_are_lost")
@pytest.mark.parametrize("num_signals", [1, 2, 3])
def test_interrupts_at_any_moment_leave_none_behind(num_signals: int) -> None:
    """The first signal interrupts at a safe point, a second one at once. In both cases all passes end before the caller
    sees the exception.
    """
    main, num_ended = threading.main_thread().ident or 0, 0

    def interrupt(delay_s: float, over: threading.Event) -> None:
        time.sleep(delay_s)
        for _ in range(num_signals):
            if not over.is_set():
                signal.pthread_kill(main, signal.SIGINT)

    for attempt in range(60):
        lockstep: Lockstep[None] = Lockstep(lambda leaves, comes: None)
        over = threading.Event()

        def one(lockstep: Lockstep[None] = lockstep) -> None:
            for _ in range(200):
                interrupts.check()
                lockstep.turn()

        thread = threading.Thread(target=interrupt, args=(1e-5 * attempt**1.5, over))
        thread.start()
        try:
            with interrupts:
                lockstep.run([one, one])
                over.set()
        except KeyboardInterrupt:
            num_ended += 1
        thread.join()
        assert len(lockstep.run([lambda: None] * 2)) == 2
        ended(lockstep)
    assert num_ended > 20
