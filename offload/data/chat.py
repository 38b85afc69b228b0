"""Conversations to text: a chat template rendered, and which parts of the result the assistant says.

The template is the tokenizer's own; without one it is `BUILTIN_TEMPLATE`, in the manner of Zephyr: each
message is its role's marker on a line, the content, and the end-of-text token, which is also what ends generation.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from offload.data.formats import Chat
from offload.data.rows import BadRow
from offload.errors import ConfigError

ROLE_MARKERS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
BUILTIN_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

# Some templates write today's date. Data must not depend on the day it was prepared, so their clock stands still.
_FIXED_CLOCK = (
    "{%- macro strftime_now(format) -%}"
    "{{ {'%d %b %Y': '01 Jan 2025', '%B %d, %Y': 'January 01, 2025'}.get(format, '2025-01-01') }}"
    "{%- endmacro -%}"
)

Segments = list[tuple[str, bool]]  # (text, trained), in order; joined they are the document


class ChatRenderer:
    """Renders conversations with one tokenizer's template and finds the assistant's part.

    Three ways, tried in this order: the template's own `{% generation %}` marks; the conversation rendered up to each
    message, when every such rendering begins the next one; and, for templates that rewrite earlier turns (as reasoning
    models do), one document for each answer, rendered as it stood when the answer was given, with only that answer
    trained.
    """

    def __init__(self, tokenizer: Any, train_on_prompt: bool) -> None:
        template = tokenizer.chat_template
        if isinstance(template, dict):
            template = template.get("default") or next(iter(template.values()))
        template = template or BUILTIN_TEMPLATE
        self._template: str = _FIXED_CLOCK + template if "strftime_now" in template else template
        self._tokenizer = tokenizer
        self._train_on_prompt = train_on_prompt
        self._marked = re.search(r"\{%-?\s*generation\s*-?%\}", template) is not None

    def token_mask(self, chat: Chat) -> tuple[list[int], np.ndarray] | None:
        """Return (ids [n], trained bool [n]) where the template marks what the assistant generates, else None."""
        if self._train_on_prompt or not self._marked or not self._tokenizer.is_fast:
            return None
        encoded = self._apply(
            chat, len(chat.messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        return encoded["input_ids"], np.asarray(encoded["assistant_masks"], bool)

    def documents(self, chat: Chat) -> list[Segments]:
        """Return the conversation as documents; more than one only when the template rewrites earlier turns."""
        whole = self._render(chat, len(chat.messages))
        if self._train_on_prompt:
            return [[(whole, True)]]
        roles = [message["role"] for message in chat.messages]
        answers = [i for i, role in enumerate(roles) if role == "assistant" and i >= chat.num_given]
        renderings = [self._render_answer(chat, index) for index in answers]
        if all(whole.startswith(text) for _, text in renderings):
            return [_segments(whole, [(start, len(text)) for start, text in renderings])]
        return [_segments(text, [(start, len(text))]) for start, text in renderings]

    def _render_answer(self, chat: Chat, index: int) -> tuple[int, str]:
        """Render up to and with the answer at `index`; return where it begins and the rendering."""
        text = self._render(chat, index + 1)
        if index == 0:
            return 0, text
        prompt = self._render(chat, index, add_generation_prompt=True)
        if text.startswith(prompt):
            return len(prompt), text
        before = self._render(chat, index)
        if text.startswith(before):  # the generation prompt says more than the template keeps, such as "<think>"
            return max(len(before), _num_common(prompt, text)), text
        raise ConfigError(
            f"{chat.where}: the tokenizer's chat template writes what comes before message {index + 1}, an answer, "
            "differently once the answer is there, so the assistant's tokens cannot be found. Set "
            "data.train_on_prompt=true to train on all of it, or use a tokenizer whose template has "
            "{% generation %} marks."
        )

    def _render(self, chat: Chat, num_messages: int, add_generation_prompt: bool = False) -> str:
        return str(self._apply(chat, num_messages, add_generation_prompt=add_generation_prompt, tokenize=False))

    def _apply(self, chat: Chat, num_messages: int, **options: bool) -> Any:
        """Return what the template makes of the first messages of a conversation. Raises BadRow."""
        messages = chat.messages[:num_messages]
        try:
            return self._tokenizer.apply_chat_template(
                messages, tools=chat.tools, chat_template=self._template, **options
            )
        except Exception as error:  # whatever a template raises
            roles = ", ".join(str(message["role"]) for message in chat.messages[:8])
            raise BadRow(
                f"{chat.where}: the tokenizer's chat template refuses a conversation of {roles}: {error}"
            ) from error


def _num_common(a: str, b: str) -> int:
    """Return how many characters two texts begin with alike."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _segments(text: str, spans: list[tuple[int, int]]) -> Segments:
    segments, position = [], 0
    for start, end in spans:
        segments += [(text[position:start], False), (text[start:end], True)]
        position = end
    segments.append((text[position:], False))
    return [(part, trained) for part, trained in segments if part]
