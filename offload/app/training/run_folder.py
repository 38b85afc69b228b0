"""The run folder: exclusive access, and small files describing the run."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from offload.app.checkpoint_folder import Checkpoints
from offload.app.config.config import Config
from offload.errors import ConfigError

CHECKPOINTS = "checkpoints"
LONG_BYTES = 4 << 30  # checkpoint bytes above which a line is printed before writing or reading
_RUN_FILES = (
    "config.yaml",
    "plan.json",
    "env.json",
    "metrics.jsonl",
    "report.html",
    "trace.json.gz",
    CHECKPOINTS,
    "hf",
)


class RunFolder:
    """A folder for one run, used by one process at a time. An earlier run is not overwritten unless resumed."""

    def __init__(self, path: Path, *, keeps: bool = True) -> None:
        """`keeps`: this process manages the folder on this disk."""
        self.path = path
        self.keeps = keeps
        self.hf = path / "hf"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / CHECKPOINTS
        self._made: Sequence[Path] = ()  # removed again if the run leaves nothing
        self._lock = -1

    @classmethod
    def of(cls, config: Config) -> RunFolder | None:
        """Return run.dir unchecked. None: not set."""
        if config.run.dir is None:
            return None
        return cls(Path(config.run.dir).expanduser())

    @classmethod
    def open(cls, config: Config) -> RunFolder:
        """Take run.dir, or create the first missing folder among runs/NAME, runs/NAME-2, ... Raises ConfigError."""
        folder = cls.of(config)
        if folder is None:
            return cls._create(config.run.name)
        path = folder.path
        if path.exists() and not path.is_dir():
            raise ConfigError(f"run.dir is {path}, which is a file; set --run.dir to a folder that is new or empty.")
        try:
            folder._make(exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"run.dir is {path}, which cannot be made: {error.strerror}; set --run.dir to another folder."
            ) from None
        if not os.access(path, os.W_OK):
            raise ConfigError(f"run.dir is {path}, which cannot be written to; set --run.dir to another folder.")
        folder._take()
        return folder

    def owns(self, path: Path) -> bool:
        """Return whether a path is this folder, the checkpoints folder, or one of the checkpoints."""
        own, begins_at = self.checkpoints.resolve(), path.resolve()
        return begins_at in (self.path.resolve(), own) or begins_at.parent == own

    def check(self, config: Config, *, resumes: bool) -> None:
        """Raise ConfigError for a folder with files from another run, before any work.

        `resumes`: the run begins at a checkpoint.
        """
        names = [name for name in _RUN_FILES if (self.path / name).exists()]  # other files are the user's
        resume = config.checkpoint.resume
        is_own = resume != "auto" and resume != "never" and self.owns(Path(resume).expanduser())
        goes_on = resumes and (is_own or bool(Checkpoints(self.checkpoints).folders()))
        ended_early = False  # before the planned checkpoint or export: a new run may begin in this folder
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, yaml.YAMLError):
            before = yaml.safe_load((self.path / "config.yaml").read_text(encoding="utf-8"))["checkpoint"]
            ended_early = "hf" not in names and (bool(before["export"]) or isinstance(before["every"], int))
        if not names or goes_on or (resume != "never" and ended_early):
            return
        why = f"checkpoint.resume is {resume}: leave that out to go on with this run"
        if resume == "auto":
            why = "no checkpoint to go on from"
        raise ConfigError(
            f"run.dir is {self.path}, which holds an earlier run ({', '.join(names)}), and {why}; nothing in it was "
            "changed. Set --run.dir to a new or empty folder, or move that run away."
        )

    @classmethod
    def _create(cls, name: str) -> RunFolder:
        number = 1
        path = Path("runs") / name
        while True:
            try:
                # Without exist_ok: two runs at the same time get two numbers.
                folder = cls(path)
                folder._make()
                folder._take()
                return folder
            except FileExistsError:
                number += 1
                path = Path("runs") / f"{name}-{number}"
            except OSError as error:
                raise ConfigError(
                    f"the run folder {path} cannot be made: {error.strerror}; set --run.dir to another folder."
                ) from None

    def _make(self, *, exist_ok: bool = False) -> None:
        self._made = [each for each in (self.path, *self.path.parents) if not each.exists()]  # the deepest first
        self.path.mkdir(parents=True, exist_ok=exist_ok)

    def _take(self) -> None:
        """Lock the folder for the lifetime of this process. The kernel releases the lock at exit."""
        self._lock = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"run.dir is {self.path}, where another process is training; wait for it, or set --run.dir to another "
                "folder."
            ) from None
        except OSError:
            pass  # a file system without locks

    def close(self) -> None:
        """Release the folder. If empty, it is removed, with empty folders above that `open` made."""
        with contextlib.suppress(OSError):  # until the first folder with a file
            for made in self._made:
                made.rmdir()
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def write_config(self, config: Config) -> None:
        """Write config.yaml atomically."""
        # A resumed run never finds half a file.
        new = self.path / "config.yaml.new"
        new.write_text(config.to_yaml(), encoding="utf-8")
        new.replace(self.path / "config.yaml")

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        (self.path / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
