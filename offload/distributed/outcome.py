"""Common result of an operation on all ranks: success on all, or one error on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from offload.distributed.comm import Comm
from offload.errors import CheckpointError, ConfigError, DiskError, DoesNotFitError, OffloadError, RankLostError, common

_Made = TypeVar("_Made")


def outcome(comm: Comm, made: _Made, failure: Exception | None, what: str) -> list[_Made]:
    """Return all ranks' results, or raise the lowest failed rank's error on all ranks, marked `common`. Collective.

    Raises ConfigError, DoesNotFitError, CheckpointError, DiskError, or OffloadError for any other error, with the same
    text on all ranks.
    """
    told = comm.gather_objects((made, None if failure is None else _describe(failure)), f"outcome of {what}")
    for rank, (_, found) in enumerate(told):
        if found is not None:
            kind, text, *rest = found
            raise common(kind(f"[rank {rank}] {text}" if rank else text, *rest)) from failure
    return [its for its, _ in told]


@contextmanager
def as_one(comm: Comm, what: str) -> Iterator[None]:
    """Turn a failure in the block on one rank into the same error on all ranks. The block must not contain collectives.

    With one rank the original error is raised; otherwise see `outcome`.
    """
    failure: Exception | None = None
    try:
        yield
    except RankLostError:
        raise
    except Exception as error:
        if comm.size == 1:
            raise
        failure = error
    outcome(comm, None, failure, what)


def _describe(failure: Exception) -> tuple[Any, ...]:
    """Return (class, message, extra arguments), so that `outcome` can build the same error on another rank."""
    text = str(failure)
    if isinstance(failure, DiskError):
        return DiskError, text, failure.errno, failure.path, failure.offset, failure.num_bytes
    if isinstance(failure, CheckpointError):
        return CheckpointError, text, failure.path
    for kind in (ConfigError, DoesNotFitError, OffloadError):
        if isinstance(failure, kind):
            return kind, text
    return OffloadError, f"failed: {type(failure).__name__}: {text}; run with --debug for the traceback"
