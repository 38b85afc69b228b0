"""Data sets from the `datasets` library: `save_to_disk` folders and hub names.

Only loading is used, which maps files into memory. `map` is not used.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from offload.errors import ConfigError
from offload.extras.data.storage import DataSet, LocalFile, library

_HUB_TIMEOUT_S = 10.0


def from_folder(folder: Path, split: str | None, setting: str) -> DataSet:
    """Return one split from a `save_to_disk` folder. Raises ConfigError and MissingLibraryError."""
    datasets = library("datasets", f"{folder}, a data set that save_to_disk has written,")
    try:
        loaded = datasets.load_from_disk(str(folder))
    except Exception as error:  # a damaged folder raises any exception
        raise ConfigError(
            f"{setting}: {folder} was written by save_to_disk, but cannot be loaded: {type(error).__name__}: {error}. "
            "Save it again."
        ) from error
    rows, split_name = _split_of(loaded, split, str(folder), setting)
    inside = folder / split_name if isinstance(loaded, dict) else folder
    files = [LocalFile(path) for path in sorted(inside.rglob("*")) if path.is_file()]
    stamp, num_bytes = "\0".join(file.stamp for file in files), sum(file.num_bytes for file in files)
    return DataSet(_format_name(str(folder), split_name), num_bytes, tuple(file.path for file in files), stamp, rows)


def from_hub(path: str, name: str | None, revision: str | None, split: str | None, setting: str) -> DataSet:
    """Return one split from a hub data set, downloaded by `datasets` now or earlier.

    Raises ConfigError and MissingLibraryError.
    """
    datasets = library("datasets", f"{setting}={path!r}, which is no file here, as the name of a data set on the hub,")
    label = f"{setting}={path!r}" + (f" at revision {revision!r}" if revision else "")
    try:
        if not os.environ.get("HF_HUB_OFFLINE"):
            hub = library("huggingface_hub", label)
            hub.HfApi().dataset_info(path, revision=revision, timeout=_HUB_TIMEOUT_S)  # fail early if not reachable
        loaded = datasets.load_dataset(path, name, revision=revision, split=split)
    except Exception as error:  # from the network, the hub or the library
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(
            f"{label} does not exist here (looked for {Path(path).absolute()}), and cannot be loaded from the hub: "
            f"{reason[:300]}. Give a file, a folder or a glob; or check the name, the revision, the split and the "
            "network. With HF_HUB_OFFLINE=1 only earlier downloads are used."
        ) from error
    rows, split_name = _split_of(loaded, split, path, setting)
    num_bytes = int(rows.data.nbytes)
    return DataSet(
        _format_name(path, split_name),
        num_bytes,
        (),
        f"{path} {name} {revision} {split_name} {rows._fingerprint}",
        rows,
    )


def _split_of(loaded: Any, split: str | None, where: str, setting: str) -> tuple[Any, str]:
    """Return the rows and the name of one split. Raises ConfigError for an ambiguous or absent split."""
    if not isinstance(loaded, dict):
        loaded_split = str(loaded.split or "")
        if split is not None and loaded_split not in ("", split) and "[" not in split:
            raise ConfigError(
                f"{setting}: {where} holds the split {loaded_split!r}, but the split {split!r} is requested."
            )
        return loaded, split or ""
    splits = list(loaded)
    if split is None and len(splits) == 1:
        split = splits[0]
    if split is None or split not in loaded:
        problem = f"has no split {split!r}" if split is not None else "has several splits, and none is named"
        raise ConfigError(
            f"{setting}: {where} {problem}; it has {', '.join(splits)}. Name one, as data.sources: "
            f"[{{path: {where}, split: {splits[0]}}}]."
        )
    return loaded[split], split


def _format_name(where: str, split: str) -> str:
    return f"{where}[{split}]" if split else where
