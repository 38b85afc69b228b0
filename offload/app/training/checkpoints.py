"""Checkpoints in a training run: the latest step, and the reaction to failed saves."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.app.checkpoint_folder import Checkpoints
from offload.app.training.build import Run
from offload.app.training.callbacks import Callbacks
from offload.app.training.progress import RunProgress
from offload.app.training.run_folder import LONG_BYTES, RunFolder
from offload.distributed.comm import Comm
from offload.distributed.outcomes import share_failure
from offload.engine.checkpoint_save import PendingCheckpoint
from offload.engine.engine import Engine
from offload.errors import DiskError, OffloadError, common, errno_text, format_bytes, is_common
from offload.files.atomic_folder import remove
from offload.files.directories import free_bytes

_AUTO_S = 3600.0
"""Seconds between checkpoints for `checkpoint.every` "auto". Limits the loss after a crash, with few disk writes."""


@dataclass
class _PendingSave:
    """A checkpoint being written to disk.

    - begin: start time. stalled_s: seconds training waited for it.
    - is_hourly: the next time-based checkpoint replaces this one.
    - best_step: step of the best evaluation; its checkpoint is kept.
    """

    saving: PendingCheckpoint
    step: int
    path: Path
    begin: float
    is_hourly: bool
    best_step: int | None
    stalled_s: float = 0.0


class Saves:
    """Checkpoint saves into RUN/checkpoints, over all ranks.

    `last_step`: step in the newest checkpoint saved or resumed from.
    """

    def __init__(
        self,
        run: Run,
        comm: Comm,
        folder: RunFolder,
        progress: RunProgress,
        callbacks: Callbacks,
        say: Callable[[str], None],
    ) -> None:
        """`progress`: initial position. `callbacks` receive an event per complete checkpoint. `say` prints a line."""
        self._comm = comm
        self._section = run.config.checkpoint
        self._needs = run.disk_needs
        self._trainable = run.setup.trainable
        self._callbacks = callbacks
        self._say = say
        self._checkpoints = Checkpoints(folder.checkpoints)
        self._keeps = folder.keeps  # one rank for each disk
        # Replaced by later checkpoints.
        self._hourly: int | None = None  # step of the last time-based checkpoint
        self._best_step = progress.best.step
        self._next_s = time.monotonic() + _AUTO_S
        # Results: the last complete save, and the failure of the latest one.
        self.last_step = None if run.meta is None else progress.num_done
        self.failure: DiskError | None = None
        self._failed_step: int | None = None  # reported once: the end of a run tries the step again
        self._pending: _PendingSave | None = None
        self._stalled_s = 0.0  # seconds training waited for saves

    def take_stalled(self) -> dict[str, float]:
        """Return the seconds training waited for saves since the last call, as a metrics field. Empty: no wait."""
        stalled_s = self._stalled_s
        self._stalled_s = 0.0
        if not stalled_s:
            return {}
        return {"checkpoint_seconds": stalled_s}

    def begin(self) -> None:
        """Move aside later checkpoints from another branch of the run, once this run has its own results.

        One rank per disk does the move.
        """
        if not self._keeps:
            return
        for path in self._checkpoints.move_aside(self.last_step or 0):
            self._say(
                f"note: a checkpoint above step {self.last_step or 0} was renamed to {path}; delete it if you like."
            )

    @property
    def is_time(self) -> bool:
        """True if `checkpoint.every` is "auto", a checkpoint is due, and the disk has enough space."""
        is_late = self._section.every == "auto" and time.monotonic() >= self._next_s
        # A full disk would cost the export.
        return is_late and free_bytes(self._checkpoints.path.parent) >= self._needs.num_bytes

    @property
    def newest_step(self) -> int | None:
        """Step of the newest checkpoint, including one being written."""
        if self._pending is not None:
            return self._pending.step
        return self.last_step

    @property
    def is_due(self) -> bool:
        """True if `settle` would not wait on this rank for a checkpoint being written."""
        return self._pending is not None and self._pending.saving.is_done

    def save(self, *args: Any) -> None:
        """Save a step and wait for the disk. Takes the arguments of `try_to_save`. Collective.

        Raises DiskError on all ranks; training may continue afterwards.
        """
        self.settle()
        self._begin(*args)
        self._end()

    def try_to_save(self, engine: Engine, step: int, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Begin to save a step, after the previous save is complete. Collective.

        `meta` and `files` are stored in the checkpoint. States copied to memory are written while training continues;
        `settle` makes them a checkpoint. On failure, continue or raise, as set by `checkpoint.on_error`.
        """
        self.settle()
        self._try(step, lambda: self._begin(engine, step, meta, files))

    def settle(self) -> None:
        """Complete the checkpoint being written, if any. Collective.

        On failure, continue or raise, as set by `checkpoint.on_error`.
        """
        if self._pending is not None:
            self._try(self._pending.step, self._end)

    def close(self) -> None:
        """Abort an unfinished save. Not collective."""
        pending = self._pending
        self._pending = None
        if pending is not None:
            pending.saving.abort()

    def _begin(self, engine: Engine, step: int, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        is_hourly = self.is_time and self._section.keep is None
        self._next_s = time.monotonic() + _AUTO_S  # from any save on
        with self._counting_stall():
            begin = time.perf_counter()
            if (about := self._needs.states_bytes) > LONG_BYTES:
                self._say(f"step {step}  saving about {format_bytes(about)} ...")
            with share_failure(self._comm, "making room for a checkpoint"):
                path = self._checkpoints.path / f"step-{step}"
                if self._keeps:
                    path = self._checkpoints.target(step)
            meta = {**meta, **self._trainable.metadata()}
            saving = engine.begin_checkpoint(path, meta, files, trained_only=self._trainable.trained_only)
            best_step = None
            if self._section.keep_best:
                best_step = meta["best"]["step"]
            self._pending = _PendingSave(saving, step, path, begin, is_hourly, best_step)
        self._pending.stalled_s = time.perf_counter() - begin

    def _end(self) -> None:
        pending, begin = self._pending, time.perf_counter()
        assert pending is not None
        try:
            with self._counting_stall():
                pending.saving.finish()
                with share_failure(self._comm, "keeping of checkpoints"):
                    if self._keeps:
                        keep, every = self._section.keep, self._section.every
                        previous = self._best_step
                        self._checkpoints.register(pending.path, keep, pending.best_step)
                        is_regular = keep is not None or (isinstance(every, int) and (previous or 0) % every == 0)
                        # Replaced: the last time-based checkpoint, and the previous best one if saved only for that.
                        replaced = {self._hourly}
                        if not is_regular:
                            replaced.add(previous)
                        for step in replaced - {None, pending.best_step}:
                            with suppress(DiskError):
                                remove(self._checkpoints.path / f"step-{step}")
                        self._hourly = None
                        if pending.is_hourly:
                            self._hourly = pending.step
                        self._best_step = pending.best_step
        finally:
            self._pending = None
        self.last_step = pending.step
        self.failure = None
        end = time.perf_counter()
        stalled_s = pending.stalled_s + end - begin
        if self._comm.rank == 0:
            with suppress(OSError):
                num_bytes = sum(file.stat().st_size for file in pending.path.iterdir())
                self._say(
                    f"step {pending.step}  saved {pending.path} ({format_bytes(num_bytes)} in "
                    f"{end - pending.begin:.1f} s; training stopped for {stalled_s:.1f} s)"
                )
        self._callbacks.notify("on_save", checkpoint=pending.path)

    @contextmanager
    def _counting_stall(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._stalled_s += time.perf_counter() - begin

    def _try(self, step: int, work: Callable[[], None]) -> None:
        try:
            work()
        except DiskError as error:
            is_reported = self._failed_step == step
            self.failure = error
            self._failed_step = step
            if self._section.on_error == "stop":
                raise self.ending_error(step, error) from error
            if not is_reported:
                self._say(f"note: {self._describe(step, error)}")

    def ending_error(self, step: int, error: DiskError) -> OffloadError:
        """Return the error for a run that ends because a step could not be saved, with the way to go on."""
        text = f"{self._describe(step, error)} {self._way_on}"
        ending = DiskError(text, error.errno or 0, error.path, error.offset, error.num_bytes)
        if is_common(error):
            return common(ending)
        return ending

    def unsaved_error(self, step: int, exported: Path | None) -> DiskError:
        """Return the error for a completed run without a saved last step."""
        assert self.failure is not None
        reason = "a disk failed"
        if self.failure.errno:
            reason = errno_text(self.failure.errno)
        where = ""
        way_on = self._way_on
        if exported is not None:
            where = f"; it is exported to {exported}"
            if self.last_step is None:
                way_on = f"There is nothing to resume: make room, and train on from {exported} with another --run.dir."
        return DiskError(
            f"the last step, {step}, could not be saved, {self._last_saved}: {reason}, as the note above says{where}. "
            f"{way_on}",
            self.failure.errno or 0,
            self.failure.path,
        )

    def _describe(self, step: int, error: DiskError) -> str:
        size = format_bytes(self._needs.states_bytes)
        return f"step {step} could not be saved, {self._last_saved}: {error} A checkpoint takes about {size}."

    @property
    def _way_on(self) -> str:
        goes_on = "begins anew"
        if self.last_step is not None:
            goes_on = f"goes on from step {self.last_step}"
        return f"Make room and start the same command again: it {goes_on}."

    @property
    def _last_saved(self) -> str:
        if self.last_step is not None:
            return f"the last one is of step {self.last_step}"
        return "and there is none yet"
