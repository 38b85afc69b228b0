"""The checkpoints of a training run: which step's is the last, and what becomes of one that cannot be written."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from offload.checkpoint.folder import Checkpoints
from offload.engine.engine import Engine
from offload.errors import DiskError, format_bytes
from offload.partition.comm import Comm
from offload.run_folder import LONG_BYTES
from offload.sections import CheckpointSection
from offload.together import as_one


class Saves:
    """Saves into RUN/checkpoints, over all ranks. `last_step`: of the newest one that was saved or begun with."""

    def __init__(
        self, comm: Comm, path: Path, section: CheckpointSection, say: Callable[[str], None], last_step: int | None
    ) -> None:
        """`say` prints a line; `last_step`: of the checkpoint that the run begins at."""
        self._comm, self._section, self._say = comm, section, say
        self._checkpoints = Checkpoints(path)
        self.last_step = last_step
        self.failure: DiskError | None = None  # of the last save
        self.stalled_s = 0.0  # for how long training stood still for saves, until somebody sets it back

    def begin(self) -> None:
        """Move aside what another branch of the run has left, once this one has something of its own. Rank 0 alone."""
        for path in self._checkpoints.move_aside(self.last_step or 0):
            self._say(f"note: a checkpoint above step {self.last_step or 0} is now {path}; delete it if you like.")

    def save(self, engine: Engine, step: int, meta: Mapping[str, Any], files: Mapping[str, bytes]) -> None:
        """Save a step; `meta` and `files` are kept with it. Collective.

        Raises DiskError, on all ranks, after which training can go on.
        """
        begin = time.perf_counter()
        if (about := sum(size for _, _, size in engine.allocations)) > LONG_BYTES:
            self._say(f"step {step}  saving about {format_bytes(about)} a rank ...")
        with as_one(self._comm, "making room for a checkpoint"):
            path = self._checkpoints.path / f"step-{step}"
            if self._comm.rank == 0:
                path = self._checkpoints.target(step)
        engine.save_checkpoint(path, meta, files)
        with as_one(self._comm, "keeping of checkpoints"):
            if self._comm.rank == 0:
                self._checkpoints.saved(path, self._section.keep)
        self.last_step, self.failure = step, None
        seconds = time.perf_counter() - begin
        self.stalled_s += seconds
        if self._comm.rank == 0:
            with suppress(OSError):
                num_bytes = sum(file.stat().st_size for file in path.iterdir())
                self._say(f"step {step}  saved {path} ({format_bytes(num_bytes)} in {seconds:.1f} s)")

    def try_to_save(self, *args: Any) -> None:
        """Save; where that fails go on or stop, as `checkpoint.on_error` says."""
        begin = time.perf_counter()
        try:
            self.save(*args)
        except DiskError as error:
            self.failure = error
            self.stalled_s += time.perf_counter() - begin
            if self._section.on_error == "stop":
                raise
            self._say(f"note: this step could not be saved, {self._last}: {error}")

    def unsaved(self, step: int, exported: Path | None) -> DiskError:
        """Return the error of a run that is over, and whose last step could not be saved."""
        assert self.failure is not None
        where = f", and exported to {exported}" if exported is not None else ""
        return DiskError(
            f"all {step} steps are done{where}, but step {step} could not be saved, {self._last}: {self.failure} Make "
            "room and start the same command again.",
            self.failure.errno or 0,
            self.failure.path,
        )

    @property
    def _last(self) -> str:
        return f"the last one is of step {self.last_step}" if self.last_step is not None else "and there is none yet"
