"""What kind of data a file is, by its name and its first bytes; and the refusal of what cannot be read, or be meant.

Reading the wrong files trains well and says nothing. So a folder is only taken for data where it leaves no choice, and
what is not read is named.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath

from offload.errors import ConfigError

RECORD_SUFFIXES = frozenset({".jsonl", ".json", ".ndjson"})
TOKEN_SUFFIXES = frozenset({".npy", ".bin"})
TEXT_SUFFIXES = frozenset(
    {".txt", ".text", ".md", ".rst", ".tex", ".html", ".sql", ".sh", ".toml", ".yaml", ".yml"}
    | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts"}
)
_READ = {"text": TEXT_SUFFIXES, "records": RECORD_SUFFIXES, "token ids": TOKEN_SUFFIXES}

_TABLE, _COLUMNS, _PACKED = "table", "columns", "packed"
_NOT_READ = {
    _TABLE: frozenset({".csv", ".tsv"}),
    _COLUMNS: frozenset({".parquet", ".arrow", ".feather", ".orc"}),
    _PACKED: frozenset({".gz", ".zst", ".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z"}),
}
UNREAD_SUFFIXES = frozenset[str]().union(*_NOT_READ.values())
_FIRST_BYTES = {
    b"PAR1": _COLUMNS,
    b"ARROW1": _COLUMNS,
    b"\x1f\x8b": _PACKED,
    b"\x28\xb5\x2f\xfd": _PACKED,
    b"BZh": _PACKED,
    b"\xfd7zXZ": _PACKED,
    b"PK\x03\x04": _PACKED,
    b"7z\xbc\xaf": _PACKED,
}
_ADVICE = {
    _TABLE: "a table, whose header and separators would be trained on as text. Write its rows as JSON lines, by "
    "`python -c 'import csv, json, sys; [print(json.dumps(row)) for row in csv.DictReader(sys.stdin)]' < IN > "
    'OUT.jsonl` with a column named "text" (or those of another data.format), or set --data.format text where it is '
    "to be read as it stands",
    _COLUMNS: "columns in a binary format, which is not read yet. Write them as JSON lines, by `python -c 'import "
    'datasets; datasets.load_dataset("parquet", data_files="IN")["train"].to_json("OUT.jsonl")\'` ("arrow" for '
    ".arrow files), and give those",
    _PACKED: "a packed file, which is not read yet. Unpack it first (gunzip, zstd -d, bunzip2, unxz, unzip, tar -x) "
    "and give what was in it",
}
_DATA_SET_FILES = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json"})
_SPLIT = re.compile(r"(train|test|validation|valid|val|dev|eval)([-_.]?\d.*)?")
_NUM_NAMED = 3


def check_file(path: Path, data_format: str) -> None:
    """Raise ConfigError for a file that cannot be read in that format, or would be read as what it is not."""
    kind = _kind(path)
    if data_format != "tokens" and kind != "token ids" and kind not in _NOT_READ:
        kind = _by_first_bytes(path) or kind
    if kind in _NOT_READ and not (kind == _TABLE and data_format == "text"):
        raise ConfigError(f"data.source: {path} is {_ADVICE[kind]}.")


def check_choice(source: str, paths: Sequence[Path], *, is_folder: bool) -> None:
    """Raise ConfigError unless files that were found, and not named one by one, are of one kind.

    A folder must not be a data set with files of its own either, nor have splits of its own.
    """
    own = sorted(path for path in paths if path.name in _DATA_SET_FILES)
    if is_folder and own:
        raise ConfigError(
            f"data.source={source!r} is a folder that a data set keeps for itself ({own[0].name} is there), which is "
            'not read yet. Write it as JSON lines, by `datasets.load_from_disk(...)["train"].to_json("OUT.jsonl")` or '
            "load_dataset, or name the files that are meant."
        )
    kinds: dict[str, list[Path]] = {}
    for path in paths:
        kinds.setdefault(_kind(path), []).append(path)
    if is_folder:
        kinds.pop("", None)  # what has none of the endings is left out, and a note says so
    if len(kinds) > 1:
        listed = "; ".join(f"{_counted(kind, found)}" for kind, found in sorted(kinds.items()))
        most = max(kinds, key=lambda kind: (kind != "text", len(kinds[kind])))
        suffix = Counter(path.suffix for path in kinds[most]).most_common(1)[0][0]
        what = "is a folder with" if is_folder else "matches"
        base = source.rstrip("/") + "/**" if is_folder else "FOLDER"
        raise ConfigError(
            f"data.source={source!r} {what} files of several kinds: {listed}. Which of them are meant cannot be told: "
            f"name them, by a glob such as '{base}/*{suffix}', or set --data.format (text, jsonl, tokens, ...), which "
            "takes those files alone."
        )
    if is_folder and not kinds.keys() <= {"text"}:
        _check_splits(source, paths)


def left_out(source: str, paths: Iterable[Path], suffixes: frozenset[str]) -> str | None:
    """Return a note about the files of a folder that have none of these endings; None where all have one."""
    found = Counter(path.suffix.lower() or path.name for path in paths if path.suffix.lower() not in suffixes)
    if not found:
        return None
    listed = [f"{number} {suffix}" for suffix, number in found.most_common(_NUM_NAMED)]
    more = ", ..." if len(found) > _NUM_NAMED else ""
    return (
        f"{_files(found.total())} of {source} {'is' if found.total() == 1 else 'are'} not read, by the ending: "
        f"{', '.join(listed)}{more}. A glob takes any."
    )


def _check_splits(source: str, paths: Sequence[Path]) -> None:
    splits: dict[str, Path] = {}
    for path in paths:
        for name in (path.parent.name, path.stem):
            if found := _SPLIT.fullmatch(name.lower()):
                splits.setdefault(found[1], path)
    if "train" in splits and len(splits) > 1:
        listed = ", ".join(str(path.relative_to(source)) for _, path in sorted(splits.items()))
        raise ConfigError(
            f"data.source={source!r} is a folder with splits of its own: {listed}. All of them would be trained on: "
            f"name those that are meant, such as {str(splits['train'])!r}; data.eval_fraction holds out a part of them."
        )


def _kind(path: PurePath) -> str:
    """Return the kind that a file's ending tells, or an empty string."""
    suffix = path.suffix.lower()
    return next((kind for kind, suffixes in {**_READ, **_NOT_READ}.items() if suffix in suffixes), "")


def _by_first_bytes(path: Path) -> str | None:
    with path.open("rb") as stream:
        start = stream.read(8)
    return next((kind for magic, kind in _FIRST_BYTES.items() if start.startswith(magic)), None)


def _counted(kind: str, paths: Sequence[Path]) -> str:
    names = sorted({path.name for path in paths})
    shown = ", ".join(names[:_NUM_NAMED]) + (", ..." if len(names) > _NUM_NAMED else "")
    return f"{_files(len(paths))} of {kind or 'another kind'} ({shown})"


def _files(number: int) -> str:
    return "1 file" if number == 1 else f"{number:,} files"
