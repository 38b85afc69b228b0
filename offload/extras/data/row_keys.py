"""Row and message keys that change the training.

They come from the formats of OpenAI, mistral, axolotl, open-instruct, LLaMA-Factory and TRL. Each key is honoured, or
refused by name. A note names all other keys, e.g. `id` and `source`. The tables here are also those in
docs/reference/data.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from decimal import Decimal
from typing import Any, NamedTuple

from offload.extras.data.rows import BadRow

_CHATS = frozenset({"messages", "sharegpt", "alpaca"})
_PAIRS = frozenset({"preference"})
_GROUPS = frozenset({"contrastive"})
WITH_ANSWERS = _CHATS | _PAIRS | {"prompt-completion"}
"""Formats with answers."""
_TOKENS = frozenset({"tokens"})
_WORDS = {
    **dict.fromkeys(("true", "yes"), True),
    **dict.fromkeys(("false", "no"), False),
    **dict.fromkeys(("", "null", "none", "nan", "na", "n/a"), None),
}
"""Words for values in tables of strings, in lower case."""


def typed(value: Any) -> Any:
    """Return the value in place of its text: a boolean, null, a number, a list or an object.

    csv and tsv store each value as text, and JSON rows may. `datasets` types the columns of a csv file in the same
    way. A value of another type, and any other text, is unchanged.
    """
    if not isinstance(value, str):
        return value
    word = value.strip().lower()
    if word in _WORDS:
        return _WORDS[word]
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value


def is_empty(value: Any) -> bool:
    """Return True for no value: null, an empty text, list or object, or a text for one of these."""
    return typed(value) in (None, "", [], {})


def _is_one_document(value: Any) -> bool:
    """Return True for positions 0, 1, 2, ... in one document, and for a list with one length."""
    value = typed(value)
    return is_empty(value) or (isinstance(value, list) and (value == list(range(len(value))) or len(value) == 1))


def _is_one(value: Any) -> bool:
    return typed(value) in (None, 1)


def _is_not_bad(value: Any) -> bool:
    """Return False for false and for numbers up to 0. Another value, such as the name of a class, marks nothing."""
    value = typed(value)
    # Decimal: pyarrow gives it for decimal columns.
    return not isinstance(value, int | float | Decimal) or value > 0


def _is_good(value: Any) -> bool:
    """Return True for true, for numbers above 0, and for no value."""
    return is_empty(value) or (_is_not_bad(value) and not isinstance(typed(value), str))


class RowKey(NamedTuple):
    """A row key, also a line in the reference."""

    name: str
    forms: str
    """Accepted values."""
    effect: str
    """Effect on the training."""
    honoured: frozenset[str] = frozenset()
    """Formats that read the key."""
    refused: frozenset[str] = frozenset()
    """Formats that refuse a row with a meaningful value. `honoured` comes first."""
    fix: str = ""
    """Remedy in the error message."""
    says_nothing: Callable[[Any], bool] = is_empty
    """True for a value without effect on the training."""
    beside: str = ""
    """Key that makes this one needless, if the row has it."""


_NOT_READ = "video and audio are not trained on: leave the key out"
_ANSWER_IS_BAD = "it marks a bad answer: leave such rows out, or write preferences (chosen, rejected)"
_ONE_DOCUMENT = "write one document in each row, without packing"
_FLAG = "true or false, 1 or 0, or such a word"


def _other_name(name: str, key: str, refused: frozenset[str] = WITH_ANSWERS) -> RowKey:
    fix = f"to train on it, map it: --data.columns '{{{key}: {name}}}'"
    return RowKey(name, "any", f"another name of `{key}`", refused=refused, fix=fix)


NO_VARIABLES = frozenset(
    {
        "conversation",
        "messages",
        "tools",
        "chat_template",
        "add_generation_prompt",
        "continue_final_message",
        "tokenize",
    }
    | {"padding", "truncation", "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask"}
    | {"tokenizer_kwargs", "sanitize_control_tokens"}
)
"""Arguments of `apply_chat_template` that are no variables of the template."""

NEGATIVES = tuple(f"negative_{number}" for number in range(1, 10))

ROW_KEYS = (
    RowKey("input", "text", "follows the `instruction`", frozenset({"alpaca"}), _PAIRS, "write it into 'prompt'"),
    RowKey(
        "system",
        "text",
        "the first message; said once where the messages begin with the same",
        _CHATS | _PAIRS,
        WITH_ANSWERS,
        "write it into 'prompt'",
    ),
    RowKey(
        "tools",
        "list, or JSON",
        "passed to the chat template, to one named `tool_use` if present; refused beside two texts",
        WITH_ANSWERS,
    ),
    RowKey(
        "chat_template_kwargs",
        "object, or JSON",
        "variables of the chat template; refused if the template drops their text behind an answer",
        WITH_ANSWERS,
    ),
    RowKey("parallel_tool_calls", _FLAG, "a variable of the chat template", WITH_ANSWERS),
    RowKey(
        "history",
        "list of pairs, or JSON",
        "earlier pairs of question and answer, with trained answers",
        frozenset({"alpaca"}),
        WITH_ANSWERS,
        "write it as messages before the others",
    ),
    *(
        RowKey(
            name,
            "text, message or messages",
            "the prompt; said once where both answers are conversations that hold it",
            _PAIRS,
        )
        for name in ("prompt", "messages")
    ),
    *(
        _other_name(name, "prompt", _PAIRS)._replace(beside="prompt")
        for name in ("instruction", "question", "conversations")
    ),
    RowKey(
        "images",
        "list, or JSON, of pictures",
        "pictures, in the order of their places; refused in preferences",
        frozenset({"messages", "sharegpt", "preference"}),
        WITH_ANSWERS,
        "write the row as messages",
    ),
    _other_name("image", "images"),
    *(
        RowKey(name, "any", "not trained on", refused=WITH_ANSWERS, fix=_NOT_READ)
        for name in ("video", "videos", "audio", "audios")
    ),
    RowKey(
        "functions",
        "any",
        "an older form of `tools`",
        refused=WITH_ANSWERS,
        fix="write each as {'type': 'function', 'function': ...} under 'tools'",
    ),
    _other_name("available_tools", "tools"),
    _other_name("system_prompt", "system"),
    RowKey(
        "weight",
        "1, or refused",
        "none: only a source has a weight",
        frozenset(),
        WITH_ANSWERS,
        "all rows have the same weight: leave it out, or set a weight for the whole source",
        _is_one,
    ),
    RowKey(
        "label",
        f"{_FLAG}; other values have no effect",
        "refused if false, 0 or less: the answer is a bad one",
        frozenset(),
        WITH_ANSWERS,
        _ANSWER_IS_BAD,
        _is_not_bad,
    ),
    RowKey(
        "kto_tag",
        _FLAG,
        "refused unless true: the answer is a bad one",
        frozenset(),
        WITH_ANSWERS,
        _ANSWER_IS_BAD,
        _is_good,
    ),
    RowKey("negatives", "text, or list of texts", "hard negatives: texts that do not answer the query", _GROUPS),
    _other_name("negative", "negatives", _GROUPS),
    *(RowKey(name, "text", "further hard negatives, in this order", _GROUPS) for name in NEGATIVES),
    *(
        RowKey(
            name,
            "1 or true, or refused",
            "none: a row has a query with its answer",
            frozenset(),
            _GROUPS,
            "a grade may mark a wrong answer, and each is trained as a right one: keep right answers, and leave it out",
            _is_one,
        )
        for name in ("label", "score", "similarity")
    ),
    RowKey("labels", "list of whole numbers, or JSON", "a token with label -100 is not trained", _TOKENS),
    RowKey("attention_mask", "list of numbers or booleans, or JSON", "a token outside is dropped", _TOKENS),
    *(
        RowKey(name, "list of numbers or booleans, or JSON", "a token outside is not trained", _TOKENS)
        for name in ("completion_mask", "assistant_masks", "loss_mask")
    ),
    *(
        RowKey(
            name,
            "list of numbers, or JSON",
            "refused if a row holds several documents",
            frozenset(),
            _TOKENS,
            _ONE_DOCUMENT,
            _is_one_document,
        )
        for name in ("position_ids", "seq_lengths")
    ),
)

MARKS = ("weight", "train", "training", "trainable", "loss")
"""Message keys with 1 or true for a trained message, 0 or false for an untrained one."""
# axolotl trains parts of a message by `train_detail`; ms-swift weights its loss by `loss_scale`.
_REFUSED_MARKS = {
    "train_detail": "a message is trained as a whole or not at all: split it into several messages",
    "loss_scale": "all trained tokens have the same weight: use 'weight' 0 or 1",
}
TEMPLATE_KEYS: Mapping[str, Callable[[str], Any]] = {
    "tool_calls": lambda text: [
        {"id": "call00001", "type": "function", "function": {"name": text, "arguments": {"k": text}}}
    ],
    "function_call": lambda text: {"name": text, "arguments": "{}"},
    "reasoning_content": str,
    "reasoning": str,
    "thinking": str,
    "refusal": str,
    "audio": lambda text: {"id": text},
}
"""Message keys for the chat template alone. The function wraps a given text into a value for the key."""


class MessageKey(NamedTuple):
    """Keys of a message, or types of a part of content, as a line in the reference."""

    names: tuple[str, ...]
    forms: str
    effect: str


MESSAGE_KEYS = (
    MessageKey(
        MARKS,
        f"{_FLAG}; refused otherwise",
        "true: the message is trained, also a user message; false: not trained, also with `data.train_on_prompt`. "
        "Refused in a completion or a preference",
    ),
    MessageKey(tuple(_REFUSED_MARKS), "any", "refused: a message is trained as a whole"),
    MessageKey(
        ("tool_calls",),
        "list of calls; `arguments` as an object or JSON",
        "passed to the chat template, with the arguments in the form for this template",
    ),
    MessageKey(("reasoning_content", "reasoning", "thinking"), "text", "thoughts, passed to the chat template"),
    MessageKey(("function_call", "refusal", "audio"), "any", "passed to the chat template"),
    MessageKey(("name", "tool_call_id", "prefix"), "any, as all other keys", "passed to the chat template unchecked"),
)
PART_TYPES = (
    MessageKey(("text",), "a text under `text`", "joined to the text parts beside it"),
    MessageKey(
        ("image", "image_url"),
        "a path, a `file://` or `data:` URI, `base64`, or the next of `images`",
        "a picture",
    ),
    MessageKey(
        ("thinking", "reasoning", "tool_result", "video"),
        "any, as all other types",
        "passed to the chat template; refused if the template drops one of the texts in the part",
    ),
)


def mark_of(message: Mapping[str, Any], where: str) -> bool | None:
    """Return True for a message marked as trained, False for untrained, None without a mark. Raises BadRow."""
    for key, fix in _REFUSED_MARKS.items():
        if not is_empty(message.get(key)):
            raise BadRow(f"{where} has {key!r}, which is not supported: {fix}.")
    marks = {key: mark for key in MARKS if (mark := typed(message.get(key))) is not None}
    for key, value in marks.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise BadRow(f"{where}: {key!r} is {value!r:.40}; a message is trained (1, true) or not (0, false).")
    # A row may have marks of several libraries. They must agree.
    if len(set(map(bool, marks.values()))) > 1:
        raise BadRow(f"{where} has marks for trained and for not trained at the same time: {marks}.")
    if not marks:
        return None
    return bool(next(iter(marks.values())))


def without_marks(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for the chat template, without marks and null values."""
    # A template may test a key for presence alone, and a table has every key in every message.
    return {key: value for key, value in message.items() if value is not None and key not in MARKS}
