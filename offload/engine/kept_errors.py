"""Gradient quantization errors in a checkpoint: for each trainable parameter one plane per replica, `error-REPLICA`.

An error is the part a rank left out in a gradient sum. The next sum includes the error, no matter from which rank. With
another replica count the planes are distributed round-robin, and each replica adds up the planes received. A run with
exact gradients ignores them.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, takewhile

import torch

from offload.checkpoint.manifest import ERROR as PREFIX
from offload.checkpoint.manifest import Contents
from offload.checkpoint.reader import Reader, Span
from offload.engine.state import EngineState
from offload.layout.planes import ERROR
from offload.tiers.tile import RegionState


def error_planes(engine: EngineState, state: RegionState) -> dict[str, torch.dtype]:
    """Return the error planes a new checkpoint has for each parameter in a region."""
    num = 0 if state.error is None else engine.store.sharding.num_replicas
    return {f"{PREFIX}{replica}": ERROR.dtype for replica in range(num)}


def error_spans(engine: EngineState, contents: Contents, state: RegionState) -> Iterator[tuple[slice, Span]]:
    """Yield (slice in this rank's error, span in the checkpoint), to write or to read."""
    if state.error is None:
        return
    sharding = engine.store.sharding
    shard = sharding.shard(state.region)
    for position, piece in enumerate(state.region.pieces):
        span, name = state.span(position), engine.infos[piece.parameter].name
        begin, end = max(span.start, shard.start), min(span.stop, shard.stop)
        if begin < end and name in contents:
            planes = (f"{PREFIX}{replica}" for replica in count(sharding.replica, sharding.num_replicas))
            for plane in takewhile(contents[name].planes.__contains__, planes):
                elements = slice(begin - shard.start, end - shard.start)
                yield elements, (name, plane, piece.begin + begin - span.start, end - begin)


def fill_error(engine: EngineState, reader: Reader, state: RegionState, anew: bool) -> None:
    """Read this rank's errors for a region. They start at 0 if the checkpoint has none, or with `anew`."""
    if state.error is None:
        return
    state.error.zero_()
    for elements, (name, plane, begin, numel) in () if anew else error_spans(engine, reader.contents, state):
        piece = torch.empty(numel, dtype=ERROR.dtype)
        reader.read(name, plane, begin, piece)
        state.error[elements] += piece.to(state.error.device)
