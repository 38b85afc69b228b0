"""What `doctor` tells: what this machine has, and which of the paths through offload are live on it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload import native
from offload.errors import DiskError, OffloadError
from offload.native_io import ALIGNMENT_BYTES, IoEngine
from offload.planning.environment import describe_environment
from offload.tiers.directories import check_dirs, file_system, free_bytes
from offload.tiers.folder import RunFolders, find_stale, remove_stale
from offload.tiers.host import Arena


def diagnose(nvme_dirs: Sequence[str], clean: bool) -> dict[str, Any]:
    """Return plain data on the machine and on each of the directories, after removing stale folders if `clean`.

    Raises ConfigError where two of the directories are the same.
    """
    found: dict[str, Any] = {"environment": describe_environment(), "kernels": native.describe()}
    cleaned = _clean(nvme_dirs) if clean else None
    with IoEngine("auto") as engine:
        engine.register(_pages(1 << 20))
        found["io"] = {
            "engine": engine.name,
            "why_not_better": engine.why or None,
            "registered": not engine.why_unregistered,
            "why_unregistered": engine.why_unregistered or None,
        }
        found["nvme"] = [_describe_dir(given, engine) for given in nvme_dirs]
    usable = [each["dir"] for each in found["nvme"] if each["usable"]]
    if usable:
        check_dirs(usable)  # each is sound: this is about all of them together
    found["cleaned"] = cleaned
    return found


def _describe_dir(given: str, engine: IoEngine) -> dict[str, Any]:
    """Do in a directory what a run does there, on a small scale."""
    about: dict[str, Any] = {"dir": given, "file_system": None, "free_bytes": None, "usable": False, "refusal": None}
    about |= {"direct": None, "why_buffered": None, "stale": [_plain(stale) for stale in find_stale([given])]}
    path = Path(given)
    if path.is_dir():
        about |= {"file_system": file_system(path.resolve()), "free_bytes": free_bytes(path)}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of stale folders, which are listed
            folders = RunFolders([given], ALIGNMENT_BYTES)
        with folders:
            about |= _try_direct(folders.paths[0] / "block", engine)
    except OffloadError as error:
        about["refusal"] = str(error)
    else:
        about["usable"] = True
    return about


def _try_direct(path: Path, engine: IoEngine) -> dict[str, Any]:
    """Write and read one block; a file system may take the flag O_DIRECT and refuse the transfer."""
    block = _pages(ALIGNMENT_BYTES)
    why = ""
    for direct in (True, False):
        file = engine.open(path, num_bytes=ALIGNMENT_BYTES, direct=direct)
        try:
            engine.write(file, 0, block).wait()
            engine.read(file, 0, block).wait()
        except DiskError as error:
            if not file.is_direct:
                raise
            why = str(error)
            continue
        finally:
            file.close()
        return {"direct": file.is_direct, "why_buffered": why or file.why_buffered or None}
    raise AssertionError("the buffered attempt returns or raises")


def _clean(nvme_dirs: Sequence[str]) -> dict[str, Any]:
    cleaned = remove_stale(nvme_dirs)
    return {
        "removed": [_plain(stale) for stale in cleaned.removed],
        "failed": [_plain(stale) | {"reason": reason} for stale, reason in cleaned.failed],
    }


def _plain(stale: Any) -> dict[str, Any]:
    return dataclasses.asdict(stale) | {"path": str(stale.path)}


def _pages(num_bytes: int) -> Any:
    import torch

    return Arena(num_bytes).take(num_bytes, torch.uint8)
