"""Killed, stopped, stuck or missing ranks: all other ranks end in time with the reason."""

from __future__ import annotations

import atexit
import re
import signal
import socket
import threading
import time
from pathlib import Path

import pytest

from offload.distributed.watchdog import CLEANUP_S, Position, Watchdog, WatchdogLimits
from tests.distributed.ranks import Rank, ranks
from tests.forks import PATIENCE_S
from tests.matrix import quick


def lost(rank: Rank) -> str:
    """Return the error message of an ended rank."""
    assert rank.end() == 1, rank.output
    *_, message = [line for line in rank.output.splitlines() if "RankLostError:" in line or line.startswith("Error:")]
    return message


def in_steady_state(started: list[Rank]) -> list[Rank]:
    for rank in started:
        rank.wait_for("steady")
    return started


def test_the_default_times_end_all_ranks_within_30_seconds():
    times = WatchdogLimits()
    assert times.beat_s + times.silence_s + times.grace_s + CLEANUP_S < 30


@pytest.mark.parametrize(("size", "victim"), quick([(3, 1), (2, 0)], [(3, 1)]))
def test_a_killed_rank_ends_all_others_at_once(tmp_path: Path, size: int, victim: int):
    with ranks(tmp_path, size, "losing", "none", str(tmp_path), VICTIM="-1") as started:
        time.sleep(0.3 if in_steady_state(started) else 0)
        started.pop(victim).process.kill()
        for rank in started:
            message = lost(rank)
            assert f"Rank {victim} is lost: its process ended without a message: it was killed" in message
            assert re.search(r"ago, it was .*all-gather of unit model\.layers\.\d", message)
            assert re.search(r"Rank \d was (waiting in|computing, \S+ s after the end of) all-gather of unit", message)
    assert [path.name for path in tmp_path.glob("file-*")] == [f"file-of-{victim}"], "the others cleaned up"


@pytest.mark.slow
def test_a_stopped_rank_ends_all_others_and_itself_when_it_goes_on(tmp_path: Path):
    with ranks(tmp_path, 3, "losing", "none", str(tmp_path), VICTIM="-1", SILENCE_S="2") as started:
        stopped = in_steady_state(started)[2]
        stopped.process.send_signal(signal.SIGSTOP)
        for rank in started[:2]:
            message = lost(rank)
            assert "Rank 2 is lost: no heartbeat for 2." in message
            assert re.search(r"Rank \d was waiting in all-gather of unit model\.layers\.\d for [1-9]", message)
        stopped.process.send_signal(signal.SIGCONT)
        assert re.search("Rank [01] reported this rank, 2, as lost", lost(stopped))
    assert not list(tmp_path.glob("file-*"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "code", "message"),
    [
        ("exception", 1, "Rank 1 ended with: ValueError: these data are bad (it was computing, "),
        ("clean", 0, "Rank 1 ended cleanly, after steady. Rank 0 was waiting in all-gather of unit model.layers.0"),
    ],
)
def test_a_rank_that_ends_tells_the_others(tmp_path: Path, way: str, code: int, message: str):
    with ranks(tmp_path, 2, "losing", way, str(tmp_path)) as (waiting, leaving):
        assert message in lost(waiting)
        assert leaving.end() == code, leaving.output


@pytest.mark.slow
def test_a_rank_that_computes_for_longer_than_the_silence_is_not_lost(tmp_path: Path):
    with ranks(tmp_path, 2, "losing", "computes", str(tmp_path), COMPUTE_S="3.5", SILENCE_S="2") as started:
        for rank in started:
            assert rank.end() == 0, rank.output
            assert rank.output == "steady\ndone\n"


@pytest.mark.slow
def test_a_rank_that_is_alive_and_never_comes_ends_with_all_others_and_shows_where_it_is(tmp_path: Path):
    with ranks(tmp_path, 2, "losing", "stuck", str(tmp_path), COMPUTE_S="1000", STALL_S="1") as (waiting, stuck):
        assert "Rank 1 is lost: other ranks have waited for it for 1 s, though it is alive" in lost(waiting)
        assert "Rank 0 reported this rank, 1, as lost" in lost(stuck)
        assert re.search("ranks_child.py.* in leave", stuck.output)
    assert not list(tmp_path.glob("file-*"))


@pytest.mark.slow
def test_ranks_that_do_different_things_are_told(tmp_path: Path):
    with ranks(tmp_path, 2, "losing", "diverged", str(tmp_path)) as started:
        text = "".join(lost(rank) for rank in started)
    assert "Ranks called different operations" in text
    assert "all-gather of unit head (2048 elements)" in text
    assert "pass a dummy input there and add its result times 0" in text


@pytest.mark.slow
def test_a_rank_that_does_not_come_back_from_its_own_work_is_ended_by_force(tmp_path: Path):
    with ranks(tmp_path, 2, "losing", "deaf", str(tmp_path)) as (deaf, killed):
        in_steady_state([deaf, killed])
        killed.process.kill()
        message = lost(deaf)
        assert re.match(r"Error: Rank 1 is lost.* Rank 0 was computing, \S+ s after the end of steady", message)
        assert "heard of 1" in deaf.output, "the listener"
        assert "Traceback" not in deaf.output
    assert not (tmp_path / "file-of-0").exists()


def test_a_place_is_described_in_words():
    assert Position(since=1).describe(3) == "computing, 2.0 s after its start"
    assert (
        Position(1, "all-gather of unit a", 4, True, since=1).describe(4) == "waiting in all-gather of unit a for 3.0 s"
    )
    assert Position(1, "all-gather", 4, False, since=1).describe(4) == "computing, 3.0 s after the end of all-gather"


def test_every_thread_of_the_watch_enters_its_device_before_it_looks(monkeypatch: pytest.MonkeyPatch):
    """On a GPU a look queries events. A thread on another device would create a context there."""
    calls: list[tuple[str, str]] = []
    ended = threading.Event()

    def note(what: str) -> None:
        calls.append((threading.current_thread().name, what))

    def look() -> list[Position]:
        note("look")
        return [Position(), Position()]

    monkeypatch.setattr("offload.distributed.watchdog._clean_up", lambda: note("clean up"))
    monkeypatch.setattr("os._exit", lambda _code: ended.set())
    here, there = socket.socketpair()
    with there:
        watch = Watchdog(0, {1: here}, look, WatchdogLimits(grace_s=0), lambda: note("enter"))
        there.close()  # rank 1 is gone
        assert ended.wait(PATIENCE_S)
    atexit.unregister(watch._at_exit)
    threads = {name for name, _ in calls} - {threading.current_thread().name}
    assert threads == {"offload watch", "offload cleanup"}
    for name in threads:
        assert next(what for thread, what in calls if thread == name) == "enter"
