"""The beginning of a run, before any work: its folder, where it goes on, and what is refused of its settings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from offload.checkpoint.folder import Checkpoints
from offload.config.config import Config
from offload.distributed.comm import Comm
from offload.distributed.outcome import as_one
from offload.files.directories import check_dirs
from offload.hf.write import check_place
from offload.lanes.throttle import parse_throttle
from offload.planning.from_config import placement, update_rule
from offload.training.resume import ResumePoint, find_start
from offload.training.run_folder import RunFolder


def open_run(config: Config, comm: Comm, say: Callable[[str], None]) -> tuple[RunFolder, ResumePoint]:
    """Open the run folder, which rank 0 holds until it is closed, and find where the run begins. Collective.

    Raises ConfigError for what cannot be placed, played or resumed.
    """
    folder = None
    try:
        with as_one(comm, "look for a checkpoint"):
            found: Any = None
            if comm.rank == 0:  # in the folder that is this process's alone by then
                folder = RunFolder.open(config)
                found = _find(config, folder, say)
        start: ResumePoint = comm.gather_objects(found, "start of the run")[0]
        with as_one(comm, "check of the settings"):
            check_settings(start.config, comm.size)
        path: Any = comm.gather_objects(folder and folder.path, "run folder")[0]
    except BaseException:
        if folder is not None:
            folder.close()
        raise
    return folder or RunFolder(path), start


def check_settings(config: Config, num_ranks: int) -> None:
    """Refuse settings that can be refused before any work. Raises ConfigError."""
    config.check_ranks(num_ranks)
    if dirs := placement(config).dirs:
        check_dirs(dirs)
    parse_throttle(config.offload.throttle)
    update_rule(config)


def _find(config: Config, folder: RunFolder, say: Callable[[str], None]) -> ResumePoint:
    for partial in Checkpoints(folder.checkpoints).clear():
        say(f"note: {partial.name}, left by a process that was killed, is removed.")
    found = find_start(config)
    if not found.folders:
        found.config.check_source()
    folder.check(found.config, resumes=bool(found.folders))
    if found.config.checkpoint.export:
        check_place(folder.hf, replace=True)
    return found
