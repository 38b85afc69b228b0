"""Rows and files to records, by one table of formats; errors name file and line.

docs/reference/data.md describes the formats. `row_keys` lists the optional keys of rows and messages, `rows` reads the
row files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from offload.errors import ConfigError, first_names, nearest, shorten
from offload.extras.data.docstrings import docstring_chats
from offload.extras.data.packing import IGNORE
from offload.extras.data.pictures import PictureMatcher, has_picture
from offload.extras.data.records import Chat, Group, Ids, Pair, Preference, Record, Text, common_prefix_length
from offload.extras.data.row_keys import (
    MARKS,
    NEGATIVES,
    NO_VARIABLES,
    ROW_KEYS,
    TEMPLATE_KEYS,
    RowKey,
    is_empty,
    mark_of,
    typed,
    without_marks,
)
from offload.extras.data.rows import ROWS_AS_TEXT, BadRow, columns_of, json_reason, open_text, read_rows
from offload.extras.data.sources import STDLIB_CHAT, SourceFile
from offload.extras.data.token_file import id_type

_PIECE_CHARS = 1 << 18
_LONG_CHARS = 1 << 21  # a row text up to one batch stays whole
_PIECE_TOKENS = 1 << 20
_LLMC_MAGIC = 20240520
_LLMC_HEADER_BYTES = 1024
_KINDS = {"input_ids": "iu", "labels": "iu"}
"""Kinds of numpy types for lists of numbers that are no masks."""

_USUAL_NAMES = {
    "prompt": ("prompt", "question", "query", "input", "instruction", "problem", "source"),
    "completion": ("completion", "answer", "response", "output", "solution", "target", "reply"),
    "input": ("context", "passage", "article", "document", "paragraph", "background", "evidence"),
    "system": ("system_message", "instructions", "system"),
}
"""Usual column names for texts in other data sets."""
_NO_PICTURES = "has pictures, and preferences are learned between texts alone (data.format=preference)."
_WHOLE_FORMATS = {"ids": "tokens", "text": "text"}
"""The format of each container without rows."""
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


class Grouping(NamedTuple):
    """What a format with several documents per row calls them. They stay together, each in a row of a batch."""

    methods: str
    """Training methods for the format, for messages."""
    keys: str
    """Keys of a row, for messages."""
    members: tuple[str, ...]
    """Names of the documents. The last name is also that of all further ones."""
    layout: str
    """The rows of a batch, in words."""
    num_before: int = 1
    """Tokens of a row before the first one that counts as trained."""


GROUPINGS = {
    "preference": Grouping(
        "dpo, orpo or reward",
        "prompt, chosen, rejected",
        ("chosen", "rejected"),
        "a row for the chosen answer, and one for the rejected one",
    ),
    "contrastive": Grouping(
        "contrastive",
        "query, positive, negatives",
        ("query", "positive", "negative"),
        "a row for each query, its answer and each hard negative",
        num_before=0,  # an embedding is of all tokens
    ),
}
RENDERED_FORMATS = frozenset({"messages", "sharegpt", "alpaca", STDLIB_CHAT})
"""Formats with one `Chat` per row."""
CHAT_FORMATS = RENDERED_FORMATS | {"prompt-completion", "preference"}


def detect_format(file: SourceFile) -> str:
    """Return the format for `file`: the configured one, or for `auto` by file ending, columns or first row keys.

    Raises ConfigError, also for a table without a required column, and for a key in `columns` that no format reads.
    """
    _check_columns(file)
    if file.is_whole:
        if file.format != "auto":
            return file.format
        return _WHOLE_FORMATS[file.container]
    names = columns_of(file)
    if file.format != "auto":
        if names is not None:
            FORMATS[file.format].check_columns(names, file)
        return file.format
    if names is None:
        return _detect_by_rows(file)
    # An empty file has no header. Every format reads nothing from it.
    if not names:
        return "jsonl"
    return _detect_by_keys(names, str(file.place), file.columns)


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
    known = list(dict.fromkeys(key for each in FORMATS.values() for key in each.read))
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
    fitting = [name for name, each in FORMATS.items() if available.issuperset(each.keys)]
    if len(fitting) > 1 and "preference" in fitting:  # preferences are requested by train.method
        fitting.remove("preference")
    if columns and len(fitting) > 1:  # the format of the renamed columns
        fitting = [name for name in fitting if columns.keys() <= set(FORMATS[name].read)] or fitting
    if len(fitting) == 1:
        return fitting[0]
    if fitting:
        raise ConfigError(
            f"{where} has the keys {sorted(names)}, which fit several formats: set --data.format to "
            f"{' or '.join(fitting)}."
        )
    renamed = ""
    if columns:
        renamed = f" (with data.columns {dict(columns)})"
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
    listed = first_names([*map(repr, unread)], _NUM_NAMED, " and {} more")
    own = [FORMATS[each] for each in data_formats if each in FORMATS]  # whole files have none
    known = {key for each in own for key in each.known}
    # A passage left out is the worst case: the answers then refer to nothing. A completion has no key for it.
    keys = []
    if known & {"input", "completion"}:
        keys.append("input")
    if "system" in known - {"completion"}:
        keys.append("system")
    names = {key: _usual_name(key, unread) for key in keys}
    key = next((key for key, name in names.items() if name is not None), "")
    # Alpaca has a key for the passage, and others for the prompt and the completion.
    if key == "input" and "completion" in known:
        renamed = {"instruction": "prompt", "output": "completion"}
        columns = {key: columns.get(other, other) for key, other in renamed.items()}
    if key:
        name = str(names[key])
        fix = f"To read {name!r}, set --data.columns '{_show_columns({**columns, key: name})}'."
    else:
        readable = dict.fromkeys(key for each in own for key in each.read)
        fix = f"To read one, map it to a key of the format by --data.columns: {', '.join(readable)}."
    label = "columns"
    if len(unread) == 1:
        label = "column"
    return f"not read: the {label} {listed}. {fix}"


def _describe_formats() -> str:
    known = "; ".join(f"{name}: {', '.join(each.keys)}" for name, each in FORMATS.items())
    return f"The formats and their keys are {known}. See data.format."


def read_records(file: SourceFile, vocab_size: int, unread: list[str]) -> Iterator[Record | BadRow]:
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
        yield from _read_rows(file, FORMATS[file.format], unread)


def _read_rows(file: SourceFile, data_format: Format, unread: list[str]) -> Iterator[Record | BadRow]:
    folder = file.place.path and file.place.path.parent
    for where, content in read_rows(file, _columns_to_read(file, data_format, unread)):
        row = content
        if isinstance(row, dict):
            row = _rename(row, file.columns)
            others = (key for key in row if key not in data_format.known and key not in unread)
            unread += [key for key in others if not is_empty(row[key])]
        if not isinstance(row, BadRow):
            row = data_format.record(row, where, folder)
        yield row


def _columns_to_read(file: SourceFile, data_format: Format, unread: list[str]) -> list[str] | None:
    """Return the table columns that the format reads. None: not a table. `unread` receives the others."""
    # Rows of texts are read as a whole: a reader cannot skip a column.
    if file.container in ROWS_AS_TEXT:
        return None
    names = columns_of(file) or []
    data_format.check_columns(names, file)
    # Also the key itself: a row without a value in the column may have one there.
    columns = [each for key in data_format.known for each in (file.columns.get(key, key), key) if each in names]
    unread += sorted(set(names).difference(columns, unread))
    return list(dict.fromkeys(columns))


def _rename(row: dict[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Return a row with the keys of its format. An empty value takes no place of one under the key itself."""
    if not columns:
        return row
    renamed = {
        key: row[column]
        for key, column in columns.items()
        if column in row and (is_empty(row.get(key)) or not is_empty(row[column]))
    }
    return {key: value for key, value in row.items() if key not in columns.values()} | renamed


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


class Row(NamedTuple):
    """A row for the parser of its format."""

    data_format: Format
    values: dict[str, Any]
    where: str
    """Name for messages: file and line."""
    folder: Path | None
    """Base of relative picture paths."""


@dataclass(frozen=True)
class Format:
    """A format of rows."""

    name: str
    keys: tuple[str, ...]
    """Required keys."""
    parse: Callable[[Row], Record]
    """Turns a row with these keys into a record. Raises BadRow."""

    @cached_property
    def read(self) -> tuple[str, ...]:
        """Required and optional keys."""
        return (*self.keys, *(key.name for key in ROW_KEYS if self.name in key.honoured))

    @cached_property
    def refused(self) -> tuple[RowKey, ...]:
        """Keys with an effect in other formats alone: a row with a value there is a bad one."""
        return tuple(key for key in ROW_KEYS if self.name in key.refused - key.honoured)

    @cached_property
    def known(self) -> dict[str, None]:
        """All keys with a meaning, in order."""
        return dict.fromkeys((*self.read, *(key.name for key in self.refused)))

    def check_columns(self, names: list[str], file: SourceFile) -> None:
        """Raise ConfigError if a table with these columns lacks one for a required key."""
        missing = [column for key in self.keys if (column := file.columns.get(key, key)) not in names]
        if missing:
            raise ConfigError(
                f"{file.place} lacks the column {_quote_names(missing)} for data.format={self.name}; it has "
                f"{_quote_names(sorted(names)) or 'nothing'}. Where it has another name, say which: --data.columns "
                f"'{{{self.keys[0]}: NAME}}'."
            )

    def record(self, value: Any, where: str, folder: Path | None) -> Record | BadRow:
        """Return the record of a JSON value, or a `BadRow`. `where`, `folder`: as in `Row`."""
        try:
            self._check(value, where)
            return self.parse(Row(self, value, where, folder))
        except BadRow as bad:
            return bad

    def _check(self, value: Any, where: str) -> None:
        """Raise BadRow unless the value is an object with all required keys and no refused one."""
        if not isinstance(value, dict):
            raise BadRow(
                f"{where} is a value of type {type(value).__name__}; data.format={self.name} needs an object with "
                f"{_quote_names(self.keys)}."
            )
        missing = [key for key in self.keys if key not in value]
        if missing:
            raise BadRow(
                f"{where} lacks {_quote_names(missing)} for data.format={self.name}; "
                f"it has {_quote_names(sorted(value)) or 'nothing'}."
            )
        attended = value
        # Padding may have any position, often 0 or 1 again, and would look like further documents.
        if "input_ids" in self.keys:
            attended = _without_padding(value)
        for key in self.refused:
            is_needless = bool(key.beside) and not is_empty(attended.get(key.beside))
            if key.name in attended and not is_needless and not key.says_nothing(attended[key.name]):
                raise BadRow(f"{where} has {key.name!r}, and data.format={self.name} does not read it; {key.fix}.")


def _parse_text(row: Row) -> Text:
    return Text(row.where, _string(row.values["text"], "text", row.where))


def _parse_turns(parse_turn: Callable[[Any, str, PictureMatcher], dict[str, Any]], row: Row) -> Chat:
    """Return the conversation in a list of turns. Raises BadRow."""
    (key,), where = row.data_format.keys, row.where
    turns = _parse_json(row.values[key], where)
    if not isinstance(turns, list) or not turns:
        raise BadRow(f"{where}: {key!r} must be a list of at least one message (data.format={row.data_format.name}).")
    matcher = PictureMatcher(_parse_list(row.values.get("images"), where), row.folder, where)
    messages = [parse_turn(turn, f"{where}, message {i}", matcher) for i, turn in enumerate(turns, 1)]
    # After all messages: now each picture must have a place.
    matcher.check()
    # Some data sets have the system message twice: as a column, and as the first message.
    system = _unless_said(_system(row), messages)
    return _parse_chat(row, [*system, *messages], pictures=tuple(matcher.pictures))


def _parse_chat(row: Row, messages: list[dict[str, Any]], **more: Any) -> Chat:
    """Return a conversation with marks, tools and template variables. Raises BadRow."""
    where = row.where
    marks = {
        i: mark for i, each in enumerate(messages) if (mark := mark_of(each, f"{where}, message {i + 1}")) is not None
    }
    if marks and "num_prompt" in more:
        mark_keys = ", ".join(repr(key) for key in MARKS if any(key in each for each in messages))
        raise BadRow(f"{where} has {mark_keys} in a message, and a completion is trained as a whole: leave it out.")
    tools, options = _tools_and_options(row)
    return Chat(where, [without_marks(each) for each in messages], tools, marks=marks, options=options, **more)


def _tools_and_options(row: Row) -> tuple[list[Any] | None, dict[str, Any]]:
    """Return the tools and the chat template variables in a row. Raises BadRow."""
    record, where = row.values, row.where
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
        # A word or a number in a table of texts. Other values go to the template as they are.
        if parallel is not None:
            parallel = bool(parallel)
    if parallel is None:
        return tools, options
    # A variable of the row itself comes last, and so wins.
    return tools, {"parallel_tool_calls": parallel, **options}


def _parse_alpaca(row: Row) -> Chat:
    """Return the `history` pairs, [[question, answer], ...], and the pair of the row, as messages. Raises BadRow."""
    record, where = row.values, row.where
    system = _system(row)
    history = _parse_json(record.get("history") or [], where)
    if not isinstance(history, list) or not all(isinstance(each, list | tuple) and len(each) == 2 for each in history):
        raise BadRow(f"{where}: 'history' must be a list of pairs [question, answer].")
    extra = ""
    if record.get("input"):
        extra = "\n\n" + _string(record["input"], "input", where)
    question = _string(record["instruction"], "instruction", where) + extra
    turns = [
        _message(role, _string(text, key, where))
        for pair in (*history, (question, record["output"]))
        for role, key, text in zip(("user", "assistant"), ("instruction", "output"), pair, strict=True)
    ]
    return _parse_chat(row, [*system, *turns])


def _parse_completion(row: Row) -> Chat | Pair:
    """Return a prompt and a completion as texts, or as one conversation for message lists. Raises BadRow."""
    record, where = row.values, row.where
    # A table of strings stores messages as JSON. Both must be messages: an answer in JSON is a text.
    given = {key: _stored_messages(record[key]) for key in ("prompt", "completion")}
    if all(isinstance(each, list) for each in given.values()):
        prompt, completion = (_parse_text_or_messages(each, f"{where}, {key!r}") for key, each in given.items())
        whole, num_prompt = _join(prompt, completion, f"{where}, 'completion'")
        return _parse_chat(row, whole, num_prompt=num_prompt)
    pair = Pair(where, *(_string(record[key], key, where) for key in ("prompt", "completion")))
    if any(_tools_and_options(row)):
        raise BadRow(
            f"{where} has 'tools' or 'chat_template_kwargs' beside texts: write prompt and completion as messages."
        )
    return pair


def _parse_preference(row: Row) -> Preference:
    """Turn a row into two texts, or into two conversations if any part is a conversation. Raises BadRow."""
    record, where = row.values, row.where
    if record.get("images"):
        raise BadRow(f"{where} {_NO_PICTURES}")
    parsed: dict[str, Any] = {
        key: _parse_text_or_messages(record.get(key), f"{where}, {key!r}")
        for key in ("prompt", "messages", "chosen", "rejected")
    }
    system, answers = _system(row), [parsed["chosen"], parsed["rejected"]]
    prompt = parsed["prompt"]
    if prompt is None:
        prompt = parsed["messages"]
    if answers[0] == answers[1]:
        raise BadRow(f"{where}: 'chosen' and 'rejected' are the same, so neither is preferred.")
    for key in ("chosen", "rejected"):
        if not parsed[key]:
            raise BadRow(f"{where}: {key!r} is empty; a text or messages are expected (data.format=preference).")
    if isinstance(prompt, str) and not prompt.strip() and any(not _is_answer(each) for each in answers):
        prompt = None
    # Some data sets have the prompt twice: as a column, and in front of both answers.
    prompt, answers = _said_once(prompt, answers)
    is_rendered = bool(system) or any(_tools_and_options(row))
    if not is_rendered and all(isinstance(each, str | None) for each in (prompt, *answers)):
        num_prompt = 0
        # Without a prompt: the common beginning of both answers is the prompt, as in TRL.
        if prompt is None:
            num_prompt = _shared_length(answers)
            prompt = answers[0][:num_prompt]
        return Preference(where, *(Pair(where, prompt, answer[num_prompt:]) for answer in answers))
    prompt_turns = _as_turns(prompt, "user")
    turns = [_as_turns(each, "assistant") for each in answers]
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
        chats.append(_parse_chat(row, [*before, *whole], num_prompt=len(before) + num_prompt))
    return Preference(where, *chats)


def _parse_contrastive(row: Row) -> Group:
    """Return the query, its answer, and all hard negatives. Raises BadRow."""
    record, where = row.values, row.where
    negatives = record.get("negatives")
    if _is_list_as_text(negatives):
        negatives = typed(negatives)  # in a table of strings
    if not isinstance(negatives, list):
        negatives = [] if is_empty(negatives) else [negatives]
    negatives = [*negatives, *(record[key] for key in NEGATIVES if not is_empty(record.get(key)))]
    named = [("query", record["query"]), ("positive", record["positive"]), *(("negatives", each) for each in negatives)]
    texts = tuple(_string(text, key, where) for key, text in named)
    for (key, _), text in zip(named, texts, strict=True):
        if not text.strip():
            raise BadRow(f"{where}: {key!r} has an empty text (data.format=contrastive).")
    return Group(where, texts)


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
    if system and turns and _content_of(turns[0]) == _content_of(system[0]):
        return []
    return system


def _content_of(message: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return role, text and calls for a comparison, without blanks around the text."""
    content = message["content"]
    if isinstance(content, str):
        content = content.strip()
    return message["role"], content, message.get("tool_calls")


def _parse_text_or_messages(value: Any, where: str) -> Any:
    """Return a text, or checked messages from a message, a list, or a JSON list (string tables). Raises BadRow."""
    value = _stored_messages(value)
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, dict):
        value = [value]
    if not isinstance(value, list) or not value:
        raise BadRow(f"{where} must be a text or a list of at least one message (data.format=preference).")
    return [_parse_text_turn(turn, f"{where}, {i}") for i, turn in enumerate(value, 1)]


def _parse_text_turn(turn: Any, where: str) -> dict[str, Any]:
    """Return a message of either form. Raises BadRow, also for a picture."""
    matcher = PictureMatcher(None, None, where)
    if _has(turn, "from"):
        return _parse_sharegpt_turn(turn, where, matcher)
    message = _check_message(turn, where, matcher)
    # A list is left of parts that are no texts alone. Parts of other types are for the chat template.
    if isinstance(message["content"], list) and has_picture(message["content"]):
        raise BadRow(f"{where} {_NO_PICTURES}")
    return message


def _stored_messages(value: Any) -> Any:
    """Return the messages in a JSON list (string tables). Any other value is unchanged: an answer may be JSON too."""
    if not _is_list_as_text(value):
        return value
    turns = typed(value)
    if isinstance(turns, list) and turns and all(isinstance(turn, dict) and _is_turn(turn) for turn in turns):
        return turns
    return value


def _is_list_as_text(value: Any) -> bool:
    return isinstance(value, str) and value.lstrip().startswith("[")


def _is_turn(turn: Mapping[str, Any]) -> bool:
    return {"from", "value"} <= turn.keys() or ("role" in turn and bool(turn.keys() & {"content", *TEMPLATE_KEYS}))


def _shared_length(answers: Sequence[Sequence[Any]]) -> int:
    """Return the length of the prompt that two answers begin with. At least one character or turn of each remains."""
    return min(common_prefix_length(*answers), *(len(each) - 1 for each in answers))


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
    if _is_list_as_text(value):
        return _parse_json(value, where)
    return value or None


def _without_padding(record: dict[str, Any]) -> dict[str, Any]:
    """Return a row of token ids without the positions of padding, which may be any."""
    mask, positions = (typed(record.get(key)) for key in ("attention_mask", "position_ids"))
    if not isinstance(mask, list) or not isinstance(positions, list) or len(mask) != len(positions):
        return record
    return {**record, "position_ids": [place for place, attended in zip(positions, mask, strict=True) if attended]}


def _parse_ids(row: Row) -> Ids:
    """Return ready-made token ids.

    Labels are unshifted, as in transformers. Completion and answer masks exclude tokens from training. Raises BadRow.
    """
    record, where = row.values, row.where
    arrays = {key: _parse_integers(record[key], key, where) for key in row.data_format.read if key in record}
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
    trained = None
    # Without labels and masks all tokens are trained, and no mask is stored.
    if masks or "labels" in record:
        trained = np.logical_and.reduce([labels != IGNORE, *masks])[attended]
    return Ids(where, ids[attended], closes=True, stream=False, trained=trained)


def _parse_integers(value: Any, key: str, where: str) -> np.ndarray:
    value = _parse_json(value, where)
    if value == []:
        return np.zeros(0, np.int64)  # numpy would take it for float64
    try:
        array = np.asarray(value)
    except (ValueError, OverflowError):
        array = np.zeros(0)
    # A mask may also be boolean. As an id or a label, true is a mistake.
    if array.ndim != 1 or array.dtype.kind not in _KINDS.get(key, "iub"):
        raise BadRow(f"{where}: {key!r} must be a list of whole numbers (data.format=tokens).")
    return array


def _parse_sharegpt_turn(turn: Any, where: str, matcher: PictureMatcher) -> dict[str, Any]:
    if not isinstance(turn, dict) or "from" not in turn or "value" not in turn:
        problem = f"{where} lacks 'from' or 'value' for data.format=sharegpt."
        if _has(turn, "role"):
            problem += " Messages with a 'role' need --data.columns '{messages: conversations}'."
        raise BadRow(problem)
    if not isinstance(turn["from"], str) or turn["from"] not in _SHAREGPT_ROLES:
        raise BadRow(
            f"{where} is from {turn['from']!r}; the speakers of data.format=sharegpt are {', '.join(_SHAREGPT_ROLES)}."
        )
    content = matcher.parts(_string(turn["value"], "value", where), where)
    # Other keys stay: a template may read them, as it reads those of messages.
    more = {key: each for key, each in turn.items() if key not in ("from", "value")}
    return {**more, **_message(_SHAREGPT_ROLES[turn["from"]], content)}


def _check_message(turn: Any, where: str, matcher: PictureMatcher) -> dict[str, Any]:
    """Return a message with string content (text parts are joined), or with a list of parts if pictures are present.

    The pictures go to `matcher`.
    """
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        problem = f"{where} lacks a 'role' for data.format=messages."
        if _has(turn, "from"):
            problem += " Turns with 'from' need --data.columns '{conversations: messages}'."
        raise BadRow(problem)
    content = matcher.parts(turn.get("content"), where)
    if isinstance(content, list):
        return {**turn, "content": content}
    if content is None and any(turn.get(key) for key in TEMPLATE_KEYS):
        content = ""
    if content is None:
        raise BadRow(f"{where}: 'content' must be a string, and this message of the role {turn['role']!r} has none.")
    return {**turn, "content": _string(content, "content", where)}


def _has(turn: Any, key: str) -> bool:
    return isinstance(turn, dict) and key in turn


def _as_turns(value: Any, role: str) -> list[Any]:
    """Return messages as they are, a text as one message of this role, and nothing for None."""
    if isinstance(value, str):
        return [_message(role, value)]
    return value or []


def _message(role: str, content: Any) -> dict[str, Any]:
    return {"role": role, "content": content}


def _system(row: Row) -> list[dict[str, Any]]:
    system = row.values.get("system")
    # An empty text is no message: a template would write its markers around it.
    if not system:
        return []
    return [_message("system", _string(system, "system", row.where))]


def _string(value: Any, key: str, where: str) -> str:
    if not isinstance(value, str):
        found = type(value).__name__
        if value is None:
            found = "null"  # the word of JSON, not of Python
        raise BadRow(f"{where}: {key!r} must be a string, it is {found}.")
    return value


def _quote_names(keys: Any) -> str:
    return ", ".join(repr(key) for key in keys)


FORMATS = {
    each.name: each
    for each in (
        Format("jsonl", ("text",), _parse_text),
        Format("messages", ("messages",), partial(_parse_turns, _check_message)),
        Format("sharegpt", ("conversations",), partial(_parse_turns, _parse_sharegpt_turn)),
        Format("alpaca", ("instruction", "output"), _parse_alpaca),
        Format("prompt-completion", ("prompt", "completion"), _parse_completion),
        Format("preference", ("chosen", "rejected"), _parse_preference),
        Format("contrastive", ("query", "positive"), _parse_contrastive),
        Format("tokens", ("input_ids",), _parse_ids),
    )
}


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
    path = file.place.path
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
    offset = 0
    # llm.c: 256 int32 header values. Version 1 holds uint16 ids.
    if file.num_bytes >= _LLMC_HEADER_BYTES and np.fromfile(path, "<i4", 1)[0] == _LLMC_MAGIC:
        offset = _LLMC_HEADER_BYTES
    # A .bin file has no dtype: nanoGPT and others write 2 bytes where the vocabulary fits.
    dtype = np.dtype(id_type(vocab_size)).newbyteorder("<")
    if (file.num_bytes - offset) % dtype.itemsize:
        raise ConfigError(
            f"{file.place} has {file.num_bytes} bytes, not a whole number of {dtype.name} ids (data.format=tokens)."
        )
    return np.memmap(path, dtype, mode="r", offset=offset)
