"""Common result of an operation on all ranks: success on all, or one error on all."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from offload.distributed.comm import Comm
from offload.errors import CheckpointError, ConfigError, DiskError, DoesNotFitError, OffloadError, RankLostError, common

_Outcome = TypeVar("_Outcome")


def share_outcome(comm: Comm, value: _Outcome, failure: Exception | None, operation: str) -> list[_Outcome]:
    """Return all ranks' results, or raise the lowest failed rank's error on all ranks, marked `common`. Collective.

    Raises ConfigError, DoesNotFitError, CheckpointError, DiskError, or OffloadError for any other error, with the same
    text on all ranks.
    """
    outcomes = comm.gather_objects((value, None if failure is None else _describe(failure)), f"outcome of {operation}")
    for rank, (_, error) in enumerate(outcomes):
        if error is not None:
            error_class, text, *rest = error
            raise common(error_class(f"[rank {rank}] {text}" if rank else text, *rest)) from failure
    return [value for value, _ in outcomes]


@contextmanager
def share_failure(comm: Comm, operation: str) -> Iterator[None]:
    """Turn a failure in the block on one rank into the same error on all ranks. The block must not contain collectives.

    With one rank the original error is raised; otherwise see `share_outcome`.
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
    share_outcome(comm, None, failure, operation)


def _describe(failure: Exception) -> tuple[Any, ...]:
    """Return (class, message, extra arguments), so that `share_outcome` can build the same error on another rank."""
    text = str(failure)
    if isinstance(failure, DiskError):
        return DiskError, text, failure.errno, failure.path, failure.offset, failure.num_bytes
    if isinstance(failure, CheckpointError):
        return CheckpointError, text, failure.path
    if isinstance(failure, DoesNotFitError):
        return DoesNotFitError, failure.reason, failure.advice
    for error_class in (ConfigError, OffloadError):
        if isinstance(failure, error_class):
            return error_class, text
    return OffloadError, f"failed: {type(failure).__name__}: {text}; run with --debug for the traceback"
