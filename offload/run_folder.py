"""The run folder: who may write into it, and the small files that say what the run was."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.config import Config
from offload.errors import ConfigError

_OF_A_RUN = (
    "config.yaml",
    "plan.json",
    "env.json",
    "metrics.jsonl",
    "report.html",
    "trace.json.gz",
    "checkpoints",
    "hf",
)


class RunFolder:
    """A folder that belongs to one run. What an earlier run left is never overwritten."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.hf = path / "hf"
        self.metrics = path / "metrics.jsonl"

    @classmethod
    def check(cls, config: Config) -> None:
        """Refuse a run.dir that cannot be used, before any work is done. Raises ConfigError."""
        if config.run.dir is None:
            return
        path = Path(config.run.dir).expanduser()
        if path.exists() and not path.is_dir():
            raise ConfigError(f"run.dir is {path}, which is a file; set --run.dir to a folder that is new or empty.")
        found = [name for name in _OF_A_RUN if (path / name).exists()]
        if found:
            raise ConfigError(
                f"run.dir is {path}, which holds an earlier run ({', '.join(found)}) and no checkpoint to go on from; "
                "it is left as it is. Set --run.dir to a folder that is new or empty, or move that one away."
            )

    @classmethod
    def create(cls, config: Config) -> RunFolder:
        """Make the folder: run.dir, or the first of runs/NAME, runs/NAME-2, ...

        that does not exist. Raises ConfigError.
        """
        cls.check(config)
        if config.run.dir is not None:
            path = Path(config.run.dir).expanduser()
            try:
                path.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError(
                    f"run.dir is {path}, which cannot be made: {error.strerror}; set --run.dir to another folder."
                ) from None
            if not os.access(path, os.W_OK):
                raise ConfigError(f"run.dir is {path}, which cannot be written to; set --run.dir to another folder.")
            return cls(path)
        number = 1
        while True:
            path = Path("runs") / (config.run.name if number == 1 else f"{config.run.name}-{number}")
            try:
                path.mkdir(parents=True)
                return cls(path)
            except FileExistsError:
                number += 1
            except OSError as error:
                raise ConfigError(
                    f"the run folder {path} cannot be made: {error.strerror}; set --run.dir to another folder."
                ) from None

    def discard_if_empty(self) -> None:
        """Take the folder away again when the run ended before anything was written."""
        with contextlib.suppress(OSError):
            self.path.rmdir()

    def write_config(self, config: Config) -> None:
        (self.path / "config.yaml").write_text(config.to_yaml(), encoding="utf-8")

    def write_json(self, name: str, values: Mapping[str, Any]) -> None:
        (self.path / name).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
