"""Disk faults in child processes: a child loses a permission or a system call for good, or runs a whole command."""

from __future__ import annotations

import errno
import gc
import hashlib
import json
import os
import platform
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from offload import Engine, Placement
from offload.errors import DiskError, OffloadError, TornError
from offload.planning import disk
from tests import forks
from tests.cases.models import build, tokens
from tests.engine.test_model_files import FILES, engine_of, past_the_cache
from tests.engine.test_overlap import deep
from tests.forks import ROOT
from tests.io.children import IO_URING_SETUP, forbid

DEFERRED: dict[str, Any] = {"max_grad_norm": 0.2, "clip": "deferred", "recompute": "always"}
KINDS: dict[str, dict[str, str]] = {  # one state type each, so a failure belongs to this type
    "parameters": {"parameters": "nvme"},
    "optimizer": {"optimizer": "nvme"},
    "gradients": {"gradients": "nvme"},
    "activations": {"activations": "nvme"},
}
ALL = {"parameters": "nvme", "optimizer": "nvme", "gradients": "nvme", "activations": "nvme"}
CALLS = {"x86_64": {"openat": 257, "pread": 17, "pwrite": 18}, "aarch64": {"openat": 56, "pread": 67, "pwrite": 68}}
TILE = 2048
NOBODY = 65534

Wanted = Sequence[Sequence[Any]]
"""Per step of a run in memory: the loss, and a hash of the weights afterwards."""


def make(folder: str | os.PathLike[str], placement: dict[str, str], **settings: Any) -> Engine:
    """Return an engine over a few small blocks, with small tiles."""
    disk._LARGEST_TILE = TILE
    return Engine(build(deep), placement=Placement(**placement, nvme_dir=str(folder)), **{**DEFERRED, **settings})


def digest(engine: Engine) -> str:
    """Return a SHA-256 hash of all weights."""
    found = hashlib.sha256()
    for _, value in engine.named_parameters():
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def train(engine: Engine, wanted: Wanted, begin: int, end: int) -> None:
    """Take steps and compare the losses with the wanted ones."""
    for seed in range(begin, end):
        assert engine.step(tokens(seed)).loss.item() == wanted[seed][0], f"the loss of step {seed}"


def until_it_fails(engine: Engine, wanted: Wanted, begin: int) -> tuple[int, OffloadError]:
    """Take steps until one raises. Return the step number and the error. All losses before must be right."""
    for seed in range(begin, begin + 3):
        try:
            train(engine, wanted, seed, seed + 1)
        except OffloadError as error:
            return seed, error
    raise AssertionError("nothing failed")


def is_torn(engine: Engine, wanted: Wanted, num_steps: int) -> bool:
    """Return True for a torn engine. Otherwise the weights must equal those after `num_steps` steps."""
    try:
        assert digest(engine) == wanted[num_steps - 1][1], f"the weights after step {num_steps}"
    except TornError:
        try:
            engine.step(tokens(num_steps))
        except TornError:
            return True
        raise AssertionError("a torn engine took a step") from None
    return False


def names(error: BaseException, *words: object) -> None:
    """Check for the words in the error message."""
    assert not [word for word in words if str(word) not in str(error)], str(error)


# -- in a child ------------------------------------------------------------------------------------------------


def child_in_which_a_call_fails(folder: str, kind: str, call: str, wanted: Wanted) -> None:
    """One system call fails from the third step on, with disk threads instead of io_uring."""
    forbid(IO_URING_SETUP, errno.EPERM)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the warning about disk threads
        engine = make(folder, KINDS[kind])
    train(engine, wanted, 0, 2)
    assert digest(engine) == wanted[1][1]  # settles the update, so later failures belong to the next step
    forbid(CALLS[platform.machine()][call], errno.EIO)
    seed, error = until_it_fails(engine, wanted, 2)
    names(error, "DiskError" if isinstance(error, TornError) else "failed", folder, "EIO", "bytes", "offset")
    try:  # the fault stays: states on disk are unreadable, all others are whole
        torn = is_torn(engine, wanted, seed)
    except DiskError:
        torn = False
    print(json.dumps([seed, torn, type(error).__name__]))
    engine.close()


def child_that_reads_files_through_the_cache(folder: str) -> None:
    """Open an engine over model files while O_DIRECT is refused."""
    forbid(CALLS[platform.machine()]["openat"], errno.EINVAL, argument=2, bits=os.O_DIRECT)
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        past_the_cache(patch)
        engine = engine_of(Path(folder), placement=FILES)
        loss = engine.step(tokens(0)).loss.item()
        engine.close()
    print(json.dumps([loss, [str(each.message) for each in caught]]))


def child_that_never_closes(folder: str, how: str) -> None:
    """The program ends normally or by an exception, or drops the engine during an update."""
    engine = make(folder, ALL, throttle={"nvme_write": {"latency_seconds": 0.005}})
    engine.step(tokens(0))
    if how == "exception":
        raise ValueError("of the script")
    if how == "dropped":
        del engine
        gc.collect()
        return
    globals()["_kept"] = engine


def child_command(module: str, words: Sequence[str], uid: int = 0) -> None:
    """Run `python -m MODULE WORDS`, as user `nobody` if `uid` is set."""
    import tokenizers  # noqa: F401
    import transformers.models.auto.modeling_auto  # noqa: F401

    from offload.app.config.command_line import run_command

    main = import_module(module).main
    if uid and os.getuid() == 0:
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    run_command(main, words)


# -- in the parent ---------------------------------------------------------------------------------------------


class Children:
    """Forks processes that run functions of this module."""

    def __init__(self, home: Path) -> None:
        self._environment = {**os.environ, "XDG_CACHE_HOME": str(home), "OMP_NUM_THREADS": "1", "TERM": "dumb"}

    def start(self, child: Callable[..., None], *arguments: object, cwd: Path = ROOT) -> forks.Forked:
        code = f"import json, sys; from {__name__} import {child.__name__} as child; child(*json.loads(sys.argv[1]))"
        return forks.start(["-c", code, json.dumps(arguments)], env=self._environment, cwd=cwd)

    def run(self, child: Callable[..., None], *arguments: object) -> str:
        """Run a child, which must exit with 0 and an empty stderr. Return stdout."""
        ended = end(self.start(child, *arguments))
        assert (ended.code, ended.err) == (0, ""), ended.err
        return ended.out


class Ended(NamedTuple):
    """Exit code and output of a child."""

    code: int
    out: str
    err: str


def end(process: forks.Forked) -> Ended:
    """Wait for a child."""
    try:
        out, err = process.communicate()
        return Ended(process.wait(), out, err)
    finally:
        process.close()
