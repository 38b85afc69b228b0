"""Snapshot before a trial run, so that the trial leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from offload.engine.state import EngineState
from offload.engine.units.snapshots import RngState
from offload.engine.units.state_snapshot import StateSnapshot


class TrialSnapshot:
    """State of random generators and all objects reachable from `roots` (e.g. the model, a batch, a loss function)."""

    def __init__(self, state: EngineState, roots: Mapping[str, Any]) -> None:
        self._state, self._roots = state, roots
        self._random, self._rng_state = state.device.random_state(), RngState.capture()
        self._state_snapshot = self.capture_state()

    def capture_state(self) -> StateSnapshot:
        """Return the current state behind the roots."""
        return StateSnapshot(self._roots, self._state.runner.is_weight, gradients=True)

    @property
    def has_sampled(self) -> bool:
        """True if random numbers were sampled since the snapshot."""
        now = self._state.device.random_state()
        is_same = all(map(torch.equal, self._random, now)) and self._rng_state.equals(RngState.capture())
        return not is_same

    def reset_generators(self) -> None:
        """Reset the random generators to the snapshot."""
        self._state.device.set_random_state(self._random)
        self._rng_state.put_back()

    def restore(self) -> None:
        """Restore the snapshot."""
        self.reset_generators()
        self._state_snapshot.put_back()

    @contextmanager
    def isolated(self) -> Iterator[None]:
        """Within the context, the engine calls the model for internal runs.

        Restores all state afterwards, also resident weights changed by model code.
        """
        state = self._state
        versions = state.slots.versions()
        try:
            with state.runner.as_engine_calls(), state.runner.stages.paused():
                yield
        finally:
            self.restore()
        state.slots.restore(versions)
