"""Worker processes for cases: one, or one per rank. Failed or hanging workers are replaced.

python -m tests.fuzz.workers        receives cases on standard input, a connection
"""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import re
import signal
import time
import traceback
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from tests.distributed.ranks import Pool, Worker
from tests.ports import free_port, rank_variables

CASE_S = 90.0
"""Time limit of a case in seconds. (On a busy machine a case over ranks with delays takes a few seconds.)"""
_GRACE_S = 8.0
"""Seconds for the other ranks in a case after the first failure."""


class _Worker(Worker):
    """A process for cases, with a session of its own: Ctrl-C must reach only the parent."""

    def __init__(self, path: Path, _rank: int) -> None:
        super().__init__("tests.fuzz.workers", path=path, start_new_session=True)

    def take(self) -> Any:
        """Return an available reply. None: the process ended without a reply."""
        try:
            return pickle.loads(self.connection.recv_bytes())
        except (EOFError, OSError):
            return None


class Crew(Pool[_Worker]):
    """A pool for cases. A one-rank case uses the first worker."""

    def __init__(self) -> None:
        super().__init__(_Worker)

    def run(self, name: str, world: int, mutation: str | None = None, limit_s: float = CASE_S) -> Any:
        """Run a case on `world` ranks. Return the Outcome."""
        working, port = self.first(world), free_port() if world > 1 else 0
        marks = [len(worker.rank.output) for worker in working]
        for rank, worker in enumerate(working):
            worker.give((name, rank, world, port, mutation, limit_s))
        replies = self._wait(working, time.monotonic() + limit_s + _GRACE_S)
        broken = [rank for rank, reply in enumerate(replies) if reply is None or not reply.is_sound]
        outcome = self._judge(working, replies, marks)
        if broken:
            self.drop(world)
        return outcome

    def _wait(self, working: list[_Worker], deadline: float) -> list[Any]:
        replies: dict[int, Any] = {}
        while len(replies) < len(working):
            left = {working[rank].connection: rank for rank in range(len(working)) if rank not in replies}
            ready = wait(list(left), max(0.0, deadline - time.monotonic()))
            if not ready:
                return [replies.get(rank) for rank in range(len(working))]
            for connection in ready:
                rank = left[connection]
                replies[rank] = working[rank].take()
                if replies[rank] is None or not replies[rank].is_sound:
                    deadline = min(deadline, time.monotonic() + _GRACE_S)
        return [replies[rank] for rank in range(len(working))]

    def _judge(self, working: list[_Worker], replies: list[Any], marks: list[int]) -> Any:
        from tests.fuzz.runner import Outcome

        wrong = []
        for rank, (worker, reply, mark) in enumerate(zip(working, replies, marks, strict=True)):
            told = f"rank {rank}: " if len(working) > 1 else ""
            if reply is None:
                code, said = worker.rank.process.poll(), worker.rank.output[mark:]
                what = "hangs" if "Timeout" in said or code is None else f"its process ended with {code}"
                wrong.append(f"{told}{what}\n{said[-6000:]}")
            elif reply.wrong:
                wrong.append(told + reply.wrong if told and not reply.wrong.startswith("rank ") else reply.wrong)
        first = next((reply for reply in replies if reply is not None), None)
        # Errors about a lost rank come last. An out-of-memory refusal on one rank counts alone.
        wrong.sort(key=lambda text: "RankLost" in text)
        refused = [reply for reply in replies if reply is not None and reply.refused.startswith("DoesNotFit")]
        if refused and all("RankLost" in text for text in wrong):
            first, wrong = refused[0], []
        outcome = first if first is not None else Outcome()
        outcome.wrong = "\n".join(dict.fromkeys(wrong))
        return outcome


# -- the process -----------------------------------------------------------------------------------------------------


def prepare() -> None:
    """Prepare this process for cases: one thread, short delays, imports outside the garbage collector."""
    import logging
    import warnings

    import torch
    import transformers

    from offload.lanes import threads

    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()  # the progress thread would stay
    logging.getLogger("torch").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    threads._LONGEST_DELAY_S = 0.001  # longer than the work in tiny models
    gc.collect()
    gc.freeze()


def run_here(name: str, rank: int = 0, world: int = 1, port: int = 0, mutation: str | None = None) -> Any:
    """Run a case in this process as one rank. Return the Outcome, also for any exception."""
    from contextlib import ExitStack

    from tests import mutations
    from tests.fuzz.cases import parse
    from tests.fuzz.runner import Outcome, run_case

    try:
        case = parse(name)
        # variables from another case; accelerate would join that group
        for variable in rank_variables() if world == 1 else ():
            os.environ.pop(variable, None)
        with ExitStack() as stack:
            if mutation:
                stack.enter_context(mutations.applied(mutation))
            if case.kind == "commands":
                from tests.fuzz.commands import run_words

                return run_words(case)
            if case.kind == "scripts":
                from tests.fuzz.scripts import run_script

                return run_script(case)
            comm = None
            if world > 1:
                from offload.distributed.joining import open_comm
                from offload.distributed.watchdog import WatchdogLimits

                variables = rank_variables(rank, world, port)
                os.environ.update(variables)  # torch reads the variables directly
                times = WatchdogLimits(beat_s=0.2, silence_s=30, grace_s=1, stall_s=30, start_s=60)
                comm = stack.enter_context(open_comm(times=times, environ=variables))
            return run_case(case, comm)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        return Outcome(wrong=describe(error), is_sound=world == 1)


def describe(error: BaseException) -> str:
    """Return one line with the exception and the package function, followed by the end of the trace."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f"{Path(f.filename).name}:{f.name}" for f in frames if "/offload/" in f.filename] or ["outside"]
    trace = "".join(traceback.format_exception(error)[-14:])
    return f"{type(error).__name__} in {ours[-1]}: {str(error)[:300]}\n{trace}"


def signature(wrong: str) -> str:
    """Return the common signature of failures with one cause: the first line without numbers and weight names."""
    line = wrong.partition("\n")[0]
    line = re.sub(r"[\w.]*\.[\w.]+(?= by )", "NAME", line)
    return re.sub(r"'[^']*'|[-+]?\d[\d.e+-]*|nan|inf", "#", line)[:160]


def main() -> None:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    connection = Connection(0)
    prepare()
    while True:
        try:
            name, rank, world, port, mutation, limit_s = pickle.loads(connection.recv_bytes())
        except EOFError:
            os._exit(0)
        print(f"-- {name} rank {rank}", flush=True)
        faulthandler.dump_traceback_later(limit_s, exit=True)
        outcome = run_here(name, rank, world, port, mutation)
        faulthandler.cancel_dump_traceback_later()
        connection.send_bytes(pickle.dumps(outcome))


if __name__ == "__main__":
    main()
