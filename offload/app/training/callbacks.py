"""User callbacks for a run, with the method names of transformers' TrainerCallback."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from offload.app.training.build import Run
from offload.app.training.progress import RunProgress
from offload.errors import ConfigError, nearest

EVENTS = (
    "on_init_end",
    "on_train_begin",
    "on_epoch_begin",
    "on_step_begin",
    "on_step_end",
    "on_log",
    "on_evaluate",
    "on_save",
    "on_epoch_end",
    "on_train_end",
)


@dataclass(slots=True)
class TrainState:
    """Run position for callbacks, with the fields of transformers' TrainerState."""

    global_step: int = 0
    """Completed steps."""
    max_steps: int = 0
    """Total steps in the run; 0 if only time is limited."""
    epoch: float = 0.0
    """Completed passes over the training rows."""
    num_input_tokens_seen: int = 0
    """Tokens in all steps, without padding."""
    best_metric: float | None = None
    """Lowest eval loss so far. None: no evaluation."""
    best_global_step: int | None = None
    """Step of the lowest eval loss."""
    is_world_process_zero: bool = True
    """True on rank 0."""
    is_local_process_zero: bool = True
    """True on the first rank of a machine."""


@dataclass(slots=True)
class TrainControl:
    """Requests set by a callback. A request on one rank takes effect on all ranks before the next step."""

    should_training_stop: bool = False
    """End the run as if all steps were done: with evaluation and export."""
    should_save: bool = False
    """Save a checkpoint, once."""
    should_evaluate: bool = False
    """Evaluate, once."""

    def take(self, name: str) -> bool:
        """Return a one-time request, and clear it."""
        is_requested = bool(getattr(self, name))
        setattr(self, name, False)
        return is_requested


class Callbacks:
    """All callbacks in a run, in order.

    A callback may define any of EVENTS as methods, called as `on_step_end(config, state, control, **more)` on every
    rank. If a callback has `state_dict` and `load_state_dict`, rank 0's state is saved in checkpoints as JSON.
    """

    def __init__(self, callbacks: Sequence[Any]) -> None:
        """Raises ConfigError for a callback with a method that is never called."""
        if not isinstance(callbacks, Sequence):
            raise ConfigError(f"callbacks is a {type(callbacks).__name__}; it should be a list of callbacks.")
        self._callbacks = [each() if isinstance(each, type) else each for each in callbacks]
        # Passed to each event.
        self.control = TrainControl()
        self._state = TrainState()
        self._more = dict[str, Any]()
        # For the epoch, known once the data are read.
        self._num_rows = 1
        self._batch_size = 1
        for each in self._callbacks:
            for name in dir(each):
                if not name.startswith("on_") or name in EVENTS or not callable(getattr(each, name)):
                    continue
                owner = next((base for base in type(each).__mro__ if name in vars(base)), type(each))
                if owner.__module__ != "transformers.trainer_callback":  # the base class methods do nothing
                    raise ConfigError(
                        f"the callback {type(each).__name__} has {name}, which is never called{nearest(name, EVENTS)}: "
                        f"the events of a run are {', '.join(EVENTS)}."
                    )

    def begin(self, run: Run, progress: RunProgress) -> None:
        """Prepare for the first step: load saved states and send the begin events."""
        config, comm = run.config, run.engine.comm
        self._state = TrainState(
            max_steps=config.train.steps or 0,
            is_world_process_zero=comm.rank == 0,
            is_local_process_zero=comm.local_rank == 0,
        )
        self._config = config
        self._progress = progress
        self._num_rows = run.data.num_train_rows
        self._batch_size = run.data.batch_size
        self._more = {"model": run.engine.model, "engine": run.engine, "processing_class": run.data.tokenizer}
        # By position: a checkpoint of a run with fewer callbacks has fewer states.
        for callback, state in zip(self._callbacks, (run.meta or {}).get("callbacks", ()), strict=False):
            if state is not None and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(state)
        for event in ("on_init_end", "on_train_begin", "on_epoch_begin"):
            self.notify(event)

    def notify(self, event: str, **more: Any) -> None:
        """Call the event method on each callback. An exception ends the run."""
        if not self._callbacks:
            return
        state, progress = self._state, self._progress
        state.global_step = progress.num_done
        state.num_input_tokens_seen = progress.num_tokens
        state.epoch = progress.num_done * self._batch_size / self._num_rows
        state.best_metric = progress.best.loss
        state.best_global_step = progress.best.step
        for callback in self._callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                # A callback may return a control of its own, as in transformers.
                self.control = method(self._config, state, self.control, **self._more, **more) or self.control

    def end_step(self, fields: Mapping[str, Any]) -> None:
        """Send the events after a step. `fields`: the step's line in metrics.jsonl."""
        before = (self._progress.num_done - 1) * self._batch_size // self._num_rows
        self.notify("on_step_end")
        self.notify("on_log", logs=dict(fields))
        if self._progress.num_done * self._batch_size // self._num_rows > before:
            self.notify("on_epoch_end")
            self.notify("on_epoch_begin")

    def state_dict(self) -> dict[str, Any]:
        """Return the callback states for a checkpoint. None: a callback without state. Raises ConfigError."""
        states = []
        for each in self._callbacks:
            state = None
            if hasattr(each, "state_dict") and hasattr(each, "load_state_dict"):
                state = each.state_dict()
            states.append(state)
            try:
                json.dumps(state)  # here the error names the callback
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    f"the state_dict() of the callback {type(each).__name__} cannot be stored in a checkpoint: "
                    f"{error}. Return only JSON values: numbers, texts, lists and mappings."
                ) from None
        return {"callbacks": states}
