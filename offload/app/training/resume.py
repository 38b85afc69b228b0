"""Start of a run before any work: run folder, refused settings, and resume point.

A run begins new, or at a checkpoint in its own or another folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from offload.app.checkpoint_folder import Checkpoints, error_with_alternative
from offload.app.config.at_resume import resumed
from offload.app.config.config import Config
from offload.app.hf.write import check_export_folder
from offload.app.telemetry.loggers import check_loggers
from offload.app.training.parts import make_placement, make_update_rule
from offload.app.training.run_folder import CHECKPOINTS, RunFolder
from offload.checkpoint.manifest import MANIFEST
from offload.checkpoint.reader import Reader
from offload.checkpoint.spread import keepers, spread
from offload.distributed.comm import Comm
from offload.distributed.outcomes import share_failure
from offload.errors import CheckpointError, ConfigError, unless_no_folder
from offload.files.directories import check_dirs
from offload.planning.settings import parse_throttle


@dataclass(frozen=True)
class ResumePoint:
    """Start of a run.

    - config: requested settings, completed by the resumed run's settings.
    - folders: candidate checkpoints. The first intact one is loaded. Empty: a new run.
    - data: `Dataset.state_dict` from the checkpoint.
    - base: base fingerprint for an adapter.
    - skipped: reasons for skipped checkpoints.
    """

    config: Config
    folders: Sequence[Path] = ()
    data: Mapping[str, Any] = field(default_factory=dict)
    base: Mapping[str, Any] = field(default_factory=dict)
    skipped: Sequence[str] = ()


def open_run(config: Config, comm: Comm, say: Callable[[str], None]) -> tuple[RunFolder, ResumePoint]:
    """Open the run folder and find the start of the run. Collective.

    Rank 0 holds the folder until it is closed. If checkpoints are spread over several disks, each rank receives the
    small files. Raises ConfigError for impossible placement, throttle or resume settings.
    """
    folder = None
    try:
        with share_failure(comm, "opening of the run folder"):
            # The cheapest checks come first: a missing package must not cost the reading of a model.
            check_loggers(config.run.report_to)
            if comm.rank == 0:
                folder = RunFolder.open(config)
        path: Any = comm.from_rank(0, folder and folder.path, "run folder")
        # A folder may be on a disk of each machine, or on a shared disk.
        keeper = keepers(comm, path)
        own = folder or RunFolder(path, keeps=keeper[comm.rank] == comm.rank)
        with share_failure(comm, "look for checkpoints"):
            if own.keeps:  # the folder belongs to this run alone by now
                for partial in Checkpoints(own.checkpoints).clear():
                    say(f"note: {partial.name}, left by a killed process, is removed.")
        broken: Mapping[Path, str] = {}
        if len(set(keeper)) > 1:
            visible: Sequence[Path] = ()
            with suppress(ConfigError):  # rank 0 reports a missing checkpoint, or another rank sees one
                visible = _candidates(config)
            broken = spread(comm, visible)
        with share_failure(comm, "look for a checkpoint"):
            start_point = None
            if folder is not None:
                start_point = find_start(config, broken)
                if not start_point.folders:
                    start_point.config.check_source()
                if start_point.config.changes:
                    say(f"changed for this resume: {'; '.join(start_point.config.changes)}")
                folder.check(start_point.config, resumes=bool(start_point.folders))
                if start_point.config.checkpoint.export:
                    check_export_folder(folder.hf, replace=True)
        start: Any = comm.from_rank(0, start_point, "start of the run")
        with share_failure(comm, "check of the settings"):
            check_settings(start.config, comm)
    except BaseException:
        if folder is not None:
            folder.close()
        raise
    return own, start


def check_settings(config: Config, comm: Comm) -> None:
    """Check number of ranks, disk folders, throttles and update rule, before any work. Raises ConfigError."""
    config.check_ranks(comm.size)
    # The objects are made again with the engine. Made here, a wrong value costs no reading of data.
    if dirs := make_placement(config).dirs:
        check_dirs(dirs)
    parse_throttle(config.offload.throttle)
    make_update_rule(config)


def find_start(config: Config, broken: Mapping[Path, str] = MappingProxyType({})) -> ResumePoint:
    """Find the checkpoints meant by `checkpoint.resume`.

    Only small files are read and verified here, data when loaded. broken: unusable checkpoints over all disks, with
    reasons. Raises ConfigError if there is none or it belongs to another run, CheckpointError if all are damaged.
    """
    folders = [folder for folder in _candidates(config) if folder not in broken]
    skipped = list(broken.values())
    for number, folder in enumerate(folders):
        try:
            with Reader(folder, in_part=True) as reader:
                meta = reader.meta["meta"] if "engine" in reader.meta else {}
        except CheckpointError as error:
            # Skip a damaged checkpoint: the one before is better than none.
            skipped.append(str(error))
            continue
        if not {"step", "config", "data", "seconds"} <= meta.keys():
            raise ConfigError(
                f"{folder} was written by engine.save_checkpoint outside of a run, and has no position in the data to "
                "resume at. Resume by engine.load_checkpoint, or export it and set --model.path to the export."
            )
        settings = resumed(config, meta["config"], str(folder))
        # With the older ones: damage in the data shows only when the states are loaded.
        return ResumePoint(settings, folders[number:], meta["data"], meta.get("base", {}), skipped)
    if folders or broken:
        raise no_intact_checkpoint([*broken, *folders], skipped)
    config.check()
    return ResumePoint(config)


def no_intact_checkpoint(folders: Sequence[Path], reasons: Sequence[str]) -> CheckpointError:
    """Return the error for unusable checkpoints.

    For a single requested checkpoint, the error suggests another.
    """
    if len(folders) == 1:
        return error_with_alternative(folders[0], reasons[-1])
    return CheckpointError(
        f"none of the {len(folders)} checkpoints in {folders[0].parent} is usable: {' '.join(reasons)} Set "
        "--checkpoint.resume to the path of another one, or --run.dir to a new folder to begin a new run.",
        folders[0].parent,
    )


def _candidates(config: Config) -> Sequence[Path]:
    resume = config.checkpoint.resume
    if resume == "never":
        return ()
    if resume == "auto":  # the same command again goes on
        own = RunFolder.of(config)
        if own is None:
            return ()
        return Checkpoints(own.checkpoints).folders()
    path, own = Path(resume).expanduser(), RunFolder.of(config)
    if own is not None and not own.owns(path) and (checkpoints := Checkpoints(own.checkpoints).folders()):
        return checkpoints  # same command again, for a run started from another run's checkpoint
    if (path / MANIFEST).exists() or path in Checkpoints(path.parent).folders():  # also if the manifest is lost
        return (path,)
    checkpoints = Checkpoints(path / CHECKPOINTS).folders() or Checkpoints(path).folders()
    if not checkpoints:
        problem = unless_no_folder(path, "holds no checkpoint")
        raise ConfigError(
            f"checkpoint.resume is {resume}, which {problem}; give a checkpoint, RUN/checkpoints/step-N, or the "
            "folder of a run that has some."
        )
    return checkpoints
