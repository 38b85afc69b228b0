"""What a path on a command line stands for: a checkpoint, a run with several of them, or something else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from offload.checkpoint.folder import Checkpoints, is_step_folder
from offload.checkpoint.manifest import MANIFEST
from offload.checkpoint.reader import Reader
from offload.errors import CheckpointError, ConfigError, format_bytes
from offload.telemetry.byte_progress import byte_progress


def is_checkpoint(path: Path) -> bool:
    """Tell whether a folder is meant as a checkpoint, whole or not."""
    named = path.is_dir() and is_step_folder(path.resolve())
    return named or (path / MANIFEST).is_file() or any(path.glob("rank-*.bin"))


def checkpoints_of(path: Path) -> Checkpoints | None:
    """Return the checkpoints of a run folder, or of its folder `checkpoints`; None where there are none."""
    for folder in (path / "checkpoints", path):
        if (checkpoints := Checkpoints(folder)).folders():
            return checkpoints
    return None


def verify_shown(folder: Path) -> str:
    """Check all of a checkpoint as `reader.verify` and show how far it is; return what was found. Raises
    CheckpointError.
    """
    with Reader(folder) as reader, byte_progress(f"verifying {folder.name}", reader.num_bytes) as tell:
        reader.verify(tell)
        return f"{len(reader.contents)} parameters and buffers, {format_bytes(reader.num_bytes)}; all checksums agree"


def chosen_checkpoint(path: Path, say: Callable[[str], None]) -> Path:
    """Return the checkpoint that is meant: the folder itself, or the newest of a run that is whole, which is read for
    that; `say` is told which, and why others are not.

    Raises ConfigError where there is none, CheckpointError where none is whole.
    """
    if is_checkpoint(path):
        return path
    checkpoints = checkpoints_of(path)
    if checkpoints is None:
        what = "holds no checkpoint" if path.exists() else "does not exist"
        raise ConfigError(f"{path} {what}; give RUN/checkpoints/step-N, or RUN for the newest one that is whole.")
    good, damaged = checkpoints.newest_that_verifies(verify_shown)
    for folder, reason in damaged:
        say(f"{folder.name} is left out: {reason}")
    if good is None:
        raise CheckpointError(f"none of the {len(damaged)} checkpoints in {checkpoints.path} is whole.", path)
    say(f"the newest checkpoint that is whole: {good}")
    return good


def chosen_model(path: Path, say: Callable[[str], None]) -> Path:
    """Return the Hugging Face folder or the checkpoint that is meant; as `chosen_checkpoint` for a run."""
    is_folder = (path / "config.json").is_file() and not is_checkpoint(path)
    return path if is_folder else chosen_checkpoint(path, say)
