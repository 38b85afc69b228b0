"""The table of row keys: each key has an effect or an error with the name."""

from __future__ import annotations

import copy
import inspect
import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from offload.errors import ConfigError
from offload.extras.data.chat import BUILTIN_TEMPLATE
from offload.extras.data.encoder import Encoder
from offload.extras.data.findings import Findings
from offload.extras.data.formats import FORMATS, detect_format, read_records
from offload.extras.data.records import Group, Ids
from offload.extras.data.row_keys import MARKS, ROW_KEYS, TEMPLATE_KEYS
from offload.extras.data.rows import BadRow
from tests.data.asked import files_of

PLAIN = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ALL = (
    "{{ tools | tojson if tools }}{{ mood }}{{ parallel_tool_calls }}"
    "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}{{ m.reasoning_content }}{{ m.refusal }}"
    "{{ (m.function_call or {}).name }}{{ (m.audio or {}).id }}"
    "{% for call in m.tool_calls or [] %}{{ call.function.arguments | tojson }}{% endfor %}{% endif %}"
    "{{ m.content }}{{ eos_token }}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
TOOL = {"type": "function", "function": {"name": "ring", "parameters": {}}}
CALL = {"type": "function", "function": {"name": "ring", "arguments": '{"bell":1}'}}


def turns(user: Any = None, **answer: Any) -> list[dict[str, Any]]:
    """Return a conversation with two answers. The extra keys belong to the first turns."""
    first = [{"role": "user", "content": "one", **(user or {})}, {"role": "assistant", "content": "A", **answer}]
    return [*first, {"role": "user", "content": "two"}, {"role": "assistant", "content": "B"}]


ALPACA = {"instruction": "two", "output": "B"}
PAIR = {"prompt": "one", "completion": "B"}
CHATS = {"prompt": turns()[:1], "completion": turns()[1:2]}
ASKED = {"query": "one", "positive": "A"}
LIKED = {"prompt": "one", "chosen": "A", "rejected": "B"}
HUMAN = {"from": "human", "value": "one"}
SECOND = "<assistant>A<|endoftext|><user>two<|endoftext|><assistant>[B"
IDS = {"input_ids": [5, 6, 7]}
BAD = (False, "False", "false", " FALSE ", "no", 0, "0", 0.0, "0.0", -1)
GOOD = (True, "True", "true", "yes", 1, "1", 1.0, None, "", "null")
CLASSES = ("sports", 3)
ARGUMENTS = sorted(
    {*inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters} - {"self", "documents", "kwargs"}
)
"""Arguments of a call, of which a row has none. `documents` is a variable of templates too."""
OF_ROWS = [  # key, row, expected text or error action
    ("input", {**ALPACA, "input": "more"}, "two\n\nmore"),
    ("input", {**LIKED, "input": "more"}, BadRow),
    ("system", {"messages": turns(), "system": "kind"}, "<system>kind"),
    (
        "system",
        {"messages": [{"role": "system", "content": "kind\n"}, *turns()], "system": "kind"},
        "kind\n<|endoftext|><user>",
    ),
    ("system", {**PAIR, "system": "kind"}, BadRow),
    ("tools", {"messages": turns(), "tools": [TOOL]}, '"ring"'),
    ("tools", {**ALPACA, "tools": json.dumps([TOOL])}, '"ring"'),
    ("tools", {**CHATS, "tools": [TOOL]}, '"ring"'),
    ("tools", {**LIKED, "tools": [TOOL]}, '"ring"'),
    ("tools", {**PAIR, "tools": [TOOL]}, BadRow),
    ("chat_template_kwargs", {"messages": turns(), "chat_template_kwargs": {"mood": "glad"}}, "glad<user>"),
    ("chat_template_kwargs", {"messages": turns(), "chat_template_kwargs": ["mood"]}, BadRow),
    *(("chat_template_kwargs", {"messages": turns(), "chat_template_kwargs": {name: 1}}, BadRow) for name in ARGUMENTS),
    ("parallel_tool_calls", {"messages": turns(), "parallel_tool_calls": False}, "False<user>"),
    *(
        ("parallel_tool_calls", {"messages": turns(), "parallel_tool_calls": no}, "False<user>")
        for no in ("False", "0")
    ),
    ("parallel_tool_calls", {"messages": turns(), "parallel_tool_calls": "often"}, BadRow),
    ("history", {**ALPACA, "history": [["before", "yes"]]}, "<user>before<|endoftext|><assistant>[yes<|endoftext|>]"),
    ("history", {"messages": turns(), "history": [["before", "yes"]]}, BadRow),
    ("prompt", LIKED, "one[A<|endoftext|>]"),
    ("messages", {"messages": turns()[:1], "chosen": "A", "rejected": "B"}, "<user>one<|endoftext|><assistant>[A"),
    *((key, {"chosen": "A", "rejected": "B", key: "one"}, BadRow) for key in ("instruction", "question")),
    ("conversations", {"chosen": "A", "rejected": "B", "conversations": turns()[:1]}, BadRow),
    ("negatives", {**ASKED, "negatives": ["B"]}, "[one]"),
    ("negatives", {**ASKED, "negatives": '["B", "C"]'}, "[one]"),
    *(("negatives", {**ASKED, "negatives": bad}, BadRow) for bad in ([1], 1, ["B", " "])),
    ("negative", {**ASKED, "negative": "B"}, BadRow),
    *((f"negative_{number}", {f"negative_{number}": "B", **ASKED}, "[one]") for number in range(1, 10)),
    *((key, {**ASKED, key: value}, BadRow) for key in ("label", "score", "similarity") for value in (0, 0.0, "0", 0.4)),
    *((key, {**ASKED, key: value}, "[one]") for key in ("label", "score", "similarity") for value in (1, True, None)),
    ("images", {**ALPACA, "images": ["a.png"]}, BadRow),
    *((key, {"messages": turns(), key: ["a.bin"]}, BadRow) for key in ("image", "video", "videos", "audio", "audios")),
    ("functions", {"messages": turns(), "functions": [TOOL["function"]]}, BadRow),
    ("available_tools", {"messages": turns(), "available_tools": [TOOL]}, BadRow),
    ("system_prompt", {"messages": turns(), "system_prompt": "kind"}, BadRow),
    ("weight", {"messages": turns(), "weight": 0.5}, BadRow),
    *(("weight", {"messages": turns(), "weight": one}, "[A<|endoftext|>]") for one in (1, 1.0, "1", "1.0")),
    *((key, {**PAIR, key: value}, BadRow) for key in ("label", "kto_tag") for value in BAD),
    *((key, {**PAIR, key: value}, "one[B<|endoftext|>]") for key in ("label", "kto_tag") for value in GOOD),
    *(("label", {**PAIR, "label": value}, "one[B<|endoftext|>]") for value in CLASSES),
    *(("kto_tag", {**PAIR, "kto_tag": value}, BadRow) for value in CLASSES if value != 3),
    ("labels", {**IDS, "labels": [-100, 6, 7]}, [0, 1, 1]),
    ("attention_mask", {**IDS, "attention_mask": [0, 1, 1]}, [1, 1]),
    ("attention_mask", {**IDS, "attention_mask": "[false, true, true]"}, [1, 1]),
    *((key, {**IDS, key: [0, 0, 1]}, [0, 0, 1]) for key in ("completion_mask", "assistant_masks", "loss_mask")),
    ("loss_mask", {**IDS, "loss_mask": [False, False, True]}, [0, 0, 1]),
    ("position_ids", {**IDS, "position_ids": "[0, 1, 2]"}, [1, 1, 1]),
    ("position_ids", {**IDS, "position_ids": "[0, 1, 0]"}, BadRow),
    ("position_ids", {**IDS, "position_ids": [0, 1, 0]}, BadRow),
    ("position_ids", {**IDS, "position_ids": [0, 1, 2]}, [1, 1, 1]),
    *(
        ("position_ids", {**IDS, "attention_mask": mask, "position_ids": places}, [1, 1])
        for mask, places in (([1, 1, 0], [0, 1, 0]), ("[1, 1, 0]", "[0, 1, 1]"), ([0, 1, 1], [1, 0, 1]))
    ),
    ("position_ids", {**IDS, "attention_mask": [1, 1, 1], "position_ids": [0, 1, 0]}, BadRow),
    ("seq_lengths", {**IDS, "seq_lengths": [2, 1]}, BadRow),
]
OF_MESSAGES = [
    *((key, {"messages": turns(**{key: 0})}, SECOND) for key in MARKS),
    *((key, {"messages": turns(**{key: True})}, "<assistant>[A<|endoftext|>]<user>") for key in MARKS),
    *(("train", {"messages": turns(train=no)}, SECOND) for no in ("False", "0", 0.0)),
    ("train", {"messages": turns(train="often")}, BadRow),
    ("train", {"messages": turns({"train": True})}, "[<user>one<|endoftext|>]<assistant>[A"),
    ("weight", {"conversations": [HUMAN, {"from": "gpt", "value": "A", "weight": 0}]}, "<assistant>A"),
    ("weight", {"messages": turns(weight=0.5)}, BadRow),
    ("weight", {"messages": turns(weight=0, train=True)}, BadRow),
    ("weight", {"prompt": turns()[:1], "completion": [turns(weight=0)[1]]}, BadRow),
    ("train_detail", {"messages": turns(train_detail=[{"begin_offset": 0, "end_offset": 1, "train": False}])}, BadRow),
    ("loss_scale", {"messages": turns(loss_scale=0.5)}, BadRow),
    ("tool_calls", {"messages": turns(content=None, tool_calls=[CALL])}, '<assistant>[{"bell": 1}'),
    ("tool_calls", {"messages": turns(tool_calls=[{**CALL, "function": {"arguments": "{bell"}}])}, BadRow),
    ("function_call", {"messages": turns(content=None, function_call={"name": "ring"})}, "[ring"),
    ("refusal", {"messages": turns(content=None, refusal="No.")}, "[No."),
    ("audio", {"messages": turns(content=None, audio={"id": "song"})}, "[song"),
    ("reasoning_content", {"messages": turns(reasoning_content="Hm.")}, "[Hm.A"),
]  # fmt: skip


@pytest.fixture(scope="module")
def encode(bpe: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str | list[int]]:
    """Return a function: encode a row to the first document's text with trained parts in brackets, or a mask."""
    from tokenizers import processors

    path: Path = tmp_path_factory.mktemp("rows") / "a.jsonl"
    own = copy.deepcopy(bpe)

    def show(
        row: dict[str, Any], template: Any = ALL, train_on_prompt: bool = False, trims: bool = False
    ) -> str | list[int]:
        own.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=trims)
        path.write_text(json.dumps(row))
        own.chat_template = template
        (file,) = files_of(str(path), "preference" if "chosen" in row else "auto")
        (record,) = read_records(replace(file, format=detect_format(file)), 1000, [])
        if isinstance(record, BadRow):
            raise record
        if isinstance(record, Ids):
            return [1] * len(record.ids) if record.trained is None else [int(each) for each in record.trained]
        made = next(Encoder(own, train_on_prompt).encode([(False, record)], Findings()))
        mask = np.ones(len(made.ids), bool) if made.trained is None else made.trained
        cuts = [0, *np.flatnonzero(np.diff(mask)) + 1, len(mask)]
        parts = [(own.decode(made.ids[a:b]), mask[a]) for a, b in pairwise(cuts)]
        return "".join(f"[{text}]" if trained else text for text, trained in parts)

    return show


@pytest.mark.parametrize(
    ("key", "row", "expected"), OF_ROWS + OF_MESSAGES, ids=lambda each: each if isinstance(each, str) else ""
)
def test_each_key_is_honoured_or_refused(
    key: str, row: dict[str, Any], expected: Any, encode: Callable[..., str | list[int]]
) -> None:
    if expected is BadRow:
        with pytest.raises(BadRow, match=rf"a\.jsonl:1.*{key}"):
            encode(row)
    elif isinstance(expected, str):
        assert expected in encode(row)
    else:
        assert encode(row) == expected


@pytest.mark.parametrize("values", [("True", "False"), ("1", "0"), ("TRUE", "FALSE"), ("1.0", "0.0")])
@pytest.mark.parametrize("ending", ["csv", "tsv"])
def test_a_label_in_a_table_is_as_datasets_types_it(values: tuple[str, str], ending: str, tmp_path: Path) -> None:
    """A row that `datasets` reads as false is a bad row, and no other."""
    path, mark = tmp_path / f"a.{ending}", "," if ending == "csv" else "\t"
    path.write_text("".join(f"one{mark}two{mark}{each}\n" for each in ("label", *values)))
    path.write_text(path.read_text().replace(f"one{mark}two", f"prompt{mark}completion", 1))
    told = datasets.Dataset.from_csv(str(path), sep=mark, cache_dir=str(tmp_path / "cache"))["label"]
    (file,) = files_of(str(path))
    found = read_records(replace(file, format=detect_format(file)), 1000, [])
    assert [isinstance(each, BadRow) for each in found] == [not each for each in told] == [False, True]


def test_numbered_negatives_come_in_order() -> None:
    """As in sentence-transformers' rows. Break: read them in the order of the columns; leave one out."""
    row = {"negative_2": "C", "query": "q", "negative_10": "E", "negative_1": "B", "positive": "p", "negatives": ["A"]}
    group = FORMATS["contrastive"].record(row, "row 1", None)
    assert isinstance(group, Group)
    assert group.members == ("q", "p", "A", "B", "C")


def test_the_table_is_whole() -> None:
    """The test tables and the documentation have every key."""
    assert {key for key, _, _ in OF_ROWS} == {key.name for key in ROW_KEYS}
    of_messages = {*MARKS, *TEMPLATE_KEYS, "train_detail", "loss_scale"}
    assert {key for key, _, _ in OF_MESSAGES} | {"reasoning", "thinking"} == of_messages
    page = (Path(__file__).parents[2] / "docs/reference/data.md").read_text()
    missing = [key for key in (*(each.name for each in ROW_KEYS), *of_messages) if f"`{key}`" not in page]
    assert not missing
    refused = {name: {key.name for key in each.refused} for name, each in FORMATS.items()}
    assert not refused["preference"] & set(FORMATS["preference"].read)
    assert "system_prompt" in refused["messages"]


@pytest.mark.parametrize("key", [*TEMPLATE_KEYS, "tools"])
def test_what_a_template_does_not_write_is_refused(key: str, encode: Callable[..., str | list[int]]) -> None:
    value = [CALL] if key == "tool_calls" else {"name": "x"} if key == "function_call" else "x"
    row = {"messages": turns(**{key: value}), "tools": [TOOL] if key == "tools" else None}
    with pytest.raises(BadRow, match=rf"a\.jsonl:1 has .*'{key}'.*chat template drops it"):
        encode(row, PLAIN)


IN_PARTS = PLAIN.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'text' %}{{ p.text }}"
    "{% elif p.type == 'thinking' %}[THINK]{{ p.thinking }}[/THINK]{% elif p.type == 'video' %}{{ p.text }}{% endif %}"
    "{% endfor %}{% endif %}",
)
"""Writes texts and thoughts, and drops other parts, as Magistral does."""


@pytest.mark.parametrize(
    ("part", "drops"),
    [
        ({"type": "text", "text": "T", "cache": "x"}, None),
        ({"text": "T"}, None),
        ({"type": "thinking", "thinking": "T", "closed": True}, None),
        ({"type": "thinking", "text": "T"}, "text"),
        ({"type": "thinking", "thinking": "T", "signature": "x"}, "signature"),
        *(({"type": each, "text": "T"}, "text") for each in ("reasoning", "output_text", "tool_result", "audio")),
        ({"type": "video", "video": "a.mp4", "text": "T"}, "video"),
        ({"type": "file", "file": {"id": "T"}}, "file.id"),
        ({"type": "image_embeds"}, "type"),
    ],
)
@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_part_of_content_is_as_the_template_has_it_or_refused(
    part: Any, drops: str | None, role: str, encode: Callable[..., str | list[int]]
) -> None:
    """The template itself is the reference. No text is joined to others under another type."""
    row = turns(**{"content": [part, {"type": "text", "text": "A"}]} if role == "assistant" else {})
    row[0] = {**row[0], "content": [part]} if role == "user" else row[0]
    text = part.get("thinking", part.get("text", ""))
    written = f"[THINK]{text}[/THINK]" if part.get("type") == "thinking" else text
    if drops is None:
        assert (f"<assistant>[{written}A" if role == "assistant" else f"<user>{written}<") in encode(
            {"messages": row}, IN_PARTS
        )
        return
    with pytest.raises(BadRow, match=rf"message {1 + (role == 'assistant')} has content of type .* drops '{drops}'"):
        encode({"messages": row}, IN_PARTS)


def test_a_part_with_another_flag_is_another_part(encode: Callable[..., str | list[int]]) -> None:
    """A template may write a text by a flag beside it. A part with the flag says nothing about one without."""
    template = IN_PARTS.replace("{{ p.thinking }}", "{{ p.thinking if p.show }}")
    shown, hidden = ({"type": "thinking", "thinking": "T", "show": show} for show in (True, False))
    assert "[THINK]T[/THINK]" in encode({"messages": turns(content=[shown])}, template)
    with pytest.raises(BadRow, match="message 6 has content of type 'thinking'.* drops 'thinking'"):
        encode({"messages": [*turns(content=[shown]), *turns(content=[hidden])]}, template)


@pytest.mark.parametrize(
    "template", [PLAIN, PLAIN.replace("{{ m.content }}", "{{ m.content + '' }}"), BUILTIN_TEMPLATE]
)
def test_a_template_without_parts_refuses_them(template: str, encode: Callable[..., str | list[int]]) -> None:
    """Break: a template that writes the list as Python does counts as one that knows the part."""
    part = {"type": "thinking", "thinking": "T"}
    with pytest.raises(BadRow, match=r"a\.jsonl:1.*(drops 'type'|refuses a conversation)"):
        encode({"messages": turns(content=[part])}, template)


def test_templates_have_names(encode: Callable[..., str | list[int]]) -> None:
    named = {"default": PLAIN, "tool_use": ALL, "other": "x"}
    assert encode({"messages": turns()}, named) == encode({"messages": turns()}, PLAIN)
    row = {"messages": turns(), "tools": [TOOL]}
    assert encode(row, named) == encode(row, ALL)
    with pytest.raises(
        ConfigError, match=r"chat templates first, second, and none is named default.*chat_template\.jinja"
    ):
        encode(row, {"second": PLAIN, "first": ALL})


@pytest.mark.parametrize("given", ['{"bell": 1}', {"bell": 1}])
def test_arguments_go_in_as_the_template_takes_them(given: Any, encode: Callable[..., str | list[int]]) -> None:
    row = {"messages": turns(content=None, tool_calls=[{**CALL, "function": {"name": "ring", "arguments": given}}])}
    for written in ("arguments | tojson", "arguments", "name + call.function.arguments"):
        assert '{"bell": 1}' in encode(row, ALL.replace("arguments | tojson", written)), written


@pytest.mark.parametrize("given", ['{"price":1.10}', '{"city": "\\u00e9"}', "", "as a text"])
def test_arguments_as_a_text_stay_as_they_are_where_the_template_writes_texts(
    given: str, encode: Callable[..., str | list[int]]
) -> None:
    """Break: parse each text for a template that writes texts and objects (Qwen3)."""
    both = "call.function.arguments if call.function.arguments is string else call.function.arguments | tojson"
    row = {"messages": turns(content=None, tool_calls=[{**CALL, "function": {"name": "ring", "arguments": given}}])}
    assert f"[{given}" in encode(row, ALL.replace("call.function.arguments | tojson", f"({both}) ~ call.function.name"))


def test_a_variable_whose_text_the_template_drops_is_refused(encode: Callable[..., str | list[int]]) -> None:
    row = {"messages": turns(), "chat_template_kwargs": {"mood": "glad"}}
    dropped = PLAIN.replace("<assistant>", "<assistant>{{ mood }}")
    with pytest.raises(BadRow, match=r"a\.jsonl:1: with 'chat_template_kwargs' \{'mood': 'glad'\}"):
        encode(row, dropped)


def test_marks_of_a_template_and_of_a_row(encode: Callable[..., str | list[int]]) -> None:
    """Answers with a line end or a leading blank keep their borders. A row can leave out an answer."""
    marked = (
        "{% for m in messages %}<{{ m.role }}>{% if m.role == 'assistant' %}"
        "{% generation %}{{ ' ' + m.content + eos_token + '\n' }}{% endgeneration %}"
        "{% else %}{{ m.content }};{% endif %}{% endfor %}{{ '<assistant>' if add_generation_prompt }}"
    )
    end = "<|endoftext|>\n"
    for trims in (False, True):
        shown = encode({"messages": turns()}, marked, trims=trims)
        assert shown == f"<user>one;<assistant>[ A{end}]<user>two;<assistant>[ B{end}]"
        row = {"messages": turns(weight=0)}
        assert encode(row, marked, trims=trims) == f"<user>one;<assistant> A{end}<user>two;<assistant>[ B{end}]"
        shown = encode(row, marked, train_on_prompt=True, trims=trims)
        assert shown == f"[<user>one;<assistant>] A{end}[<user>two;<assistant> B{end}]"


STRANGE = (
    *(None, True, 0, -1, 0.5, 2**70, "", "x y", "[]", "null", '[{"role":', "<image>", "\ud800", "file:///x", "data:,x"),
    *([], {}, [[]], [{}], [None], [["a", "b"]], [0, 1], [1.5], [2**70], ["a"], [1, [2]]),
    *({"role": "user", "content": "q"}, {"from": "human", "value": "q"}, turns()),
)
BASES: dict[str, Any] = {
    "jsonl": {"text": "a"},
    "messages": {"messages": turns(content=[{"type": "text", "text": "a"}], tool_calls=[CALL])},
    "sharegpt": {"conversations": [HUMAN, {"from": "gpt", "value": "A"}]},
    "alpaca": {**ALPACA, "history": [["a", "b"]]},
    "prompt-completion": CHATS,
    "preference": {"prompt": turns()[:1], "chosen": turns(), "rejected": turns()[:2]},
    "tokens": {**IDS, "labels": [5, 6, 7], "attention_mask": [1, 1, 1]},
}
NAMES = [
    *(key.name for key in ROW_KEYS),
    *MARKS,
    *TEMPLATE_KEYS,
    "role",
    "content",
    "type",
    "text",
    "path",
    "image_url",
]


def mutated(value: Any, draw: random.Random) -> Any:
    """Return a value with parts replaced, removed and added."""
    if draw.random() < 0.04:
        return copy.deepcopy(draw.choice(STRANGE))
    if isinstance(value, dict):
        kept = {key: mutated(each, draw) for key, each in value.items() if draw.random() > 0.01}
        return kept | {draw.choice(NAMES): draw.choice(STRANGE) for _ in range(draw.random() < 0.1)}
    return [mutated(each, draw) for each in value if draw.random() > 0.01] if isinstance(value, list) else value


@pytest.mark.slow
@pytest.mark.parametrize("number", [400, 20_000])
def test_any_row_is_a_record_or_a_bad_row(number: int, bpe: Any) -> None:
    """Rows with damage of any kind, through three chat templates: no other error, and no other type of result."""
    tokenizer, kinds = copy.deepcopy(bpe), Counter[str]()
    for template in (ALL, PLAIN, IN_PARTS):
        tokenizer.chat_template = template
        for seed in range(number):
            draw = random.Random(seed)
            data_format = draw.choice(list(BASES))
            found = FORMATS[data_format].record(mutated(BASES[data_format], draw), "a:1", None)
            kinds[type(found).__name__] += 1
            if not isinstance(found, BadRow):
                list(Encoder(tokenizer, bool(seed % 2)).encode([(False, found)], Findings("skip")))
    assert min(kinds[name] for name in ("BadRow", "Chat", "Preference", "Ids", "Text")) > number / 40
