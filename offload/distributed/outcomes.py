"""Errors common to all ranks: values that differ, and failures of one rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from offload.distributed.comm import Comm
from offload.errors import (
    CheckpointError,
    ConfigError,
    DiskError,
    DoesNotFitError,
    OffloadError,
    RankLostError,
    common,
    first_names,
    plural,
)


def difference(name: str, digests: Sequence[int], values: Sequence[Any]) -> str:
    """Return an error message with the ranks and keys that differ from the majority value (in a draw, from rank 0)."""
    most = max(digests, key=digests.count)  # in a draw the first one
    reference = digests.index(most)
    same = _names([rank for rank, digest in enumerate(digests) if digest == most])
    parts = []
    for digest in dict.fromkeys(digests):
        if digest != most:
            ranks = [rank for rank, other in enumerate(digests) if other == digest]
            own = _flatten(values[ranks[0]])
            expected = _flatten(values[reference])
            keys = [key for key in {**expected, **own} if own.get(key, _UNSET) != expected.get(key, _UNSET)]
            shown = (f"{key}{_show(own, key)} instead of {_show(expected, key).strip()}" for key in keys)
            listed = first_names(shown, 8, "; and {} more", between="; ")
            parts.append(f"{_names(ranks)}: {listed}")
    return f"{name} must be the same on all ranks, but differs from {same} on {', and on '.join(parts)}."


_UNSET = object()


def _names(ranks: Sequence[int]) -> str:
    return f"{plural('rank', len(ranks))} {', '.join(map(str, ranks))}"


def _show(values: Mapping[str, Any], key: str) -> str:
    text = "nothing"
    if key in values:
        text = repr(values[key])
    if len(text) > 80:
        text = text[:77] + "..."
    if key:
        return f" {text}"
    return text


def _flatten(value: Any, prefix: str = "") -> dict[str, Any]:
    """Return a nested dict as a flat dict with dotted keys. Any other value gets the empty key."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        path = str(key)
        if prefix:
            path = f"{prefix}.{key}"
        flat |= _flatten(inner, path)
    return flat


def share_outcome(comm: Comm, failure: Exception | None, operation: str) -> None:
    """Raise the lowest failed rank's error on all ranks, marked `common`. Collective.

    A single rank raises `failure` itself. Several ranks raise ConfigError, DoesNotFitError, CheckpointError, DiskError,
    or OffloadError for any other error, with the same text.
    """
    comm = comm.world
    if failure is not None and comm.size == 1:
        raise failure
    described = None
    if failure is not None:
        described = _describe(failure)
    errors = comm.gather_objects(described, f"outcome of {operation}")
    for rank, error in enumerate(errors):
        if error is not None:
            error_class, text, *rest = error
            if rank:  # rank 0 stands for all: most errors come from every rank
                text = f"[rank {rank}] {text}"
            raise common(error_class(text, *rest)) from failure


@contextmanager
def share_failure(comm: Comm, operation: str) -> Iterator[None]:
    """Turn a failure in the block on one rank into the same error on all ranks (see `share_outcome`).

    The block must not contain collectives.
    """
    try:
        yield
    except RankLostError:
        raise
    except Exception as error:
        share_outcome(comm, error, operation)
    else:
        share_outcome(comm, None, operation)


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
