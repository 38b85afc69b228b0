"""Watchdog: detects lost ranks by heartbeats, and ends every rank within a fixed time after a loss.

Each rank has a socket to every other rank. A dead process closes its sockets, visible to all ranks at once. A stopped
process or a lost machine sends no more heartbeats. A busy rank still sends them, from a thread. The first rank to
detect a loss informs the others, so all ranks name the same rank.

The main thread gets the error in the present or next collective. If the main thread does not return in time, a watchdog
thread prints the message and ends the process. (A rank with a GIL held forever can end the other ranks, but not itself.
The launcher must end it.)
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
"""Seconds for finalizers in a process ended by force."""


@dataclass(frozen=True)
class WatchdogLimits:
    """Intervals and limits in seconds. After a loss all ranks end within beat_s + silence_s + grace_s + CLEANUP_S."""

    beat_s: float = 0.25  # heartbeat interval, also the age of the reported state of a lost rank
    silence_s: float = 18.0  # a rank without heartbeat for this time is lost
    grace_s: float = 5.0  # from the loss to the forced end
    # a live rank is lost if the others wait in a collective for this time (None: no limit)
    stall_s: float | None = 1800.0
    start_s: float = 300.0  # for all ranks to arrive


@dataclass(frozen=True)
class Position:
    """Progress of a rank: inside or after collective `number`. All ranks make the same collectives in the
    same order.
    """

    number: int = 0
    operation: str = ""
    numel: int = 0
    inside: bool = False
    since: float = field(default_factory=time.monotonic)
    among: frozenset[int] | None = None  # participating ranks; None: all

    def describe(self, now: float | None = None) -> str:
        """Return the rank's activity as text: "waiting in all-gather of unit head for 3.0 s"."""
        if now is None:
            now = time.monotonic()
        age = now - self.since
        if self.inside:
            return f"waiting in {self.operation} for {age:.1f} s"
        if self.operation:
            return f"computing, {age:.1f} s after the end of {self.operation}"
        return f"computing, {age:.1f} s after its start"


@dataclass
class _Peer:
    """State of another rank, as known here."""

    rank: int
    connection: socket.socket
    heard: float = field(default_factory=time.monotonic)
    positions: Sequence[Position] = (Position(),)
    unread: bytes = b""
    unsent: bytes = b""
    ended: bool = False  # after a clean end the rank sends nothing more

    def at(self, queue: int) -> Position:
        """Return the rank's position in `queue`, or the start position if the queue does not exist yet."""
        if queue < len(self.positions):
            return self.positions[queue]
        return Position()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one line. Data refused by the socket is sent before the next line."""
        self.unsent += json.dumps(message).encode() + b"\n"
        with suppress(OSError):  # the read side detects a lost connection
            self.unsent = self.unsent[self.connection.send(self.unsent) :]

    def receive(self) -> tuple[list[dict[str, Any]], bool]:
        """Return the new messages, and True while the connection is open."""
        is_open = True
        try:
            while data := self.connection.recv(1 << 16):
                self.unread += data
            is_open = False
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            is_open = False
        *lines, self.unread = self.unread.split(b"\n")
        return [json.loads(line) for line in lines], is_open


class Watchdog:
    """Heartbeat thread for this rank.

    `look` returns this rank's positions in all queues. After a loss, a watchdog thread calls all `listeners` with the
    error, to wake waiting threads. `enter` runs first in each watchdog thread.
    """

    def __init__(
        self,
        rank: int,
        connections: Mapping[int, socket.socket],
        look: Callable[[], Sequence[Position]],
        times: WatchdogLimits,
        enter: Callable[[], object] = lambda: None,
    ) -> None:
        self.rank = rank
        self._look = look
        self._times = times
        self._enter = enter
        self._peers = {other: _Peer(other, connection) for other, connection in connections.items()}
        self._lock = threading.Lock()
        """Held to end or to lose a rank, since only the first of both counts."""

        # After a loss.
        self.error: RankLostError | None = None
        self.listeners: list[Callable[[RankLostError], None]] = []
        self._is_lost = threading.Event()
        self._exit_code = 1  # exit code after a loss, unless this rank failed first
        self._deadline = float("inf")  # of the forced end
        self._ending = False  # True after a clean end

        # Sockets to the other ranks, and one to wake the thread.
        self._selector = selectors.DefaultSelector()
        for peer in self._peers.values():
            peer.connection.setblocking(False)
            self._selector.register(peer.connection, selectors.EVENT_READ, peer)
        self._wait_socket, self._wake_socket = socket.socketpair()
        self._wait_socket.setblocking(False)
        self._selector.register(self._wait_socket, selectors.EVENT_READ)
        atexit.register(self._at_exit)
        self._thread = threading.Thread(target=self._run, name="offload watch", daemon=True)
        self._thread.start()

    # -- called by the rank -------------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """True after this rank has left, or after a loss."""
        return self._ending or self.error is not None

    def ends_with(self, error: BaseException | None) -> None:
        """Set the exit code from a project error, for a forced end after a later loss."""
        self._exit_code = getattr(error, "exit_code", self._exit_code)

    def check(self) -> None:
        """Raise RankLostError if a rank is lost."""
        if self.error is not None:
            raise RankLostError(str(self.error), self.error.rank)

    def explain(self, error: Exception) -> RankLostError:
        """Return the RankLostError for a failed collective. Waits for the watchdog to find the lost rank."""
        if self._ending:
            return RankLostError(f"This rank, {self.rank}, has already left the other ranks: {error}", self.rank)
        self._is_lost.wait(self._times.silence_s / 2)  # the sockets report the loss within a moment
        if self.error is None:
            self._lose(None, f"A connection between ranks broke: {error}")
        assert self.error is not None
        return RankLostError(str(self.error), self.error.rank)

    def end(self, error: BaseException | None = None) -> None:
        """Leave the other ranks and inform them: cleanly, or with an error. No effect after a loss: the process ends
        anyway.
        """
        with self._lock:
            if self.is_over:
                return
            self._ending = True
            positions = self._positions()
            for peer in self._peers.values():
                peer.send({"kind": "end", "error": error and f"{type(error).__name__}: {error}", **positions})
        self._wake_socket.send(b".")
        if self._thread is not threading.current_thread():
            self._thread.join(1)
        for peer in self._peers.values():
            with suppress(OSError):
                # a full close with unread heartbeats could discard the last message
                peer.connection.shutdown(socket.SHUT_WR)
        atexit.unregister(self._at_exit)

    # -- watchdog thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        self._enter()
        beat_s = self._times.beat_s
        looked = time.monotonic()
        next_beat = 0.0
        while not self.is_over:
            now = time.monotonic()
            if now >= next_beat:
                with self._lock:
                    for peer in self._peers.values():
                        if not peer.ended:
                            peer.send({"kind": "beat", **self._positions()})
                next_beat = now + beat_s
            ready = self._selector.select(max(0.0, next_beat - time.monotonic()))
            now = time.monotonic()
            before = looked
            looked = time.monotonic()
            for peer in self._peers.values():
                if now - before > 2 * beat_s:  # this rank was stopped, so it could not receive heartbeats
                    peer.heard += now - before
            for key, _ in ready:
                if isinstance(key.data, _Peer):
                    self._read_messages(key.data)
            self._check_peers(time.monotonic())

    def _read_messages(self, peer: _Peer) -> None:
        messages, is_open = peer.receive()
        now = time.monotonic()
        for message in messages:
            peer.heard = now
            if message["kind"] == "lost":
                why = message["why"]
                if message["rank"] == self.rank:
                    why = f"Rank {peer.rank} reported this rank, {self.rank}, as lost. {why}"
                self._lose(message["rank"], why)
                continue
            # Ages travel, not times: the clocks of machines differ.
            peer.positions = [
                Position(number, operation, numel, inside, now - age)
                for number, operation, numel, inside, age in message["positions"]
            ]
            if message["kind"] == "end":
                peer.ended = True
                if message["error"]:
                    doing = describe(peer.positions, now)
                    self._lose(peer.rank, f"Rank {peer.rank} ended with: {message['error']} (it was {doing})")
        if not is_open:  # the kernel closes the sockets of a dead process
            self._selector.unregister(peer.connection)
            if not peer.ended:
                peer.ended = True
                ended = "its process ended without a message: it was killed, ran out of memory or crashed"
                self._lose(peer.rank, self._describe(peer, ended))

    def _check_peers(self, now: float) -> None:
        """Detect silent ranks, absent ranks, and ranks in different collectives."""
        for peer in self._peers.values():
            if not peer.ended and now - peer.heard > self._times.silence_s:
                silent = f"no heartbeat for {now - peer.heard:.1f} s: its process is stopped, its machine is down, "
                self._lose(peer.rank, self._describe(peer, silent + "or a thread holds its Python lock"))
        for queue, own in enumerate(self._look()):
            self._compare(queue, own, now)

    def _compare(self, queue: int, own: Position, now: float) -> None:
        """Compare this rank's position in `queue` with the positions of the other ranks."""
        stall_s = self._times.stall_s
        waited = 0.0
        if own.inside:
            waited = now - own.since
        peers = [peer for peer in self._peers.values() if own.among is None or peer.rank in own.among]
        for peer in peers:
            other = peer.at(queue)
            if peer.ended:
                if waited and other.number < own.number:  # gone before the exchange in which this rank waits
                    ended = max(peer.positions, key=lambda position: position.since).operation
                    self._lose(peer.rank, f"Rank {peer.rank} ended cleanly, after {ended or 'no exchange'}")
            elif other.number == own.number and (other.operation, other.numel) != (own.operation, own.numel):
                other_position = f"{other.operation} ({other.numel} elements)"
                own_position = f"rank {self.rank} is at {own.operation} ({own.numel} elements)"
                self._lose(
                    peer.rank,
                    f"Ranks called different operations: rank {peer.rank} is at {other_position}, {own_position}. All "
                    "ranks use the same modules in a step: for a module without an input on one rank, such as a tower "
                    "for pictures, pass a dummy input there and add its result times 0",
                )
        present = [peer for peer in peers if not peer.ended]
        if stall_s is not None and waited > stall_s and present:
            last = min(present, key=lambda peer: peer.at(queue).number)  # the furthest behind holds up the others
            missing = f"other ranks have waited for it for {stall_s:g} s, though it is alive"
            if last.at(queue).number == own.number:
                missing = f"all ranks have been in {own.operation} for {stall_s:g} s"
            self._lose(last.rank, self._describe(last, missing))

    def _describe(self, peer: _Peer, why: str) -> str:
        now = time.monotonic()
        doing = describe(peer.positions, peer.heard)
        return f"Rank {peer.rank} is lost: {why}. When last heard, {now - peer.heard:.1f} s ago, it was {doing}"

    def _positions(self) -> dict[str, Any]:
        now = time.monotonic()
        return {"positions": [(p.number, p.operation, p.numel, p.inside, now - p.since) for p in self._look()]}

    # -- after a loss -------------------------------------------------------------------------------------------

    def _lose(self, rank: int | None, why: str) -> None:
        """Record the first loss, inform the other ranks and local waiters, and start the forced end."""
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
            os.write(2, f"Error: {error}\n".encode(errors="backslashreplace"))
        if error.rank == self.rank:
            with suppress(Exception):
                faulthandler.dump_traceback()  # show the stuck call
        cleanup = threading.Thread(target=self._clean_up, name="offload cleanup", daemon=True)
        cleanup.start()
        cleanup.join(CLEANUP_S)
        self._leave()

    def _clean_up(self) -> None:
        with suppress(Exception):  # also after a device loss, to remove as much as possible
            self._enter()
        _clean_up()

    def _at_exit(self) -> None:
        if self.error is None:
            self.end(getattr(sys, "last_value", None))  # the exception that ended the program, if any
        elif threading.current_thread() is threading.main_thread():
            # End here and not in the interpreter exit: gloo threads may be blocked forever, or request the GIL after
            # its destruction and so abort the process (seen with torch 2.13). The alarm ends hanging finalizers.
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, max(0.1, self._deadline - time.monotonic()))
            atexit.unregister(self._at_exit)
            _clean_up()
            self._leave()

    def _leave(self) -> NoReturn:
        """Exit with 1, like Python, after an uncaught exception; otherwise with the recorded code."""
        if hasattr(sys, "last_value"):
            os._exit(1)
        os._exit(self._exit_code)


def _clean_up() -> None:
    """Run the interpreter's exit handlers, for example to remove temporary files. Handlers already started may run
    twice.
    """
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()
    atexit._run_exitfuncs()


def connect(
    rank: int, hosts: Sequence[str], gather: Callable[[Any, str], list[Any]], start_s: float
) -> dict[int, socket.socket]:
    """Connect all pairs of ranks and return the sockets by rank. Collective.

    hosts: address of each rank. gather: returns the values of all ranks, in rank order.
    """
    family = socket.AF_INET
    if ":" in hosts[rank]:
        family = socket.AF_INET6
    with socket.create_server((hosts[rank], 0), backlog=len(hosts), family=family) as server:
        endpoints = gather((server.getsockname()[1], secrets.token_hex(16)), "exchange of addresses")
        token = endpoints[0][1]  # unique for this run, to reject other processes
        connections: dict[int, socket.socket] = {}
        for other in range(rank):
            connection = socket.create_connection((hosts[other], endpoints[other][0]), timeout=start_s)
            connection.sendall(f"{token} {rank:8}".encode())
            connections[other] = connection
        server.settimeout(start_s)
        while len(connections) < len(hosts) - 1:
            connection, _ = server.accept()
            connection.settimeout(start_s)
            received_token, _, number = (
                connection.recv(len(token) + 9, socket.MSG_WAITALL).decode(errors="replace").partition(" ")
            )
            if secrets.compare_digest(received_token.encode(), token.encode()):
                connections[int(number)] = connection
            else:
                connection.close()
    for connection in connections.values():  # heartbeats are small, and must not wait for more data
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connections


def describe(positions: Sequence[Position], now: float | None = None) -> str:
    """Return the activity of a rank: the longest wait, or the last finished collective."""
    if waits := [position for position in positions if position.inside]:
        return min(waits, key=lambda position: position.since).describe(now)
    return max(positions, key=lambda position: position.since).describe(now)
