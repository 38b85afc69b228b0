"""File types by name and first bytes, and the refusal of unreadable or ambiguous files.

Training on the wrong files succeeds silently. Therefore a folder must be unambiguous, and skipped files are reported.
"""

from __future__ import annotations

import glob
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path, PurePath
from typing import TypeVar

from offload.errors import ConfigError, counted, first_names
from offload.extras.data.storage import PACKINGS, Place, decompressed_name
from offload.files.pointers import FIRST_BYTES, pointer_error

FilePath = TypeVar("FilePath", bound=PurePath)

CONTAINERS = {
    "json": frozenset({".jsonl", ".json", ".ndjson"}),
    "csv": frozenset({".csv"}),
    "tsv": frozenset({".tsv"}),
    "parquet": frozenset({".parquet"}),
    "arrow": frozenset({".arrow", ".feather"}),
}
"""File endings for each row container."""
ROW_SUFFIXES = frozenset[str]().union(*CONTAINERS.values())
TOKEN_SUFFIXES = frozenset({".npy", ".bin"})
TEXT_SUFFIXES = frozenset(
    {".txt", ".text", ".md", ".rst", ".tex", ".html", ".sql", ".sh", ".toml", ".yaml", ".yml"}
    | {".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go", ".java", ".js", ".ts"}
)
# File types, in the words of error messages.
_TABLE = "table"
_COLUMNS = "columns"
_TOKENS = "token ids"
_PACKED = "packed"
_UTF16 = "UTF-16"
_SUFFIXES_BY_TYPE = {
    "text": TEXT_SUFFIXES,
    "records": CONTAINERS["json"],
    _TABLE: CONTAINERS["csv"] | CONTAINERS["tsv"],
    _COLUMNS: CONTAINERS["parquet"] | CONTAINERS["arrow"],
    _TOKENS: TOKEN_SUFFIXES,
    _PACKED: frozenset({".bz2", ".xz", ".lz4", ".zip", ".tar", ".tgz", ".7z", ".orc"}),
}
UNREAD_SUFFIXES = _SUFFIXES_BY_TYPE[_PACKED]
_FIRST_BYTES = {
    b"PAR1": ".parquet",
    b"ARROW1": ".arrow",
    b"\x1f\x8b": ".gz",
    b"\x28\xb5\x2f\xfd": ".zst",
    b"BZh": ".bz2",
    b"\xfd7zXZ": ".xz",
    b"PK\x03\x04": ".zip",
    b"7z\xbc\xaf": ".7z",
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
}
_DOCUMENTS = {
    b"%PDF": "a PDF document: extract its text first, such as by `pdftotext IN.pdf OUT.txt`",
    b"\xd0\xcf\x11\xe0": "an office document: save its text first, as a .txt file",
    b"\x89PNG": "a picture; rows of conversations name pictures (data.format messages)",
    b"\xff\xd8\xff": "a picture; rows of conversations name pictures (data.format messages)",
    b"SQLite format": "a database: export its rows first, as .csv or .jsonl",
    b"GGUF": "model weights, not text",
}
"""Files often mistaken for text, by their first bytes."""
_NUM_FIRST = max(map(len, (*_FIRST_BYTES, *_DOCUMENTS, FIRST_BYTES)))
_OFFICE = {".docx", ".xlsx", ".pptx", ".odt", ".epub"}
_UNPACK = (
    "a compressed file or archive in an unsupported format (.gz and .zst are supported). Unpack it first (bunzip2, "
    "unxz, unzip, tar -x) and give the unpacked files"
)
_DATA_SET_FILES = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json"})
# Splits by name, as `datasets` has them (`datasets.data_files`): words for each, between these separators.
_SPLIT_NAMES = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "dev", "val"),
    "test": ("test", "testing", "eval", "evaluation"),
}
_SEPARATORS = "[-._ 0-9]"
_SHARD = re.compile(r"data/(.+)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_DATA_SET_TEXTS = frozenset({".txt", ".text"})
"""Texts in data sets. Names in a tree with sources or documents say nothing about splits."""
_NUM_NAMED = 3


def suffix_of(path: PurePath) -> str:
    """Return the lower-case ending that decides the type, e.g. .jsonl for a.jsonl.gz."""
    return decompressed_name(path).suffix.lower()


def container_of(path: PurePath) -> str:
    """Return the row container: a key in CONTAINERS, `ids` for token id files, else `text`."""
    suffix = suffix_of(path)
    if suffix in TOKEN_SUFFIXES:
        return "ids"
    return next((name for name, suffixes in CONTAINERS.items() if suffix in suffixes), "text")


def check_file(place: Place, data_format: str, setting: str = "data.source") -> None:
    """Raise ConfigError for a file that is unreadable in this format or has another type than the name says."""
    file_type, suffix = _file_type(place.name), place.name.suffix.lower()
    label = f"{setting}: {place}"
    if file_type == _PACKED:
        raise ConfigError(f"{label} is {_UNPACK}.")
    if suffix in PACKINGS and file_type in (_COLUMNS, _TOKENS):
        raise ConfigError(
            f"{label} is a compressed file of {file_type}, which need random access: unpack it first "
            f"({PACKINGS[suffix]} {place}), and give the unpacked file."
        )
    with place.open() as stream:  # once: each open of a URL is a request
        start = stream.read(_NUM_FIRST)
    # A clone without git-lfs has short texts in place of files. Training on these texts would succeed.
    if start.startswith(FIRST_BYTES):
        raise pointer_error(label, "the folder of this file")
    if file_type == _TOKENS or data_format == "tokens":
        return
    # Any bytes may be token ids, so only text and rows are checked below.
    document = next((description for magic, description in _DOCUMENTS.items() if start.startswith(magic)), None)
    if suffix in _OFFICE:
        document = "an office document or a book: save its text first, such as by `pandoc IN -t plain -o OUT.txt`"
    if document is not None:
        raise ConfigError(f"{label} is {document}.")
    content_type = _type_by_first_bytes(start)
    if content_type and content_type.startswith(_UTF16):
        raise ConfigError(
            f"{label} begins as UTF-16 text, and text has to be UTF-8: convert it, by "
            f"`iconv -f {content_type} -t UTF-8 IN > OUT`."
        )
    for container, title in (("parquet", "a parquet file"), ("arrow", "an Arrow file")):
        if content_type == f".{container}" and suffix not in CONTAINERS[container]:
            raise ConfigError(
                f"{label} begins as {title} (columns), but its name ends otherwise: rename it to NAME.{container}."
            )
    if content_type in PACKINGS and suffix != content_type:
        raise ConfigError(
            f"{label} begins as a {content_type} file, but its name ends otherwise: rename it to NAME{content_type}, "
            f"such as {place.name.name}{content_type}, or unpack it ({PACKINGS[content_type]})."
        )
    if content_type and content_type in UNREAD_SUFFIXES:
        raise ConfigError(f"{label} is {_UNPACK}.")
    if suffix in PACKINGS and content_type != suffix and place.num_bytes:
        raise ConfigError(
            f"{label} does not begin as a {suffix} file: correct the ending of its name, or compress it again."
        )
    # Past a byte order mark and blanks: the first sign tells rows in JSON from a text.
    first = start[: max(map(len, _FIRST_BYTES))].lstrip(b"\xef\xbb\xbf \t\r\n")[:1]
    if data_format == "preference" and file_type == "text" and first not in (b"{", b"[", b""):
        raise ConfigError(
            f"{label} is a text, and train.method dpo, orpo and reward train on pairs of answers: give rows with the "
            "keys prompt, chosen and rejected (.jsonl, .json, .csv, .parquet), or set --train.method sft."
        )
    if file_type == _COLUMNS and not place.num_bytes:
        raise ConfigError(f"{label} is empty, so it is no valid {suffix} file: write it again, or leave it out.")
    if suffix == ".parquet" and content_type != ".parquet":
        raise ConfigError(f"{label} does not begin as a parquet file (PAR1): it is damaged, or has another format.")


def check_one_type(source: str, paths: Sequence[PurePath], *, is_folder: bool, setting: str = "data.source") -> None:
    """Raise ConfigError unless the files from a folder or glob have one type.

    A folder must also not be an internal folder of the `datasets` library.
    """
    internal_files = sorted(path for path in paths if path.name in _DATA_SET_FILES)
    if is_folder and internal_files:
        raise ConfigError(
            f"{setting}={source!r} is an internal folder of the `datasets` library ({internal_files[0].name} is in "
            "it), not the output of save_to_disk. Name the data files, or write the data set by "
            "`datasets.load_dataset(...).save_to_disk(FOLDER)` and give that folder."
        )
    files_by_type: dict[str, list[PurePath]] = {}
    for path in paths:
        files_by_type.setdefault(_file_type(path), []).append(path)
    if is_folder:
        files_by_type.pop("", None)  # other endings are skipped with a note
    if len(files_by_type) > 1:
        listed = "; ".join(f"{_describe_files(file_type, files)}" for file_type, files in sorted(files_by_type.items()))
        # A README often lies beside data, so the example names rows before texts.
        most = max(files_by_type, key=lambda file_type: (file_type != "text", len(files_by_type[file_type])))
        suffix = Counter(path.suffix for path in files_by_type[most]).most_common(1)[0][0]
        relation, example = "matches", f"FOLDER/*{suffix}"
        # Inside a folder, a glob can be written out. Of another glob, the folder is not known.
        if is_folder:
            relation, example = "is a folder with", f"{source.rstrip('/')}/**/*{suffix}"
            # A glob over several splits would be refused in turn.
            folder = Path(source).expanduser()
            if folder.is_dir() and len(splits := splits_of(files_by_type[most], folder)) > 1:
                example = _glob_of(splits.get("train", min(splits.values())), paths)
        raise ConfigError(
            f"{setting}={source!r} {relation} files of several kinds: {listed}. Only one kind can be read: select "
            f"files by a glob such as {example!r}, or set --data.format (text, jsonl, tokens, ...) to read the files "
            "of one format."
        )


def without_cards(source: str, paths: Sequence[Path], notes: list[str]) -> list[Path]:
    """Return files without the cards of data sets, README.md beside rows; `notes` receives a message. All of a text
    folder are returned: there the file is a text as others.
    """
    cards = [path for path in paths if path.name.lower() == "readme.md"]
    if not cards or all(_file_type(path) in ("text", "") for path in paths):
        return list(paths)
    notes.append(f"{source}: README.md is not read, as the card of a data set. Name it to read it as text.")
    return [path for path in paths if path not in cards]


def _glob_of(files: Sequence[PurePath], among: Sequence[PurePath]) -> str:
    """Return a glob for exactly these files among others; the first file if no short one exists."""
    start = os.path.commonprefix(list(map(str, files)))  # noqa: RUF071 - shards share a part of their names
    rests = [str(path).removeprefix(start) for path in among if str(path).startswith(start)]
    matched = sum("/" not in rest and rest.endswith(files[0].suffix) for rest in rests)
    # A second match of a single file, or a file in a subfolder, would be left out or added.
    if len(files) > 1 and matched == len(files):
        return f"{glob.escape(start)}*{files[0].suffix}"
    return str(files[0])


def skipped_note(source: str, paths: Iterable[PurePath], suffixes: frozenset[str]) -> str | None:
    """Return a note about folder files with other endings. None: no other files."""
    counts = Counter(path.suffix.lower() or path.name for path in paths if suffix_of(path) not in suffixes)
    if not counts:
        return None
    listed = first_names([f"{number} {suffix}" for suffix, number in counts.most_common()], _NUM_NAMED)
    verb = "are"
    if counts.total() == 1:
        verb = "is"
    return (
        f"{counted(counts.total(), 'file')} of {source} {verb} not read, because of the ending: {listed}. A glob reads "
        "any ending."
    )


def splits_of(paths: Iterable[FilePath], folder: PurePath) -> dict[str, list[FilePath]]:
    """Return the files for each split in a folder, as `datasets` has them. Empty: no name tells a split.

    A file may be in several splits, or in none.
    """
    splits: dict[str, list[FilePath]] = {}
    names = {path: path.relative_to(folder) for path in paths}
    # Shards come first: their names may say any split. Folders come before files.
    for path, name in names.items():
        if match := _SHARD.fullmatch(name.as_posix()):
            splits.setdefault(match[1], []).append(path)
    for in_folders in (True, False):
        if splits:
            break
        for path, name in names.items():
            words, end = name.parts[-1:], _SEPARATORS
            if in_folders:
                words, end = name.parts[:-1], f"({_SEPARATORS}|$)"
            for split, keywords in _SPLIT_NAMES.items():
                pattern = f"(^|{_SEPARATORS})({'|'.join(keywords)}){end}"
                if any(re.search(pattern, word, re.IGNORECASE) for word in words):
                    splits.setdefault(split, []).append(path)
    return splits


def select_split(
    source: str,
    paths: Sequence[FilePath],
    folder: PurePath,
    split: str | None,
    notes: list[str],
    *,
    is_glob: bool,
    setting: str = "data.source",
) -> list[FilePath]:
    """Return the files in one split, by file or folder names below `folder`.

    Without `split`: the only split in a folder, all files by a glob. `notes` receives a message about files without
    a split. Raises ConfigError for several splits without a choice, and for an absent one.
    """
    splits = splits_of(paths, folder)
    # Names in a tree with sources or documents are ordinary, unless a split is requested.
    is_data_set = all(suffix_of(path) in _DATA_SET_TEXTS for path in paths) and {"train"} < splits.keys()
    is_tree = all(_file_type(path) in ("text", "") for path in paths) and not is_data_set
    if not splits or (split is None and is_tree):
        check_split(source, split, setting)
        return list(paths)
    others = [path for path in paths if not any(path in files for files in splits.values())]
    if split is None and (len(splits) > 1 or (others and "train" not in splits)):
        firsts = {name: files[0] for name, files in sorted(splits.items())}
        example = _glob_of(splits.get("train") or others or min(splits.values()), paths)
        if others:
            firsts["no split"] = others[0]
        listed = ", ".join(f"{file.relative_to(folder)} ({name})" for name, file in firsts.items())
        raise ConfigError(
            f"{setting}={source!r} has files of several splits: {listed}. Without a choice the run would read all of "
            f"them: name the files of one split, such as {example!r}, or its split in data.sources; "
            "data.eval_share holds out a part. To read several splits, name the files of each."
        )
    # A split may be requested by another name: `val` for `validation`.
    name = next((each for each, names in _SPLIT_NAMES.items() if split in names and split not in splits), split)
    if name is None:
        if is_glob:
            return list(paths)
        (name,) = splits
        if others:
            listed = first_names([str(path.relative_to(folder)) for path in others], _NUM_NAMED)
            notes.append(f"{source} has the split {name} by its file names. Files of no split are not read: {listed}.")
    if name not in splits:
        raise ConfigError(f"{setting}={source!r} has no split {split!r}; it has {', '.join(sorted(splits))}.")
    return splits[name]


def check_split(source: str, split: str | None, setting: str) -> None:
    """Raise ConfigError for a split other than `train` on files without splits."""
    if split not in (None, "train"):
        raise ConfigError(
            f"{setting}: {source!r} has no split {split!r}: files have none, unless their names or folders say train, "
            "validation or test. Leave split out."
        )


def is_saved_data_set(paths: Sequence[PurePath], folder: PurePath) -> bool:
    """Return True for a folder written by `save_to_disk` from `datasets`."""
    names = {path.name for path in paths if path.parent == folder}
    return "dataset_dict.json" in names or {"dataset_info.json", "state.json"} <= names


def _file_type(path: PurePath) -> str:
    """Return the file type for the ending, or an empty string."""
    suffix = suffix_of(path)
    return next((file_type for file_type, suffixes in _SUFFIXES_BY_TYPE.items() if suffix in suffixes), "")


def _type_by_first_bytes(start: bytes) -> str | None:
    # UTF-16 without a mark would pass for UTF-8: a zero byte is a valid character.
    unmarked = {b"\0\xff\0\xff": f"{_UTF16}BE", b"\xff\0\xff\0": f"{_UTF16}LE"}  # zero bytes of Latin letters
    content_type = unmarked.get(bytes(255 * bool(byte) for byte in start[:4]))
    return content_type or next(
        (content_type for magic, content_type in _FIRST_BYTES.items() if start.startswith(magic)), None
    )


def _describe_files(file_type: str, paths: Sequence[PurePath]) -> str:
    names = sorted({path.name for path in paths})
    return f"{counted(len(paths), 'file')} of {file_type or 'another kind'} ({first_names(names, _NUM_NAMED)})"
