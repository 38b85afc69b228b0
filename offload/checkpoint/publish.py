"""A checkpoint in the making: a folder under another name, which takes its own in one step when it is complete.

Its `manifest.json`, empty until then, is the folder's lock (files/atomic_folder.py).
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from offload.checkpoint.manifest import MANIFEST, Attached, Contents, Manifest, checksum, gather
from offload.errors import CheckpointError, ConfigError, DiskError
from offload.files.atomic_folder import as_disk_errors, make_partial, remove, take_place
from offload.native.io import sync_path

_OWN_FILE = re.compile(r"manifest\.json|rank-[0-9]+\.bin")


class Save:
    """One rank's part in a save, on each disk: makes the folder that all ranks there write into, and publishes it.

        with Save(target) as save:                   # every rank: Writer(save.path, ...)
            save.commit(contents, parts, meta)       # parts: of all ranks

    path: the folder to write into. An earlier checkpoint at `target` stays until the new one takes its place. Leaving
    the `with` block without `commit` removes the folder.
    """

    def __init__(self, target: Path) -> None:
        """Raises DiskError; ConfigError where `target` is something else than a checkpoint, which is left alone."""
        if foreign := foreign_names(target):
            raise ConfigError(
                f"{target} holds {', '.join(foreign[:3])}, so it is not a checkpoint, and saving one there would "
                "delete that; give another folder."
            )
        self.target = target
        self._attached: dict[str, Attached] = {}
        with as_disk_errors("the making", target.parent):
            if not target.parent.is_dir():
                target.parent.mkdir(parents=True, exist_ok=True)
                sync_path(target.parent.parent)
            self.path, self._lock = make_partial(target)

    def attach(self, name: str, data: bytes) -> None:
        """Keep a small file with the states. Raises DiskError; FileExistsError where there is one of that name."""
        path = self.path / name
        with as_disk_errors(f"the write of {len(data)} bytes", path):
            with path.open("xb") as stream:
                stream.write(data)
            sync_path(path)
        self._attached[name] = Attached(num_bytes=len(data), checksum=checksum(data))

    def commit(
        self,
        contents: Contents,
        parts: Sequence[Mapping[str, Any]],
        meta: Mapping[str, Any],
        elsewhere: Collection[str] = (),
    ) -> Path:
        """Publish what the ranks wrote; return `target`.

        elsewhere: the data files that are on other disks. meta: anything for JSON, given back as JSON gives it back.
        Raises ValueError where the parts do not hold each plane of `contents` exactly once or meta is not for JSON;
        DiskError. What was at `target` is there still then.
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
            sync_path(self.path)  # after this the folder is complete, whatever happens
        with as_disk_errors("the publishing", self.target):
            old = take_place(self.path, self.target)
            self._lock.close()
            sync_path(self.target.parent)  # before the old one goes
        if old:
            with contextlib.suppress(DiskError):  # the new one is there all the same
                remove(old)
        return self.target

    def abort(self) -> None:
        """Remove what was written; nothing to do after `commit`."""
        if not self._lock.closed:
            shutil.rmtree(self.path, ignore_errors=True)  # what is left then is removed by `clear`
            self._lock.close()

    def __enter__(self) -> Save:
        return self

    def __exit__(self, *_error: object) -> None:
        self.abort()

    def _check_size(self, path: Path, num_bytes: int) -> None:
        with as_disk_errors("the look at what another rank has written", path):
            found = path.lstat().st_size
        if found != num_bytes:
            raise DiskError(f"{path} has {found} bytes where {num_bytes} were written.", 0, path)


def foreign_names(folder: Path) -> list[str]:
    """Return what is in a folder that no checkpoint holds; nothing where there is no folder."""
    if folder.is_dir():
        names = {path.name for path in folder.iterdir() if not _OWN_FILE.fullmatch(path.name)}
        if names:  # what is attached is known by the manifest alone
            with contextlib.suppress(CheckpointError, OSError):
                names -= Manifest.decode((folder / MANIFEST).read_bytes(), folder).attached.keys()
        return sorted(names)
    return [folder.name] if folder.exists() or folder.is_symlink() else []
