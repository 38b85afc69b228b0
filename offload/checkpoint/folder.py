"""The checkpoints of a run: `checkpoints/step-N/`, and `latest`, which names the one that was saved last.

`latest` is written when the checkpoint that it names is on the disk, so it never names a worse one; what it says is for
people and scripts, and nothing here believes it: checkpoints are found by their folders and verified.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from offload.checkpoint.publish import foreign_names
from offload.checkpoint.reader import verify
from offload.errors import CheckpointError, DiskError
from offload.files.atomic_folder import as_disk_errors, clear, remove, write_small

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
        self, verify: Callable[[Path], object] = verify
    ) -> tuple[Path | None, list[tuple[Path, str]]]:
        """Return the checkpoint of the highest step that is whole, read from end to end, and those above it that are
        not, each with the reason. `verify` may be one that shows how far it is.
        """
        return _first_that_verifies(self.folders(), verify)

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

    def saved(self, new: Path, keep: int | None = None) -> None:
        """Point `latest` at a new checkpoint, if that can be; then remove all but the `keep` of the highest steps, the
        lowest first. None: all stay. The new one stays in any case, and so does one that cannot be removed.
        """
        with contextlib.suppress(DiskError):  # nothing here believes it
            write_small(self.path / _LATEST, f"{new.name}\n")
        if keep is not None:
            for old in reversed(self.folders()[keep:]):
                if old.name != new.name:
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


def is_step_folder(folder: Path) -> bool:
    """Tell whether a folder has the name of a step's checkpoint."""
    return _STEP.fullmatch(folder.name) is not None


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
    others = [path for path in Checkpoints(folder.parent).folders() if path.name != folder.name]
    good, _ = _first_that_verifies(others, verify)
    found = f"The last good one is {good}." if good else "There is no other one beside it that is good."
    return CheckpointError(f"{reason} {found}", path or folder)


def _first_that_verifies(
    folders: Sequence[Path], verify: Callable[[Path], object]
) -> tuple[Path | None, list[tuple[Path, str]]]:
    skipped = []
    for folder in folders:
        try:
            verify(folder)
        except CheckpointError as error:
            skipped.append((folder, str(error)))
        else:
            return folder, skipped
    return None, skipped
