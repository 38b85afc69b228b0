"""Trained tokens in a conversation, checked by decoding, for all common template types."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import ByT5Tokenizer, PreTrainedTokenizerFast

from offload.errors import ConfigError
from offload.extras.data.chat import BUILTIN_TEMPLATE
from offload.extras.data.encoder import Encoder
from offload.extras.data.findings import Findings
from offload.extras.data.records import Chat, Group, Pair, Preference, Record, Text
from offload.extras.data.rows import BadRow
from offload.extras.data.text_encoder import EncodedDocument
from offload.extras.data.tokenizer import load_tokenizer

CHAT = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "What is two and two?"},
    {"role": "assistant", "content": "It is four."},
    {"role": "user", "content": "And 日本?"},
    {"role": "assistant", "content": "Ü — Paris."},
]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for m in messages %}{% if m.role == 'assistant' %}A:{% generation %}{{ m.content }}!{% endgeneration %}"
    "{% else %}{{ m.role }}:{{ m.content }};{% endif %}{% endfor %}"
)
MISTRAL = (  # no generation prompt, and an error for non-alternating roles
    "{{ bos_token }}{% for m in messages if m.role != 'system' %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% else %} "
    "{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
THINKING = (  # like Qwen3: an empty thought only before the last answer
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n\n</think>\n\n{% endif %}"
    "{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
OPEN_THOUGHT = (  # like DeepSeek-R1: the generation prompt opens a thought, absent from the history
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant><think>\n{% endif %}"
)
COUNTING = "{{ messages | length }}{% for m in messages %}{{ m.role }}{{ m.content }}{% endfor %}"
OWN_END = CHATML.replace("<|im_end|>", "{{ eos_token }}")


def encode(tokenizer: Any, *records: Record, train_on_prompt: bool = False) -> list[EncodedDocument]:
    return list(Encoder(tokenizer, train_on_prompt).encode(((False, record) for record in records), Findings()))


def trained_runs(tokenizer: Any, document: EncodedDocument) -> list[str]:
    """Return the text for each maximal run of trained tokens."""
    mask = np.ones(len(document.ids), bool) if document.trained is None else document.trained
    assert len(mask) == len(document.ids)
    borders = np.flatnonzero(np.diff(np.concatenate([[False], mask, [False]])))
    return [tokenizer.decode(document.ids[a:b]) for a, b in zip(borders[::2], borders[1::2], strict=True)]


GLM = (  # an answer ends by the next role marker
    "{% for m in messages %}{{ '<|' + m.role + '|>\n' + m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
SPACED = GLM.replace("'<|' +", "'\n<|' +").replace("%}<|assistant|>", "%}{{ '\n<|assistant|>' }}")
MARKERS = ("<|endoftext|>", "<|user|>", "<|tool|>")
CALLING = [*CHAT[:3], {"role": "tool", "content": "four"}, {"role": "assistant", "content": "Yes."}, *CHAT[3:]]


@pytest.mark.parametrize(
    ("template", "messages", "ends", "runs"),
    [
        (CHATML, CHAT, (), ["It is four.<|im_end|>\n", "Ü — Paris.<|im_end|>\n<|endoftext|>"]),
        (MARKED, CHAT, (), ["It is four.!", "Ü — Paris.!<|endoftext|>"]),
        (OPEN_THOUGHT, CHAT, (), ["It is four.<|endoftext|>", "Ü — Paris.<|endoftext|>"]),
        (OWN_END, CHAT, (), ["It is four.<|endoftext|>\n", "Ü — Paris.<|endoftext|>\n"]),
        (GLM, CHAT, MARKERS, ["\nIt is four.<|user|>", "\nÜ — Paris.<|endoftext|>"]),
        (GLM, CALLING, MARKERS, ["\nIt is four.<|tool|>", "\nYes.<|user|>", "\nÜ — Paris.<|endoftext|>"]),
        (SPACED, CHAT, MARKERS, ["\nIt is four.\n<|user|>", "\nÜ — Paris.<|endoftext|>"]),
        (GLM, [*CHAT, CHAT[1]], MARKERS, ["\nIt is four.<|user|>", "\nÜ — Paris.<|user|>"]),
        (GLM, CHAT, MARKERS[:1], ["\nIt is four.", "\nÜ — Paris.<|endoftext|>"]),
        (CHATML, CHAT, ("<|im_end|>", *MARKERS), ["It is four.<|im_end|>\n", "Ü — Paris.<|im_end|>\n<|endoftext|>"]),
        (OWN_END, CHAT, MARKERS, ["It is four.<|endoftext|>\n", "Ü — Paris.<|endoftext|>\n"]),
        (MISTRAL, CHAT[1:], MARKERS, [" It is four.<|endoftext|>", " Ü — Paris.<|endoftext|>"]),
        (MARKED, CHAT, MARKERS, ["It is four.!", "Ü — Paris.!<|endoftext|>"]),
        (BUILTIN_TEMPLATE, CALLING, MARKERS, [f"{t}<|endoftext|>" for t in ("It is four.", "Yes.", "Ü — Paris.")]),
    ],
)
def test_the_token_that_ends_a_turn_is_trained_once(
    template: str, messages: Any, ends: tuple[str, ...], runs: list[str], bpe_folder: Callable[..., str]
) -> None:
    """Break: train no role marker, or the marker behind a turn with an own end."""
    tokenizer = load_tokenizer(bpe_folder(template))
    findings = Findings()
    (document,) = Encoder(tokenizer, ends=ends).encode([(False, Chat("x", messages))], findings)
    assert trained_runs(tokenizer, document) == runs
    assert findings.num_open == (len(ends) < 2 and template != MARKED), "no token ends its first answer"
    assert tokenizer.decode(document.ids).removesuffix("<|endoftext|>") == tokenizer.apply_chat_template(
        messages, tokenize=False
    ).removesuffix("<|endoftext|>"), "the text is the template's"


FORMS = "%d %b %Y|%B %d, %Y|%A, %d %B %y|%-d/%-m|%e|%H:%M:%S %p|%x %X %c|%j %U %a|%%Y 100%"


def test_the_clock_of_a_template_stands_still(
    bpe_folder: Callable[..., str], dataset_of: Any, write_lines: Any
) -> None:
    """All forms are of one day, which a note names. Break: know two forms; replace `%%Y` by the year."""
    folder = bpe_folder(f"{{{{ strftime_now('{FORMS}') }}}}{CHATML}")
    tokenizer = load_tokenizer(folder)
    (document,) = encode(tokenizer, Chat("x", CHAT))
    day = datetime(2025, 1, 1).strftime(FORMS)
    assert tokenizer.decode(document.ids).startswith(f"{day}<|im_start|>system")
    rows = write_lines("rows.jsonl", {"messages": CHAT})
    for each in (folder, bpe_folder(name="plain")):
        notes = " ".join(dataset_of(rows, tokenizer=each, sequence_length=256, batch_size=1).notes)
        assert ("writes the date of the day: 01 Jan 2025" in notes) == (each is folder)


TURN_END, CALL_END = "<end_of_turn>", "<|call|>"
CALLS = "{{ m.tool_calls[0].name + '<|call|>' if m.tool_calls else m.content + '<end_of_turn>\n' }}"
OWN_ENDS = CHATML.replace("{{ m.content }}<|im_end|>\n", CALLS)


@pytest.mark.parametrize("is_known", [True, False])
def test_an_end_of_generation_that_is_no_eos_is_trained_once(is_known: bool, bpe: Any) -> None:
    """As in Gemma and gpt-oss. Break: look for the EOS alone; add no EOS behind a token that ends nothing."""
    tokenizer = deepcopy(bpe)
    tokenizer.add_special_tokens({"additional_special_tokens": [TURN_END, CALL_END]})
    tokenizer.chat_template = OWN_ENDS
    call = {"role": "assistant", "content": "", "tool_calls": [{"name": "ring"}]}
    chats = [Chat("x", CHAT[1:3]), Chat("x", [CHAT[1], call])]
    texts = [Pair("x", "two", f" four{TURN_END}\n"), Text("x", f"The fox.{CALL_END}"), Text("x", "The fox.")]
    preference = Preference("x", *(replace(each, num_prompt=1) for each in chats))
    ends = ("<|endoftext|>", *((TURN_END, CALL_END) if is_known else ()))
    findings = Findings()
    found = Encoder(tokenizer, ends=ends).encode(((False, each) for each in (*chats, *texts, preference)), findings)
    eos = "" if is_known else "<|endoftext|>"
    ended = [f"{text}{eos}" for text in ("It is four.<end_of_turn>\n", "ring<|call|>")]
    wanted = [*ended, f" four<end_of_turn>\n{eos}", f"The fox.<|call|>{eos}", "The fox.<|endoftext|>", *ended]
    assert [trained_runs(tokenizer, each) for each in found] == [[text] for text in wanted]
    assert findings.num_extended == (0 if is_known else 4)
    assert ("with the EOS behind the special token" in " ".join(findings.notes())) == (not is_known)


def test_a_trained_turn_of_the_user_keeps_its_marker_once(bpe_folder: Callable[..., str]) -> None:
    tokenizer = load_tokenizer(bpe_folder(GLM))
    chat = Chat("x", CHAT, marks={3: True})
    (document,) = Encoder(tokenizer, ends=MARKERS).encode([(False, chat)], Findings())
    assert trained_runs(tokenizer, document) == ["\nIt is four.<|user|>\nAnd 日本?", "\nÜ — Paris.<|endoftext|>"]


def test_the_ends_are_those_of_the_model(bpe_folder: Callable[..., str], dataset_of: Any, write_lines: Any) -> None:
    """The file with the ends of generation decides, else config.json, and a note tells turns without an end."""
    folder = Path(bpe_folder(GLM))
    path = write_lines("rows.jsonl", {"messages": CHAT}, {"messages": CHAT})
    found, ids = [], {word: load_tokenizer(str(folder)).convert_tokens_to_ids(word) for word in MARKERS}
    for name, ends in (("none", None), ("config.json", ids["<|user|>"]), ("generation_config.json", [*ids.values()])):
        (folder / name).write_text(json.dumps({"eos_token_id": ends, "model_type": "llama"}))
        data = dataset_of(path, model_path=str(folder), tokenizer=None, sequence_length=96, batch_size=1)
        labels = data.batch(0)["labels"][0]
        found.append((labels == ids["<|user|>"]).sum().item())
        assert any("2 answers before other turns" in note for note in data.notes) == (name == "none")
    assert found == [0, 1, 1]


def test_texts_that_the_template_drops_are_counted_in_a_note(
    bpe_folder: Callable[..., str], dataset_of: Any, write_lines: Any
) -> None:
    """Break: count no system messages, or texts that a template writes in another form."""
    no_system = "{% for m in messages if m.role != 'system' %}{{ m.content }}{{ eos_token }}{% endfor %}"
    strips = "{% for m in messages %}{{ m.content | trim }}{{ documents | tojson }}{{ eos_token }}{% endfor %}"
    rows = [{"messages": [{"role": "system", "content": " Be  brief.\n"}, *CHAT[1:3]]}, {"messages": CHAT[1:3]}]
    rows.append({**rows[0], "chat_template_kwargs": {"documents": [{"title": "T", "text": 'a "word"'}]}})
    path = write_lines("rows.jsonl", *rows)
    for template, dropped in (
        (no_system, "3 texts, the first one is message 1 (role 'system') of "),
        (strips, ""),
    ):
        data = dataset_of(path, tokenizer=bpe_folder(template), sequence_length=96, batch_size=1)
        notes = [note for note in data.notes if "changed by the tokenizer's chat template" in note]
        assert len(notes) == bool(dropped)
        assert all(f"{dropped}{path}:1. " in note or f"{dropped}{path} line 1. " in note for note in notes), notes


def test_a_message_marked_as_not_trained_stays_so_beside_the_prompt(dataset_of: Any, write_lines: Any) -> None:
    """Break: store no marks of tokens where the prompt is trained."""
    (*before, answer) = CHAT[:3]
    path = write_lines("rows.jsonl", {"messages": [*before, {**answer, "train": False}, *CHAT[3:]]})
    data = dataset_of(path, train_on_prompt=True, sequence_length=96, batch_size=1)
    labels = data.batch(0)["labels"][0]
    trained = data.tokenizer.decode(labels[labels >= 0])
    assert "two and two?" in trained
    assert "Ü — Paris." in trained
    assert "four" not in trained


SYSTEM_OF_ITS_OWN = "{{ '<|system|>Q' if messages[0].role != 'system' }}" + CHATML
GREETING = [{"role": "assistant", "content": "Hello."}, *CHAT[1:3]]


@pytest.mark.parametrize("template", [CHATML, SYSTEM_OF_ITS_OWN, OWN_END, GLM, OPEN_THOUGHT, MARKED, THINKING])
def test_an_answer_without_a_question_is_trained_from_the_answer_on(
    template: str, bpe_folder: Callable[..., str]
) -> None:
    """Break: train the role marker of the first message, or a system message that the template writes itself."""
    tokenizer = load_tokenizer(bpe_folder(template))
    for chat in (Chat("x", GREETING), Chat("x", GREETING[:1])):
        document = encode(tokenizer, chat)[0]
        before, answer, _ = trained_runs(tokenizer, document)[0].partition("Hello.")
        assert answer
        assert before.removesuffix("<think>\n\n</think>\n\n") in ("", "\n", ">", "assistant>"), "at most a border token"


def test_a_template_that_rewrites_earlier_turns(bpe_folder: Callable[..., str]) -> None:
    tokenizer = load_tokenizer(bpe_folder(THINKING))
    findings = Findings()
    first, second = Encoder(tokenizer).encode([(False, Chat("x", CHAT))], findings)
    assert findings.num_split == 1
    thought = "<think>\n\n</think>\n\n"
    assert trained_runs(tokenizer, first) == [f"{thought}It is four.<|im_end|>\n<|endoftext|>"]
    assert trained_runs(tokenizer, second) == [f"{thought}Ü — Paris.<|im_end|>\n<|endoftext|>"]
    assert "assistant\nIt is four.<|im_end|>" in tokenizer.decode(second.ids), "as the model will see it"
    (single,) = encode(tokenizer, Chat("x", CHAT[:3]))
    assert trained_runs(tokenizer, single) == trained_runs(tokenizer, first)


def test_a_template_without_any_stable_beginning_is_refused(bpe_folder: Callable[..., str]) -> None:
    tokenizer = load_tokenizer(bpe_folder(COUNTING))
    with pytest.raises(BadRow, match=r"a\.jsonl:3: .*message 3.*data\.train_on_prompt=true"):
        encode(tokenizer, Chat("a.jsonl:3", CHAT))
    findings = Findings("skip")
    assert not list(Encoder(tokenizer).encode([(False, Chat("a.jsonl:3", CHAT))], findings))
    assert findings.num_bad == 1
    (document,) = encode(tokenizer, Chat("a.jsonl:3", CHAT), train_on_prompt=True)
    assert document.trained is None


HARMONY = (  # like gpt-oss: thoughts before a call are dropped when the answer follows
    "{% set is_done = messages[-1].role == 'assistant' and not messages[-1].tool_calls %}"
    "{% for m in messages %}<|{{ m.role }}|>{{ m.thinking if loop.last or not is_done }}{{ m.content }}"
    "{{ m.tool_calls | tojson if m.tool_calls }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_one_row_that_a_template_rewrites_is_left_out_alone(bpe_folder: Callable[..., str]) -> None:
    """A row with a thought, a call, a result and an answer. Rows without the thought are trained."""
    tokenizer = load_tokenizer(bpe_folder(HARMONY))
    call: dict[str, Any] = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {}}}],
    }
    turns = [CHAT[1], call, {"role": "tool", "content": "four"}, CHAT[2]]
    thought = [CHAT[1], {**call, "thinking": "Add."}, *turns[2:]]
    rows = [Chat(f"a:{number}", each) for number, each in enumerate((turns, thought, turns), 1)]
    findings = Findings("skip")
    found = list(Encoder(tokenizer).encode(((False, row) for row in rows), findings))
    assert [each.where for each in found] == ["a:1", "a:3"]
    assert findings.num_bad == 1
    with pytest.raises(BadRow, match=r"a:2: the tokenizer's chat template changes the text before message 4"):
        encode(tokenizer, *rows)


@pytest.mark.parametrize("template", [None, CHATML, MARKED, THINKING, OPEN_THOUGHT])
def test_train_on_prompt_trains_all(bpe_folder: Callable[..., str], template: str | None) -> None:
    tokenizer = load_tokenizer(bpe_folder(template))
    (document,) = encode(tokenizer, Chat("x", CHAT), train_on_prompt=True)
    assert document.trained is None
    rendered = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert tokenizer.decode(document.ids).removesuffix("<|endoftext|>") == rendered.removesuffix("<|endoftext|>")


def test_prompt_and_completion(bpe: Any) -> None:
    (document,) = encode(bpe, Pair("x", "The capital of France is", " Paris 日本"))
    assert bpe.decode(document.ids) == "The capital of France is Paris 日本<|endoftext|>"
    assert trained_runs(bpe, document) == [" Paris 日本<|endoftext|>"]
    (document,) = encode(bpe, Pair("x", "a", "b"), train_on_prompt=True)
    assert document.trained is None
    assert len(bpe(" the", add_special_tokens=False)["input_ids"]) == 1
    (document,) = encode(bpe, Pair("x", "over t", "he lazy dog"))
    assert trained_runs(bpe, document) == [" the lazy dog<|endoftext|>"], "no character of the completion is lost"


def test_plain_text_is_all_trained_and_ends_in_eos(bpe: Any) -> None:
    documents = encode(
        bpe, Text("x", "The fox."), Text("x", ""), Text("x", "A", closes=False), Text("x", " dog.", opens=False)
    )
    assert [bpe.decode(document.ids) for document in documents] == ["The fox.<|endoftext|>", "A", " dog.<|endoftext|>"]
    assert all(document.trained is None for document in documents)
    assert [document.closes for document in documents] == [True, False, True]


def test_a_long_row_is_tokenized_in_pieces(bpe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The row stays one document. Pieces end at line ends, and few pieces are tokenized at a time."""
    monkeypatch.setattr("offload.extras.data.formats._LONG_CHARS", 64)
    monkeypatch.setattr("offload.extras.data.formats._PIECE_CHARS", 32)
    monkeypatch.setattr("offload.extras.data.text_encoder._BATCH_CHARS", 50)
    lines, word = "The fox is quick.\n" * 9, "x" * 200
    parts = encode(bpe, Text("x", lines), Text("y", word), Text("z", "It is."))
    assert len(parts) > 12
    assert all(len(part.ids) <= 65 for part in parts)
    documents = [[int(i) for part in parts if part.where == where for i in part.ids] for where in "xyz"]
    assert [bpe.decode(each) for each in documents] == [f"{text}<|endoftext|>" for text in (lines, word, "It is.")]
    assert documents[0] == bpe(lines)["input_ids"] + [bpe.eos_token_id]
    assert [part.where for part in parts if part.closes] == ["x", "y", "z"]


@pytest.fixture(scope="module")
def sentencepiece_like() -> Any:
    """A tokenizer like Llama 2: metaspace with a leading space, and an automatic BOS."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always")
    text = "The user asks what two and two is and the answer is four. [INST] [/INST] 0123456789!?;:ABCD\n"
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.UnigramTrainer(vocab_size=90, special_tokens=special, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator([text] * 50, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    wrapped: Any = PreTrainedTokenizerFast
    return wrapped(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_the_tokenizers_own_bos_comes_once(sentencepiece_like: Any) -> None:
    tokenizer = sentencepiece_like
    tokenizer.chat_template = MISTRAL
    text, chat, pair = encode(
        tokenizer,
        Text("x", "the answer is four"),
        Chat("x", [{"role": "user", "content": "two and two?"}, {"role": "assistant", "content": "four."}]),
        Pair("x", "two and two is", " four"),
    )
    for document in (text, chat, pair):
        assert document.ids[0] == tokenizer.bos_token_id
        assert document.ids[-1] == tokenizer.eos_token_id
        assert (document.ids == tokenizer.bos_token_id).sum() == 1
        assert (document.ids == tokenizer.eos_token_id).sum() == 1
    assert [run.strip() for run in trained_runs(tokenizer, chat)] == ["four.</s>"]
    assert [run.strip() for run in trained_runs(tokenizer, pair)] == ["four</s>"]
    assert tokenizer.decode(pair.ids) == tokenizer.decode(tokenizer("two and two is four")["input_ids"]) + "</s>", (
        "encoded as one text: no second leading space before the completion"
    )


@pytest.mark.parametrize("frame", ["<s> $A", "<s> $A </s>", "<s> <unk> $A <unk>"])
def test_special_tokens_that_a_text_brings_come_once(frame: str, sentencepiece_like: Any) -> None:
    """As in a text from `apply_chat_template`. Break: put the BOS before each text; append the tokenizer's own end."""
    tokenizer, plain = deepcopy(sentencepiece_like), "two and two is"
    special = [("<s>", 1), ("</s>", 2), ("<unk>", 0)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=frame, special_tokens=special)
    wanted = encode(tokenizer, Text("x", plain))[0].ids.tolist()
    before, _, behind = frame.replace(" ", "").partition("$A")
    brought = [f"{before}{plain}", f"{plain}{behind}", f"{before}{plain}{behind}"]
    pairs = [Pair("x", each[: len(before) + 4], each[len(before) + 4 :]) for each in (plain, *brought)]
    for record in (*(Text("x", each) for each in brought), *pairs, Preference("x", *pairs[:2])):
        assert all(each.ids.tolist() == wanted for each in encode(tokenizer, record)), record
    # An embedding is of the tokens that sentence-transformers gives the model.
    (group,) = encode(tokenizer, Group("x", (brought[2],)))
    assert group.ids.tolist() == tokenizer(brought[2])["input_ids"]


def test_an_end_comes_once_whatever_the_tokens_of_a_line_end(sentencepiece_like: Any, bpe: Any) -> None:
    """Break: look for the EOS among the last two tokens."""
    tokenizer = deepcopy(sentencepiece_like)
    tokenizer.chat_template = OWN_END
    assert len(tokenizer("\n\n", add_special_tokens=False)["input_ids"]) > 1
    turns = [{"role": "user", "content": "two?"}, {"role": "assistant", "content": "four."}]
    for end in ("", "\n", "\n\n \n"):
        tokenizer.chat_template = OWN_END.replace("\n{% endfor %}", f"{{{{ {end!r} }}}}{{% endfor %}}")
        (document,) = encode(tokenizer, Chat("x", turns))
        assert (document.ids == tokenizer.eos_token_id).sum() == 2, end
    (document,) = encode(bpe, Pair("x", "Two or four?<|endoftext|>", "A"))
    assert trained_runs(bpe, document) == ["A<|endoftext|>"], "the EOS of the question is not the end of the answer"


def test_what_the_tokenizer_puts_behind_comes_before_the_eos(sentencepiece_like: Any) -> None:
    tokenizer = deepcopy(sentencepiece_like)
    special = [("<s>", 1), ("<unk>", 0)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A <unk>", special_tokens=special
    )
    text, pair = encode(tokenizer, Text("x", "two"), Pair("x", "two", " four"))
    for document in (text, pair):
        assert document.ids[[0, -2, -1]].tolist() == [1, 0, 2]
        assert (document.ids == tokenizer.eos_token_id).sum() == 1
    assert pair.trained is not None
    assert pair.trained[[0, -2, -1]].tolist() == [False, True, True]


def test_ranges_that_leave_out_blanks(bpe: Any) -> None:
    """Some tokenizers trim blanks from a token range. An all-blank token then has an empty range at its position."""
    trimming = deepcopy(bpe)
    trimming.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    records = (Pair("x", "two  \n\n ", "It   is four\n\n"), Pair("x", "Fox   ", "\n\nIt"), Pair("x", "日", "本 Ü"))
    for plain, trimmed in zip(encode(bpe, *records), encode(trimming, *records), strict=True):
        assert trained_runs(trimming, trimmed) == trained_runs(bpe, plain)


@pytest.mark.parametrize("measured", ["none", "all"])
@pytest.mark.parametrize("is_fast", [True, False])
def test_a_text_that_the_tokenizer_refuses_is_a_bad_row(is_fast: bool, measured: Any, bpe: Any) -> None:
    """Half a surrogate pair, for example from a cut emoji: the whole row is skipped, including its other document."""
    half, records = "cut \ud83d here", list[tuple[bool, Record]]()
    for where, text in (("a", "fox"), ("b", half), ("c", "dog")):
        chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": text}]
        chosen, rejected = Pair(where, "Hi ", "fox"), Pair(where, "Hi ", text)
        rows = (Text(where, text), Pair(where, "Hi ", text), Chat(where, chat), Preference(where, chosen, rejected))
        records += [(False, record) for record in rows]
    findings = Findings("skip")
    encoder = Encoder(bpe if is_fast else ByT5Tokenizer())
    tokens = list(encoder.encode(records, findings, measured))
    assert [each.where for each in tokens] == list("aaaaaccccc")
    assert findings.num_bad == 4
    told = r"b: the tokenizer refuses half a surrogate pair \('\\ud83d' at character \d+\): \w+Error: .*"
    assert all(re.fullmatch(told, each) for each in findings.bad)
    with pytest.raises(BadRow, match=f"{told} \\(--data.on_bad_row skip"):
        list(encoder.encode(records, Findings()))
    with pytest.raises(ConfigError, match="half a surrogate") as caught:  # a piece of a file is not a row
        list(encoder.encode([(False, Text("b", half, closes=False))], findings))
    assert not isinstance(caught.value, BadRow)


def test_a_tokenizer_without_ranges() -> None:
    """ByT5 is plain Python without ranges, so prompt and answer are encoded separately."""
    tokenizer = ByT5Tokenizer()
    chat, pair = encode(tokenizer, Chat("x", CHAT), Pair("x", "two", "2 日"))
    assert [run.strip() for run in trained_runs(tokenizer, chat)] == ["It is four.</s>", "Ü — Paris.</s>"]
    assert trained_runs(tokenizer, pair) == ["2 日</s>"]
