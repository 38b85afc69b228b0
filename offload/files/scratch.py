"""Nameless files for the nvme tier: on the file system of a directory, but not listed in the directory.

The kernel frees such a file when the last process with an open descriptor ends, however the process ends. A forked
child shares the descriptor; a program started with exec does not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

_O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)
_HAS_NONE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)  # file system, old kernel, or an unsupported flag


def open_nameless(directory: str | os.PathLike[str], flags: int) -> int:
    """Return the descriptor of a new empty file without a name. flags: as for os.open, for example os.O_RDWR.

    On a file system without nameless files, the file is created and unlinked at once. Only a kill between both calls
    leaves the name `.offload-RANDOM` behind, with an empty file, since no space is reserved yet. Raises OSError.
    """
    try:
        return os.open(directory, flags | _O_TMPFILE | os.O_EXCL, 0o600)  # O_EXCL: no later link to a name
    except OSError as error:
        if error.errno not in _HAS_NONE:
            raise
    path, fd = Path(directory) / f".offload-{secrets.token_hex(8)}", -1
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:  # some file systems reject O_DIRECT only after creating the file
        try:
            path.unlink(missing_ok=True)
        except OSError:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise
    return fd
