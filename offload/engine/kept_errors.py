"""The errors of coded gradients in a checkpoint: a plane for each replica, `error-REPLICA`, of every trained parameter.

What a rank keeps was left out of one sum or another, and goes into the next one, whoever adds it. So another number of
replicas takes the planes by turns, and adds up those that become one's; a run with exact gradients leaves them.
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
    """Return the planes that a checkpoint is to have of each parameter of a region."""
    num = 0 if state.error is None else engine.store.sharding.num_replicas
    return {f"{PREFIX}{replica}": ERROR.dtype for replica in range(num)}


def error_spans(engine: EngineState, contents: Contents, state: RegionState) -> Iterator[tuple[slice, Span]]:
    """Yield what this rank writes or takes of a checkpoint's errors of a region: which of the elements that it keeps,
    and where these are.
    """
    if state.error is None:
        return
    sharding = engine.store.sharding
    shard = sharding.shard(state.region)
    for position, piece in enumerate(state.region.pieces):
        span, name = state.span(position), engine.infos[piece.parameter].name
        begin, end = max(span.start, shard.start), min(span.stop, shard.stop)
        if begin < end and name in contents:
            there = (f"{PREFIX}{replica}" for replica in count(sharding.replica, sharding.num_replicas))
            for plane in takewhile(contents[name].planes.__contains__, there):
                its = slice(begin - shard.start, end - shard.start)
                yield its, (name, plane, piece.begin + begin - span.start, end - begin)


def fill_error(engine: EngineState, reader: Reader, state: RegionState, anew: bool) -> None:
    """Take what is this rank's of a checkpoint's errors of a region; they begin at 0 where there are none, or with
    `anew`.
    """
    if state.error is None:
        return
    state.error.zero_()
    for its, (name, plane, begin, numel) in () if anew else error_spans(engine, reader.contents, state):
        piece = torch.empty(numel, dtype=ERROR.dtype)
        reader.read(name, plane, begin, piece)
        state.error[its] += piece.to(state.error.device)
