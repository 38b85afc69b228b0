"""Wake-ups: none is lost, none is needless, and a finalizer may close lanes at any point."""

from __future__ import annotations

import gc
import itertools
import random
import threading
import time
import weakref
from typing import Any

import pytest

from offload.lanes.lanes import Lanes
from offload.lanes.ticket import Bell, CancelledError, Countdown, Ticket, wait_until_done
from offload.lanes.timeline import LANES, Throttle
from tests.lanes.patience import FOREVER_S, MOMENT_S, Gate, eventually, nothing, start, within

NAMES = (*("h2d", "d2h", "update", "fetch_read", "update_read", "update_write", "activation_read", "activation_write"),)
STUCK_S = 60.0


# -- bells and countdowns --------------------------------------------------------------------------------------


def test_a_ring_is_kept_until_it_is_heard():
    bell = Bell()
    bell.ring()
    bell.ring()
    within(bell.wait)
    begin = time.perf_counter()
    bell.wait(MOMENT_S)
    assert time.perf_counter() - begin >= MOMENT_S - 1e-3, "two rings are heard as one"


def test_who_waits_is_woken_once_by_the_last_ticket():
    tickets, rung = [Ticket("a"), Ticket("b"), Ticket("c", is_done=True)], []
    countdown = Countdown([*tickets, tickets[0]], lambda: rung.append(True))
    for ticket in tickets[:2]:
        assert countdown.left
        assert not rung
        ticket.finish()
        assert not ticket.watchers
    assert rung == [True]
    wait_until_done(threading.Lock(), tickets)


# -- no lost wake-up -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("seed", "slow"), [(1, False), (2, True), (3, False)])
def test_random_work_keeps_a_topological_order(open_threads, seed, slow):
    """Eight lanes with work after any earlier work. Three threads submit, and wait for some of the tickets."""
    throttle = {lane: Throttle(latency_s=2e-4) for lane in LANES} if slow else None
    lanes, chance, number = open_threads(throttle), random.Random(seed), itertools.count()
    tickets: list[tuple[str, Ticket, list[Ticket]]] = []
    begun: dict[int, int] = {}
    ended: dict[int, int] = {}

    def work(key: int) -> None:
        begun[key] = next(number)
        if key % 7 == 0:
            time.sleep(1e-4)
        ended[key] = next(number)

    def submit(chance: random.Random) -> None:
        for _ in range(700):
            with mutex:  # one submission order, so the order per lane is known
                name, key = chance.choice(NAMES), len(tickets)
                before = [
                    ticket for _, ticket, _ in chance.sample(tickets[-60:], min(len(tickets), chance.randrange(4)))
                ]
                ticket = getattr(lanes, name).submit(lambda key=key: work(key), reads=before[:1], users=before[1:])
                tickets.append((name, ticket, before))
            if chance.random() < 0.05:
                lanes.wait([ticket])
                assert ticket.is_done

    mutex = threading.Lock()
    threads = [start(lambda seed=seed: submit(random.Random(seed))) for seed in (chance.random() for _ in range(3))]
    for thread, _ in threads:
        thread.join(STUCK_S)
        assert not thread.is_alive(), "it hangs"
    assert [result for _, result in threads] == [[None]] * 3
    within(lambda: lanes.wait([ticket for _, ticket, _ in tickets]), STUCK_S)
    keys = {id(ticket): key for key, (_, ticket, _) in enumerate(tickets)}
    for key, (_, ticket, before) in enumerate(tickets):
        assert ticket.error is None
        for earlier in before:
            assert ended[keys[id(earlier)]] < begun[key]
    for name in NAMES:
        mine = [key for key, (lane, _, _) in enumerate(tickets) if lane == name]
        assert name == "h2d" or sorted(mine, key=begun.__getitem__) == mine
        assert all(ended[a] < begun[b] for a, b in itertools.pairwise(sorted(mine, key=begun.__getitem__)))


@pytest.mark.parametrize("seed", range(4))
def test_random_work_that_is_given_up_or_closed_ends_all_the_same(seed):
    lanes, chance = Lanes(overlap=True, throttle={"h2d": Throttle(latency_s=FOREVER_S)}), random.Random(seed)
    for end in (lanes.give_up, lanes.give_up, lanes.close):
        tickets: list[Ticket] = []
        for _ in range(400):
            before = chance.sample(tickets[-30:], min(len(tickets), chance.randrange(3)))
            tickets.append(getattr(lanes, chance.choice(NAMES)).submit(nothing, users=before))
        waiting = [start(lambda ticket=ticket: lanes.wait([ticket])) for ticket in chance.sample(tickets, 4)]
        within(end, STUCK_S)
        for thread, result in waiting:
            thread.join(STUCK_S)
            assert not thread.is_alive(), "whoever waited was not woken"
            assert result[0] is None or isinstance(result[0], CancelledError)
        assert eventually(lambda tickets=tickets: all(ticket.is_done for ticket in tickets))


def test_a_ticket_wakes_only_those_who_wait_for_it(open_threads):
    lanes, gates = open_threads(), {name: Gate() for name in NAMES}
    held = Ticket("nobody's")
    heard: list[str] = []
    for name in NAMES:
        lane: Any = getattr(lanes, name)
        within(lambda lane=lane: lanes.wait([lane.submit(nothing)]))

        class Counted(Bell):
            def wait(self, timeout_s: float = -1, name: str = name) -> None:
                super().wait(timeout_s)
                heard.append(name)

        before, lane._bell = lane._bell, Counted()
        before.ring()  # from now on the lane waits on the new bell
    time.sleep(MOMENT_S)
    heard.clear()
    within(lambda: lanes.wait([lanes.d2h.submit(nothing)]))
    lanes.update.submit(gates["update"], reads=[held])  # must not begin
    queued = lanes.update.submit(nothing)
    for _ in range(20):
        within(lambda: lanes.wait([lanes.d2h.submit(nothing)]))
    time.sleep(MOMENT_S)
    assert set(heard) == {"d2h"}
    with lanes.lock:
        held.finish()
    gates["update"].open()
    within(lambda: lanes.wait([queued]))
    assert heard.count("update") == 1
    assert set(heard) == {"d2h", "update"}


# -- finalizers --------------------------------------------------------------------------------------------------


def busy_lanes() -> tuple[Lanes, list[Ticket]]:
    """Return lanes: one asleep, one idle, one waiting for a ticket that never ends."""
    lanes, begun = Lanes(overlap=True, throttle={"d2h": Throttle(latency_s=FOREVER_S)}), threading.Event()
    tickets = [lanes.d2h.submit(begun.set), lanes.h2d.submit(nothing)]
    tickets += [lanes.update.submit(nothing, reads=[Ticket("nobody's")]), lanes.fetch_read.submit(nothing)]
    assert begun.wait(STUCK_S)
    within(lambda: lanes.wait([tickets[1], tickets[3]]))
    return lanes, tickets


class Owner:
    """In a reference cycle, so only the garbage collector frees the object, like an engine."""

    def __init__(self, lanes: Lanes) -> None:
        self.itself = self
        weakref.finalize(self, lanes.abandon)


def test_a_finalizer_ends_lanes_while_its_thread_holds_their_lock():
    before = set(threading.enumerate())
    lanes, tickets = busy_lanes()

    def collect() -> None:
        with lanes.lock:
            owner = Owner(lanes)
            del owner
            gc.collect()

    within(collect)
    assert eventually(lambda: set(threading.enumerate()) <= before)
    assert all(ticket.is_done for ticket in tickets)
    assert isinstance(tickets[2].error, CancelledError)


def finalize(patch: pytest.MonkeyPatch, lanes: Lanes) -> None:
    """Run the finalizer once."""
    patch.undo()
    owner = Owner(lanes)
    del owner
    gc.collect()


def test_a_finalizer_ends_lanes_in_the_midst_of_their_work(monkeypatch):
    before = set(threading.enumerate())
    lanes, _ = busy_lanes()
    lanes.h2d.submit(lambda: finalize(monkeypatch, lanes))
    assert eventually(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("name", ["h2d", "update"])
@pytest.mark.parametrize("when", ["before the wait", "as it looks"])
def test_a_finalizer_ends_lanes_in_the_thread_that_is_about_to_wait(name, when, monkeypatch):
    """The thread has just seen an empty queue, or only work that must not begin."""
    before = set(threading.enumerate())
    lanes, tickets = busy_lanes()
    lane: Any = getattr(lanes, name)
    bell, look = lane._bell, lane._next

    class Late(Bell):
        def wait(self, timeout_s: float = -1) -> None:
            finalize(monkeypatch, lanes)
            bell.wait(timeout_s)

        def ring(self) -> None:
            bell.ring()

    def looks() -> Any:
        found = look()
        finalize(monkeypatch, lanes)
        return found

    assert eventually(lambda: lane._is_idle)
    if when == "before the wait":
        monkeypatch.setattr(lane, "_bell", Late())
    else:
        monkeypatch.setattr(lane, "_next", looks)
    bell.ring()  # the lane looks again
    assert eventually(lambda: set(threading.enumerate()) <= before)
    assert all(ticket.is_done for ticket in tickets)
