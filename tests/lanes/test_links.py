"""Lanes on a shared link: one throttle, one clock, no overlap between spans; and update cancellation."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import defaultdict

import pytest

from offload.lanes.lanes import Lanes
from offload.lanes.threads import Link
from offload.lanes.ticket import CancelledError, Ticket
from offload.lanes.timeline import LANES, Span, Throttle, Timeline
from tests.lanes.patience import FOREVER_S, MOMENT_S, PATIENCE_S, Gate, eventually, fail, nothing, start, within

SHARED = {
    "nvme_read": ("fetch_read", "update_read", "activation_read"),
    "nvme_write": ("update_write", "activation_write"),
}
DISK = tuple(itertools.chain(*SHARED.values()))


def assert_apart(spans: list[Span], busy: dict[str, float], seconds: float) -> None:
    """Assert disjoint spans per link, with busy seconds equal to their sum."""
    by_lane = defaultdict(list)
    for span in spans:
        by_lane[span.lane].append(span)
    for lane, shown in by_lane.items():
        assert all(before.end <= after.begin for before, after in itertools.pairwise(shown)), f"{lane} is in order"
        assert all(span.begin <= span.end for span in shown)
        assert busy[lane] == pytest.approx(sum(span.end - span.begin for span in shown))
        assert busy[lane] <= seconds + 1e-9


# -- disk lanes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overlap", [True, False])
def test_every_lane_of_the_disk_has_a_thread_of_its_own_once_it_has_work(overlap):
    before = set(threading.enumerate())
    lanes, gates, ran = Lanes(overlap=overlap, throttle={}), {name: Gate() for name in DISK}, []
    assert set(threading.enumerate()) == before
    tickets = {name: getattr(lanes, name).submit(gate) for name, gate in gates.items()}
    for gate in gates.values():
        gate.wait_begun()  # all at once
    assert {thread.name for thread in set(threading.enumerate()) - before} == {f"offload {name}" for name in DISK}
    later = [getattr(lanes, name).submit(lambda name=name: ran.append(name)) for name in DISK]
    for gate in gates.values():
        gate.open()
    within(lambda: lanes.wait(later))
    for link, names in SHARED.items():
        assert {tickets[name].lane for name in names} == {link}
    assert sorted(ran) == sorted(DISK)
    within(lanes.close)
    assert set(threading.enumerate()) <= before


def test_fetches_from_the_disk_do_not_overtake(open_threads):
    lanes, ran = open_threads(), []
    for name in DISK:
        getattr(lanes, name).submit(nothing, reads=[Ticket("nobody's")])
        getattr(lanes, name).submit(lambda: ran.append("overtook"))
    time.sleep(MOMENT_S)
    assert not ran


@pytest.mark.parametrize("kind", ["reads", "users"])
def test_compute_that_does_a_lanes_work_itself_waits_for_the_disk(kind):
    lanes, gate, ran = Lanes(overlap=False, throttle={}), Gate(), []
    lanes.timeline.begin_step()
    read = lanes.fetch_read.submit(gate)
    thread, _ = start(lambda: lanes.h2d.submit(lambda: ran.append(read.is_done), **{kind: [read]}))
    gate.wait_begun()
    time.sleep(MOMENT_S)
    assert not ran
    gate.open()
    thread.join(PATIENCE_S)
    assert ran == [True]
    _, times, _ = lanes.end_step()
    assert times["nvme_read"].exposed_seconds >= MOMENT_S / 2
    failed = lanes.fetch_read.submit(fail(OSError("of the disk")))
    assert eventually(lambda: failed.is_done)
    if kind == "reads":
        with pytest.raises(OSError, match="of the disk"):
            lanes.h2d.submit(lambda: ran.append("never"), reads=[failed])
        assert ran == [True]
    else:
        lanes.h2d.submit(lambda: ran.append("whatever became of it"), users=[failed])
    within(lanes.close)


# -- one link --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 1, 2])
@pytest.mark.parametrize("link", SHARED)
def test_lanes_of_a_link_share_its_throttle(open_threads, link, seed):
    lanes, gate = open_threads({link: Throttle(bytes_per_second=1e6, latency_s=0.002)}, seed), Gate()
    lanes.timeline.begin_step()
    lanes.update.submit(gate)
    last = lanes.update.submit(nothing)
    tickets = [getattr(lanes, name).submit(nothing, reads=[last], num_bytes=3_000) for name in SHARED[link] * 8]
    gate.open()
    within(lambda: lanes.wait(tickets))
    seconds, times, spans = lanes.end_step()
    in_order = sorted(tickets, key=lambda ticket: ticket.begin)
    assert in_order[0].begin == last.end
    assert all(ticket.end - ticket.begin >= 0.005 - 1e-9 for ticket in tickets)
    over = in_order[0].end
    for before, after in itertools.pairwise(in_order):
        assert after.begin - before.begin >= 0.005 - 1e-9, "not at the same time"
        assert after.begin <= over + 1e-9, "and without gaps"
        over = max(over, after.end)
    assert len(tickets) * 0.005 - 1e-9 <= times[link].busy_seconds <= max(t.end for t in tickets) - last.end + 1e-9
    assert_apart(spans, {lane: times[lane].busy_seconds for lane in LANES}, seconds)


def test_links_do_not_share_throttles(open_threads):
    lanes = open_threads({"nvme_read": Throttle(latency_s=FOREVER_S)})
    lanes.fetch_read.submit(nothing)
    within(lambda: lanes.wait([getattr(lanes, name).submit(nothing) for name in (*SHARED["nvme_write"], "h2d")]))


def test_a_link_is_busy_while_anything_goes_on_over_it(monkeypatch):
    """Includes a long piece's time around a short one, and counts no moment twice."""
    timeline, chance = Timeline(LANES), random.Random(5)
    for throttle in (None, Throttle(latency_s=0.5)):
        link, now, under_way, busy = Link("nvme_read", timeline, throttle), 0.0, [], []
        monkeypatch.setattr("offload.lanes.threads.time.perf_counter", lambda: now)  # noqa: B023
        timeline.end_step()
        for _ in range(400):
            now += chance.random()
            if len(under_way) < 3 and chance.random() < 0.6:
                under_way.append(Ticket("nvme_read"))
                link.begin(under_way[-1], now - chance.random(), 0)
            elif under_way:
                ticket = under_way.pop(chance.randrange(len(under_way)))
                link.end(ticket, "", now)
                busy.append((ticket.begin, ticket.end))
                assert ticket.begin <= ticket.end == now
        for ticket in under_way:
            now += 1
            link.end(ticket, "", now)
            busy.append((ticket.begin, now))
        monkeypatch.undo()
        _, times, spans = timeline.end_step()
        assert all(before.end <= after.begin for before, after in itertools.pairwise(spans))
        total, until = 0.0, 0.0
        for begin, end in sorted(busy):
            total += max(0.0, end - max(begin, until))
            until = max(until, end)
        assert times["nvme_read"].busy_seconds == pytest.approx(total)


def test_what_is_given_up_frees_its_link_and_leaves_the_others_their_time(open_threads):
    lanes = open_threads({"nvme_read": Throttle(bytes_per_second=1.0)})
    begun = [threading.Event(), threading.Event()]
    given_up = lanes.fetch_read.submit(begun[0].set, num_bytes=FOREVER_S)
    assert begun[0].wait(PATIENCE_S)
    behind = lanes.update_read.submit(begun[1].set, num_bytes=FOREVER_S)
    assert begun[1].wait(PATIENCE_S)
    within(lanes.update_read.cancel)
    assert behind.is_done
    assert behind.begin == behind.end <= time.perf_counter(), "its time never came"
    assert not given_up.is_done
    within(lanes.fetch_read.cancel)
    later = lanes.activation_read.submit(nothing)
    within(lambda: lanes.wait([later]))
    assert given_up.end <= later.begin <= later.end <= time.perf_counter()


def test_work_that_fails_frees_its_link(open_threads):
    lanes = open_threads({"nvme_write": Throttle(latency_s=FOREVER_S)})
    failed = lanes.update_write.submit(fail(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        within(lambda: lanes.wait([failed]))
    begun = threading.Event()
    lanes.activation_write.submit(begun.set)
    assert begun.wait(PATIENCE_S)
    within(lanes.activation_write.cancel)


# -- cancelled updates -----------------------------------------------------------------------------------------


UPDATES = ("update_read", "update", "update_write")
OTHERS = ("h2d", "d2h", "fetch_read", "activation_read", "activation_write")


def test_what_was_settled_is_kept_on_every_lane_of_updates(open_threads):
    lanes, gate, ran, settled = open_threads(), Gate(), [], []
    for name in (*UPDATES, *OTHERS):
        getattr(lanes, name).submit(gate)
        before = getattr(lanes, name).submit(lambda name=name: ran.append(f"{name} before"))
        if name in UPDATES:
            settled.append(before)
    lanes.close_step()
    tickets = [getattr(lanes, name).submit(lambda: ran.append("after")) for name in (*UPDATES, *OTHERS)]
    thread, _ = start(lanes.give_up)
    assert eventually(lambda: lanes.update_write._queue[-1].is_cancelled), "all at once, whoever is waited for first"
    gate.open()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert eventually(lambda: all(isinstance(ticket.error, CancelledError) for ticket in tickets))
    within(lanes.drain_updates)
    within(lambda: lanes.wait(settled))  # draining does not wait for reads
    assert sorted(name for name in ran if name.split()[0] in UPDATES) == sorted(f"{name} before" for name in UPDATES)
    assert "after" not in ran
    assert lanes.failure is None


@pytest.mark.parametrize("name", UPDATES[1:])
def test_a_failed_update_is_known_until_it_is_given_up_itself(open_threads, name):
    lanes = open_threads()
    lane = getattr(lanes, name)
    for _ in range(2):
        assert lanes.failure is None
        lane.submit(fail(OSError("of this step")))
        assert eventually(lambda: lanes.failure is not None)
        within(lanes.give_up)
        assert lanes.failure is None, "it was part of what is given up"
        lane.submit(nothing)
        lanes.close_step()
    lane.submit(fail(OSError("of the step before")))
    lanes.close_step()
    assert eventually(lambda: lanes.failure is not None)
    lane.submit(fail(OSError("of this step")))
    within(lanes.give_up)
    assert str(lanes.failure) == "of the step before"


def test_a_failed_copy_is_no_failed_update_nor_is_a_read_that_no_update_needs(open_threads):
    lanes = open_threads()
    tickets = [getattr(lanes, name).submit(fail(OSError(name))) for name in (*OTHERS, "update_read")]
    assert eventually(lambda: all(ticket.is_done for ticket in tickets))
    assert lanes.failure is None


def test_draining_the_updates_waits_for_what_is_written(open_threads):
    lanes, gate = open_threads(), Gate()
    updated = lanes.update.submit(gate)
    written = lanes.update_write.submit(lambda: time.sleep(MOMENT_S), reads=[updated])
    thread, _ = start(lanes.drain_updates)
    gate.open()
    thread.join(PATIENCE_S)
    assert written.is_done
    failed = lanes.update_write.submit(fail(OSError("no space")))
    with pytest.raises(OSError, match="no space"):
        within(lanes.drain_updates)
    assert failed.error is lanes.failure
