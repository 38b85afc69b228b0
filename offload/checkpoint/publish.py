"""Checkpoint publication: ranks write to a temporary folder, and a rename publishes the complete checkpoint.

Until then, `manifest.json` is empty and serves as the lock of the folder (files/atomic_folder.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.checkpoint.manifest import MANIFEST, AttachedFile, Contents, Manifest, checksum, gather
from offload.errors import CheckpointError, ConfigError, DiskError
from offload.files.atomic_folder import as_disk_errors, make_partial, remove, replace_folder
from offload.native.io import sync_path

_OWN_FILE = re.compile(r"manifest\.json|rank-[0-9]+\.bin")


class Save:
    """A save on one disk. One rank per disk creates the folder for all ranks there, and publishes the checkpoint.

        with Save(target) as save:                   # every rank: Writer(save.path, ...)
            save.commit(contents, parts, meta)       # parts: from all ranks

    path: temporary folder for the data files. An earlier checkpoint at `target` stays until replaced. Leaving the
    `with` block without `commit` removes the temporary folder.
    """

    def __init__(self, target: Path) -> None:
        """Raises DiskError. Raises ConfigError if `target` exists and is no checkpoint; the folder stays."""
        if foreign := foreign_names(target):
            raise ConfigError(
                f"{target} holds {', '.join(foreign[:3])}, so it is not a checkpoint, and saving a checkpoint there "
                "would delete this; give another folder."
            )
        self.target = target
        self._attached: dict[str, AttachedFile] = {}
        with as_disk_errors("the making", target.parent):
            if not target.parent.is_dir():
                target.parent.mkdir(parents=True, exist_ok=True)
                sync_path(target.parent.parent)
            self.path, self._lock = make_partial(target)

    def attach(self, name: str, data: bytes) -> None:
        """Store a small file with the states. Raises DiskError, or FileExistsError for a name already in use."""
        path = self.path / name
        with as_disk_errors(f"the write of {len(data)} bytes", path):
            with path.open("xb") as stream:
                stream.write(data)
            sync_path(path)
        self._attached[name] = AttachedFile(num_bytes=len(data), checksum=checksum(data))

    def commit(
        self,
        contents: Contents,
        parts: Sequence[Mapping[str, Any]],
        meta: Mapping[str, Any],
        elsewhere: Collection[str] = (),
    ) -> Path:
        """Publish the data written by all ranks. Return `target`.

        elsewhere: data files on other disks. meta: JSON-serializable data, returned on load. Raises ValueError unless
        the parts contain each plane in `contents` exactly once and meta is JSON-serializable. Raises DiskError. After
        an error, the previous checkpoint is still at `target`.
        """
        manifest = gather(contents, parts, meta, self._attached)
        data = manifest.encode()
        for name, file in manifest.files.items():
            if name not in elsewhere:
                self._check_size(self.path / name, file.num_bytes)
        path = self.path / MANIFEST
        with as_disk_errors(f"the write of {len(data)} bytes", path):
            with open(self._lock.fileno(), "wb", closefd=False) as stream:
                stream.write(data)
            os.fsync(self._lock.fileno())
            sync_path(self.path)  # from here on the folder is complete, even after a crash
        with as_disk_errors("the publishing", self.target):
            old = replace_folder(self.path, self.target)
            self._lock.close()
            sync_path(self.target.parent)  # durable before the old one is removed
        if old:
            with contextlib.suppress(DiskError):  # the new checkpoint is published in any case
                remove(old)
        return self.target

    def abort(self) -> None:
        """Remove all written data; no effect after `commit`."""
        if not self._lock.closed:
            shutil.rmtree(self.path, ignore_errors=True)  # `clear` removes any remainder
            self._lock.close()

    def __enter__(self) -> Save:
        return self

    def __exit__(self, *_error: object) -> None:
        self.abort()

    def _check_size(self, path: Path, num_bytes: int) -> None:
        with as_disk_errors("the look at what another rank has written", path):
            size = path.lstat().st_size
        if size != num_bytes:
            raise DiskError(f"{path} has {size} bytes, but {num_bytes} were written.", 0, path)


def foreign_names(folder: Path) -> list[str]:
    """Return names in a folder foreign to a checkpoint; an empty list without a folder."""
    if folder.is_dir():
        names = {path.name for path in folder.iterdir() if not _OWN_FILE.fullmatch(path.name)}
        if names:  # only the manifest lists attached files
            with contextlib.suppress(CheckpointError, OSError):
                names -= Manifest.decode((folder / MANIFEST).read_bytes(), folder).attached.keys()
        return sorted(names)
    return [folder.name] if folder.exists() or folder.is_symlink() else []
