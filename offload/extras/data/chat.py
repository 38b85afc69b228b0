"""Conversations to text: render the chat template and locate the assistant's parts in the result.

The tokenizer supplies the template. Without one, `BUILTIN_TEMPLATE` writes each message in Zephyr style: a line with
the role marker, the content, and the end-of-text token, which also ends generation.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cached_property, lru_cache
from typing import Any

from offload.errors import ConfigError
from offload.extras.data.findings import Findings
from offload.extras.data.pictures import parts_of
from offload.extras.data.records import Chat, common_prefix_length
from offload.extras.data.row_keys import TEMPLATE_KEYS
from offload.extras.data.rows import BadRow, json_reason

ROLE_MARKERS = ("<|system|>", "<|user|>", "<|assistant|>", "<|tool|>")
BUILTIN_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\n' + message['content'] + eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
)

# Some templates write the current date. A fixed clock makes the tokens independent of the preparation day.
_DAY = datetime(2025, 1, 1)
TOLD_DAY = f"{_DAY:%d %b %Y}"
_DIRECTIVES = [f"%{letter}" for letter in "aAbBcdDeFGhHIjmMnprRStTuUVwWxXyYzZ"]
_DIRECTIVES += [f"%-{letter}" for letter in "deHIjmMSy"]  # without a zero before it


def _replaced(directives: Iterable[tuple[str, str]]) -> str:
    return "".join(f".replace({directive!r}, {value!r})" for directive, value in directives)


# transformers passes texts to a template, no functions, so the clock is written in the language of templates.
_FIXED_CLOCK = (
    "{%- macro strftime_now(format) -%}{{ format"
    + _replaced([("%%", "\0"), *((each, _DAY.strftime(each)) for each in _DIRECTIVES), ("\0", "%")])
    + " }}{%- endmacro -%}"
)

Segments = list[tuple[str, bool]]
"""Consecutive (text, is trained) parts. The joined texts are the document."""
Spans = Sequence[tuple[int, int]]
"""Character ranges (start, end) in order."""

# No template writes this text by itself: in the output, the text proves that a key was read.
_PROBE = "probe7f3a"
_KEYED = {"k": _PROBE}
_CONTENT = "content"
_MAX_SHAPES = 4096


class ChatRenderer:
    """Renders conversations with the chat templates of one tokenizer and locates the trained parts.

    Three methods, tried in this order:

    1. The `{% generation %}` marks of the template.
    2. Prefixes: render the conversation up to each message, if every rendering is a prefix of the next one.
    3. One document per answer, for templates that rewrite earlier turns (reasoning models). The document ends with
       the answer, and only this answer is trained.

    For rows with marks on single messages, methods 2 and 3 locate the messages, and the template's `{% generation %}`
    marks restrict the trained characters. The completion in a prompt-completion row is trained as a whole.

    Some templates end an answer by the next role marker alone (GLM). If this marker ends generation, it is trained as
    the end of the answer. Marks of the template are kept as they are.
    """

    def __init__(self, tokenizer: Any, train_on_prompt: bool, ends: Sequence[str] = ()) -> None:
        """Raises ConfigError for named templates without a `default`."""
        templates = tokenizer.chat_template or BUILTIN_TEMPLATE
        if not isinstance(templates, dict):
            templates = {"default": templates}
        if "default" not in templates:
            raise ConfigError(
                f"the tokenizer has the chat templates {', '.join(sorted(templates))}, and none is named default: "
                "write one of them into chat_template.jinja in the folder of the tokenizer."
            )
        self._default = Template(tokenizer, templates["default"])
        self._tool_use = self._default
        # transformers chooses the template named `tool_use` for conversations with tools in the same way.
        if "tool_use" in templates:
            self._tool_use = Template(tokenizer, templates["tool_use"])
        self._train_on_prompt = train_on_prompt
        self.ends = tuple(ends)
        """Texts of the tokens that end generation."""
        self.findings = Findings()
        """Counts open answers and dropped texts."""

    def render_documents(self, chat: Chat) -> list[Segments]:
        """Return the documents of a conversation: several only if the template rewrites earlier turns.

        Raises BadRow, also if the answers cannot be located.
        """
        template = self._default
        if chat.tools:
            template = self._tool_use
        chat = template.with_expected_forms(chat)
        whole, marks = template.render(chat, len(chat.messages))
        # The template's own marks are exact. Marks of the row, and a completion, need the place of each message.
        has_places = marks is None or chat.marks or chat.num_prompt is not None
        parts = dict[int, tuple[int, str, Spans | None]]()
        if has_places and not self._train_on_prompt:
            parts = {i: _find_message(template, chat, i) for i in range(len(chat.messages)) if chat.trains(i)}
        # An answer counts as it is trained: a template may write an earlier one in another way.
        self._check_messages(template, chat, whole, {i: text for i, (_, text, _) in parts.items()})
        if self._train_on_prompt:
            return [_segments(whole, _untrained_spans(template, chat, whole), inside=False)]
        if not has_places:
            return [_segments(whole, marks or ())]
        spans = dict[int, Spans]()
        for i, (start, text, own_marks) in parts.items():
            # A completion is trained as a whole, so marks of the template do not narrow it.
            if own_marks is None or chat.num_prompt is not None:
                spans[i] = [(start, len(text))]
            else:
                spans[i] = _within(start, len(text), own_marks)
        # Each rendering continues the one before, so one document has all answers at the places found.
        if all(whole.startswith(text) for _, text, _ in parts.values()):
            # A turn with another trained message right behind it has no marker to add.
            starts = {start for start, _, _ in parts.values()}
            for i, (start, text, own_marks) in parts.items():
                is_answer = chat.messages[i]["role"] == "assistant"
                if is_answer and not own_marks and len(text) not in starts:
                    spans[i] = [(start, self._end_of_turn(whole, start, len(text)))]
            return [_segments(whole, [span for each in spans.values() for span in each])]
        # The template rewrites earlier turns: each answer gets the text that the model saw before the answer.
        return [_segments(text, spans[i]) for i, (_, text, _) in parts.items()]

    def _check_messages(self, template: Template, chat: Chat, whole: str, answers: Mapping[int, str]) -> None:
        """Raise BadRow for a message that the template leaves out, and count texts that it leaves out or changes.

        answers: the text up to and including each trained message, by index.
        """
        lost = template.lost_parts(chat)
        for i, message in enumerate(chat.messages):
            name = f"message {i + 1} (role {message['role']!r}) of {chat.where}"
            gone, kept = lost.get(i, (set(), set()))
            # Templates without system messages are frequent, and many write no text beside a call.
            if gone and message["role"] != "system" and (not kept or gone != {_CONTENT}):
                raise BadRow(
                    f"{name}: the tokenizer's chat template drops the {min(gone)}. Give the message another role, such "
                    "as 'user' or 'tool', write its text into another message, or use a tokenizer with another chat "
                    "template."
                )
            texts = [str(part.get("text") or "") for part in parts_of(message["content"])]
            if chat.trains(i):  # earlier thoughts are no part of a prompt
                texts += [each for key in TEMPLATE_KEYS if isinstance(each := message.get(key), str)]
            if gone or not all(_is_in(answers.get(i, whole), text) for text in texts):
                self.findings.drop(name)
        # A template writes all documents or none.
        documents = [text for _, text in _texts_of(chat.options.get("documents")) if text]
        if documents and not any(_is_in(whole, text) for text in documents):
            self.findings.drop(f"'documents' of {chat.where}")

    def _end_of_turn(self, text: str, start: int, end: int) -> int:
        """Return the end of a turn with the next token, if this one ends generation and the turn has no such token."""
        behind = text[end:].lstrip()
        if not behind or text[start:end].rstrip().endswith(self.ends):
            return end
        marker = next((each for each in self.ends if behind.startswith(each)), None)
        if marker is None:
            self.findings.num_open += 1
            return end
        # The blanks before the marker belong to the turn, too.
        return len(text) - len(behind) + len(marker)


class Template:
    """A chat template, with a record of the message keys present in the output."""

    def __init__(self, tokenizer: Any, text: str) -> None:
        self._tokenizer = tokenizer
        self._text = text
        if "strftime_now" in text:
            self._text = _FIXED_CLOCK + text
        self._has_marks = re.search(r"\{%-?\s*generation\s*-?%\}", text) is not None
        # A probe renders a conversation, so each key and each shape of a part is tried once.
        self._key_is_written: dict[str, bool] = {}
        self._parts_written: dict[tuple[Any, ...], list[str]] = {}
        self._lost_parts: dict[str, dict[int, tuple[set[str], set[str]]]] = {}

    def render(self, chat: Chat, num_messages: int, add_generation_prompt: bool = False) -> tuple[str, Spans | None]:
        """Return the text of the first messages and the character ranges inside `generation` marks.

        The ranges are None for a template without marks. Raises BadRow.
        """
        messages = chat.messages[:num_messages]
        try:
            return self._render(messages, chat.tools, add_generation_prompt=add_generation_prompt, **chat.options)
        except Exception as error:  # templates raise any exception
            roles = ", ".join(str(message["role"]) for message in chat.messages[:8])
            raise BadRow(
                f"{chat.where}: the tokenizer's chat template refuses a conversation of {roles}: {error}"
            ) from error

    def with_expected_forms(self, chat: Chat) -> Chat:
        """Return the conversation with contents and tool call arguments in the form the template expects.

        Raises BadRow for a key that the template does not write.
        """
        used_keys = dict[str, str]()
        if chat.tools:
            used_keys["tools"] = "'tools'"
        for number, message in enumerate(chat.messages, 1):
            used_keys |= {key: f"{key!r} in message {number}" for key in TEMPLATE_KEYS if message.get(key)}
            for part in parts_of(message["content"]):
                self._check_part(message["role"], part, f"{chat.where}, message {number}")
        if self._takes_parts:
            chat = replace(chat, messages=[{**each, "content": parts_of(each["content"])} for each in chat.messages])
        for key, key_name in used_keys.items():
            if not self._writes(key):
                raise BadRow(
                    f"{chat.where} has {key_name}, but the tokenizer's chat template drops it: use a tokenizer with "
                    "another chat template, write it into a 'content', or leave it out."
                )
        if "tool_calls" not in used_keys:
            return chat
        return replace(chat, messages=[self._with_arguments(each, chat.where) for each in chat.messages])

    def lost_parts(self, chat: Chat) -> Mapping[int, tuple[set[str], set[str]]]:
        """Return (parts that the template drops, parts that it writes), by index of each message with a dropped one.

        Each text has another one in its place, since a short text may be in a rendering by chance. Conversations that
        differ in these texts alone are tried once.
        """
        probes: list[tuple[int, str]] = []

        def probe(part: str) -> str:
            probes.append((number, part))
            return f"{_PROBE}n{len(probes)}e"

        messages = []
        for number, message in enumerate(chat.messages):  # noqa: B007 (read by `probe`)
            messages.append(_with_probes(message, probe))
        shape = repr((messages, bool(chat.tools), chat.options))
        if shape not in self._lost_parts:
            if len(self._lost_parts) >= _MAX_SHAPES:
                self._lost_parts.clear()
            found: dict[int, tuple[set[str], set[str]]] = {}
            # A template may refuse the probes: rendering the actual row decides.
            rendered = self._try_out(messages, chat.tools, **chat.options)
            for place, (index, part) in enumerate(probes, 1):
                is_written = rendered is None or f"{_PROBE}n{place}e" in rendered
                found.setdefault(index, (set(), set()))[is_written].add(part)
            self._lost_parts[shape] = {index: parts for index, parts in found.items() if parts[0]}
        return self._lost_parts[shape]

    def _writes(self, key: str) -> bool:
        """Return True if the template writes a probe text under this key.

        A template error counts as True: rendering the actual row decides.
        """
        if key not in self._key_is_written:
            rendered = self._try_out(*_probe(key))
            self._key_is_written[key] = rendered is None or _PROBE in rendered
        return self._key_is_written[key]

    def _check_part(self, role: str, part: dict[str, Any], where: str) -> None:
        """Raise BadRow for a part of content with a text that the template does not write.

        A template that writes the list itself, as Python does, does not know parts.
        """
        if part["type"] in ("text", "image"):
            return
        texts = dict(_texts_of(part))
        probes = {key: f"{_PROBE}{number}" for number, key in enumerate(texts)}
        probe = _with_texts(part, probes)
        # Parts that differ in texts alone are written alike. A template may ask for any other value, as for a flag.
        shape = role, repr(probe)
        if shape not in self._parts_written:
            turns: list[dict[str, Any]] = [{"role": role, "content": [probe]}]
            # Many templates refuse a conversation that does not begin with a user, or has two users in a row.
            if role != "user":
                turns.insert(0, {"role": "user", "content": "q"})
            rendered = self._try_out(turns)
            dropped = [key for key, probe in probes.items() if rendered is not None and probe not in rendered]
            is_list = rendered is not None and "'type': " in rendered
            self._parts_written[shape] = [".".join(key) for key in dropped] or ["type"] * (is_list or not texts)
        if unwritten := self._parts_written[shape]:
            raise BadRow(
                f"{where} has content of type {part['type']!r}, and the tokenizer's chat template drops "
                f"{unwritten[0]!r} from it: write it as a part of type 'text', leave it out, or use a tokenizer with "
                "another chat template."
            )

    @cached_property
    def _takes_parts(self) -> bool:
        """True if the template writes a text only as a part of a list, as those for pictures do."""
        of_text, of_parts = (self._try_out([{"role": "user", "content": each}]) for each in (_PROBE, parts_of(_PROBE)))
        return of_text is not None and _PROBE not in of_text and _PROBE in (of_parts or "")

    @cached_property
    def _written_types(self) -> set[type]:
        """Types of tool call arguments, text or object, that the template writes as JSON."""
        messages, _ = _probe("tool_calls")
        function = messages[1]["tool_calls"][0]["function"]
        as_json = json.dumps(_KEYED)
        found = set[type]()
        # Single quotes are Python's text of the object: such a template expects JSON text.
        if (rendered := self._try_out(messages)) is not None and str(_KEYED) not in rendered:
            found.add(dict)
        # A template may accept both types.
        function["arguments"] = as_json
        if as_json in (self._try_out(messages) or ""):
            found.add(str)
        return found

    def _with_arguments(self, message: dict[str, Any], where: str) -> dict[str, Any]:
        """Return a message with tool call arguments of a type that the template writes. Raises BadRow.

        Arguments of such a type stay as they are, because a text parsed and written again may be another text.
        """
        given = message.get("tool_calls")
        if not given:
            return message
        if not isinstance(given, list):
            raise BadRow(f"{where}: 'tool_calls' must be a list, it is {type(given).__name__}.")
        return {**message, "tool_calls": [self._with_argument_type(call, where) for call in given]}

    def _with_argument_type(self, call: Any, where: str) -> dict[str, Any]:
        """Return a tool call with arguments of a written type. Raises BadRow.

        A call is an object with a `function`, or the function itself.
        """
        if not isinstance(call, dict) or not isinstance(call.get("function", call), dict):
            raise BadRow(f"{where}: each of 'tool_calls' must be an object with a 'function'.")
        if "function" in call:
            return {**call, "function": self._function_with_argument_type(call["function"], where)}
        return self._function_with_argument_type(call, where)

    def _function_with_argument_type(self, function: dict[str, Any], where: str) -> dict[str, Any]:
        if "arguments" not in function:
            return function
        arguments, types = function["arguments"], self._written_types
        as_text = dict not in types or (isinstance(arguments, str) and str in types)
        return {**function, "arguments": _parse_arguments(arguments, as_text, where)}

    def _try_out(self, messages: list[dict[str, Any]], tools: list[Any] | None = None, **options: Any) -> str | None:
        """Return the rendered text, or None after a template error."""
        try:
            return self._render(messages, tools, **options)[0]
        except Exception:  # see render
            return None

    def _render(self, messages: list[dict[str, Any]], tools: Any, **options: Any) -> tuple[str, Spans | None]:
        if not self._has_marks:
            render_options = {"chat_template": self._text, "tokenize": False, **options}
            return str(self._tokenizer.apply_chat_template(messages, tools=tools, **render_options)), None
        from transformers.utils.chat_template_utils import render_jinja_template

        # Unlike the tokenizer's method, this function returns the ranges of marks. The method passes the special tokens
        # as variables of the template, so they are passed here too.
        special = getattr(self._tokenizer, "tokenizer", self._tokenizer).special_tokens_map  # also from a processor
        render_options = {
            "chat_template": self._text,
            "return_assistant_tokens_mask": True,
            **special,
            **options,
        }
        (text,), (spans,) = render_jinja_template([messages], tools, **render_options)
        return str(text), spans


def _is_in(rendered: str, text: str) -> bool:
    """Return True if a rendered conversation has a text, as it is or as JSON. Any spaces are equal."""
    forms = text.strip(), json.dumps(text, ensure_ascii=False)[1:-1]
    return any(each in rendered for each in forms) or any(
        _without_spaces(each) in _without_spaces(rendered) for each in forms
    )


@lru_cache(2)  # a conversation is asked for each of its texts
def _without_spaces(text: str) -> str:
    return "".join(text.split())


def _find_message(template: Template, chat: Chat, index: int) -> tuple[int, str, Spans | None]:
    """Render up to and including message `index`. Return (start of the message in characters, text, marks)."""
    text, marks = template.render(chat, index + 1)
    is_answer = chat.messages[index]["role"] == "assistant"
    if index == 0:
        start = 0
        if is_answer:
            start = _start_of_first_answer(template, chat, text)
        return start, text, marks
    # An answer begins behind the generation prompt: a model never writes the role marker itself.
    prompt, _ = template.render(chat, index, add_generation_prompt=is_answer)
    if text.startswith(prompt):
        return len(prompt), text, marks
    before, _ = template.render(chat, index)
    if text.startswith(before):  # the generation prompt adds text that the template drops later, e.g. "<think>"
        if chat.options and prompt != template.render(replace(chat, options={}), index, is_answer)[0]:
            raise BadRow(
                f"{chat.where}: with 'chat_template_kwargs' {dict(chat.options)} the chat template begins an answer "
                "with text that the finished conversation lacks, so the trained tokens cannot be found: leave the "
                "variable out, or write the text into the answers."
            )
        # The common part of the generation prompt, for example the role marker, belongs to the prompt.
        return max(len(before), common_prefix_length(prompt, text)), text, marks
    kind, fix = "a message with a mark", "Leave the mark out."
    if is_answer:
        kind = "an answer"
        fix = (
            "Set data.train_on_prompt=true to train on all tokens, or use a tokenizer with {% generation %} marks in "
            "the template."
        )
    raise BadRow(
        f"{chat.where}: the tokenizer's chat template changes the text before message {index + 1}, {kind}, when this "
        f"message is added, so the tokens of the message cannot be found. {fix}"
    )


def _start_of_first_answer(template: Template, chat: Chat, text: str) -> int:
    """Return the start of an answer in `text`, the rendering of this answer alone. Raises BadRow.

    The template may write a role marker and a system message of its own before the answer. The answer is found behind
    a question, where a generation prompt is possible.
    """
    answer = chat.messages[0]
    question: Any = "q"
    # In the form of the answer: a template for pictures expects parts in each message.
    if not isinstance(answer["content"], str):
        question = parts_of(question)
    asked = replace(chat, messages=[{"role": "user", "content": question}, answer])
    start, behind_question, _ = _find_message(template, asked, 1)
    # A template may write a first answer in another way. Then no part of the text is known to be a prompt.
    if not text.endswith(behind_question[start:]):
        return 0
    return len(text) - (len(behind_question) - start)


def _untrained_spans(template: Template, chat: Chat, whole: str) -> Spans:
    """Return the ranges of messages marked as not trained. Raises BadRow."""
    parts = [_find_message(template, chat, index) for index, mark in chat.marks.items() if not mark]
    if not all(whole.startswith(text) for _, text, _ in parts):
        raise BadRow(
            f"{chat.where}: the chat template rewrites earlier turns, so the text of a message marked as not trained "
            "cannot be found in the conversation: set data.train_on_prompt=false, or leave the mark out."
        )
    return [(start, len(text)) for start, text, _ in parts]


def _within(start: int, end: int, marks: Spans) -> Spans:
    """Return the marked parts within a range."""
    return [(max(start, a), min(end, b)) for a, b in marks if a < end and b > start]


def _segments(text: str, spans: Spans, inside: bool = True) -> Segments:
    """Cut a text at character ranges. `inside`: training mark within the ranges; the rest gets the opposite mark."""
    segments, position = Segments(), 0
    for start, end in spans:
        segments += [(text[position:start], not inside), (text[start:end], inside)]
        position = end
    segments.append((text[position:], not inside))
    return [(part, trained) for part, trained in segments if part]


def _probe(key: str) -> tuple[list[dict[str, Any]], list[Any] | None]:
    """Return a trial conversation and tools with the probe text in one place."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    if key == "tools":
        function = {"name": _PROBE, "description": _PROBE, "parameters": {"type": "object", "properties": {}}}
        return turns, [{"type": "function", "function": function}]
    return [turns[0], {**turns[1], key: TEMPLATE_KEYS[key](_PROBE)}], None


def _with_probes(message: dict[str, Any], probe: Callable[[str], str]) -> dict[str, Any]:
    """Return a message with `probe(part)` in place of each text, and of the arguments or the name of each call."""
    content = message["content"]
    if isinstance(content, str):
        content = content.strip() and probe(_CONTENT)
    else:
        content = [{**part, "text": probe(_CONTENT)} if (part.get("text") or "").strip() else part for part in content]
    # Thoughts differ from row to row.
    found = {
        key: "thought" if key in TEMPLATE_KEYS and isinstance(each, str) else each for key, each in message.items()
    }
    found["content"] = content
    if calls := message.get("tool_calls"):
        found["tool_calls"] = [_call_with_probes(call, probe) for call in calls]
    return found


def _call_with_probes(call: dict[str, Any], probe: Callable[[str], str]) -> dict[str, Any]:
    if "function" in call:
        return {**call, "function": _call_with_probes(call["function"], probe)}
    arguments = call.get("arguments")
    if not arguments or not isinstance(arguments, str | dict) or arguments == "{}":
        return {**call, "name": probe("name of a call")}
    found: Any = {"k": probe("arguments of a call")}
    if isinstance(arguments, str):
        found = json.dumps(found)
    return {**call, "arguments": found}


def _texts_of(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (path of keys, text) for all texts in a part of content, except for types."""
    if isinstance(value, str):
        yield path, value
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = enumerate(value)
    for key, each in items:
        if key != "type":
            yield from _texts_of(each, (*path, str(key)))


def _with_texts(value: Any, texts: Mapping[tuple[str, ...], str], path: tuple[str, ...] = ()) -> Any:
    """Return a part of content with other texts, by path of keys."""
    if isinstance(value, dict):
        return {key: _with_texts(each, texts, (*path, str(key))) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_texts(each, texts, (*path, str(index))) for index, each in enumerate(value)]
    return texts.get(path, value)


def _parse_arguments(arguments: Any, as_text: bool, where: str) -> Any:
    """Return tool call arguments as JSON text or as an object. Raises BadRow."""
    is_text = isinstance(arguments, str)
    if as_text and is_text:
        return arguments
    if as_text:
        return json.dumps(arguments, ensure_ascii=False)
    parsed = arguments
    try:
        # A call without arguments may have an empty text.
        if is_text:
            parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError) as error:
        raise BadRow(
            f"{where}: 'tool_calls' have 'arguments' that are not valid JSON: {json_reason(error)}."
        ) from error
    if not isinstance(parsed, dict):
        raise BadRow(f"{where}: the 'arguments' in 'tool_calls' must be an object, or a text with one as JSON.")
    return parsed
