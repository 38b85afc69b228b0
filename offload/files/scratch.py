"""Files of the nvme tier: on the file system of a directory, and in no directory.

The kernel takes such a file back when the last process that has it open ends, however that ends. A forked child has it
open too; a program that is started (exec) has not.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from pathlib import Path

_O_TMPFILE: int = getattr(os, "O_TMPFILE", 0)
_HAS_NONE = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL)  # of the file system, an old kernel, one of the flags


def open_nameless(directory: str | os.PathLike[str], flags: int) -> int:
    """Return the descriptor of a new, empty file without a name. `flags`: as of os.open, os.O_RDWR for one.

    Where the file system has no such files one is made and unlinked at once. Only a process that is killed between the
    two leaves its name, `.offload-RANDOM`, with an empty file: no space was reserved yet. Raises OSError.
    """
    try:
        return os.open(directory, flags | _O_TMPFILE | os.O_EXCL, 0o600)  # O_EXCL: it cannot be given a name later
    except OSError as error:
        if error.errno not in _HAS_NONE:
            raise
    path, fd = Path(directory) / f".offload-{secrets.token_hex(8)}", -1
    try:
        fd = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:  # also where O_DIRECT is refused, which some file systems do after they have made the file
        try:
            path.unlink(missing_ok=True)
        except OSError:
            with contextlib.suppress(OSError):
                os.close(fd)
            raise
    return fd
