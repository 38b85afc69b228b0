"""No rank hangs in silence: each one hears the others' heartbeats, and ends within a set time when one is lost.

Every rank holds a socket to every other. A process that ends closes its sockets, which the others see at once; one that
is stopped, or whose machine is gone, sends nothing any more. A rank that computes for long is heard, as a thread sends.
Whoever is first to know of a loss tells the others, so that all name the same rank.

The main thread gets the error from its next exchange, or from the one that it waits in. Where it does not come back in
time, the process is ended for it, with the message. (A rank whose Python lock is held for ever can end the others, but
not itself: that is left to whoever started it.)
"""

from __future__ import annotations

import atexit
import faulthandler
import json
import os
import secrets
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from offload.errors import RankLostError

CLEANUP_S = 3.0
"""What finalizers get of a process that is ended by force."""


@dataclass(frozen=True)
class Times:
    """How often ranks are heard, and what they are given. A loss ends all ranks within beat_s + silence_s + grace_s +
    CLEANUP_S.
    """

    beat_s: float = 0.25  # what is said of a lost rank is as old as that
    silence_s: float = 18.0  # not heard of for so long: lost
    grace_s: float = 5.0  # from the loss to the end by force
    stall_s: float | None = 1800.0  # the others wait in an exchange for so long: lost, though it is heard
    start_s: float = 300.0  # for all ranks to come


@dataclass(frozen=True)
class Position:
    """Where a rank is: in (`inside`) or after its exchange `number`. The ranks of a run make the same exchanges in the
    same order.
    """

    number: int = 0
    what: str = ""
    numel: int = 0
    inside: bool = False
    since: float = field(default_factory=time.monotonic)
    among: frozenset[int] | None = None  # who takes part; None for all

    def describe(self, now: float | None = None) -> str:
        """Return what a rank was doing: "waiting in all-gather of unit head for 3.0 s"."""
        age = (time.monotonic() if now is None else now) - self.since
        if self.inside:
            return f"waiting in {self.what} for {age:.1f} s"
        if self.what:
            return f"computing since the end of {self.what} {age:.1f} s before"
        return f"computing, {age:.1f} s after its start"


@dataclass
class _Peer:
    """Another rank, as far as it is known here."""

    rank: int
    connection: socket.socket
    heard: float = field(default_factory=time.monotonic)
    positions: Sequence[Position] = (Position(),)
    unread: bytes = b""
    unsent: bytes = b""
    ended: bool = False  # cleanly: nothing more is expected of it

    def at(self, row: int) -> Position:
        """Return where the rank is in a row, which it may have none of yet."""
        return self.positions[row] if row < len(self.positions) else Position()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one line; what the socket does not take now goes before the next."""
        self.unsent += json.dumps(message).encode() + b"\n"
        with suppress(OSError):  # that it is gone is seen by reading
            self.unsent = self.unsent[self.connection.send(self.unsent) :]

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the messages that came, and whether the connection still stands."""
        stands = True
        try:
            while data := self.connection.recv(1 << 16):
                self.unread += data
            stands = False
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            stands = False
        *lines, self.unread = self.unread.split(b"\n")
        return [json.loads(line) for line in lines], stands


class Watchdog:
    """This rank's ear for the others.

    `look` returns where this rank is, in each row of exchanges. `listeners` are called with the error, by a
    thread of the watch, when a rank is lost: they wake whoever waits. `enter` is called by each of its threads first.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        look: Callable[[], Sequence[Position]],
        times: Times,
        enter: Callable[[], object] = lambda: None,
    ) -> None:
        self.rank = rank
        self.error: RankLostError | None = None
        self._exit_code = 1  # of a process that ends for a loss, unless it had failed by itself before
        self.listeners: list[Callable[[RankLostError], None]] = []
        self._look, self._times, self._enter = look, times, enter
        self._peers = {other: _Peer(other, connection) for other, connection in connections.items()}
        self._lock = threading.Lock()
        self._is_lost = threading.Event()
        self._ending, self._deadline = False, float("inf")
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            peer.connection.setblocking(False)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._bell, self._rope = socket.socketpair()
        self._bell.setblocking(False)
        self._selector.register(self._bell, selectors.EVENT_READ)
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._run, name="offload watch", daemon=True)
        self._thread.start()

    # -- for the rank ----------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """True when this rank has left, or has lost another."""
        return self._ending or self.error is not None

    def ends_with(self, error: BaseException | None) -> None:
        """The process ends for this error, if it is of the project's, should another rank be lost before."""
        self._exit_code = getattr(error, "exit_code", self._exit_code)

    def check(self) -> None:
        """Raise what was found, if a rank is lost."""
        if self.error is not None:
            raise RankLostError(str(self.error), self.error.rank)

    def explain(self, error: Exception) -> RankLostError:
        """An exchange failed: return which rank was lost by it."""
        if self._ending:
            return RankLostError(f"This rank, {self.rank}, has left the others: {error}", self.rank)
        self._is_lost.wait(self._times.silence_s / 2)  # the sockets tell, in a moment
        if self.error is None:
            self._lose(None, f"A connection between ranks broke: {error}")
        assert self.error is not None
        return RankLostError(str(self.error), self.error.rank)

    def end(self, error: BaseException | None = None) -> None:
        """This rank leaves, cleanly or with an error, and says so. After a loss the process ends in any case."""
        with self._lock:
            if self.is_over:
                return
            self._ending = True
            positions = self._positions()
            for peer in self._peers.values():
                peer.send({"kind": "end", "error": error and f"{type(error).__name__}: {error}", **positions})
        self._rope.send(b".")
        if self._thread is not threading.current_thread():
            self._thread.join(1)
        for peer in self._peers.values():
            with suppress(OSError):
                peer.connection.shutdown(socket.SHUT_WR)  # closing it with unread beats could take the word back
        atexit.unregister(self._at_exit)

    # -- the thread ------------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._enter()
        beat_s, looked, next_beat = self._times.beat_s, time.monotonic(), 0.0
        while not self.is_over:
            now = time.monotonic()
            if now >= next_beat:
                with self._lock:
                    for peer in self._peers.values():
                        if not peer.ended:
                            peer.send({"kind": "beat", **self._positions()})
                next_beat = now + beat_s
            ready = self._selector.select(max(0.0, next_beat - time.monotonic()))
            now, before, looked = time.monotonic(), looked, time.monotonic()
            for peer in self._peers.values():
                if now - before > 2 * beat_s:  # this rank itself was stopped: it could not hear
                    peer.heard += now - before
            for key, _ in ready:
                if isinstance(key.data, _Peer):
                    self._hear(key.data)
            self._judge(time.monotonic())

    def _hear(self, peer: _Peer) -> None:
        messages, stands = peer.receive()
        now = time.monotonic()
        for message in messages:
            peer.heard = now
            if message["kind"] == "lost":
                self._learn(peer, message)
                continue
            peer.positions = [
                Position(number, what, numel, inside, now - age)
                for number, what, numel, inside, age in message["positions"]
            ]
            if message["kind"] == "end":
                peer.ended = True
                if message["error"]:
                    doing = describe(peer.positions, now)
                    self._lose(peer.rank, f"Rank {peer.rank} ended with: {message['error']} (it was {doing})")
        if not stands:
            self._selector.unregister(peer.connection)
            if not peer.ended:
                peer.ended = True
                ended = "its process ended without a word: it was killed, ran out of memory or crashed"
                self._lose(peer.rank, self._describe(peer, ended))

    def _learn(self, peer: _Peer, message: Mapping[str, Any]) -> None:
        if message["rank"] != self.rank:
            self._lose(message["rank"], message["why"])
            return
        self._lose(self.rank, f"Rank {peer.rank} took this rank, {self.rank}, for lost. {message['why']}")

    def _judge(self, now: float) -> None:
        """Find who is silent, who is missing, and who went another way."""
        for peer in self._peers.values():
            if not peer.ended and now - peer.heard > self._times.silence_s:
                silent = f"it has not been heard of for {now - peer.heard:.1f} s: it was stopped, its machine is gone, "
                self._lose(peer.rank, self._describe(peer, silent + "or something holds its Python lock"))
        for row, here in enumerate(self._look()):
            self._compare(row, here, now)

    def _compare(self, row: int, here: Position, now: float) -> None:
        """Compare where this rank is in a row of exchanges with where the others are."""
        stall_s = self._times.stall_s
        waited = now - here.since if here.inside else 0.0
        peers = [peer for peer in self._peers.values() if here.among is None or peer.rank in here.among]
        for peer in peers:
            there = peer.at(row)
            if peer.ended:
                if waited and there.number < here.number:
                    ended = max(peer.positions, key=lambda position: position.since).what
                    self._lose(peer.rank, f"Rank {peer.rank} ended cleanly, after {ended or 'no exchange'}")
            elif there.number == here.number and (there.what, there.numel) != (here.what, here.numel):
                other = f"{there.what} ({there.numel} elements)"
                mine = f"rank {self.rank} is at {here.what} ({here.numel} elements)"
                self._lose(peer.rank, f"Ranks went different ways: rank {peer.rank} is at {other}, {mine}")
        present = [peer for peer in peers if not peer.ended]
        if stall_s is not None and waited > stall_s and present:
            last = min(present, key=lambda peer: peer.at(row).number)
            missing = f"others have waited for it for {stall_s:g} s, though it is alive"
            if last.at(row).number == here.number:
                missing = f"all ranks have been in {here.what} for {stall_s:g} s"
            self._lose(last.rank, self._describe(last, missing))

    def _describe(self, peer: _Peer, why: str) -> str:
        now = time.monotonic()
        doing = describe(peer.positions, peer.heard)
        return f"Rank {peer.rank} is lost: {why}. When last heard, {now - peer.heard:.1f} s ago, it was {doing}"

    def _positions(self) -> dict[str, Any]:
        now = time.monotonic()
        return {"positions": [(p.number, p.what, p.numel, p.inside, now - p.since) for p in self._look()]}

    # -- the end of a rank that lost another -----------------------------------------------------------------

    def _lose(self, rank: int | None, why: str) -> None:
        """Keep the first loss, tell the other ranks and whoever waits here, and see to it that the process ends."""
        with self._lock:
            if self.is_over:
                return
            doing = describe(self._look())
            self._deadline = time.monotonic() + self._times.grace_s + CLEANUP_S
            self.error = error = RankLostError(f"{why}. Rank {self.rank} was {doing}.", rank)
            for peer in self._peers.values():
                peer.send({"kind": "lost", "rank": rank, "why": why})
        threading.Thread(target=self._end_by_force, args=(error,), name="offload end", daemon=True).start()
        self._is_lost.set()
        for listener in list(self.listeners):
            listener(error)

    def _end_by_force(self, error: RankLostError) -> None:
        time.sleep(self._times.grace_s)
        with suppress(OSError):
            os.write(2, f"Error: {error}\n".encode())
        if error.rank == self.rank:
            with suppress(Exception):
                faulthandler.dump_traceback()  # where it is stuck
        cleanup = threading.Thread(target=self._clean_up, name="offload cleanup", daemon=True)
        cleanup.start()
        cleanup.join(CLEANUP_S)
        self._leave()

    def _clean_up(self) -> None:
        with suppress(Exception):  # of a device that is lost, too: what can be removed is
            self._enter()
        _clean_up()

    def _at_exit(self) -> None:
        if self.error is None:
            self.end(getattr(sys, "last_value", None))  # the exception that ended the program, if one did
        elif threading.current_thread() is threading.main_thread():
            # Not by the interpreter's end: threads of gloo may be blocked for ever, or ask for Python's lock when it is
            # gone and so abort the process (seen with torch 2.13). The alarm is for finalizers that hang.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(0.1, self._deadline - time.monotonic()))
            atexit.unregister(self._at_exit)
            _clean_up()
            self._leave()

    def _leave(self) -> NoReturn:
        """End with 1, as Python does, where nobody caught the error, whether a loss was heard of before or not."""
        os._exit(1 if hasattr(sys, "last_value") else self._exit_code)


def _clean_up() -> None:
    """What the interpreter would do at its end, such as the removal of files of this run. (Of functions that it has
    begun with, some are called twice.)
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    atexit._run_exitfuncs()


def connect(
    rank: int, hosts: Sequence[str], gather: Callable[[Any, str], list[Any]], start_s: float
) -> dict[int, socket.socket]:
    """Connect every rank to every other, and return the sockets by rank. Collective.

    hosts: the address at which each rank is reached. gather: returns what every rank gave to it, in rank order.
    """
    with socket.create_server(
        (hosts[rank], 0), backlog=len(hosts), family=socket.AF_INET6 if ":" in hosts[rank] else socket.AF_INET
    ) as server:
        told = gather((server.getsockname()[1], secrets.token_hex(16)), "exchange of addresses")
        token = told[0][1]  # of this run: a stranger who comes by does not know it
        connections: dict[int, socket.socket] = {}
        for other in range(rank):
            connection = socket.create_connection((hosts[other], told[other][0]), timeout=start_s)
            connection.sendall(f"{token} {rank:8}".encode())
            connections[other] = connection
        server.settimeout(start_s)
        while len(connections) < len(hosts) - 1:
            connection, _ = server.accept()
            connection.settimeout(start_s)
            given, _, number = (
                connection.recv(len(token) + 9, socket.MSG_WAITALL).decode(errors="replace").partition(" ")
            )
            if secrets.compare_digest(given.encode(), token.encode()):
                connections[int(number)] = connection
            else:
                connection.close()
    for connection in connections.values():
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connections


def describe(positions: Sequence[Position], now: float | None = None) -> str:
    """Return what a rank is doing: what it has waited for longest, or what it has done last."""
    waits = [position for position in positions if position.inside]
    return (min(waits, key=lambda p: p.since) if waits else max(positions, key=lambda p: p.since)).describe(now)
