"""Agreement between ranks, with a simulated comm: the printing rank for errors and notes, and common failures."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from offload.app.training.ranks import Notes, RankExit, rank_0_first, tally
from offload.distributed.comm import Comm
from offload.distributed.outcomes import share_failure
from offload.errors import (
    ConfigError,
    DoesNotFitError,
    InterruptedRun,
    OffloadError,
    RankLostError,
    common,
    is_left_to_another_rank,
)


class Meeting:
    """Shared values and a barrier for the threads in a test."""

    def __init__(self, size: int) -> None:
        self.values: list[Any] = [None] * size
        self.barrier = threading.Barrier(size, timeout=120)


class Threads(Comm):
    """The comm for a rank in a thread."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        super().__init__()
        self.rank = self.local_rank = rank
        self.size = self.local_size = len(meeting.values)
        self._meeting = meeting
        self.calls: list[str] = []

    def gather_objects(self, value: Any, what: str) -> list[Any]:
        self.calls.append(what)
        self._meeting.values[self.rank] = value
        self._meeting.barrier.wait()
        values = list(self._meeting.values)
        self._meeting.barrier.wait()
        return values

    def any(self, flag: bool, what: str) -> bool:
        return any(self.gather_objects(flag, what))

    def sum_in_order(self, values: Any, what: str) -> Any:
        return [sum(column) for column in zip(*self.gather_objects(values, what), strict=True)]


def on_ranks(size: int, work: Callable[[Comm], Any]) -> list[Any]:
    """Return the result or exception from `work` for each rank."""
    meeting, found = Meeting(size), [None] * size

    def run(rank: int) -> None:
        try:
            found[rank] = work(Threads(meeting, rank))
        except Exception as error:
            found[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return found


@pytest.mark.parametrize(
    ("failure", "kind", "text"),
    [
        (ConfigError("no"), ConfigError, "[rank 1] no"),
        (DoesNotFitError("no.", "Raise it."), DoesNotFitError, "[rank 1] no. Raise it."),
        (RuntimeError("no"), OffloadError, "[rank 1] failed: RuntimeError: no; run with --debug for the traceback"),
    ],
)
def test_what_fails_on_one_rank_fails_on_all(failure: Exception, kind: type[Exception], text: str) -> None:
    def work(comm: Comm) -> None:
        with share_failure(comm, "work"):
            if comm.rank == 1:
                raise failure

    for error in on_ranks(3, work):
        assert type(error) is kind
        assert str(error) == text
        assert vars(error).get("advice") == vars(failure).get("advice")


def test_what_fails_on_the_only_rank_is_raised_as_it_is() -> None:
    failure = RuntimeError("no")
    with pytest.raises(RuntimeError) as caught, share_failure(Comm(), "work"):
        raise failure
    assert caught.value is failure


def test_rank_0_makes_it_before_the_others_and_may_take_its_time() -> None:
    order: list[int] = []

    def work(comm: Comm) -> int:
        def make(alive: Callable[[], object]) -> int:
            for _ in range(5 if comm.rank == 0 else 0):
                alive()
            order.append(comm.rank)
            return comm.rank

        return rank_0_first(comm, "data", make)

    assert on_ranks(3, work) == [0, 1, 2]
    assert order[0] == 0
    assert rank_0_first(Comm(), "data", lambda alive: (alive(), 7)) == (True, 7)


@pytest.mark.parametrize("bad", [0, 2])
def test_data_that_one_rank_cannot_make_are_no_data_for_any(bad: int) -> None:
    def work(comm: Comm) -> int:
        def make(_alive: Callable[[], object]) -> int:
            if comm.rank == bad:
                raise ConfigError("no data")
            return 1

        return rank_0_first(comm, "data", make)

    assert {str(error) for error in on_ranks(3, work)} == {"no data" if bad == 0 else "[rank 2] no data"}


def test_a_tally_is_one_exchange() -> None:
    def work(comm: Comm) -> Any:
        return tally(comm, "step", first=comm.rank == 0, all=1, none=False), comm.calls  # type: ignore[attr-defined]

    assert on_ranks(2, work) == [({"first": 1, "all": 2, "none": 0}, ["step"])] * 2


def test_a_note_of_all_ranks_is_shown_once() -> None:
    def work(comm: Comm) -> list[str]:
        shown: list[str] = []
        notes = Notes(comm, shown.append)
        notes.add("of all")
        if comm.rank:
            notes.add("of 1 and 2")
        assert shown == ([] if comm.rank else ["note: of all"])
        assert notes.num_new == 1 + (comm.rank > 0)
        notes.exchange()
        assert notes.num_new == 0
        if comm.rank == 2:
            notes.add("of all")
            notes.add("of 2")
        notes.exchange()
        return shown

    assert on_ranks(3, work) == [["note: of all"], ["[rank 1] note: of 1 and 2"], ["[rank 2] note: of 2"]]


class Leaving(Comm):
    """The comm for one rank among four on two machines. `hear`: the error reported by this comm."""

    def __init__(self, rank: int, hear: RankLostError | None = None) -> None:
        super().__init__()
        self.rank, self.size, self.local_rank, self.local_size = rank, 4, rank % 2, 2
        self.machines = [0, 0, 2, 2]
        self.told: list[BaseException | None] = []
        self._hear = hear

    def on_lost(self, listener: Callable[[RankLostError], None]) -> None:
        if self._hear is not None:
            listener(self._hear)

    def close(self, error: BaseException | None = None) -> None:
        self.told.append(error)


def speakers(
    make: Callable[[int], BaseException], ranks: tuple[int, ...] = (0, 1, 2, 3), hear: Any = None
) -> list[int]:
    """Return the ranks that print their error."""
    return [rank for rank in ranks if not is_left_to_another_rank(RankExit(Leaving(rank, hear)).leave(make(rank)))]


def test_one_rank_of_a_machine_prints_why_all_end() -> None:
    assert speakers(lambda _: common(ConfigError("all"))) == [0, 2]
    assert speakers(lambda _: KeyboardInterrupt()) == [0, 2]
    assert speakers(lambda _: RankLostError("Rank 1 is lost: killed.", 1), (0, 2, 3)) == [0, 2]
    assert speakers(lambda _: RankLostError("Rank 0 is lost: killed.", 0), (1, 2, 3)) == [1, 2]
    assert speakers(lambda _: RankLostError("A connection broke.", None)) == [0, 2]
    assert speakers(lambda _: RankLostError("Rank 0 reported this rank, 3, as lost.", 3), (3,)) == [3]


def test_a_rank_with_an_error_prints_it_and_those_beside_it_do_not() -> None:
    loss = "Rank 1 ended with: ValueError: bad (it was computing). Rank 0 was waiting."
    assert speakers(lambda rank: ValueError("bad") if rank == 1 else RankLostError(loss, 1)) == [1, 2]


def test_an_error_that_rank_0_has_too_is_left_to_it() -> None:
    heard = RankLostError("Rank 0 ended with: ValueError: bad (it was computing). Rank 1 was computing.", 0)
    assert speakers(lambda _: ValueError("bad"), (0, 1), heard) == [0]
    assert speakers(lambda rank: ValueError(f"bad {rank}"), (0, 1), heard) == [0, 1]
    assert speakers(lambda _: ValueError("bad"), (0, 1), None) == [0, 1], "nothing was heard in time"


@pytest.mark.parametrize(
    ("told", "kind", "code"),
    [
        ("ConfigError: no", ConfigError, 2),
        ("DoesNotFitError: no", DoesNotFitError, 3),
        ("KeyboardInterrupt: ", InterruptedRun, 130),
        ("ValueError: no", RankLostError, 1),
    ],
)
def test_a_rank_ends_as_the_one_that_ended_it(told: str, kind: type[OffloadError], code: int) -> None:
    left = RankExit(Leaving(1)).leave(RankLostError(f"Rank 0 ended with: {told} (it was computing).", 0))
    assert type(left) is kind
    assert left.exit_code == code


def test_the_others_are_told_of_an_error_unless_they_have_it() -> None:
    comm, error = Leaving(1), ValueError("bad")
    RankExit(comm).leave(error)
    RankExit(comm).leave(common(InterruptedRun("saved")))
    assert comm.told == [error, None]
