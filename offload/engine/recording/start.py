"""Snapshot before a trial run, so that the trial leaves no trace."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from offload.engine.state import EngineState
from offload.engine.units.belongings import Belongings
from offload.engine.units.drawn import Drawn


class Start:
    """State of random generators and all objects reachable from `roots` (e.g. the model, a batch, a loss function)."""

    def __init__(self, state: EngineState, roots: Mapping[str, Any]) -> None:
        self._state, self._roots = state, roots
        self._random, self._drawn = state.device.random_state(), Drawn.so_far()
        self._belongings = self.belongings_now()

    def belongings_now(self) -> Belongings:
        """Return the current state behind the roots."""
        return Belongings(self._roots, self._state.runner.is_weight, gradients=True)

    @property
    def has_drawn(self) -> bool:
        """True if random numbers were sampled since the snapshot."""
        now = self._state.device.random_state()
        is_same = all(map(torch.equal, self._random, now)) and self._drawn.is_as(Drawn.so_far())
        return not is_same

    def draw_again(self) -> None:
        """Reset the random generators to the snapshot."""
        self._state.device.set_random_state(self._random)
        self._drawn.put_back()

    def put_back(self) -> None:
        """Restore the snapshot."""
        self.draw_again()
        self._belongings.put_back()

    @contextmanager
    def unseen(self) -> Iterator[None]:
        """Within the context, the engine calls the model for internal runs.

        Restores all state afterwards, also resident weights changed by model code.
        """
        state = self._state
        versions = state.slots.versions()
        try:
            with state.runner.as_ours(), state.runner.forwards.paused():
                yield
        finally:
            self.put_back()
        state.slots.restore(versions)
