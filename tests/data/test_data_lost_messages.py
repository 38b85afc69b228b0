"""Every text of a conversation is in a document, or the row is refused or told, for published chat templates."""

from __future__ import annotations

from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from offload.extras.data.chat import ChatRenderer
from offload.extras.data.encoder import Encoder
from offload.extras.data.findings import Findings
from offload.extras.data.formats import FORMATS
from offload.extras.data.records import Chat
from offload.extras.data.rows import BadRow
from tests.matrix import quick

SPEC = find_spec("trl")
FOLDER = Path(SPEC.submodule_search_locations[0]) / "chat_templates" if SPEC else Path()
NAMES = sorted(path.stem for path in FOLDER.glob("*.jinja"))
FAMILIES = [name for name in ("qwen2_5", "llama3", "gemma", "gptoss", "phi3", "deepseekv3") if name in NAMES]


def turn(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": "call00001", "type": "function", "function": {"name": name, "arguments": arguments}}


ASKED, LOOKED, ANSWERED = turn("user", "Zurich time?"), turn("assistant", "Wait, looking."), turn("assistant", "Noon.")
CALLED = turn("assistant", "", tool_calls=[call("clock", city="Zürich")])
RESULT = turn("tool", "bell rang", tool_call_id="call00001", name="clock")
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "plain": [turn("system", "Kindly."), ASKED, ANSWERED],
    "sharegpt": [{"from": "human", "value": "Zurich time?"}, {"from": "gpt", "value": "Noon."}],
    "observation of sharegpt": [
        {"from": "human", "value": "Zurich time?"},
        {"from": "gpt", "value": "Wait, looking."},
        {"from": "observation", "value": "bell rang"},
        {"from": "gpt", "value": "Noon."},
    ],
    **{
        f"a result of {role}": [ASKED, LOOKED, turn(role, "bell rang"), ANSWERED]
        for role in ("function", "ipython", "observation", "tool_response", "tool")
    },
    "a call as a role": [ASKED, turn("tool_call", '{"name": "clock"}'), turn("tool_response", "bell rang"), ANSWERED],
    **{f"asked by {role}": [turn(role, "Zurich time?"), ANSWERED] for role in ("human", "User", "prompter")},
    "answered by model": [ASKED, turn("model", "Wait, looking."), turn("user", "Now?"), ANSWERED],
    "developer": [turn("developer", "Kindly."), ASKED, ANSWERED],
    "a system in the middle": [ASKED, LOOKED, turn("system", "Kindly."), turn("user", "Now?"), ANSWERED],
    "two systems": [turn("system", "Kindly."), turn("system", "Briefly."), ASKED, ANSWERED],
    "parts": [turn("user", [{"type": "text", "text": "Zurich"}, {"type": "text", "text": " time?"}]), ANSWERED],
    "an empty question": [turn("user", ""), ANSWERED],
    "an empty answer": [ASKED, turn("assistant", ""), turn("user", "Now?"), ANSWERED],
    "thoughts": [ASKED, turn("assistant", "Noon.", reasoning_content="Hmm, bells.")],
    "thoughts by another name": [ASKED, turn("assistant", "Noon.", thinking="Hmm, bells.")],
    "thoughts in the text": [ASKED, turn("assistant", "<think>\nHmm, bells.\n</think>\n\nNoon.")],
    "earlier thoughts": [
        ASKED,
        turn("assistant", "<think>\nHmm, bells.\n</think>\n\nWait, looking."),
        turn("user", "Now?"),
        ANSWERED,
    ],
    "names": [turn("user", "Zurich time?", name="Ada"), ANSWERED],
    "a call": [ASKED, CALLED, RESULT, ANSWERED],
    "a call with words": [ASKED, {**CALLED, "content": "Wait, looking."}, RESULT, ANSWERED],
    "two calls": [
        ASKED,
        turn("assistant", "", tool_calls=[call("clock", city="Zürich"), call("chime", tower="east")]),
        RESULT,
        turn("tool", "thrice", tool_call_id="call00002", name="chime"),
        ANSWERED,
    ],
    "a result as an object": [
        ASKED,
        CALLED,
        {**RESULT, "content": '{"bell": "rang \\"twice\\"", "n": [1, 2]}'},
        ANSWERED,
    ],
    "lines and blanks": [turn("user", "  Zurich\n\n\ttime?  "), turn("assistant", "\n Noon.\n\n")],
}
HEARD = {"Kindly", "Briefly", "Zurich", "time?", "Wait", "looking", "bell", "rang", "thrice", "Now?", "Noon", "Hmm"}
WORDS = HEARD | {"bells", "clock", "Zürich", "chime", "east", "twice"}


def record_of(messages: list[dict[str, Any]]) -> Chat:
    key, name = ("conversations", "sharegpt") if "from" in messages[0] else ("messages", "messages")
    found = FORMATS[name].record({key: messages}, "row 1", None)
    assert isinstance(found, Chat)
    return found


@pytest.mark.skipif(not FOLDER.name, reason="the templates are TRL's")
@pytest.mark.parametrize("name", quick(NAMES, FAMILIES))
def test_no_text_of_a_conversation_is_lost_without_a_word(name: str, bpe: Any) -> None:
    """Break: look for system messages alone; look for short texts anywhere; look at the first call alone."""
    tokenizer = deepcopy(bpe)
    tokenizer.chat_template = (FOLDER / f"{name}.jinja").read_text()
    renderer = ChatRenderer(tokenizer, train_on_prompt=False)
    silent, heard = [], 0
    for kind, messages in CONVERSATIONS.items():
        renderer.findings = Findings()
        try:
            documents = renderer.render_documents(record_of(messages))
        except BadRow:
            continue
        written = "".join(text for document in documents for text, _ in document)
        # An argument or a result may be written as JSON.
        lost = [word for word in WORDS if word in str(messages) and word not in written]
        heard += not lost
        if lost and not renderer.findings.num_dropped:
            silent.append((kind, lost))
    assert not silent
    assert heard >= 5, "a template for conversations writes most of them"


SHORT = "{% for m in messages if m.role in ('user', 'assistant') %}{{ m.role }}:{{ m.content }};{% endfor %}"
FIRST_CALL = (
    "{% for m in messages %}{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls[0] | tojson }}{% endif %}{% endfor %}"
)
NO_ARGUMENTS = "{% for m in messages %}{{ m.content }}{{ m.tool_calls[0].function.name if m.tool_calls }}{% endfor %}"
NO_THOUGHTS = "{% for m in messages %}{{ m.role }}:{{ m.content.split('</think>')[-1] }};{% endfor %}"


@pytest.mark.parametrize(
    ("template", "messages", "told"),
    [
        (
            SHORT,
            [turn("user", "user"), turn("tool", "s"), ANSWERED],
            r"message 2 \(role 'tool'\) of row 1: .*the content",
        ),
        (FIRST_CALL, CONVERSATIONS["two calls"], r"message 2 .* drops the arguments of a call"),
        (NO_ARGUMENTS, CONVERSATIONS["a call"], r"message 2 .* drops the arguments of a call"),
        (NO_THOUGHTS, CONVERSATIONS["thoughts in the text"], None),
    ],
)
@pytest.mark.parametrize("trains_all", [False, True])
def test_a_lost_message_is_refused_and_a_changed_one_is_told(
    template: str, messages: Any, told: str | None, trains_all: bool, bpe: Any
) -> None:
    """Also where its text stands elsewhere by chance."""
    tokenizer = deepcopy(bpe)
    tokenizer.chat_template = template
    encoder, findings = Encoder(tokenizer, trains_all), Findings("skip")
    found = list(encoder.encode([(False, record_of(messages))], findings))
    assert len(found) == (told is None)
    if told is None:
        assert "1 text, the first one is message 2 (role 'assistant') of row 1" in " ".join(findings.notes())
    else:
        assert findings.num_bad == 1
        with pytest.raises(BadRow, match=told):
            list(encoder.encode([(False, record_of(messages))], Findings()))
