"""The checkpoints of a training run: which step's is the last, and what becomes of one that cannot be written."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.checkpoint.folder import Checkpoints
from offload.distributed.comm import Comm
from offload.distributed.outcome import as_one
from offload.engine.checkpoints import Saving
from offload.engine.engine import Engine
from offload.errors import DiskError, errno_text, format_bytes
from offload.files.atomic_folder import remove
from offload.files.directories import free_bytes
from offload.training.build import Run
from offload.training.callbacks import Callbacks
from offload.training.progress import RunProgress
from offload.training.run_folder import LONG_BYTES, RunFolder

_AUTO_S = 3600.0
"""Between checkpoints that no number of steps asks for: so much is lost at most, and a disk is written once for it."""


@dataclass
class _UnderWay:
    """A checkpoint on its way to the disk: since when, and for how long training stood still for it. is_hourly: the
    next one takes its place. best_step: that of the best evaluation, whose checkpoint stays.
    """

    saving: Saving
    step: int
    path: Path
    begin: float
    is_hourly: bool
    best_step: int | None
    stalled_s: float = 0.0


class Saves:
    """Saves into RUN/checkpoints, over all ranks. `last_step`: of the newest one that was saved or begun with."""

    def __init__(
        self,
        run: Run,
        comm: Comm,
        folder: RunFolder,
        stands: RunProgress,
        callbacks: Callbacks,
        say: Callable[[str], None],
    ) -> None:
        """`stands`: where the run begins; `callbacks` are told of each checkpoint that is whole; `say` prints a
        line.
        """
        self._comm, self._section, self._say = comm, run.config.checkpoint, say
        self._checkpoints, self._keeps = Checkpoints(folder.checkpoints), folder.keeps
        self._needs, self._next_s = run.disk_needs, time.monotonic() + _AUTO_S
        self._trained, self._best_step, self._callbacks = run.trained, stands.best.step, callbacks
        self._hourly: int | None = None  # the step of the last one, if that was saved for the hour
        self.last_step = None if run.meta is None else stands.num_done
        self.failure: DiskError | None = None  # of the last save
        self._failed_step: int | None = None
        self._under_way: _UnderWay | None = None
        self._stalled_s = 0.0  # for how long training stood still for saves

    def take_stalled(self) -> dict[str, float]:
        """Return, as a field of a step, for how many seconds training stood still for saves since this was called last;
        nothing where it did not.
        """
        stalled_s, self._stalled_s = self._stalled_s, 0.0
        return {"checkpoint_seconds": stalled_s} if stalled_s else {}

    def begin(self) -> None:
        """Move aside what another branch of the run has left, once this one has something of its own. On a disk one
        rank does.
        """
        for path in self._checkpoints.move_aside(self.last_step or 0) if self._keeps else ():
            self._say(f"note: a checkpoint above step {self.last_step or 0} is now {path}; delete it if you like.")

    @property
    def is_time(self) -> bool:
        """True where `checkpoint.every` is auto, and it is time for a checkpoint that there is room for."""
        is_late = self._section.every == "auto" and time.monotonic() >= self._next_s
        return is_late and free_bytes(self._checkpoints.path.parent) >= self._needs.num_bytes

    @property
    def newest_step(self) -> int | None:
        """Of the newest checkpoint, be it on its way."""
        return self._under_way.step if self._under_way is not None else self.last_step

    @property
    def is_due(self) -> bool:
        """True where this rank has a checkpoint under way that `settle` need not wait for."""
        return self._under_way is not None and self._under_way.saving.is_done

    def save(self, *args: Any) -> None:
        """Save a step, with what `try_to_save` takes, and wait until it is on the disk. Collective.

        Raises DiskError, on all ranks, after which training can go on.
        """
        self.settle()
        self._begin(*args)
        self._end()

    def try_to_save(self, engine: Engine, step: int, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Begin to save a step, once the one before is on the disk; `meta` and `files` are kept with it. What memory
        holds a copy of goes to the disk while training goes on, and is a checkpoint by `settle`. Collective.

        Where it fails go on or stop, as `checkpoint.on_error` says.
        """
        self.settle()
        self._try(step, lambda: self._begin(engine, step, meta, files))

    def settle(self) -> None:
        """Wait for the checkpoint that is under way, if there is one, and make it one. Collective. Where it fails go on
        or stop, as `checkpoint.on_error` says.
        """
        if self._under_way is not None:
            self._try(self._under_way.step, self._end)

    def close(self) -> None:
        """Give up what is under way. Not collective."""
        under_way, self._under_way = self._under_way, None
        if under_way is not None:
            under_way.saving.abort()

    def _begin(self, engine: Engine, step: int, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        is_hourly, self._next_s = self.is_time and self._section.keep is None, time.monotonic() + _AUTO_S
        with self._standing_still():
            begin = time.perf_counter()
            if (about := sum(size for _, _, size in engine.allocations)) > LONG_BYTES:
                self._say(f"step {step}  saving about {format_bytes(about)} a rank ...")
            with as_one(self._comm, "making room for a checkpoint"):
                path = self._checkpoints.path / f"step-{step}"
                if self._keeps:
                    path = self._checkpoints.target(step)
            meta = {**meta, **self._trained.marks()}
            saving = engine.begin_checkpoint(path, meta, files, trained_only=self._trained.trained_only)
            best_step = meta["best"]["step"] if self._section.keep_best else None
            self._under_way = _UnderWay(saving, step, path, begin, is_hourly, best_step)
        self._under_way.stalled_s = time.perf_counter() - begin

    def _end(self) -> None:
        under_way, begin = self._under_way, time.perf_counter()
        assert under_way is not None
        try:
            with self._standing_still():
                under_way.saving.finish()
                with as_one(self._comm, "keeping of checkpoints"):
                    if self._keeps:
                        self._checkpoints.saved(under_way.path, self._section.keep, under_way.best_step)
                        for step in self._outlived(under_way.best_step):
                            with suppress(DiskError):
                                remove(self._checkpoints.path / f"step-{step}")
                        self._hourly = under_way.step if under_way.is_hourly else None
                        self._best_step = under_way.best_step
        finally:
            self._under_way = None
        self.last_step, self.failure, end = under_way.step, None, time.perf_counter()
        stalled_s = under_way.stalled_s + end - begin
        if self._comm.rank == 0:
            with suppress(OSError):
                num_bytes = sum(file.stat().st_size for file in under_way.path.iterdir())
                self._say(
                    f"step {under_way.step}  saved {under_way.path} ({format_bytes(num_bytes)} in "
                    f"{end - under_way.begin:.1f} s, of which training stood still for {stalled_s:.1f} s)"
                )
        self._callbacks.tell("on_save", checkpoint=under_way.path)

    def _outlived(self, best_step: int | None) -> set[int]:
        """Return the steps of checkpoints that one which is on the disk now has taken the place of: the last hourly
        one, and the best one until now where it was saved for that alone.
        """
        every, was = self._section.every, self._best_step
        is_regular = was is None or self._section.keep is not None or (isinstance(every, int) and was % every == 0)
        steps = {self._hourly, None if is_regular else was} - {None, best_step}
        return {step for step in steps if step is not None}

    @contextmanager
    def _standing_still(self) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._stalled_s += time.perf_counter() - begin

    def _try(self, step: int, work: Callable[[], None]) -> None:
        try:
            work()
        except DiskError as error:
            is_told = self._failed_step == step
            self.failure, self._failed_step = error, step
            if self._section.on_error == "stop":
                raise
            if not is_told:
                self._say(f"note: step {step} could not be saved, {self._last}: {error}")

    def unsaved(self, step: int, exported: Path | None) -> DiskError:
        """Return the error of a run that is over, and whose last step could not be saved."""
        assert self.failure is not None
        where = f"; it is exported to {exported}" if exported is not None else ""
        reason = errno_text(self.failure.errno) if self.failure.errno else "a disk failed"
        return DiskError(
            f"the last step, {step}, could not be saved, {self._last}: {reason}, as the note above says{where}. Make "
            "room and start the same command again.",
            self.failure.errno or 0,
            self.failure.path,
        )

    @property
    def _last(self) -> str:
        return f"the last one is of step {self.last_step}" if self.last_step is not None else "and there is none yet"
