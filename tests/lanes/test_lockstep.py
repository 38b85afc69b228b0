"""Passes by turns: their order, what ends them, and that no thread stays."""

from __future__ import annotations

import gc
import signal
import threading
import time
from typing import Any

import pytest

from offload.lanes.lockstep import Lockstep
from tests.forks import PATIENCE_S


class Told(Exception):
    """Raised on purpose."""


def by_turns(
    num_passes: int, lengths: list[int], failing: tuple[int, int] | None = None
) -> tuple[list[str], list[str]]:
    """Return what passes of these lengths have noted, in order, and who handed over to whom."""
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
    """Assert that no function runs any more, and no thread stays."""
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


@pytest.mark.parametrize("is_late", [False, True])
def test_an_interrupt_while_another_pass_runs_ends_both(is_late: bool) -> None:
    """It comes to the main thread, which waits: the pass that has the turn goes on to its end first. Or it comes as
    late as the turn.
    """
    noted: list[str] = []
    lockstep: Lockstep[None] = Lockstep(lambda leaves, comes: None)

    def first() -> None:
        try:
            lockstep.turn()
        finally:
            noted.append("first")

    def second() -> None:
        if is_late:
            signal.raise_signal(signal.SIGINT)  # wakes nobody
        else:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            until = time.monotonic() + PATIENCE_S
            while lockstep._error is None and time.monotonic() < until:
                time.sleep(0.001)  # where it came just before the main thread began to wait, another has to wake that
                signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        noted.append("second goes on")
        try:
            lockstep.turn()
        finally:
            noted.append("second")

    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            lockstep.run([first, second])
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert noted == ["second goes on", *(["first", "second"] if is_late else ["second", "first"])]
    ended(lockstep)


def test_interrupts_while_the_last_one_ends_leave_none_behind() -> None:
    """The first function is over, and the main thread waits: whoever went on would meet the other's next turn."""
    lockstep: Lockstep[None] = Lockstep(lambda leaves, comes: None)
    main, ends = threading.main_thread().ident or 0, []

    def long() -> None:
        lockstep.turn()
        for _ in range(3):
            time.sleep(0.05)
            signal.pthread_kill(main, signal.SIGINT)
        time.sleep(0.1)
        ends.append("long")

    with pytest.raises(KeyboardInterrupt):
        lockstep.run([lockstep.turn, long])
    assert ends == ["long"]
    assert len(lockstep.run([lambda: None] * 2)) == 2
    ended(lockstep)


def test_an_interrupt_at_any_moment_leaves_one_running() -> None:
    """Wherever it comes, also within the change itself, never two run at once, and all end."""
    ended_early = 0

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    gc.disable()  # an interrupt in a callback of the collector is lost
    try:
        for attempt in range(300):
            holder = threading.Lock()
            lockstep: Lockstep[Any] = Lockstep(lambda leaves, comes: None)

            def one(holder: threading.Lock = holder, lockstep: Lockstep[Any] = lockstep) -> None:
                for _ in range(50):
                    assert holder.acquire(blocking=False), "two run at once"
                    holder.release()
                    lockstep.turn()

            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-5 + 7e-6 * attempt)
                lockstep.run([one, one])
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                ended_early += 1
            assert len(set(lockstep.run([threading.get_ident] * 2))) == 2, "it can be used again"
            lockstep.close()
            until = time.monotonic() + PATIENCE_S
            while any(thread.name.startswith("pass ") and thread.is_alive() for thread in threading.enumerate()):
                assert time.monotonic() < until, "one that came within an interrupt ends as soon"
                time.sleep(0.001)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        gc.enable()
    assert ended_early > 100
