"""Lanes and tickets: order, waits, errors, cancellation, thread ends, and the lane responsible for a wait."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import pytest

from offload.lanes.lanes import Lanes
from offload.lanes.streams import open_lanes, overlaps
from offload.lanes.threads import Link, ThreadLane
from offload.lanes.ticket import CancelledError, Fence, Ticket
from offload.lanes.timeline import LANES, LaneTime, Throttle, Timeline
from tests.lanes.patience import FOREVER_S, MOMENT_S, PATIENCE_S, Gate, eventually, fail, nothing, start, within

# -- order ---------------------------------------------------------------------------------------------------


def test_compute_waits_for_reads_and_fills(open_threads):
    lanes = open_threads()
    for kind in ("reads", "users"):
        gate = Gate()
        ticket = lanes.h2d.submit(gate)
        if kind == "reads":
            thread, _ = start(lambda ticket=ticket: lanes.compute_after([ticket]))
        else:
            thread, _ = start(lambda ticket=ticket: lanes.compute_after((), users=[ticket]))
        gate.wait_begun()
        time.sleep(MOMENT_S)
        assert thread.is_alive()
        gate.open()
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
        assert ticket.is_over


# -- errors --------------------------------------------------------------------------------------------------


def test_an_error_travels_through_after(open_threads):
    lanes, error, ran = open_threads(), ValueError("of h2d"), []
    first = lanes.h2d.submit(fail(error))
    second = lanes.update.submit(lambda: ran.append("update"), reads=[first])
    third = lanes.d2h.submit(lambda: ran.append("d2h"), reads=[second])
    with pytest.raises(ValueError, match="of h2d") as raised:
        within(lambda: lanes.wait([third]))
    assert raised.value is error
    assert first.error is second.error is third.error is error
    assert ran == []
    for lane in (lanes.h2d, lanes.update, lanes.d2h):
        with pytest.raises(ValueError, match="of h2d"):
            within(lane.drain)


def test_an_error_does_not_travel_through_behind(open_threads):
    lanes, ran = open_threads(), []
    failed = lanes.h2d.submit(fail(ValueError("of h2d")))
    ticket = lanes.update.submit(lambda: ran.append("update"), users=[failed])
    within(lambda: lanes.wait([ticket], users=[failed]))
    within(lanes.update.drain)
    assert ran == ["update"]
    assert ticket.error is None
    assert lanes.update.error is None


def test_drain_raises_the_first_error_and_what_follows_runs_on(open_threads):
    lanes, ran = open_threads(), []
    lanes.update.submit(fail(ValueError("the first")))
    lanes.update.submit(fail(ValueError("the second")))
    lanes.update.submit(lambda: ran.append("third"))
    for _ in range(2):
        with pytest.raises(ValueError, match="the first"):
            within(lanes.update.drain)
    assert ran == ["third"]
    within(lanes.update.cancel)
    within(lanes.update.drain)
    lanes.update.submit(lambda: ran.append("fourth"))
    within(lanes.update.drain)
    assert ran == ["third", "fourth"]


class Interruption(BaseException):
    pass


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, Interruption])
def test_an_interruption_in_work_is_its_tickets_error_and_not_its_threads_end(open_threads, kind):
    lanes = open_threads()
    ticket = lanes.h2d.submit(fail(kind()))
    after = lanes.h2d.submit(nothing)
    with pytest.raises(kind):
        within(lambda: lanes.wait([ticket]))
    within(lambda: lanes.wait([after]))


# -- cancellation --------------------------------------------------------------------------------------------


def test_what_has_not_begun_when_it_is_given_up_never_runs(open_threads):
    lanes, gate, ran = open_threads(), Gate(), []
    never = Ticket("nobody's")
    held = lanes.d2h.submit(lambda: ran.append("held"), reads=[never])
    queued = lanes.d2h.submit(lambda: ran.append("queued"))
    lanes.h2d.submit(gate)
    within(lanes.d2h.cancel)
    for ticket in (held, queued):
        with pytest.raises(CancelledError, match="cancelled"):
            within(lambda ticket=ticket: lanes.wait([ticket]))
    within(lambda: lanes.wait([lanes.d2h.submit(lambda: ran.append("later"))]))
    assert ran == ["later"]
    assert lanes.d2h.error is None
    gate.open()


def test_fetches_overtake_one_that_waits_for_its_update_and_nothing_else_overtakes(open_threads):
    lanes, ran = open_threads(), []
    never = Ticket("nobody's")
    for lane in (lanes.h2d, lanes.d2h, lanes.update):
        lane.submit(nothing, reads=[never])
        for number in range(3):
            lane.submit(lambda name=lane.name, number=number: ran.append((name, number)))
    time.sleep(MOMENT_S)
    assert ran == [("h2d", 0), ("h2d", 1), ("h2d", 2)], "in their order, past the one that may not begin"
    for lane in (lanes.h2d, lanes.d2h, lanes.update):
        lane.cancel()


def test_giving_up_waits_for_what_has_begun(open_threads):
    lanes, gate = open_threads(), Gate()
    begun = lanes.h2d.submit(gate)
    gate.wait_begun()
    thread, _ = start(lanes.h2d.cancel)
    time.sleep(MOMENT_S)
    assert thread.is_alive(), "it may touch memory still"
    gate.open()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert begun.is_done
    assert begun.error is None


def test_what_has_begun_does_not_sleep_out_its_throttle_nor_delay_what_comes_later(open_threads):
    lanes = open_threads({"h2d": Throttle(bytes_per_second=1.0)})
    begun = threading.Event()
    ticket = lanes.h2d.submit(begun.set, num_bytes=FOREVER_S)
    assert begun.wait(PATIENCE_S)
    time.sleep(MOMENT_S)
    assert not ticket.is_done
    within(lanes.h2d.cancel)
    assert ticket.is_done
    assert ticket.error is None
    assert ticket.begin <= ticket.end <= time.perf_counter(), "a span that is over does not end in the future"
    later = lanes.h2d.submit(nothing)
    within(lambda: lanes.wait([later]))
    assert later.begin >= ticket.end


@pytest.mark.parametrize("num_earlier", [0, 5])
def test_giving_up_since_a_position(open_threads, num_earlier):
    """Also if the first pieces have already left the queue."""
    lanes, gate, ran = open_threads(), Gate(), []
    for _ in range(num_earlier):
        lanes.update.submit(nothing)
    within(lanes.update.drain)
    long = lanes.update.submit(gate)
    kept = lanes.update.submit(lambda: ran.append("kept"))
    since = lanes.update.position
    assert since == num_earlier + 2
    given_up = lanes.update.submit(lambda: ran.append("given up"))
    gate.wait_begun()
    within(lambda: lanes.update.cancel(since))
    assert not long.is_done, "it returns while an earlier piece is under way"
    gate.open()
    with pytest.raises(CancelledError):
        within(lambda: lanes.wait([long, kept, given_up]))
    assert ran == ["kept"]
    assert long.error is kept.error is None


def test_giving_up_since_a_position_leaves_earlier_throttles_and_errors(open_threads):
    lanes = open_threads({"update": Throttle(latency_s=4 * MOMENT_S)})
    lanes.update.submit(fail(ValueError("before")))
    begun = threading.Event()
    slept = lanes.update.submit(begun.set)
    since = lanes.update.position
    lanes.update.submit(nothing)
    assert begun.wait(PATIENCE_S)
    within(lambda: lanes.update.cancel(since))
    within(lambda: lanes.wait([slept]))
    assert slept.end - slept.begin >= 4 * MOMENT_S - 1e-9
    assert time.perf_counter() >= slept.end
    with pytest.raises(ValueError, match="before"):
        within(lanes.update.drain)


def test_who_waits_for_what_is_given_up_gets_cancelled_too(open_threads):
    lanes, gate, ran = open_threads(), Gate(), []
    lanes.h2d.submit(gate)
    gate.wait_begun()
    ticket = lanes.h2d.submit(nothing)
    waiting, result = start(lambda: lanes.wait([ticket]))
    after = lanes.update.submit(lambda: ran.append("after"), reads=[ticket])
    behind = lanes.d2h.submit(lambda: ran.append("behind"), users=[ticket])
    lanes.h2d.revoke()  # before the piece can begin
    giving_up, _ = start(lanes.h2d.cancel)
    gate.open()
    for thread in (waiting, giving_up):
        thread.join(PATIENCE_S)
    assert isinstance(result[0], CancelledError)
    with pytest.raises(CancelledError):
        within(lambda: lanes.wait([after]))
    within(lambda: lanes.wait([behind]))
    within(lanes.update.drain)  # a cancellation is no error of this lane
    assert ran == ["behind"]


# -- the end of a thread ---------------------------------------------------------------------------------------


def test_closing_leaves_no_thread_behind():
    before = set(threading.enumerate())
    lanes, gate, ran = Lanes(overlap=True, throttle={"d2h": Throttle(latency_s=FOREVER_S)}), Gate(), []
    lanes.h2d.submit(gate)
    never = Ticket("nobody's")
    lost = [lanes.h2d.submit(lambda: ran.append("queued")), lanes.update.submit(nothing, reads=[never])]
    lanes.d2h.submit(nothing)
    gate.wait_begun()
    assert len(set(threading.enumerate()) - before) == 3
    closing, _ = start(lanes.close)
    time.sleep(MOMENT_S)
    assert closing.is_alive(), "work that has begun comes first"
    gate.open()
    closing.join(PATIENCE_S)
    assert set(threading.enumerate()) <= before
    assert ran == []
    assert all(isinstance(ticket.error, CancelledError) for ticket in lost)
    within(lanes.close)  # again


def test_abandoned_threads_end_by_themselves():
    before = set(threading.enumerate())
    lanes, gate, ran = Lanes(overlap=True, throttle={"d2h": Throttle(latency_s=FOREVER_S)}), Gate(), []
    tickets = [lanes.h2d.submit(gate), lanes.d2h.submit(nothing), lanes.h2d.submit(lambda: ran.append("queued"))]
    tickets.append(lanes.update.submit(lambda: ran.append("held"), reads=[Ticket("nobody's")]))
    gate.wait_begun()
    within(lanes.abandon)
    assert not tickets[0].is_done, "nobody waits for what has begun"
    gate.open()
    assert eventually(lambda: set(threading.enumerate()) <= before)
    assert [type(ticket.error) for ticket in tickets[2:]] == [CancelledError, CancelledError]
    assert tickets[0].error is None
    assert ran == []


def test_a_lane_that_is_closed_by_its_own_work_ends():
    lane, ran_on = ThreadLane("update", threading.Lock(), Link("update", Timeline(LANES))), []
    lane.submit(lambda: ran_on.append(threading.current_thread()))
    ticket = lane.submit(lane.close)
    assert eventually(lambda: ticket.is_done)
    assert ticket.error is None
    assert eventually(lambda: not ran_on[0].is_alive())


class Weight:
    pass


def test_an_idle_lane_holds_nothing_of_what_it_has_done(open_threads):
    lanes = open_threads({"d2h": Throttle(latency_s=0.001)}, seed=1)

    def submit(lane: Any, **more: Any) -> tuple[weakref.ref, Ticket]:
        weight = Weight()
        return weakref.ref(weight), lane.submit(lambda: str(weight), **more)

    given_up = CancelledError("given up")
    never = Ticket("nobody's", is_done=True)
    never.error = given_up
    submitted = [submit(lanes.h2d), submit(lanes.d2h, num_bytes=8), submit(lanes.update, reads=[never])]
    assert eventually(lambda: all(ticket.is_done for _, ticket in submitted))
    assert submitted[2][1].error is given_up
    for weight, _ticket in submitted:
        assert eventually(lambda weight=weight: weight() is None), "though the ticket is kept and the thread idles"


def test_work_holds_nothing_once_its_ticket_is_done(open_threads):
    """Who waits for a ticket may give the memory away, as a park does. Break: release the work after `finish`."""
    lanes, gate = open_threads(), Gate()
    lanes.h2d.submit(gate)
    weight = Weight()
    ticket = lanes.h2d.submit(lambda weight=weight: str(weight))
    held = weakref.ref(weight)
    found = []
    ticket.watchers.append(lambda: found.append(held()))
    del weight
    gate.open()
    within(lambda: lanes.wait([ticket]))
    assert found == [None]


# -- throttles -------------------------------------------------------------------------------------------------


def test_throttled_work_takes_its_latency_and_its_bytes(open_threads):
    lanes = open_threads({"h2d": Throttle(bytes_per_second=1e6, latency_s=0.02), "d2h": Throttle(latency_s=0.03)})
    begin = time.perf_counter()
    tickets = [lanes.h2d.submit(nothing, num_bytes=30_000), lanes.d2h.submit(nothing, num_bytes=1 << 40)]
    for ticket, least in zip(tickets, (0.05, 0.03), strict=True):
        within(lambda ticket=ticket: lanes.wait([ticket]))
        assert time.perf_counter() >= ticket.end, "done before it is over"
        assert ticket.begin >= begin
        assert least - 1e-9 <= ticket.end - ticket.begin < least + PATIENCE_S
    within(lambda: lanes.wait([lanes.update.submit(nothing, num_bytes=1 << 40)]))  # no throttle


def test_a_throttle_counts_from_when_the_work_could_have_begun(open_threads):
    lanes = open_threads({lane: Throttle(latency_s=0.05) for lane in LANES}, seed=5)
    gate = Gate()
    lanes.update.submit(gate)  # submit everything before any work can begin
    updated = lanes.update.submit(nothing)
    fetched = lanes.h2d.submit(nothing, reads=[updated])
    behind = lanes.d2h.submit(nothing, users=[updated])
    gate.open()
    within(lambda: lanes.wait([fetched, behind]))
    assert fetched.begin == behind.begin == updated.end
    time.sleep(MOMENT_S)
    idle_until = time.perf_counter()
    later = lanes.h2d.submit(nothing, reads=[updated])
    within(lanes.h2d.drain)
    assert later.begin >= idle_until, "not before it was submitted"


# -- exposed waits -----------------------------------------------------------------------------------------------


def test_a_wait_is_exposed_for_the_lane_that_held_it_up(open_threads):
    """Compute waits for an H2D copy, which waits for an update."""
    lanes = open_threads({"h2d": Throttle(latency_s=0.1), "update": Throttle(latency_s=0.3)})
    lanes.timeline.begin_step()
    submitted = time.perf_counter()
    updated = lanes.update.submit(nothing)
    fetched = lanes.h2d.submit(nothing, reads=[updated])
    begun = []

    def wait():  # in a thread, possibly started late on a busy machine
        begun.append(time.perf_counter())
        lanes.wait([fetched])

    within(wait)
    begin, end = begun[0], time.perf_counter()
    within(lambda: lanes.wait([updated, fetched]))  # no wait
    seconds, times, _ = lanes.end_step()
    assert updated.begin >= submitted
    assert fetched.delayed_by == "update"
    assert updated.delayed_by == "update"
    assert times["h2d"].exposed_seconds >= 0.1 - 1e-9
    assert 0.3 - (begin - submitted) - 0.1 <= times["update"].exposed_seconds <= updated.end - begin + 1e-9
    exposed = sum(times[lane].exposed_seconds for lane in LANES)
    assert 0.4 - (begin - submitted) - 0.1 <= exposed <= end - begin
    assert times["compute"].busy_seconds + exposed == pytest.approx(seconds)
    assert times["compute"].exposed_seconds == 0.0
    lanes.timeline.begin_step()
    _, times, _ = lanes.end_step()
    assert all(times[lane].exposed_seconds == 0.0 for lane in LANES)


def test_a_lane_that_was_busy_anyway_holds_itself_up(open_threads):
    lanes = open_threads({"h2d": Throttle(latency_s=0.3)})
    lanes.timeline.begin_step()
    updated = lanes.update.submit(nothing)
    first = lanes.h2d.submit(nothing)
    second = lanes.h2d.submit(nothing, reads=[updated])
    within(lambda: lanes.wait([second]))
    _, times, _ = lanes.end_step()
    assert updated.end < first.end == second.begin
    assert second.delayed_by == "h2d"
    assert times["update"].exposed_seconds == 0.0
    assert times["h2d"].exposed_seconds > 0.3


def test_of_several_the_one_that_came_last_was_waited_for(open_threads):
    lanes = open_threads({"h2d": Throttle(latency_s=0.02), "d2h": Throttle(latency_s=0.3)})
    lanes.timeline.begin_step()
    tickets = [lanes.d2h.submit(nothing), lanes.h2d.submit(nothing)]
    within(lambda: lanes.wait(tickets[1:], users=tickets[:1]))
    _, times, _ = lanes.end_step()
    assert times["h2d"].exposed_seconds == 0.0
    assert times["d2h"].exposed_seconds > 0.1


def test_a_wait_for_what_failed_is_exposed_too(open_threads):
    lanes, gate = open_threads(), Gate()
    lanes.timeline.begin_step()

    def work() -> None:
        gate()
        raise ValueError("of h2d")

    ticket = lanes.h2d.submit(work)
    waiting, result = start(lambda: lanes.wait([ticket]))
    gate.wait_begun()
    time.sleep(MOMENT_S)
    gate.open()
    waiting.join(PATIENCE_S)
    assert isinstance(result[0], ValueError)
    seconds, times, _ = lanes.end_step()
    assert 0 < times["h2d"].exposed_seconds <= seconds
    assert times["compute"].busy_seconds + times["h2d"].exposed_seconds == pytest.approx(seconds)


# -- lanes without threads ---------------------------------------------------------------------------------------


def test_an_inline_lane_works_where_it_is_submitted():
    lanes, ran = Lanes(overlap=False, throttle={}), []
    lane, timeline = lanes.h2d, lanes.timeline
    timeline.begin_step()
    ticket = lane.submit(lambda: ran.append(threading.current_thread()), reads=(), num_bytes=5, name="a")
    assert ran == [threading.current_thread()]
    assert ticket.is_over
    slow = lane.submit(lambda: time.sleep(0.01))
    assert slow.end - slow.begin >= 0.01
    assert slow.begin >= ticket.end
    with pytest.raises(ValueError, match="here"):
        lane.submit(fail(ValueError("here")))
    assert lane.position == 3
    lane.cancel()
    lane.drain()  # submit has already raised the error
    lane.close()
    seconds, times, spans = timeline.end_step()
    busy = slow.end - slow.begin + ticket.end - ticket.begin
    assert times["h2d"] == LaneTime(pytest.approx(busy), pytest.approx(busy))
    assert times["compute"].busy_seconds == pytest.approx(seconds - busy)
    assert [span.name for span in spans] == ["a", ""]


def test_threads_only_where_a_link_is_played_or_delayed():
    def num_threads() -> int:
        return sum(thread.name.startswith("offload ") for thread in threading.enumerate())

    before = num_threads()
    for throttle, seed, has_threads in (({}, None, False), ({"h2d": Throttle()}, None, True), ({}, 0, True)):
        lanes = open_lanes(None, throttle, seed, overlaps(False, throttle, seed))
        assert overlaps(False, throttle, seed) == lanes.overlap == has_threads
        for lane in (lanes.h2d, lanes.d2h, lanes.update):
            lane.submit(nothing)
        assert num_threads() == before + 3 * has_threads
        within(lanes.close)


def test_delays_are_drawn_from_the_seed_and_differ_by_lane():
    assert Lanes(overlap=False, throttle={}).delays("h2d") is None

    def draw(seed: int, name: str) -> list[float]:
        delays = Lanes(overlap=False, throttle={}, delay_seed=seed).delays(name)
        assert delays is not None
        return [delays.random() for _ in range(3)]

    assert draw(0, "h2d") == draw(0, "h2d")
    assert draw(0, "h2d") != draw(0, "d2h")
    assert draw(0, "h2d") != draw(1, "h2d")


# -- the race rule -----------------------------------------------------------------------------------------------


def test_a_reader_waits_for_the_writer_and_a_writer_for_all_before_it():
    fence = Fence("slot")
    assert list(fence.before_read()) == list(fence.before_fill()) == []
    filled, readers, refilled = Ticket("h2d"), [Ticket("compute"), Ticket("update")], Ticket("h2d")
    fence.record_writer(filled)
    assert list(fence.before_read()) == list(fence.before_fill()) == [filled]
    for reader in readers:
        fence.record_reader(reader)
    assert list(fence.before_read()) == [filled]
    assert list(fence.before_fill()) == [filled, *readers]
    fence.record_writer(refilled)
    assert list(fence.before_read()) == list(fence.before_fill()) == [refilled]


class Event:
    """State of work in a GPU stream."""

    def __init__(self, fired: bool) -> None:
        self.fired = fired

    def query(self) -> bool:
        return self.fired


def test_a_fence_that_is_never_filled_forgets_readers_that_are_over():
    fence = Fence("frozen weights")
    under_way = [Ticket("h2d"), Ticket("h2d", is_done=True, event=Event(False))]
    for ticket in under_way:
        fence.record_reader(ticket)
    for _ in range(300):
        fence.record_reader(Ticket("h2d", is_done=True))
        fence.record_reader(Ticket("h2d", is_done=True, event=Event(True)))
        assert len(fence.before_fill()) < 40
        assert list(fence.before_fill())[:2] == under_way
