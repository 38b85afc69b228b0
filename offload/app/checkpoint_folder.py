"""Checkpoint folders of a run: `checkpoints/step-N/`, and a file `latest` with the name of the last save.

Also resolves a path from the command line to a checkpoint, a run, or a model folder. `latest` is written only after the
checkpoint is on disk. The file serves people and scripts; this code ignores the content, and finds checkpoints by
folder name and verification.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from offload.amounts import Tally
from offload.app.telemetry.progress import work_progress
from offload.checkpoint.manifest import MANIFEST
from offload.checkpoint.reader import Reader, verify
from offload.checkpoint.writer import foreign_names
from offload.errors import CheckpointError, ConfigError, DiskError, format_bytes, unless_absent
from offload.files.atomic_folder import as_disk_errors, clear, remove
from offload.native.io import sync_path

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_LATEST = "latest"


class Checkpoints:
    """Checkpoints of one run. Only rank 0 saves and removes; any process may list."""

    def __init__(self, path: Path) -> None:
        """path: RUN/checkpoints, created by the first save."""
        self.path = path

    def folders(self) -> list[Path]:
        """Return all checkpoint folders, highest step first, without verification."""
        folders: list[Path] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            folders = [path for path in self.path.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
        return sorted(folders, key=_step, reverse=True)

    def newest_intact(
        self, verify: Callable[[Path], object] = verify, but: str = ""
    ) -> tuple[Path | None, list[tuple[Path, str]]]:
        """Return the intact checkpoint with the highest step, and the damaged ones above with the reasons.

        Reads each candidate from end to end. but: folder name to skip. verify: may also display progress. The
        checkpoint is None if all are damaged.
        """
        skipped = []
        for folder in self.folders():
            if folder.name == but:
                continue
            try:
                verify(folder)
            except CheckpointError as error:
                skipped.append((folder, str(error)))
            else:
                return folder, skipped
        return None, skipped

    def target(self, step: int) -> Path:
        """Return the folder for the checkpoint of a step. An existing checkpoint stays until the new one is complete.

        A folder with the same name but foreign files is no checkpoint, and is renamed permanently. Raises DiskError.
        """
        target = self.path / f"step-{step}"
        with as_disk_errors("the look", target):
            is_foreign = bool(foreign_names(target))
        if is_foreign:
            self._move(target, "foreign")
        return target

    def register(self, new: Path, keep: int | None = None, best: int | None = None) -> None:
        """Point `latest` at a new checkpoint if possible, then remove old ones, lowest step first.

        keep: number of highest steps to keep; None: all. The new checkpoint and the `best` step always stay, as does a
        checkpoint impossible to remove.
        """
        with contextlib.suppress(DiskError):  # only informative, and never read here
            write_small(self.path / _LATEST, f"{new.name}\n")
        if keep is not None:
            # The oldest first: a kill in between leaves the newest.
            for old in reversed(self.folders()[keep:]):
                if old.name not in (new.name, f"step-{best}"):
                    # A checkpoint too many is better than a failed run.
                    with contextlib.suppress(DiskError):
                        remove(old)

    def move_aside(self, step: int) -> list[Path]:
        """Rename the checkpoints above a step before a run resumes from this step: they are damaged, or the run will
        make these steps again. Return the new paths. Raises DiskError.
        """
        above = [path for path in self.folders() if _step(path) > step]
        return [self._move(path, "aside") for path in above]

    def _move(self, folder: Path, suffix: str) -> Path:
        # A random ending: a run may go back to the same step more than once.
        moved = folder.with_name(f"{folder.name}.{suffix}-{secrets.token_hex(4)}")
        with as_disk_errors("the renaming", folder):
            return folder.rename(moved)

    def clear(self) -> list[Path]:
        """Remove remains of dead processes at the start of a run. Return the removed paths."""
        return clear(self.path)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


@contextlib.contextmanager
def suggesting_alternative(folder: Path) -> Iterator[None]:
    """Context manager: add the newest intact checkpoint to a CheckpointError; see `error_with_alternative`."""
    try:
        yield
    except CheckpointError as error:
        raise error_with_alternative(folder, str(error), error.path) from None


def error_with_alternative(folder: Path, reason: str, path: Path | None = None) -> CheckpointError:
    """Return an error for an unusable checkpoint with a reason and the newest intact alternative.

    path: file at fault, if known. Reads the other checkpoints to verify them.
    """
    good, _ = Checkpoints(folder.parent).newest_intact(but=folder.name)
    alternative = "There is no other good one beside it."
    if good:
        alternative = f"The last good one is {good}."
    return CheckpointError(f"{reason} {alternative}", path or folder)


def is_checkpoint(path: Path) -> bool:
    """Tell whether a folder looks like a checkpoint, intact or not."""
    # By any mark: a damaged checkpoint must get the error for checkpoints, not for folders without a model.
    named = path.is_dir() and _STEP.fullmatch(path.resolve().name) is not None
    return named or (path / MANIFEST).is_file() or any(path.glob("rank-*.bin"))


def checkpoints_of(path: Path) -> Checkpoints | None:
    """Return the checkpoints of a run folder or a `checkpoints` folder; None without any."""
    for folder in (path / "checkpoints", path):
        if (checkpoints := Checkpoints(folder)).folders():
            return checkpoints
    return None


def verify_with_progress(folder: Path) -> str:
    """Verify a checkpoint with a progress bar. Return a summary. Raises CheckpointError."""
    with Reader(folder) as reader, work_progress() as tell:
        tally = Tally(reader.num_bytes)
        tell(f"verifying {folder.name}", tally)
        reader.verify(tally.add)
        about = f"{len(reader.contents):,} parameters and buffers, {format_bytes(reader.num_bytes)}"
        return f"{about}; all checksums agree"


def hint_of_model(run: Path) -> str:
    """Return a sentence about the model of a run that saved no checkpoint; empty without one."""
    model = run / "hf"
    if model.is_dir():
        return f" The run saved none, and the trained model is {model}."
    return ""


def choose_checkpoint(path: Path, say: Callable[[str], None], others: str = "") -> Path:
    """Return the checkpoint for a path: the folder itself, or the newest intact one of a run.

    Reads the candidates of a run to verify them. say: receives the choice and the reasons for skipped ones. others:
    further formats for the error, such as "a file, ". Raises ConfigError without any checkpoint, CheckpointError
    without an intact one.
    """
    if is_checkpoint(path):
        return path
    checkpoints = checkpoints_of(path)
    if checkpoints is None:
        problem = unless_absent(path, "holds no checkpoint")
        raise ConfigError(
            f"{path} {problem}; give {others}RUN/checkpoints/step-N, or RUN for its newest undamaged one."
            f"{hint_of_model(path)}"
        )
    # All bytes are read: a choice by name could give a damaged one.
    good, damaged = checkpoints.newest_intact(verify_with_progress)
    for folder, reason in damaged:
        say(f"{folder.name} is skipped: {reason}")
    if good is None:
        raise CheckpointError(f"all {len(damaged)} checkpoints in {checkpoints.path} are damaged.", path)
    say(f"the newest undamaged checkpoint: {good}")
    return good


def choose_model(path: Path, say: Callable[[str], None]) -> Path:
    """Return the Hugging Face folder or the checkpoint for a path; for a run as in `choose_checkpoint`."""
    is_folder = (path / "config.json").is_file() and not is_checkpoint(path)  # a checkpoint has a config.json too
    if is_folder:
        return path
    return choose_checkpoint(path, say, others="a Hugging Face folder, ")


def write_small(path: Path, text: str) -> None:
    """Replace a small file atomically and durably. Raises DiskError."""
    fresh = path.with_name(f".{path.name}.new")
    with as_disk_errors("the write", path):
        fresh.write_text(text, encoding="utf-8")
        sync_path(fresh)  # before the rename: a power failure must not leave an empty file under the name
        fresh.rename(path)
        sync_path(path.parent)
