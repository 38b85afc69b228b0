"""All errors visible to users. Each message states the value, the reason with numbers, and the key or flag to change.

Commands print the message as one paragraph and exit with `exit_code`; a traceback appears only with `--debug`.
"""

from __future__ import annotations

import difflib
import errno
import os
import re
import sys
import warnings
from collections.abc import Iterable
from pathlib import Path


class OffloadError(Exception):
    """Base class for errors explained to the user without a traceback."""

    exit_code = 1


class ConfigError(OffloadError, ValueError):
    """A setting, a file or an input is wrong or cannot be honoured (exit code 2)."""

    exit_code = 2


class DoesNotFitError(OffloadError, MemoryError):
    """The budget of a tier is too small for the request (exit code 3).

    reason: the need, the limit and the shortfall. advice: the changes to make.
    """

    exit_code = 3

    def __init__(self, reason: str, advice: str = "") -> None:
        super().__init__(reason, advice)
        self.reason = reason
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.reason} {self.advice}".rstrip()

    def advise(self, advice: str) -> None:
        """Replace the advice."""
        self.advice = advice


class NonFiniteError(OffloadError, ArithmeticError):
    """A gradient, a new weight or, with MeZO, a loss is not finite (exit code 1)."""


class DiskError(OffloadError, OSError):
    """A file cannot be read, written or created (exit code 1).

    errno: 0 if a file ended too early. offset, num_bytes: position and size of the failed block, for a transfer.
    """

    def __init__(self, message: str, code: int, path: Path, offset: int | None = None, num_bytes: int | None = None):
        super().__init__(message)
        self.errno = code
        self.path = path
        self.offset = offset
        self.num_bytes = num_bytes


class MissingLibraryError(OffloadError, ImportError):
    """A required library is not installed (exit code 2)."""

    exit_code = 2


class CheckpointError(OffloadError, ValueError):
    """A checkpoint is damaged, incomplete, or in an unsupported format (exit code 1).

    path: the file or folder at fault.
    """

    def __init__(self, message: str, path: Path) -> None:
        super().__init__(message)
        self.path = path


class RankLostError(OffloadError, RuntimeError):
    """Another rank ended, stopped or diverged, so this rank cannot continue (exit code 1).

    rank: the lost rank; None if a connection broke and no rank is known to be lost.
    """

    def __init__(self, message: str, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class TornError(OffloadError, RuntimeError):
    """Only part of the units were updated in a step, so the states in memory belong to no step (exit code 1)."""


class InterruptedRun(OffloadError):
    """The user or the system stopped the run. The message names the saved state and the location (exit code 130)."""

    exit_code = 130


_COMMON = "all ranks have this error"
_TOLD = "another rank prints this"


def common(error: OffloadError) -> OffloadError:
    """Mark an error as raised on every rank, now or soon."""
    error.add_note(_COMMON)
    return error


def is_common(error: BaseException) -> bool:
    """Tell whether every rank has this error."""
    return _COMMON in getattr(error, "__notes__", ())


def leave_to_another_rank(error: BaseException) -> None:
    """Mark an error as printed by another rank on this machine. This rank only exits with the exit code."""
    error.add_note(_TOLD)


def is_left_to_another_rank(error: BaseException) -> bool:
    """Tell whether another rank prints this error."""
    return _TOLD in getattr(error, "__notes__", ())


def errno_text(code: int) -> str:
    """Return the system text and the name for an error number."""
    return f"{os.strerror(code)} ({errno.errorcode.get(code, code)})"


def system_code(error: BaseException) -> int | None:
    """Return the error number of a failed system call. None: another failure.

    Libraries in Rust (safetensors, tokenizers) raise errors of their own, with the number in the text alone.
    """
    if isinstance(error, OSError):
        return error.errno or 0
    # Our own text may quote the text of another failure.
    if isinstance(error, OffloadError):
        return None
    in_text = re.search(r"\(os error (\d+)\)", str(error))
    return int(in_text[1]) if in_text else None


def too_few_rows(batch_size: int, world_size: int, shared_by: int = 1) -> str:
    """Return the error text for too few rows: fewer per step than ranks, or than rank groups sharing rows."""
    each = "rank"
    if shared_by != 1:
        each = f"group of {shared_by} ranks (train.sequence_parallel)"
    return (
        f"train.batch_size is {batch_size}, but there are {world_size} ranks, and every {each} needs its own row; set "
        f"--train.batch_size to {world_size // shared_by} or more, or start at most {batch_size * shared_by} ranks."
    )


_BETWEEN = {"offload", "torch", "transformers", "accelerate", "trl", "peft", "contextlib", "functools"}
"""Packages between the engine and a user's code."""


def warn(text: str) -> None:
    """Warn at the user code line behind this call, not inside a library."""
    level = 2
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _BETWEEN:
        level += 1
        frame = frame.f_back
    warnings.warn(text, stacklevel=level)


_MAX_SHOWN = 200


def shorten(text: str) -> str:
    """Return a text for a message; a long one is cut to both ends, with the total length."""
    if len(text) <= _MAX_SHOWN:
        return text
    return f"{text[: _MAX_SHOWN // 2]} ... {text[-_MAX_SHOWN // 4 :]} ({len(text):,} characters)"


def describe(error: BaseException) -> str:
    """Return the class and the message of an error on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def nearest(word: str, allowed: Iterable[str], cutoff: float = 0.5) -> str:
    """Return ` (did you mean NAME?)` for the allowed name closest to `word`, or an empty string."""
    if len(word) > _MAX_SHOWN:  # slow, and no misspelt name
        return ""
    matches = difflib.get_close_matches(word, list(allowed), n=1, cutoff=cutoff)
    if not matches:
        return ""
    return f" (did you mean {matches[0]}?)"


def allocation_name(name: str) -> str:
    """Return the display name for an allocation."""
    if name == "low":
        return "master, low 16 bits"
    return name


def ratio(number: float) -> str:
    """Format a ratio as `0.5`, `3.14` or `1,070`: three digits, but all digits above 100."""
    # `.3g` would write 1,070 as 1.07e+03.
    if number >= 100:
        return f"{number:,.0f}"
    return f"{number:.3g}"


def counted(number: int, noun: str) -> str:
    """Return a count with the noun: `1 step`, `1,070 steps`."""
    return f"{number:,} {plural(noun, number)}"


def plural(noun: str, number: float) -> str:
    """Return the noun for a number of things: `step` for 1, else `steps`."""
    if number == 1:
        return noun
    return f"{noun}s"


def first_names(names: Iterable[str], most: int, more: str = ", ...", *, between: str = ", ") -> str:
    """Return the first names as a list for a message. `more`: a text for further ones, with {} for their number."""
    names = list(names)
    listed = between.join(names[:most])
    if len(names) > most:
        listed += more.format(len(names) - most)
    return listed


def unless_absent(path: Path, fault: str) -> str:
    """Return the fault of a path for a message: the given one, or `does not exist`."""
    if path.exists():
        return fault
    return "does not exist"


def unless_no_folder(path: Path, fault: str) -> str:
    """Return the fault of a folder for a message: the given one, or `is no folder`."""
    if path.is_dir():
        return fault
    return "is no folder"


def format_bytes(num_bytes: float) -> str:
    """Return a size for display: exact below one KiB, else three digits in binary units."""
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            if unit == "B" or size >= 100:
                return f"{size:.0f} {unit}"
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.4g} TiB"


def untrainable_error(name: str, method: str) -> ConfigError:
    """Return the error for quantized weights that would be trained."""
    return ConfigError(
        f"{name} is quantized in the model's folder ({method}) but not frozen: most updates are smaller than the "
        "distance between two quantized values, and would be lost. Train an adapter over it (--lora.rank 16, or "
        "requires_grad=False before Engine()), or give the folder of the unquantized model."
    )
