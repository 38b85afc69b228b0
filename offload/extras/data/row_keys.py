"""Row and message keys that change the training.

They come from the formats of OpenAI, mistral, axolotl, open-instruct, LLaMA-Factory and TRL. Each key is honoured, or
refused by name. Other keys, e.g. `id` and `source`, are ignored.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from offload.extras.data.rows import BadRow

_CHATS = frozenset({"messages", "sharegpt", "alpaca"})
_ALL = _CHATS | {"prompt-completion", "preference"}
_TOKENS = frozenset({"tokens"})


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, str | list | dict) and value in ("", "[]", "{}", [], {}))


def _is_one_document(value: Any) -> bool:
    """Return True for positions 0, 1, 2, ... in one document, and for a list with one length."""
    return _is_empty(value) or (isinstance(value, list) and (value == list(range(len(value))) or len(value) == 1))


class RowKey(NamedTuple):
    """A row key."""

    name: str
    honoured: frozenset[str]
    """Formats that read the key."""
    refused: frozenset[str] = frozenset()
    """Formats that refuse a row with a meaningful value."""
    fix: str = ""
    """Remedy in the error message."""
    says_nothing: Callable[[Any], bool] = _is_empty
    """True for a value without effect on the training."""


_RENAME = "to train on it, map it: --data.columns '{{{}: {}}}'"
_NOT_READ = "video and audio are not trained on: leave the key out"
_ANSWER_IS_BAD = "it marks a bad answer: leave such rows out, or write preferences (chosen, rejected)"

ROW_KEYS = (
    RowKey("input", frozenset({"alpaca"}), frozenset({"preference"}), "write it into 'prompt'"),
    RowKey("system", _CHATS | {"preference"}, _ALL - _CHATS - {"preference"}, "write it into 'prompt'"),
    *(RowKey(name, _ALL) for name in ("tools", "chat_template_kwargs", "parallel_tool_calls")),
    RowKey("history", frozenset({"alpaca"}), _ALL - {"alpaca"}, "write it as messages before the others"),
    *(RowKey(name, frozenset({"preference"})) for name in ("prompt", "messages")),
    *(
        RowKey(name, frozenset(), frozenset({"preference"}), _RENAME.format("prompt", name))
        for name in ("instruction", "question", "conversations")
    ),
    RowKey("images", frozenset({"messages", "sharegpt", "preference"}), _ALL, "write the row as messages"),
    RowKey("image", frozenset(), _ALL, _RENAME.format("images", "image")),
    *(RowKey(name, frozenset(), _ALL, _NOT_READ) for name in ("video", "videos", "audio", "audios")),
    RowKey("functions", frozenset(), _ALL, "write each as {'type': 'function', 'function': ...} under 'tools'"),
    RowKey("available_tools", frozenset(), _ALL, _RENAME.format("tools", "available_tools")),
    RowKey("system_prompt", frozenset(), _ALL, _RENAME.format("system", "system_prompt")),
    RowKey(
        "weight",
        frozenset(),
        _ALL,
        "all rows have the same weight: leave it out, or set a weight for the whole source",
        lambda value: value is None or value == 1,
    ),
    *(
        RowKey(name, frozenset(), _ALL, _ANSWER_IS_BAD, lambda value: value is not False)
        for name in ("label", "kto_tag")
    ),
    *(
        RowKey(name, _TOKENS)
        for name in ("labels", "attention_mask", "completion_mask", "assistant_masks", "loss_mask")
    ),
    *(
        RowKey(name, frozenset(), _TOKENS, "write one document in each row, without packing", _is_one_document)
        for name in ("position_ids", "seq_lengths")
    ),
)

MARKS = ("weight", "train", "training", "trainable", "loss")
"""Message keys with 1 or true for a trained message, 0 or false for an untrained one."""
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


def columns_for(data_format: str) -> tuple[str, ...]:
    """Return the optional keys of a format."""
    return tuple(key.name for key in ROW_KEYS if data_format in key.honoured)


def refused_in(data_format: str) -> tuple[str, ...]:
    """Return the refused keys of a format."""
    return tuple(key.name for key in ROW_KEYS if data_format in key.refused - key.honoured)


def check_row(data_format: str, row: Mapping[str, Any], where: str) -> None:
    """Raise BadRow for a meaningful value under a refused key."""
    for key in ROW_KEYS:
        if key.name in row and data_format in key.refused - key.honoured and not key.says_nothing(row[key.name]):
            raise BadRow(f"{where} has {key.name!r}, and data.format={data_format} does not read it; {key.fix}.")


def mark_of(message: Mapping[str, Any], where: str) -> bool | None:
    """Return True for a message marked as trained, False for untrained, None without a mark. Raises BadRow."""
    for key, fix in _REFUSED_MARKS.items():
        if not _is_empty(message.get(key)):
            raise BadRow(f"{where} has {key!r}, which is not supported: {fix}.")
    marks = {key: message[key] for key in MARKS if message.get(key) is not None}
    for key, value in marks.items():
        if not isinstance(value, int | float) or value not in (0, 1):
            raise BadRow(f"{where}: {key!r} is {value!r:.40}; a message is trained (1, true) or not (0, false).")
    if len(set(map(bool, marks.values()))) > 1:
        raise BadRow(f"{where} has marks for trained and for not trained at the same time: {marks}.")
    return bool(next(iter(marks.values()))) if marks else None


def without_marks(message: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message for the chat template, without marks and null values."""
    return {key: value for key, value in message.items() if value is not None and key not in MARKS}
