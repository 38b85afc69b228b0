"""What a file holds: every format read into one of four records, with errors that name the file and the line.

format              one record
text                a file; long files come in pieces of about 256 Ki characters, cut at line ends
jsonl               {"text": "..."}
messages            {"messages": [{"role": "user", "content": "..."}, ...]}, optionally with "tools"
sharegpt            {"conversations": [{"from": "human", "value": "..."}, ...]}, optionally with "system"
alpaca              {"instruction": "...", "input": "...", "output": "..."}, optionally with "system"
prompt-completion   {"prompt": "...", "completion": "..."}
tokens              .npy: integers [tokens], or [documents, tokens]; .bin: bare uint16
                    (uint32 for vocabularies above 65536), or the same after llm.c's header

Records stand one a line (.jsonl; empty lines are passed over) or in one JSON array (.json).
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import xxhash

from offload.data.kinds import RECORD_SUFFIXES, TOKEN_SUFFIXES
from offload.data.sources import STDLIB_CHAT, SourceFile
from offload.errors import ConfigError

_PIECE_CHARS = 1 << 18
_PIECE_TOKENS = 1 << 20
_LLMC_MAGIC = 20240520

_KEYS = {
    "jsonl": ("text",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt-completion": ("prompt", "completion"),
}
_SHAREGPT_ROLES = {
    "system": "system",
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "tool": "tool",
    "observation": "tool",
}
CHAT_FORMATS = frozenset({"messages", "sharegpt", "alpaca", "prompt-completion", STDLIB_CHAT})


@dataclass(frozen=True)
class Text:
    """Plain text: a document, or a piece of one that does not open or close it."""

    where: str
    text: str
    opens: bool = True
    closes: bool = True


@dataclass(frozen=True)
class Chat:
    """A conversation in the messages format; the assistant's messages are what is trained."""

    where: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None


@dataclass(frozen=True)
class Pair:
    """A prompt and the completion to train on."""

    where: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class Ids:
    """Token ids [n] that are used as they are; `stream` when they come from a file that marks no documents."""

    where: str
    ids: np.ndarray
    closes: bool
    stream: bool


Record = Text | Chat | Pair | Ids


def texts_of(record: Record) -> list[str]:
    """Return the texts in a record, in order; of token ids there are none."""
    if isinstance(record, Text):
        return [record.text]
    if isinstance(record, Pair):
        return [record.prompt, record.completion]
    return [message["content"] for message in record.messages] if isinstance(record, Chat) else []


def detect_format(file: SourceFile) -> str:
    """Return the format of `file`: the one asked for, or by its ending and its first record's keys under `auto`."""
    if file.format != "auto":
        return file.format
    suffix = file.path.suffix.lower()
    if suffix in TOKEN_SUFFIXES:
        return "tokens"
    if suffix not in RECORD_SUFFIXES:
        return "text"
    for where, record in _json_records(file):
        fitting = [
            name for name, keys in _KEYS.items() if isinstance(record, dict) and all(key in record for key in keys)
        ]
        if len(fitting) == 1:
            return fitting[0]
        if fitting:
            raise ConfigError(
                f"{where} has the keys {sorted(record)}, which fit several formats: set --data.format to "
                f"{' or '.join(fitting)}."
            )
        found = f"the keys {sorted(record)}" if isinstance(record, dict) else f"a value of type {type(record).__name__}"
        known = "; ".join(f"{data_format}: {', '.join(keys)}" for data_format, keys in _KEYS.items())
        raise ConfigError(
            f"{where} has {found}, which is no known format. The formats and their keys are {known}. See data.format."
        )
    return "jsonl"  # an empty file: any format reads nothing from it


def read_records(file: SourceFile, vocab_size: int) -> Iterator[Record]:
    """Yield the records of `file` in order. `vocab_size` decides the width of the ids in a headerless .bin file."""
    if file.format == "text":
        yield from _read_text(file)
    elif file.format == "tokens":
        yield from _read_tokens(file, vocab_size)
    elif file.format == STDLIB_CHAT:
        for line, messages in docstring_chats("".join(piece.text for piece in _read_text(file)), file.name):
            yield Chat(f"{file.path}:{line}", messages)
    else:
        for where, record in _json_records(file):
            yield _parse(file.format, record, where)


def _read_text(file: SourceFile) -> Iterator[Text]:
    try:
        with file.path.open(encoding="utf-8-sig") as stream:
            held, opens = "", True
            while block := stream.read(_PIECE_CHARS):
                if len(held) >= _PIECE_CHARS:  # something is held back, so that the last piece is known to be the last
                    cut = held.rfind("\n") + 1 or len(held)
                    yield Text(str(file.path), held[:cut], opens, closes=False)
                    held, opens = held[cut:], False
                held += block
            yield Text(str(file.path), held, opens, closes=True)
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"{file.path} is not UTF-8 text (byte {error.start}: {error.reason}). Convert it, or leave it out of "
            f"data.source; data.format={file.format}."
        ) from error


def _json_records(file: SourceFile) -> Iterator[tuple[str, Any]]:
    """Yield (place, record) for each record of a JSON-lines file or of a JSON array."""
    with file.path.open("rb") as stream:
        start = stream.read(64).removeprefix(b"\xef\xbb\xbf").lstrip()
        stream.seek(0)
        if start.startswith(b"["):
            for number, record in enumerate(_parse_json(stream.read(), str(file.path)), 1):
                yield f"{file.path}, record {number}", record
            return
        for number, line in enumerate(stream, 1):
            if line.strip():
                yield f"{file.path}:{number}", _parse_json(line, f"{file.path}:{number}")


def _parse_json(data: bytes, where: str) -> Any:
    try:
        return json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # bad JSON, bad UTF-8, a thousand brackets
        raise ConfigError(
            f"{where} is not valid JSON: {error}. One record a line is expected, or one array of records."
        ) from error


def _parse(data_format: str, record: Any, where: str) -> Record:
    """Turn one JSON value into a record, or say what it lacks."""
    if not isinstance(record, dict):
        raise ConfigError(
            f"{where} is a value of type {type(record).__name__}; data.format={data_format} needs an object with "
            f"{_named(_KEYS[data_format])}."
        )
    missing = [key for key in _KEYS[data_format] if key not in record]
    if missing:
        raise ConfigError(
            f"{where} lacks {_named(missing)} for data.format={data_format}; "
            f"it has {_named(sorted(record)) or 'nothing'}."
        )
    if data_format == "jsonl":
        return Text(where, _string(record, "text", where))
    if data_format == "prompt-completion":
        return Pair(where, _string(record, "prompt", where), _string(record, "completion", where))
    if data_format == "alpaca":
        extra = _string(record, "input", where) if record.get("input") else ""
        question = _string(record, "instruction", where) + (f"\n\n{extra}" if extra else "")
        answer = _string(record, "output", where)
        return Chat(where, [*_system(record, where), _message("user", question), _message("assistant", answer)])
    turns = record["conversations" if data_format == "sharegpt" else "messages"]
    if not isinstance(turns, list) or not turns:
        raise ConfigError(
            f"{where}: {_KEYS[data_format][0]!r} must be a list of at least one message (data.format={data_format})."
        )
    if data_format == "sharegpt":
        return Chat(
            where,
            _system(record, where) + [_sharegpt_turn(turn, f"{where}, message {i}") for i, turn in enumerate(turns, 1)],
        )
    return Chat(
        where, [_checked_message(turn, f"{where}, message {i}") for i, turn in enumerate(turns, 1)], record.get("tools")
    )


def _sharegpt_turn(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        raise ConfigError(f"{where} lacks 'from' or 'value' for data.format=sharegpt.")
    if turn["from"] not in _SHAREGPT_ROLES:
        raise ConfigError(
            f"{where} is from {turn['from']!r}; the speakers of data.format=sharegpt are {', '.join(_SHAREGPT_ROLES)}."
        )
    return _message(_SHAREGPT_ROLES[turn["from"]], _string(turn, "value", where))


def _checked_message(turn: Any, where: str) -> dict[str, Any]:
    """Return a message whose content is a string; parts of type text are joined, other parts are refused."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise ConfigError(f"{where} lacks a 'role' for data.format=messages.")
    content = turn.get("content")
    if isinstance(content, list):
        if not all(isinstance(part, dict) and isinstance(part.get("text"), str) for part in content):
            raise ConfigError(f"{where} has content that is not text; only text can be trained on.")
        content = "".join(part["text"] for part in content)
    if content is None and turn.get("tool_calls"):
        content = ""
    return {**turn, "content": _string({"content": content}, "content", where)}


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


def _system(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    return [_message("system", _string(record, "system", where))] if record.get("system") else []


def _string(record: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(record[key], str):
        raise ConfigError(f"{where}: {key!r} must be a string, it is {type(record[key]).__name__}.")
    return str(record[key])


def _named(keys: Any) -> str:
    return ", ".join(repr(key) for key in keys)


def _read_tokens(file: SourceFile, vocab_size: int) -> Iterator[Ids]:
    tokens = _open_tokens(file, vocab_size)
    if tokens.ndim == 2:
        for row in tokens:
            yield Ids(str(file.path), np.asarray(row), closes=True, stream=False)
        return
    for start in range(0, len(tokens), _PIECE_TOKENS):
        piece = np.asarray(tokens[start : start + _PIECE_TOKENS])
        yield Ids(str(file.path), piece, closes=start + len(piece) == len(tokens), stream=True)


def _open_tokens(file: SourceFile, vocab_size: int) -> np.ndarray:
    if file.num_bytes == 0:
        return np.zeros(0, np.uint16)
    if file.path.suffix.lower() == ".npy":
        try:
            tokens: np.ndarray = np.load(file.path, mmap_mode="r")
        except ValueError as error:
            raise ConfigError(f"{file.path} is not a .npy file of integers: {error} (data.format=tokens).") from error
        if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2):
            raise ConfigError(
                f"{file.path} holds {tokens.dtype} {list(tokens.shape)}; data.format=tokens needs integers [tokens] or "
                "[documents, tokens]."
            )
        return tokens
    header = np.fromfile(file.path, "<i4", 2) if file.num_bytes >= 1024 else np.zeros(2)
    is_llmc = header[0] == _LLMC_MAGIC  # 256 int32 of header; its version 1 holds uint16 ids
    wide = vocab_size > 65536
    offset, dtype = (1024 if is_llmc else 0), np.dtype("<u4" if wide else "<u2")
    if (file.num_bytes - offset) % dtype.itemsize:
        raise ConfigError(
            f"{file.path} has {file.num_bytes} bytes, not a whole number of {dtype.name} ids (data.format=tokens)."
        )
    return np.memmap(file.path, dtype, mode="r", offset=offset)


# `builtin:stdlib-chat`: questions and answers that are made from docstrings.
_Documented = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
_QUESTIONS = (
    "What does `{name}` do?",
    "Explain the {kind} `{name}` from Python's standard library.",
    "What is `{name}` for?",
    "Give me the documentation of `{name}`.",
    "I found `{name}` in some Python code. What is it?",
    "How would you describe the {kind} `{name}` in `{module}`?",
)


def docstring_chats(source: str, file_name: str) -> Iterator[tuple[int, list[dict[str, str]]]]:
    """Yield (line, messages) for every documented function, class and method of a module, in the order of the file.

    `file_name` is the path inside the standard library, such as `asyncio/tasks.py`. The wording of a question is chosen
    by a hash of the name, so the same Python gives the same chats.
    """
    parts = PurePosixPath(file_name).with_suffix("").parts
    module = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in old modules are not this run's business
        tree = ast.parse(source)
    for node, qualified, kind in _documented(tree.body, f"{module}.", "function"):
        wording = _QUESTIONS[xxhash.xxh3_64_intdigest(qualified.encode()) % len(_QUESTIONS)]
        question = wording.format(name=qualified, kind=kind, module=module)
        answer = ast.get_docstring(node) or ""
        yield node.lineno, [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def _documented(body: list[ast.stmt], prefix: str, function_kind: str) -> Iterator[tuple[_Documented, str, str]]:
    for node in body:
        if not isinstance(node, _Documented):
            continue
        is_class = isinstance(node, ast.ClassDef)
        if ast.get_docstring(node):
            yield node, prefix + node.name, "class" if is_class else function_kind
        if is_class:
            yield from _documented(node.body, f"{prefix}{node.name}.", "method")
