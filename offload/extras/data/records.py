"""Records: what a row, a document or a piece of a document says, in six types for all formats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from offload.extras.data.pictures import Picture


@dataclass(frozen=True)
class Record:
    """The common part of all types."""

    where: str
    """Name for messages: file and line."""

    @property
    def texts(self) -> list[str]:
        """Texts in order. Empty for token ids."""
        return []

    @property
    def size(self) -> int:
        """Characters of texts plus bytes of token ids and of stored pictures."""
        return sum(map(len, self.texts))

    @property
    def untrained_roles(self) -> set[str]:
        """Roles in a conversation without a trained message and without the role assistant."""
        return set()


@dataclass(frozen=True)
class Text(Record):
    """Plain text: a document, or a piece. A middle piece neither opens nor closes the document."""

    text: str
    opens: bool = True
    closes: bool = True

    @property
    def texts(self) -> list[str]:
        return [self.text]


@dataclass(frozen=True)
class Chat(Record):
    """A conversation in the messages format.

    Assistant messages are trained, from message `num_prompt` on if the row separates prompt and answer. `marks`
    override this for single messages, by index from 0. `options` are variables for the chat template. `pictures`: the
    pictures in order; the messages hold the placeholders.
    """

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

    @property
    def texts(self) -> list[str]:
        contents = [message["content"] for message in self.messages]
        parts = [part for each in contents if not isinstance(each, str) for part in each]
        in_parts = (text for part in parts for text in (part.get("text"), part.get(part["type"])))
        return [each for each in (*contents, *in_parts) if isinstance(each, str)]

    @property
    def size(self) -> int:
        return super().size + sum(len(each.data or b"") for each in self.pictures)

    @property
    def untrained_roles(self) -> set[str]:
        roles = {message["role"] for message in self.messages}
        trains = any(self.trains(index) for index in range(len(self.messages)))
        # A row may untrain its answers on purpose. Only other names for the role are a likely mistake.
        if trains or "assistant" in roles:
            return set()
        return roles


@dataclass(frozen=True)
class Pair(Record):
    """A prompt and the completion to train on."""

    prompt: str
    completion: str

    @property
    def texts(self) -> list[str]:
        return [self.prompt, self.completion]


@dataclass(frozen=True)
class Preference(Record):
    """Two answers to one prompt, the first preferred."""

    chosen: Chat | Pair
    rejected: Chat | Pair

    @property
    def texts(self) -> list[str]:
        return [*self.chosen.texts, *self.rejected.texts]


@dataclass(frozen=True)
class Group(Record):
    """A query, its answer, and hard negatives: texts to compare."""

    members: tuple[str, ...]

    @property
    def texts(self) -> list[str]:
        return [*self.members]


@dataclass(frozen=True)
class Ids(Record):
    """Token ids [n], used without change.

    `stream`: the file does not mark documents. `trained` bool [n], None: all tokens.
    """

    ids: np.ndarray
    closes: bool
    stream: bool
    trained: np.ndarray | None = None

    @property
    def size(self) -> int:
        return self.ids.nbytes


def common_prefix_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Return the common prefix length for two texts or conversations."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
