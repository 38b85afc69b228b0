"""Checkpoints over the disks of several machines. Each disk has the manifest and the data files of the local ranks.

Two ranks share a disk if a file created by one is visible to the other, so shared folders (NFS, Lustre) and local disks
follow the same code path. Data needed by a rank but absent on the local disk are copied there once.

A failing rank, for example on a full disk, raises alone and ends; the other ranks then end as after any rank failure.
"""

from __future__ import annotations

import pickle
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch

from offload.checkpoint.manifest import CHUNK_BYTES, MANIFEST, Manifest, checksum, raw
from offload.checkpoint.reader import Reader
from offload.distributed.comm import Comm
from offload.distributed.outcomes import share_failure
from offload.errors import CheckpointError, common
from offload.files.atomic_folder import as_disk_errors, make_partial, remove, replace_folder
from offload.native.io import sync_path

_Value = TypeVar("_Value")


def keepers(comm: Comm, folder: Path) -> list[int]:
    """Return for each rank the lowest rank on the same disk at `folder`; a missing folder is created.

    Collective. Raises DiskError, on all ranks.
    """
    if comm.size == 1:
        return [0]
    with ExitStack() as opened:
        with share_failure(comm, "look at the disk"), as_disk_errors("the making", folder):
            folder.mkdir(parents=True, exist_ok=True)
            mark = _make_partial(folder / "disk", opened)
        marks = comm.gather_objects(mark.name, "marks on disks")
        seen = [(folder / name).exists() for name in marks]
        return comm.gather_objects(seen.index(True), "disks of ranks")  # by now every rank has looked


def spread(comm: Comm, folders: Sequence[Path]) -> dict[Path, str]:
    """Copy manifest and attached files of checkpoints to every disk, provided all parts exist on some disk.

    folders: checkpoints visible to this rank, complete or in part. Return the broken checkpoints, each with a reason.
    Collective.
    """
    by_rank = comm.gather_objects({folder: _read_disk(folder) for folder in folders}, "checkpoints on disks")
    broken = {}
    for folder in dict.fromkeys(folder for each in by_rank for folder in each):
        disks = [each.get(folder) for each in by_rank]
        present: dict[str, set[str]] = {}
        for disk in filter(None, disks):
            present.setdefault(disk.mark, set()).update(disk.present)
        missing = {disk: sorted(disk.files - present[disk.mark]) for disk in filter(None, disks)}
        # Disks may hold different saves of one name: the most complete one counts.
        best = min(missing, key=lambda disk: len(missing[disk]), default=None)
        if best is None or missing[best]:
            name = MANIFEST if best is None else missing[best][0]
            broken[folder] = f"{folder / name} is missing on the disks of all machines."
            continue
        ranks_without = [rank for rank, disk in enumerate(disks) if disk is None or disk.mark != best.mark]
        if ranks_without:
            keeper = keepers(comm, folder.parent)
            takers = {keeper[rank] for rank in ranks_without}
            with _copying(comm, folder, dict(best.small), disks.index(best), takers) as partial:
                if partial is not None:
                    with as_disk_errors("the publishing", folder):
                        old = replace_folder(partial, folder)
                        sync_path(folder.parent)
                    if old:
                        remove(old)
    return broken


def copy_missing_files(comm: Comm, reader: Reader, wanted: Collection[str]) -> None:
    """Copy data files wanted by this rank but absent on the local disk. Collective.

    Raises CheckpointError, on all ranks, if a file exists on no disk.
    """
    missing_by_rank = comm.gather_objects(reader.absent & set(wanted), "files that a disk lacks")
    if not any(missing_by_rank):
        return
    keeper = keepers(comm, reader.path.parent)
    has = comm.gather_objects(reader.num_bytes_of.keys() - reader.absent, "files on disks")
    for name in sorted(set().union(*missing_by_rank)):
        takers = {keeper[rank] for rank, names in enumerate(missing_by_rank) if name in names}
        source = next((rank for rank, names in enumerate(has) if name in names), None)
        if source is None:
            missing = reader.path / name
            raise common(CheckpointError(f"{missing} is missing on the disks of all machines.", missing))
        with _copying(comm, reader.path, {name: reader.num_bytes_of[name]}, source, takers) as partial:
            if partial is not None:
                # Only a complete file, already on the disk, gets the name.
                with as_disk_errors("the publishing", reader.path):
                    (partial / name).rename(reader.path / name)
                    sync_path(reader.path)
    comm.barrier("files on all disks")  # one rank copies for all others on its disk
    reader.open_data()


def broadcast_value(comm: Comm, value: _Value, label: str) -> _Value:
    """Return the value from rank 0, with any length. Collective."""
    data = pickle.dumps(value if comm.rank == 0 else None)
    # The length first: the other ranks need a buffer of this size.
    num_bytes = comm.from_rank(0, len(data), f"{label}: length")
    flat = torch.frombuffer(bytearray(data.ljust(num_bytes)), dtype=torch.uint8)[:num_bytes]
    comm.broadcast(flat, 0, label)
    result: _Value = pickle.loads(flat.numpy().tobytes())
    return result


class _DiskContents(NamedTuple):
    """Checkpoint parts on a disk.

    mark: manifest checksum. present: data files on this disk. files: data files listed in the manifest. small:
    name and size of the files stored on every disk.
    """

    mark: str
    present: frozenset[str]
    files: frozenset[str]
    small: tuple[tuple[str, int], ...]


def _read_disk(folder: Path) -> _DiskContents | None:
    """Return the checkpoint parts on this disk; None without a readable manifest."""
    with suppress(OSError, CheckpointError):
        data = (folder / MANIFEST).read_bytes()
        manifest = Manifest.decode(data, folder / MANIFEST)
        small = *((name, its.num_bytes) for name, its in manifest.attached.items()), (MANIFEST, len(data))
        present = frozenset(name for name in manifest.files if (folder / name).is_file())
        return _DiskContents(checksum(data), present, frozenset(manifest.files), small)
    return None


@contextmanager
def _copying(
    comm: Comm, folder: Path, num_bytes: Mapping[str, int], source: int, takers: Collection[int]
) -> Iterator[Path | None]:
    """Copy files with sizes `num_bytes` from the disk of rank `source` to a partial folder on each taker disk.

    Yield the partial folder on takers, None on other ranks. Remaining files in the folder are removed afterwards.
    Every rank takes part in each broadcast.
    """
    with ExitStack() as opened:
        partial = None
        if comm.rank in takers:
            with as_disk_errors("the making", folder):
                partial = _make_partial(folder, opened)
        for name, size in num_bytes.items():
            with as_disk_errors("the copy", folder / name), ExitStack() as one:
                original = copy = None
                # Buffered files: a call without a buffer may read or write less than a piece, with no error.
                if comm.rank == source:
                    original = one.enter_context((folder / name).open("rb"))
                if partial is not None:
                    copy = one.enter_context((partial / name).open("wb"))
                # In pieces: a file may be larger than memory.
                for begin in range(0, size, CHUNK_BYTES):
                    piece = torch.zeros(min(CHUNK_BYTES, size - begin), dtype=torch.uint8)
                    if original is not None:
                        # Zeros remain behind the end of a truncated file. Its checksum in the manifest shows them.
                        original.readinto(raw(piece).data)
                    comm.broadcast(piece, source, f"copy of {name}")
                    if copy is not None:
                        copy.write(raw(piece).data)
            if partial is not None:
                sync_path(partial / name)
        if partial is not None:
            sync_path(partial)  # before the caller gives the files their names
        yield partial


def _make_partial(target: Path, opened: ExitStack) -> Path:
    """Create a partial folder for `target`. Closing `opened` removes the folder; after a crash `clear` does."""
    path, lock = make_partial(target)
    opened.enter_context(lock)
    opened.callback(shutil.rmtree, path, ignore_errors=True)
    return path
