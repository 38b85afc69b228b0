"""Model runs by the engine before the first step, without a trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from offload.engine.state import EngineState
from offload.engine.units.trial import TrialSnapshot


@contextmanager
def isolated(state: EngineState, roots: Mapping[str, Any]) -> Iterator[TrialSnapshot]:
    """Within the context, the engine calls the model for internal runs. Yield the snapshot of `roots`.

    Restores all state afterwards, also resident weights changed by model code.
    """
    snapshot, versions = TrialSnapshot(state.device, roots, state.runner.is_weight), state.slots.versions()
    try:
        with state.runner.as_engine_calls(), state.runner.stages.paused():
            yield snapshot
    finally:
        snapshot.restore()
    state.slots.restore(versions)
