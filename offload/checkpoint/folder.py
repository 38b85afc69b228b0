"""The checkpoints of a run: `checkpoints/step-N/`, and `latest`, which names the one that was saved last; and what a
path on a command line stands for: a checkpoint, a run with several of them, or something else.

`latest` is written when the checkpoint that it names is on the disk, so it never names a worse one; what it says is for
people and scripts, and nothing here believes it: checkpoints are found by their folders and verified.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path

from offload.checkpoint.manifest import MANIFEST
from offload.checkpoint.publish import foreign_names
from offload.checkpoint.reader import Reader, verify
from offload.errors import CheckpointError, ConfigError, DiskError, format_bytes
from offload.files.atomic_folder import as_disk_errors, clear, remove, write_small
from offload.telemetry.byte_progress import byte_progress

_STEP = re.compile(r"step-(0|[1-9][0-9]*)")
_LATEST = "latest"


class Checkpoints:
    """The checkpoints of one run, of which one process, rank 0, saves and removes; any may look."""

    def __init__(self, path: Path) -> None:
        """`path`: RUN/checkpoints, made by the first save."""
        self.path = path

    def folders(self) -> list[Path]:
        """Return the folders of all checkpoints, that of the highest step first; whether they verify is not told."""
        found: list[Path] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            found = [path for path in self.path.iterdir() if _STEP.fullmatch(path.name) and path.is_dir()]
        return sorted(found, key=_step, reverse=True)

    def newest_that_verifies(
        self, verify: Callable[[Path], object] = verify, but: str = ""
    ) -> tuple[Path | None, list[tuple[Path, str]]]:
        """Return the checkpoint of the highest step that is whole, read from end to end, and those above it that are
        not, each with the reason; of all `but` one. `verify` may be one that shows how far it is.
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
        """Return the folder for a step's checkpoint, to be saved there; what there is of that step stays until the new
        one is complete.

        A folder of that name with files that no checkpoint has is no checkpoint, and is moved aside for good. Raises
        DiskError.
        """
        target = self.path / f"step-{step}"
        with as_disk_errors("the look", target):
            is_foreign = bool(foreign_names(target))
        if is_foreign:
            self._move(target, "foreign")
        return target

    def saved(self, new: Path, keep: int | None = None, best: int | None = None) -> None:
        """Point `latest` at a new checkpoint, if that can be; then remove all but the `keep` of the highest steps, the
        lowest first. None: all stay. The new one stays in any case, so does that of the `best` step, and so does one
        that cannot be removed.
        """
        with contextlib.suppress(DiskError):  # nothing here believes it
            write_small(self.path / _LATEST, f"{new.name}\n")
        if keep is not None:
            for old in reversed(self.folders()[keep:]):
                if old.name not in (new.name, f"step-{best}"):
                    with contextlib.suppress(DiskError):
                        remove(old)

    def move_aside(self, step: int) -> list[Path]:
        """Rename the checkpoints above a step, from which a run goes on: they are damaged, or of steps that it makes
        anew. Return what they are called now. Raises DiskError.
        """
        above = [path for path in self.folders() if _step(path) > step]
        return [self._move(path, "aside") for path in above]

    def _move(self, folder: Path, kind: str) -> Path:
        moved = folder.with_name(f"{folder.name}.{kind}-{secrets.token_hex(4)}")
        with as_disk_errors("the renaming", folder):
            return folder.rename(moved)

    def clear(self) -> list[Path]:
        """Remove what dead processes left of checkpoints, at the start of a run; return what was removed."""
        return clear(self.path)


def _step(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


@contextlib.contextmanager
def offering_another(folder: Path) -> Iterator[None]:
    """Within, a CheckpointError of this checkpoint says which of those beside it is good; as `offer`."""
    try:
        yield
    except CheckpointError as error:
        raise offer(folder, str(error), error.path) from None


def offer(folder: Path, reason: str, path: Path | None = None) -> CheckpointError:
    """Return the error about a checkpoint that cannot be used for that reason (and the file at fault, if it is known),
    which says which of those beside it is good; finding that out reads them.
    """
    good, _ = Checkpoints(folder.parent).newest_that_verifies(but=folder.name)
    found = f"The last good one is {good}." if good else "There is no other one beside it that is good."
    return CheckpointError(f"{reason} {found}", path or folder)


def is_checkpoint(path: Path) -> bool:
    """Tell whether a folder is meant as a checkpoint, whole or not."""
    named = path.is_dir() and _STEP.fullmatch(path.resolve().name) is not None
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
        about = f"{len(reader.contents):,} parameters and buffers, {format_bytes(reader.num_bytes)}"
        return f"{about}; all checksums agree"


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
    if not path.exists():
        raise ConfigError(
            f"{path} does not exist; give a Hugging Face folder, a checkpoint (RUN/checkpoints/step-N), or RUN for its "
            "newest one."
        )
    is_folder = (path / "config.json").is_file() and not is_checkpoint(path)
    return path if is_folder else chosen_checkpoint(path, say)
