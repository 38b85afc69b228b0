"""Rows and files to records: five record types for all formats; errors name file and line.

docs/reference/data.md describes the formats. `row_keys` lists the optional keys of rows and messages, `rows` reads the
row files.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from offload.errors import ConfigError, nearest, shorten
from offload.extras.data.docstrings import docstring_chats
from offload.extras.data.packing import IGNORE
from offload.extras.data.pictures import Picture, PictureMatcher, has_picture
from offload.extras.data.row_keys import (
    MARKS,
    NO_VARIABLES,
    TEMPLATE_KEYS,
    check_row,
    columns_for,
    is_empty,
    mark_of,
    refused_in,
    typed,
    without_marks,
)
from offload.extras.data.rows import BadRow, columns_of, json_reason, open_text, read_rows
from offload.extras.data.sources import STDLIB_CHAT, SourceFile
from offload.extras.data.storage import LocalFile

_PIECE_CHARS = 1 << 18
_LONG_CHARS = 1 << 21  # a row text up to one batch stays whole
_PIECE_TOKENS = 1 << 20
_LLMC_MAGIC = 20240520

_KEYS = {
    "jsonl": ("text",),
    "messages": ("messages",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction", "output"),
    "prompt-completion": ("prompt", "completion"),
    "preference": ("chosen", "rejected"),
    "tokens": ("input_ids",),
}
_USUAL_NAMES = {
    "prompt": ("prompt", "question", "query", "input", "instruction", "problem", "source"),
    "completion": ("completion", "answer", "response", "output", "solution", "target", "reply"),
    "input": ("context", "passage", "article", "document", "paragraph", "background", "evidence"),
    "system": ("system_message", "instructions", "system"),
}
"""Usual column names for texts in other data sets."""
_NO_PICTURES = "has pictures, and preferences are learned between texts alone (data.format=preference)."
_NUM_NAMED = 8  # columns in a note
_NUM_FIRST = 10  # rows searched for a readable one
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
RENDERED_FORMATS = frozenset({"messages", "sharegpt", "alpaca", STDLIB_CHAT})
"""Formats with one `Chat` per row."""
CHAT_FORMATS = RENDERED_FORMATS | {"prompt-completion", "preference"}


@dataclass(frozen=True)
class Text:
    """Plain text: a document, or a piece. A middle piece neither opens nor closes the document."""

    where: str
    text: str
    opens: bool = True
    closes: bool = True


@dataclass(frozen=True)
class Chat:
    """A conversation in the messages format.

    Assistant messages are trained, from message `num_prompt` on if the row separates prompt and answer. `marks`
    override this for single messages, by index from 0. `options` are variables for the chat template. `pictures`: the
    pictures in order; the messages hold the placeholders.
    """

    where: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None = None
    num_prompt: int | None = None
    pictures: tuple[Picture, ...] = ()
    marks: Mapping[int, bool] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    def trains(self, index: int) -> bool:
        """Return True if a message is trained."""
        by_role = self.messages[index]["role"] == "assistant" and index >= (self.num_prompt or 0)
        return self.marks.get(index, by_role)


@dataclass(frozen=True)
class Pair:
    """A prompt and the completion to train on."""

    where: str
    prompt: str
    completion: str


@dataclass(frozen=True)
class Preference:
    """Two answers to one prompt, the first preferred."""

    where: str
    chosen: Chat | Pair
    rejected: Chat | Pair


@dataclass(frozen=True)
class Ids:
    """Token ids [n], used without change.

    `stream`: the file does not mark documents. `trained` bool [n], None: all tokens.
    """

    where: str
    ids: np.ndarray
    closes: bool
    stream: bool
    trained: np.ndarray | None = None


Record = Text | Chat | Pair | Preference | Ids


def texts_of(record: Record) -> list[str]:
    """Return the texts in a record, in order. Empty for token ids."""
    if isinstance(record, Text):
        return [record.text]
    if isinstance(record, Pair):
        return [record.prompt, record.completion]
    if isinstance(record, Preference):
        return [*texts_of(record.chosen), *texts_of(record.rejected)]
    if isinstance(record, Ids):
        return []
    contents = [message["content"] for message in record.messages]
    parts = [part for each in contents if not isinstance(each, str) for part in each]
    return [each for each in contents if isinstance(each, str)] + [
        text for part in parts for text in (part.get("text"), part.get(part["type"])) if isinstance(text, str)
    ]


def untrained_roles(record: Record) -> set[str]:
    """Return the roles in a conversation if no message is trained and none has the role assistant."""
    if not isinstance(record, Chat) or any(record.trains(index) for index in range(len(record.messages))):
        return set()
    roles = {message["role"] for message in record.messages}
    return set() if "assistant" in roles else roles


def picture_bytes(record: Record) -> int:
    """Return the picture bytes stored inside a record."""
    return sum(len(each.data or b"") for each in record.pictures) if isinstance(record, Chat) else 0


def detect_format(file: SourceFile) -> str:
    """Return the format for `file`: the configured one, or for `auto` by file ending, columns or first row keys.

    Raises ConfigError, also for a table without a required column, and for a key in `columns` that no format reads.
    """
    _check_columns(file)
    if file.is_whole:
        if file.format != "auto":
            return file.format
        return "tokens" if file.container == "ids" else "text"
    names = columns_of(file)
    if file.format != "auto":
        if names is not None:
            _check_keys(file.format, names, str(file.place), file.columns)
        return file.format
    if names is None:
        return _detect_by_rows(file)
    return _detect_by_keys(names, str(file.place), file.columns) if names else "jsonl"


def _detect_by_rows(file: SourceFile) -> str:
    """Return the format of the first rows: of the first row with the keys of a format. Raises ConfigError without one.

    Earlier rows are then bad rows.
    """
    problem: ConfigError | None = None
    for where, row in islice(read_rows(file), _NUM_FIRST):
        if isinstance(row, BadRow):
            continue
        try:
            if not isinstance(row, dict):
                raise ConfigError(
                    f"{where} has a value of type {type(row).__name__}, which is no known format. {_describe_formats()}"
                )
            return _detect_by_keys(sorted(row), where, file.columns)
        except ConfigError as error:
            problem = problem or error
    if problem is None:
        return "jsonl"  # no rows: every format reads nothing. Bad rows: the later read reports the error
    raise problem


def _check_columns(file: SourceFile) -> None:
    known = list(dict.fromkeys(key for name, keys in _KEYS.items() for key in (*keys, *columns_for(name))))
    for key in file.columns:
        if key not in known:
            raise ConfigError(
                f"data.columns has the key {shorten(repr(key))} for {file.place}, and no format reads this "
                f"key{nearest(key, known)}; the keys are {', '.join(known)}."
            )


def _detect_by_keys(names: list[str], where: str, columns: Mapping[str, str]) -> str:
    """Return the one format with all keys in `names`. Raises ConfigError."""
    # A renamed column counts under both names.
    available = {*names, *(key for key, column in columns.items() if column in names)}
    fitting = [name for name, keys in _KEYS.items() if all(key in available for key in keys)]
    if len(fitting) > 1 and "preference" in fitting:  # preferences are requested by train.method
        fitting.remove("preference")
    if columns and len(fitting) > 1:  # the format of the renamed columns
        fitting = [name for name in fitting if columns.keys() <= {*_KEYS[name], *columns_for(name)}] or fitting
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ConfigError(
            f"{where} has the keys {sorted(names)}, which fit several formats: set --data.format to "
            f"{' or '.join(fitting)}."
        )
    renamed = f" (with data.columns {dict(columns)})" if columns else ""
    raise ConfigError(
        f"{where} has the keys {sorted(names)}{renamed}, which is no known format. {_describe_formats()} Where a "
        f"column has another name, say which: --data.columns '{_example_renaming(names)}'."
    )


def _example_renaming(names: list[str]) -> str:
    """Return an example value for data.columns, with usual prompt and answer columns if present."""
    prompt, completion, context = (_usual_name(key, names) for key in ("prompt", "completion", "input"))
    if prompt is None or completion is None:
        return "{text: NAME}"
    if context is not None:
        return _show_columns({"instruction": prompt, "input": context, "output": completion})
    return _show_columns({"prompt": prompt, "completion": completion})


def _usual_name(key: str, names: Collection[str]) -> str | None:
    """Return the column with a usual name for a key, or None."""
    return next((name for name in _USUAL_NAMES[key] if name in names), None)


def _show_columns(columns: Mapping[str, str]) -> str:
    return "{" + ", ".join(f"{key}: {name}" for key, name in columns.items()) + "}"


def unread_note(data_formats: Collection[str], unread: Sequence[str], columns: Mapping[str, str]) -> str:
    """Return a note about columns without effect, with the setting to read one. `columns`: as `Source.columns`."""
    listed = ", ".join(map(repr, unread[:_NUM_NAMED]))
    more = f" and {len(unread) - _NUM_NAMED} more" if len(unread) > _NUM_NAMED else ""
    known = {key for each in data_formats for key in _known_keys(each)}
    # A passage left out is the worst case: the answers then refer to nothing.
    context = _usual_name("input", unread) if known & {"input", "completion"} else None
    system = _usual_name("system", unread) if "system" in known - {"completion"} else None
    if context is not None and "completion" in known:
        renamed = {"instruction": "prompt", "output": "completion"}
        columns = {key: columns.get(other, other) for key, other in renamed.items()}
    if context is not None or system is not None:
        key, name = ("input", context) if context is not None else ("system", system)
        fix = f"To read {name!r}, set --data.columns '{_show_columns({**columns, key: str(name)})}'."
    else:
        keys = dict.fromkeys(key for each in data_formats for key in (*_KEYS.get(each, ()), *columns_for(each)))
        fix = f"To read one, map it to a key of the format by --data.columns: {', '.join(keys)}."
    return f"not read: the {'column' if len(unread) == 1 else 'columns'} {listed}{more}. {fix}"


def _describe_formats() -> str:
    known = "; ".join(f"{data_format}: {', '.join(keys)}" for data_format, keys in _KEYS.items())
    return f"The formats and their keys are {known}. See data.format."


def _check_keys(data_format: str, names: list[str], where: str, columns: Mapping[str, str]) -> None:
    """Raise ConfigError if a table lacks a column for the format."""
    missing = [columns.get(key, key) for key in _KEYS[data_format] if columns.get(key, key) not in names]
    if missing:
        raise ConfigError(
            f"{where} lacks the column {_quote_names(missing)} for data.format={data_format}; it has "
            f"{_quote_names(sorted(names)) or 'nothing'}. Where it has another name, say which: --data.columns "
            f"'{{{_KEYS[data_format][0]}: NAME}}'."
        )


def read_records(file: SourceFile, vocab_size: int, unread: set[str] | None = None) -> Iterator[Record | BadRow]:
    """Yield the records in `file` in order, with a `BadRow` in place of each bad row.

    `vocab_size` decides the id width in a .bin file without header. `unread` receives the columns without effect: in a
    table with types all of them, in other files each with a value in some row.
    """
    if file.container == "ids":
        yield from _read_tokens(file, vocab_size)
    elif file.format == "text":
        yield from _read_text(file)
    elif file.format == STDLIB_CHAT:
        for line, messages in docstring_chats("".join(piece.text for piece in _read_text(file)), file.name):
            yield Chat(f"{file.place}:{line}", messages)
    else:
        unread, known = set() if unread is None else unread, _known_keys(file.format)
        for where, row in read_rows(file, _columns_to_read(file, unread)):
            if not isinstance(row, dict):
                yield row if isinstance(row, BadRow) else _parse_row(file, row, where)
                continue
            renamed = _rename(row, file.columns)
            unread.update(key for key in renamed.keys() - known - unread if not is_empty(renamed[key]))
            yield _parse_row(file, renamed, where)


def _known_keys(data_format: str) -> frozenset[str]:
    """Return the keys with a meaning in a format."""
    return frozenset((*_KEYS.get(data_format, ()), *columns_for(data_format), *refused_in(data_format)))


def _columns_to_read(file: SourceFile, unread: set[str]) -> list[str] | None:
    """Return the table columns that the format reads. None: not a table. `unread` receives the others."""
    names = columns_of(file) if file.container not in ("json", "csv", "tsv") else None
    if names is None:
        return None
    _check_keys(file.format, names, str(file.place), file.columns)
    wanted = (*_KEYS[file.format], *columns_for(file.format), *refused_in(file.format))
    columns = list(dict.fromkeys(column for key in wanted if (column := file.columns.get(key, key)) in names))
    unread.update(name for name in names if name not in columns)
    return columns


def _rename(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a row with the keys of its format."""
    if not columns:
        return row
    renamed = {key: row[column] for key, column in columns.items() if column in row}
    return {key: value for key, value in row.items() if key not in columns.values()} | renamed


def _parse_row(file: SourceFile, row: Any, where: str) -> Record | BadRow:
    try:
        return _parse(file.format, row, where, file.place.path.parent if isinstance(file.place, LocalFile) else None)
    except BadRow as bad:
        return bad


def _read_text(file: SourceFile) -> Iterator[Text]:
    where = str(file.place)
    pending = ""
    opens = True  # of the next piece
    with open_text(file) as text:
        while block := text.read(_PIECE_CHARS):
            if len(pending) >= _PIECE_CHARS:  # hold one block back, to recognize the last piece
                cut = _cut(pending, len(pending))
                yield Text(where, pending[:cut], opens, closes=False)
                pending, opens = pending[cut:], False
            pending += block
        yield Text(where, pending, opens, closes=True)


def pieces_of(text: str) -> Iterator[str]:
    """Yield a text in pieces like those from a text file. A text up to 2 Mi characters stays whole."""
    begin = 0
    while len(text) - begin > _LONG_CHARS:
        end = _cut(text, begin + _PIECE_CHARS, begin)
        yield text[begin:end]
        begin = end
    yield text[begin:]


def _cut(text: str, end: int, begin: int = 0) -> int:
    """Return a cut position: after the last line end in [begin, end), or `end` without one."""
    return text.rfind("\n", begin, end) + 1 or end


def _parse(data_format: str, record: Any, where: str, folder: Path | None) -> Record:
    """Turn one JSON value into a record. `folder`: base of relative picture paths. Raises BadRow."""
    if not isinstance(record, dict):
        raise BadRow(
            f"{where} is a value of type {type(record).__name__}; data.format={data_format} needs an object with "
            f"{_quote_names(_KEYS[data_format])}."
        )
    missing = [key for key in _KEYS[data_format] if key not in record]
    if missing:
        raise BadRow(
            f"{where} lacks {_quote_names(missing)} for data.format={data_format}; "
            f"it has {_quote_names(sorted(record)) or 'nothing'}."
        )
    # Padding may have any position, often 0 or 1 again, and would look like further documents.
    check_row(data_format, _without_padding(record) if data_format == "tokens" else record, where)
    if data_format == "tokens":
        return _parse_ids(record, where)
    if data_format == "jsonl":
        return Text(where, _string(record, "text", where))
    if data_format == "prompt-completion":
        return _parse_completion(record, where)
    if data_format == "preference":
        return _parse_preference(record, where)
    if data_format == "alpaca":
        return _parse_chat(record, where, [*_system(record, where), *_alpaca_turns(record, where)])
    (turns_key,) = _KEYS[data_format]
    turns = _parse_json(record[turns_key], where)
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"{where}: {turns_key!r} must be a list of at least one message (data.format={data_format}).")
    matcher = PictureMatcher(_parse_list(record.get("images"), where), folder, where)
    check = _parse_sharegpt_turn if data_format == "sharegpt" else _check_message
    messages = [check(turn, f"{where}, message {i}", matcher) for i, turn in enumerate(turns, 1)]
    # After all messages: now each picture must have a place.
    matcher.check()
    # Some data sets have the system message twice: as a column, and as the first message.
    system = _unless_said(_system(record, where), messages)
    return _parse_chat(record, where, [*system, *messages], pictures=tuple(matcher.pictures))


def _parse_chat(record: dict[str, Any], where: str, messages: list[dict[str, Any]], **more: Any) -> Chat:
    """Return a conversation with marks, tools and template variables. Raises BadRow."""
    marks = {
        i: mark for i, each in enumerate(messages) if (mark := mark_of(each, f"{where}, message {i + 1}")) is not None
    }
    if marks and "num_prompt" in more:
        mark_keys = ", ".join(repr(key) for key in MARKS if any(key in each for each in messages))
        raise BadRow(f"{where} has {mark_keys} in a message, and a completion is trained as a whole: leave it out.")
    tools, options = _tools_and_options(record, where)
    return Chat(where, [without_marks(each) for each in messages], tools, marks=marks, options=options, **more)


def _tools_and_options(record: dict[str, Any], where: str) -> tuple[list[Any] | None, dict[str, Any]]:
    """Return the tools and the chat template variables in a row. Raises BadRow."""
    tools = _parse_json(record.get("tools") or None, where) or None
    options = _parse_json(record.get("chat_template_kwargs") or None, f"{where}, 'chat_template_kwargs',") or {}
    if tools is not None and not isinstance(tools, list):
        raise BadRow(f"{where}: 'tools' must be a list, it is {type(tools).__name__}.")
    if not isinstance(options, dict):
        raise BadRow(f"{where}: 'chat_template_kwargs' must be an object, it is {type(options).__name__}.")
    if arguments := sorted(options.keys() & NO_VARIABLES):
        raise BadRow(
            f"{where}: 'chat_template_kwargs' has {arguments[0]!r}, which is no variable of a chat template but an "
            "argument of apply_chat_template: leave it out."
        )
    parallel = record.get("parallel_tool_calls")
    if isinstance(parallel, str):
        parallel = typed(parallel)
        if isinstance(parallel, str | list | dict):
            raise BadRow(f"{where}: 'parallel_tool_calls' is {parallel!r:.40}; it should be true or false.")
        parallel = None if parallel is None else bool(parallel)
    return tools, options if parallel is None else {"parallel_tool_calls": parallel, **options}


def _alpaca_turns(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """Return the `history` turns, [[question, answer], ...], followed by the row's own turn. Raises BadRow."""
    history = _parse_json(record.get("history") or [], where)
    if not isinstance(history, list) or not all(isinstance(each, list | tuple) and len(each) == 2 for each in history):
        raise BadRow(f"{where}: 'history' must be a list of pairs [question, answer].")
    extra = _string(record, "input", where) if record.get("input") else ""
    question = _string(record, "instruction", where) + (f"\n\n{extra}" if extra else "")
    pairs = [*history, (question, record["output"])]
    return [
        _message(role, _string({key: text}, key, where))
        for pair in pairs
        for role, key, text in zip(("user", "assistant"), ("instruction", "output"), pair, strict=True)
    ]


def _parse_completion(record: dict[str, Any], where: str) -> Chat | Pair:
    """Return a prompt and a completion as texts, or as one conversation for message lists. Raises BadRow."""
    # A table of strings stores messages as JSON. Both must be messages: an answer in JSON is a text.
    given = {key: _stored_messages(record[key]) for key in ("prompt", "completion")}
    if all(isinstance(each, list) for each in given.values()):
        prompt, completion = (_parse_text_or_messages(each, f"{where}, {key!r}") for key, each in given.items())
        whole, num_prompt = _join(prompt, completion, f"{where}, 'completion'")
        return _parse_chat(record, where, whole, num_prompt=num_prompt)
    pair = Pair(where, _string(record, "prompt", where), _string(record, "completion", where))
    if any(_tools_and_options(record, where)):
        raise BadRow(
            f"{where} has 'tools' or 'chat_template_kwargs' beside texts: write prompt and completion as messages."
        )
    return pair


def _parse_preference(record: dict[str, Any], where: str) -> Preference:
    """Turn a row into two texts, or into two conversations if any part is a conversation. Raises BadRow."""
    if record.get("images"):
        raise BadRow(f"{where} {_NO_PICTURES}")
    parsed: dict[str, Any] = {
        key: _parse_text_or_messages(record.get(key), f"{where}, {key!r}")
        for key in ("prompt", "messages", "chosen", "rejected")
    }
    system, answers = _system(record, where), [parsed["chosen"], parsed["rejected"]]
    prompt = parsed["messages"] if parsed["prompt"] is None else parsed["prompt"]
    if answers[0] == answers[1]:
        raise BadRow(f"{where}: 'chosen' and 'rejected' are the same, so neither is preferred.")
    for key in ("chosen", "rejected"):
        if not parsed[key]:
            raise BadRow(f"{where}: {key!r} is empty; a text or messages are expected (data.format=preference).")
    if isinstance(prompt, str) and not prompt.strip() and any(not _is_answer(each) for each in answers):
        prompt = None
    # Some data sets have the prompt twice: as a column, and in front of both answers.
    prompt, answers = _said_once(prompt, answers)
    is_rendered = bool(system) or any(_tools_and_options(record, where))
    if not is_rendered and all(isinstance(each, str | None) for each in (prompt, *answers)):
        # Without a prompt: the common beginning of both answers is the prompt, as in TRL.
        num_prompt = 0 if prompt is not None else _shared_length(answers)
        prompt = answers[0][:num_prompt] if prompt is None else prompt
        return Preference(where, *(Pair(where, prompt, answer[num_prompt:]) for answer in answers))
    prompt_turns = [_message("user", prompt)] if isinstance(prompt, str) else prompt or []
    turns = [[_message("assistant", each)] if isinstance(each, str) else each for each in answers]
    joined = [
        _join(prompt_turns, each, f"{where}, {key!r}") for key, each in zip(("chosen", "rejected"), turns, strict=True)
    ]
    if not prompt_turns:
        shared = _shared_length(turns)
        joined = [(each, shared) for each in turns]
    chats = []
    for key, (whole, num_prompt) in zip(("chosen", "rejected"), joined, strict=True):
        if all(message["role"] != "assistant" for message in whole[num_prompt:]):
            raise BadRow(f"{where}: {key!r} has no message of the assistant behind the prompt.")
        before = _unless_said(system, whole)
        chats.append(_parse_chat(record, where, [*before, *whole], num_prompt=len(before) + num_prompt))
    return Preference(where, *chats)


def _said_once(prompt: Any, answers: list[Any]) -> tuple[Any, list[Any]]:
    """Return prompt and answers as they are, or the prompt once, if both answers are texts that begin with it.

    A prompt of a single word is exempt: both answers may begin with this word by chance.
    """
    if not all(isinstance(each, str) for each in (prompt, *answers)) or len(prompt.split()) < 2:
        return prompt, answers
    for start, texts in ((prompt, answers), (prompt.strip(), [each.lstrip() for each in answers])):
        if all(each.startswith(start) and each.strip() != start.strip() for each in texts):
            return start, [each[len(start) :] for each in texts]
    return prompt, answers


def _join(prompt: list[Any], turns: list[Any], where: str) -> tuple[list[Any], int]:
    """Return the turns of prompt and answer, and the number of turns up to the end of the prompt.

    If the answer is a conversation that holds the prompt, or begins with the last turns of the prompt, these turns come
    once. Blanks and line ends around a text make no difference. `where`: name of the answer. Raises BadRow for a
    question of the prompt that may come twice.
    """
    asked, said = ([_content_of(turn) for turn in each] for each in (prompt, turns))
    if not asked or said[: len(asked)] == asked:
        return turns, len(asked)
    if _is_answer(turns):
        return [*prompt, *turns], len(asked)
    # The prompt within the answer, e.g. behind a system message.
    for start in range(len(said) - len(asked) + 1):
        if said[start : start + len(asked)] == asked:
            return turns, start + len(asked)
    # The longest overlap first, so no turn comes twice.
    for common in range(min(len(asked), len(said)), 0, -1):
        if asked[-common:] == said[:common]:
            return [*prompt[:-common], *turns], len(asked)
    if asked[-1][0] == "user" or any(each in said for each in asked):
        raise BadRow(
            f"{where} is a conversation that begins with a turn of the {said[0][0]}, so the prompt is not alone before "
            "it, and other text stands there: leave the prompt out, or leave the question out of the answers."
        )
    return [*prompt, *turns], len(asked)


def _is_answer(turns: Any) -> bool:
    """Return True for a text, and for turns that begin with an answer. Other turns begin with a prompt."""
    return isinstance(turns, str) or turns[0]["role"] in ("assistant", "tool")


def _unless_said(system: list[Any], turns: list[Any]) -> list[Any]:
    """Return the system message, or nothing if the turns begin with it."""
    return [] if system and turns and _content_of(turns[0]) == _content_of(system[0]) else system


def _content_of(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return role, text and calls for a comparison, without blanks around the text."""
    content = message["content"]
    return message["role"], content.strip() if isinstance(content, str) else content, message.get("tool_calls")


def _parse_text_or_messages(value: Any, where: str) -> Any:
    """Return a text, or checked messages from a message, a list, or a JSON list (string tables). Raises BadRow."""
    value = _stored_messages(value)
    if value is None or isinstance(value, str):
        return value
    turns = [value] if isinstance(value, dict) else value
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"{where} must be a text or a list of at least one message (data.format=preference).")
    return [
        (_parse_sharegpt_turn if isinstance(turn, dict) and "from" in turn else _check_message)(turn, f"{where}, {i}")
        for i, turn in enumerate(turns, 1)
    ]


def _stored_messages(value: Any) -> Any:
    """Return the messages in a JSON list (string tables). Any other value is unchanged: an answer may be JSON too."""
    turns = typed(value) if isinstance(value, str) and value.lstrip().startswith("[") else None
    is_messages = isinstance(turns, list) and turns and all(isinstance(turn, dict) and _is_turn(turn) for turn in turns)
    return turns if is_messages else value


def _is_turn(turn: Mapping[str, Any]) -> bool:
    return {"from", "value"} <= turn.keys() or ("role" in turn and bool(turn.keys() & {"content", *TEMPLATE_KEYS}))


def _shared_length(answers: Sequence[Sequence[Any]]) -> int:
    """Return the length of the prompt that two answers begin with. At least one character or turn of each remains."""
    return min(common_prefix_length(*answers), *(len(each) - 1 for each in answers))


def common_prefix_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the common prefix length for two texts or conversations."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def _parse_json(value: Any, where: str) -> Any:
    """Parse JSON if the value is a text, as in string tables. Raises BadRow."""
    if not isinstance(value, str) or not value.strip():
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError) as error:
        raise BadRow(
            f"{where} has a text where a list is expected, which is not valid JSON either: {json_reason(error)}."
        ) from error


def _parse_list(value: Any, where: str) -> Any:
    """Parse a JSON list (string tables). Return any other value unchanged, None for an empty one."""
    return _parse_json(value, where) if isinstance(value, str) and value.lstrip().startswith("[") else value or None


def _without_padding(record: dict[str, Any]) -> dict[str, Any]:
    """Return a row of token ids without the positions of padding, which may be any."""
    mask, positions = (typed(record.get(key)) for key in ("attention_mask", "position_ids"))
    if not isinstance(mask, list) or not isinstance(positions, list) or len(mask) != len(positions):
        return record
    return {**record, "position_ids": [place for place, attended in zip(positions, mask, strict=True) if attended]}


def _parse_ids(record: dict[str, Any], where: str) -> Ids:
    """Return ready-made token ids.

    Labels are unshifted, as in transformers. Completion and answer masks exclude tokens from training. Raises BadRow.
    """
    arrays = {
        key: _parse_integers(record[key], key, where) for key in ("input_ids", *columns_for("tokens")) if key in record
    }
    ids = arrays["input_ids"]
    for key, array in arrays.items():
        if len(array) != len(ids):
            raise BadRow(f"{where} has {len(array)} {key} and {len(ids)} input_ids.")
    # Padding is dropped, not masked: rows are padded anew, to the length of the batch.
    attended = arrays.pop("attention_mask", np.ones(len(ids))) != 0
    # transformers shifts labels in the loss. Labels shifted in the data would train each token on the second next one.
    labels = arrays.pop("labels", ids)
    if not np.array_equal(labels[labels != IGNORE], ids[labels != IGNORE]):
        raise BadRow(
            f"{where} has labels that are neither {IGNORE} nor the input id in the same place: labels are unshifted."
        )
    masks = [mask != 0 for key, mask in arrays.items() if key != "input_ids"]
    trained = np.logical_and.reduce([labels != IGNORE, *masks])[attended] if masks or "labels" in record else None
    return Ids(where, ids[attended], closes=True, stream=False, trained=trained)


def _parse_integers(value: Any, key: str, where: str) -> np.ndarray:
    value = _parse_json(value, where)
    try:
        array = np.asarray(value if value != [] else np.zeros(0, np.int64))  # an empty list would be float64
    except (ValueError, OverflowError):
        array = np.zeros(0)
    kinds = "iu" if key in ("input_ids", "labels") else "iub"
    if array.ndim != 1 or array.dtype.kind not in kinds:
        raise BadRow(f"{where}: {key!r} must be a list of whole numbers (data.format=tokens).")
    return array


def _parse_sharegpt_turn(turn: Any, where: str, matcher: PictureMatcher | None = None) -> dict[str, Any]:
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        fix = " Messages with a 'role' need --data.columns '{messages: conversations}'." if _has(turn, "role") else ""
        raise BadRow(f"{where} lacks 'from' or 'value' for data.format=sharegpt.{fix}")
    if not isinstance(turn["from"], str) or turn["from"] not in _SHAREGPT_ROLES:
        raise BadRow(
            f"{where} is from {turn['from']!r}; the speakers of data.format=sharegpt are {', '.join(_SHAREGPT_ROLES)}."
        )
    value = _string(turn, "value", where)
    more = {key: each for key, each in turn.items() if key not in ("from", "value")}
    return {
        **more,
        **_message(_SHAREGPT_ROLES[turn["from"]], value if matcher is None else matcher.parts(value, where)),
    }


def _check_message(turn: Any, where: str, matcher: PictureMatcher | None = None) -> dict[str, Any]:
    """Return a message with string content (text parts are joined), or with a list of parts if pictures are present.

    The pictures go to `matcher`; without `matcher` a picture raises BadRow.
    """
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        fix = " Turns with 'from' need --data.columns '{conversations: messages}'." if _has(turn, "from") else ""
        raise BadRow(f"{where} lacks a 'role' for data.format=messages.{fix}")
    content = turn.get("content")
    content = (matcher or PictureMatcher(None, None, where)).parts(content, where)
    if isinstance(content, list):
        if matcher is None and has_picture(content):
            raise BadRow(f"{where} {_NO_PICTURES}")
        return {**turn, "content": content}
    if content is None and any(turn.get(key) for key in TEMPLATE_KEYS):
        content = ""
    if content is None:
        raise BadRow(f"{where}: 'content' must be a string, and this message of the role {turn['role']!r} has none.")
    return {**turn, "content": _string({"content": content}, "content", where)}


def _has(turn: Any, key: str) -> bool:
    return isinstance(turn, dict) and key in turn


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _system(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    return [_message("system", _string(record, "system", where))] if record.get("system") else []


def _string(record: dict[str, Any], key: str, where: str) -> str:
    if not isinstance(record[key], str):
        raise BadRow(f"{where}: {key!r} must be a string, it is {_type_name(record[key])}.")
    return str(record[key])


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__


def _quote_names(keys: Any) -> str:
    return ", ".join(repr(key) for key in keys)


def _read_tokens(file: SourceFile, vocab_size: int) -> Iterator[Ids]:
    tokens = _open_tokens(file, vocab_size)
    if tokens.ndim == 2:
        for index, row in enumerate(tokens):
            yield Ids(f"{file.place}, row {index}", np.asarray(row), closes=True, stream=False)
        return
    for start in range(0, len(tokens), _PIECE_TOKENS):
        # A mapped file is read piece by piece, and may be larger than memory.
        piece = np.asarray(tokens[start : start + _PIECE_TOKENS])
        yield Ids(str(file.place), piece, closes=start + len(piece) == len(tokens), stream=True)


def _open_tokens(file: SourceFile, vocab_size: int) -> np.ndarray:
    if file.num_bytes == 0:
        return np.zeros(0, np.uint16)
    path = file.place.path if isinstance(file.place, LocalFile) else None
    if path is None:
        raise ConfigError(f"{file.place} holds token ids, which are mapped into memory: copy the file to this machine.")
    if path.suffix.lower() == ".npy":
        try:
            tokens: np.ndarray = np.load(path, mmap_mode="r")
        except ValueError as error:
            raise ConfigError(f"{file.place} is not a .npy file of integers: {error} (data.format=tokens).") from error
        if tokens.dtype.kind not in "iu" or tokens.ndim not in (1, 2):
            raise ConfigError(
                f"{file.place} holds {tokens.dtype} {list(tokens.shape)}; data.format=tokens needs integers [tokens] "
                "or [documents, tokens]."
            )
        return tokens
    header = np.fromfile(path, "<i4", 2) if file.num_bytes >= 1024 else np.zeros(2)
    is_llmc = header[0] == _LLMC_MAGIC  # 256 int32 header values; version 1 holds uint16 ids
    # A .bin file has no dtype: nanoGPT and others write 2 bytes where the vocabulary fits.
    wide = vocab_size > 65536
    offset, dtype = (1024 if is_llmc else 0), np.dtype("<u4" if wide else "<u2")
    if (file.num_bytes - offset) % dtype.itemsize:
        raise ConfigError(
            f"{file.place} has {file.num_bytes} bytes, not a whole number of {dtype.name} ids (data.format=tokens)."
        )
    return np.memmap(path, dtype, mode="r", offset=offset)
