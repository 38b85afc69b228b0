"""Preferences: all row spellings, compared tokens, and intact pairs."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from offload.errors import ConfigError
from offload.extras.data.dataset import Dataset
from offload.extras.data.encoder import Encoder
from offload.extras.data.findings import Findings
from offload.extras.data.formats import read_records
from offload.extras.data.mixture import Mixture
from offload.extras.data.records import Chat, Pair, Preference
from offload.extras.data.rows import BadRow
from tests.data.asked import files_of, source_of

ASKED = {"role": "user", "content": "What is two and two?"}
GOOD, BAD = ({"role": "assistant", "content": text} for text in ("It is four.", "It is five, and so on."))
SYSTEM = {"role": "system", "content": "Be brief."}
CHATS: dict[str, dict[str, Any]] = {
    "messages": {"prompt": [ASKED], "chosen": [GOOD], "rejected": [BAD]},
    "one message": {"messages": [ASKED], "chosen": GOOD, "rejected": BAD},
    "implicit": {"chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "prompt twice": {"prompt": [ASKED], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "a text before messages": {"prompt": ASKED["content"], "chosen": [ASKED, GOOD], "rejected": [ASKED, BAD]},
    "texts behind messages": {"prompt": [ASKED], "chosen": GOOD["content"], "rejected": BAD["content"]},
    "sharegpt": {
        "prompt": [{"from": "human", "value": ASKED["content"]}],
        "chosen": {"from": "gpt", "value": GOOD["content"]},
        "rejected": {"from": "gpt", "value": BAD["content"]},
    },
}


def record(path: Path) -> Any:
    return next(iter(read_records(files_of(str(path), "preference")[0], 300, [])))


@pytest.mark.parametrize("spelling", CHATS)
def test_all_spellings_of_a_conversation_are_one(write_lines: Callable[..., Path], spelling: str) -> None:
    found = record(write_lines("rows.jsonl", CHATS[spelling]))
    assert isinstance(found, Preference)
    assert isinstance(found.chosen, Chat)
    assert found.chosen.messages == [ASKED, GOOD]
    assert found.rejected == Chat(found.where, [ASKED, BAD], None, num_prompt=1)


def test_a_system_message_and_a_table_of_strings(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    with path.open("w", newline="") as stream:
        writer = csv.writer(stream)
        writer.writerow(["system", "question", "chosen", "rejected"])
        writer.writerow([SYSTEM["content"], ASKED["content"], GOOD["content"], json.dumps([BAD])])
    file = replace(files_of(str(path), "preference")[0], columns={"prompt": "question"})
    found = next(iter(read_records(file, 300, [])))
    assert isinstance(found, Preference)
    assert isinstance(found.chosen, Chat)
    assert found.chosen.messages == [SYSTEM, ASKED, GOOD]
    assert found.chosen.num_prompt == 2


EARLIER = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "One."}]
QUESTION = ASKED["content"]


def conversations(prompt: Any, *before: dict[str, str], **more: Any) -> dict[str, Any]:
    """Return a row with a prompt beside two conversations."""
    return {"prompt": prompt, "chosen": [*before, GOOD], "rejected": [*before, BAD], **more}


@pytest.mark.parametrize(
    ("row", "turns", "num_prompt"),
    [
        (conversations(QUESTION, ASKED), [ASKED], 1),
        (conversations(QUESTION, SYSTEM, ASKED), [SYSTEM, ASKED], 2),
        (conversations(f" {QUESTION}\n", ASKED), [ASKED], 1),
        (conversations(QUESTION, {**ASKED, "content": f"{QUESTION}\n"}), [{**ASKED, "content": f"{QUESTION}\n"}], 1),
        (conversations(QUESTION, *EARLIER, ASKED), [*EARLIER, ASKED], 3),
        (conversations([ASKED], SYSTEM, ASKED), [SYSTEM, ASKED], 2),
        (conversations([SYSTEM, *EARLIER, ASKED], ASKED), [SYSTEM, *EARLIER, ASKED], 4),
        (conversations([{**ASKED, "name": "x"}], ASKED), [ASKED], 1),
        (conversations(QUESTION, ASKED, system="Be brief."), [SYSTEM, ASKED], 2),
        (conversations(QUESTION, SYSTEM, ASKED, system="Be brief.\n"), [SYSTEM, ASKED], 2),
        (conversations([SYSTEM], ASKED), [SYSTEM, ASKED], 1),
        (conversations(" ", SYSTEM, ASKED), [SYSTEM, ASKED], 2),
        (conversations([SYSTEM, ASKED], system="Be brief."), [SYSTEM, ASKED], 2),
        (conversations(EARLIER, ASKED), [*EARLIER, ASKED], 2),
        (conversations([ASKED], *EARLIER[1:], ASKED), [ASKED, EARLIER[1], ASKED], 1),
    ],
)
def test_a_prompt_beside_conversations_is_said_once(
    write_lines: Callable[..., Path], row: dict[str, Any], turns: list[Any], num_prompt: int
) -> None:
    found = record(write_lines("rows.jsonl", row))
    assert [found.chosen.messages, found.rejected.messages] == [[*turns, GOOD], [*turns, BAD]]
    assert found.chosen.num_prompt == found.rejected.num_prompt == num_prompt


@pytest.mark.parametrize(
    "row",
    [
        conversations("what is two and two", ASKED),
        conversations(f"Be brief. {QUESTION}", SYSTEM, ASKED),
        conversations([{"role": "system", "content": "Be long."}, ASKED], SYSTEM, ASKED),
        {"prompt": [ASKED], "completion": [{**ASKED, "content": "Two and two?"}, GOOD]},
    ],
)
def test_a_prompt_beside_a_conversation_with_another_question_is_a_bad_row(
    write_lines: Callable[..., Path], row: dict[str, Any]
) -> None:
    (file,) = files_of(str(write_lines("rows.jsonl", row)))
    data_format = "preference" if "chosen" in row else "prompt-completion"
    (bad,) = read_records(replace(file, format=data_format), 300, [])
    assert isinstance(bad, BadRow)
    with pytest.raises(BadRow, match=r"rows\.jsonl:1, '(chosen|completion)' is a conversation .*leave the prompt out"):
        raise bad


def test_a_completion_that_holds_the_prompt_says_it_once(write_lines: Callable[..., Path]) -> None:
    path = write_lines("rows.jsonl", {"prompt": [ASKED], "completion": [SYSTEM, ASKED, GOOD]})
    (found,) = read_records(replace(files_of(str(path))[0], format="prompt-completion"), 300, [])
    assert isinstance(found, Chat)
    assert (found.messages, found.num_prompt) == ([SYSTEM, ASKED, GOOD], 2)


@pytest.mark.parametrize(
    ("row", "prompt"),
    [
        ({"prompt": "2 + 2 is", "chosen": "2 + 2 is four", "rejected": "2 + 2 is five"}, "2 + 2 is"),
        ({"prompt": " 2 + 2 is ", "chosen": "2 + 2 is four", "rejected": "2 + 2 is five"}, "2 + 2 is"),
        ({"prompt": "Two", "chosen": "Two is four", "rejected": "Two is five"}, "Two"),
        ({"prompt": "2 + 2 is", "chosen": " four", "rejected": " five"}, "2 + 2 is"),
        ({"chosen": "2 + 2 is four", "rejected": "2 + 2 is five"}, "2 + 2 is f"),
        ({"prompt": "", "chosen": "2 + 2 is four", "rejected": "2 + 2 is five"}, ""),
    ],
)
def test_texts_stay_texts(write_lines: Callable[..., Path], row: dict[str, str], prompt: str) -> None:
    found = record(write_lines("rows.jsonl", row))
    assert isinstance(found.chosen, Pair)
    assert found.chosen.prompt == found.rejected.prompt == prompt
    assert (found.chosen.prompt + found.chosen.completion).endswith("four")
    assert (found.chosen.prompt + found.chosen.completion).count("2 + 2") < 2


@pytest.mark.parametrize(("one", "other"), [("It is 5", "It is 55"), ("It is 55", "It is 5")])
def test_an_answer_that_begins_the_other_keeps_an_end(
    write_lines: Callable[..., Path], build: Callable[..., Dataset], one: str, other: str
) -> None:
    """Break: take the whole shorter answer for the prompt, so that the pair has no answer, and is left out."""
    data = build(write_lines("rows.jsonl", {"chosen": one, "rejected": other}), batch_size=1)
    assert said(data, data.batch(0)) == [one[6:], other[6:]]


@pytest.mark.parametrize(
    "answers", [('[{"name": "x"}]', '[{"name": "y"}]'), ('[{"name":', "[]"), ('[{"role": "x"}]', "x")]
)
def test_an_answer_in_json_is_a_text(write_lines: Callable[..., Path], answers: tuple[str, str]) -> None:
    """Break: read each text with a list of objects as messages."""
    row = dict(zip(("chosen", "rejected"), answers, strict=True))
    found = record(write_lines("rows.jsonl", {"prompt": "Name it: ", **row}))
    assert (found.chosen.completion, found.rejected.completion) == answers


def test_a_completion_in_a_table_of_strings_is_a_conversation(write_lines: Callable[..., Path]) -> None:
    row = {"prompt": json.dumps([SYSTEM, ASKED]), "completion": json.dumps([GOOD])}
    file = replace(files_of(str(write_lines("rows.jsonl", row)))[0], format="prompt-completion")
    (found,) = read_records(file, 300, [])
    assert isinstance(found, Chat)
    assert (found.messages, found.num_prompt) == ([SYSTEM, ASKED, GOOD], 2)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "x", "rejected": "y"}, r"rows.jsonl:1 lacks 'chosen' for data.format=preference"),
        ({"prompt": "x", "chosen": "y", "rejected": "y"}, "'chosen' and 'rejected' are the same"),
        ({"prompt": "x", "chosen": "", "rejected": "y"}, "'chosen' is empty"),
        ({"prompt": "x", "chosen": 3, "rejected": "y"}, "'chosen' must be a text or a list of at least one message"),
        ({"prompt": [ASKED], "chosen": [ASKED], "rejected": [BAD]}, "'chosen' has no message of the assistant"),
        ({"chosen": [ASKED, GOOD], "rejected": [ASKED, {"content": "x"}]}, "'rejected', 2 lacks a 'role'"),
    ],
)
def test_a_row_that_is_no_preference(write_lines: Callable[..., Path], row: dict[str, Any], said: str) -> None:
    bad = record(write_lines("rows.jsonl", row))
    assert isinstance(bad, BadRow)
    with pytest.raises(BadRow, match=said):
        raise bad


def test_an_answer_without_a_token_stays_beside_the_other() -> None:
    """A tokenizer can drop blanks. Break: skip the empty document, so that pairs mix two rows."""
    rules = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    rules.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    encoder, findings = Encoder(PreTrainedTokenizerFast(tokenizer_object=rules)), Findings()
    pair = Preference("rows.jsonl:1", Pair("rows.jsonl:1", "", " "), Pair("rows.jsonl:1", "", "a"))
    assert [each.ids.tolist() for each in encoder.encode([(False, pair)], findings)] == [[], [0]]
    assert findings.num_empty == 0


@pytest.fixture
def build(dataset_of: Callable[..., Dataset]) -> Callable[..., Dataset]:
    def made(*paths: Path, weights: tuple[float | None, ...] = (None,), **more: Any) -> Dataset:
        sources = [source_of(str(path), "preference", weight=w) for path, w in zip(paths, weights, strict=False)]
        grouped = {"grouped": "preference", "group": 2, "group_by_length": True}
        return dataset_of(*sources, **grouped | {"sequence_length": 48, "batch_size": 3} | more)

    return made


def numbered(count: int, longer: tuple[int, ...] = ()) -> list[dict[str, Any]]:
    """Return numbered pairs. For numbers in `longer` the question for the chosen answer exceeds a row."""
    return [
        {
            "prompt": [{"role": "user", "content": f"Say {i}." + " Please" * 90 * (i in longer)}],
            "chosen": [{"role": "assistant", "content": f"{i} yes"}],
            "rejected": [{"role": "assistant", "content": f"{i} no"}],
        }
        for i in range(count)
    ]


def said(data: Dataset, batch: dict[str, Any]) -> list[str]:
    """Return the compared text in each row of a batch."""
    return [
        data.tokenizer.decode(ids[labels != -100], skip_special_tokens=True).strip()
        for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True)
    ]


def test_what_is_compared_is_the_answer_behind_the_prompt(
    write_lines: Callable[..., Path], build: Callable[..., Dataset]
) -> None:
    turns = [{"role": "user", "content": "One?"}, {"role": "assistant", "content": "One."}, ASKED]
    data = build(write_lines("rows.jsonl", {"prompt": turns, "chosen": [GOOD], "rejected": [BAD]}), batch_size=1)
    batch = data.batch(0)
    assert said(data, batch) == [GOOD["content"], BAD["content"]]
    assert "One." in data.tokenizer.decode(batch["input_ids"][0])
    assert data.group == 2
    assert data.rows_description.startswith("pairs of rows: 1 of 48 tokens to train on, 0 to evaluate")
    assert data.sources[0].contents.endswith(f": 1 pair, {int(batch['attention_mask'].sum())} tokens")


def test_pairs_stay_pairs_in_any_order_and_none_is_cut_in_half(
    write_lines: Callable[..., Path], build: Callable[..., Dataset]
) -> None:
    """Pairs without room for an answer are dropped. An epoch has each other pair once, shared over ranks."""
    data = build(write_lines("rows.jsonl", *numbered(21, longer=(4, 9))), eval_share=0.2, seed=5)
    seen: list[str] = []
    for step in range(data.num_steps(1)):
        rows = said(data, data.batch(step))
        assert [row.replace("no", "yes") for row in rows[1::2]] == rows[::2]
        assert all(row.endswith("no") for row in rows[1::2])
        shared = [row for rank in range(2) for row in said(data, data.batch(step, rank, 2))]
        assert shared == rows
        assert [len(data.batch(step, rank, 2)["input_ids"]) for rank in range(2)] == [2, 4]
        seen += rows[::2]
    of_epoch = seen[: data.num_train_rows // 2]
    held_out = [row for batch in data.eval_batches(2) for row in said(data, batch)][::2]
    assert sorted(of_epoch + held_out) == sorted(f"{i} yes" for i in range(21) if i not in (4, 9))
    assert any("without a trained token" in note for note in data.notes)


def test_a_mixture_of_pairs(write_lines: Callable[..., Path], build: Callable[..., Dataset]) -> None:
    paths = [write_lines(f"{name}.jsonl", *numbered(count)) for name, count in (("few", 3), ("many", 12))]
    data = build(*paths, weights=(0.5, 0.5))
    assert isinstance(data.train, Mixture)
    assert data.train.quotas == (24, 24)
    seen = [row for step in range(8) for row in said(data, data.batch(step))]
    assert [row.replace("no", "yes") for row in seen[1::2]] == seen[::2]
    assert [seen.count(f"{i} no") for i in range(12)] == [5, 5, 5] + [1] * 9


def test_values_of_rows_come_with_them(write_lines: Callable[..., Path], build: Callable[..., Dataset]) -> None:
    class Numbers:
        def of(self, rows: np.ndarray, labels: np.ndarray) -> dict[str, torch.Tensor]:
            return {"own": torch.from_numpy(rows), "seen": torch.from_numpy(labels)}

    data = build(write_lines("rows.jsonl", *numbered(9)), eval_share=0.3)
    with_values = Dataset(**vars(data) | {"values": dict.fromkeys(data.row_sets, Numbers())})
    batch = with_values.batch(1)
    assert batch["own"].tolist() == data.train.at(6, 6, 0).tolist()
    assert torch.equal(batch["seen"], batch["labels"])
    (held_out, *_) = with_values.eval_batches(2)
    assert held_out["own"].tolist() == data.eval.at(0, 2, 0).tolist()


def test_other_data_than_preferences_are_refused(
    write_lines: Callable[..., Path], dataset_of: Callable[..., Dataset]
) -> None:
    files = write_lines("rows.jsonl", *numbered(3)), write_lines("text.jsonl", {"text": "x y z"})
    with pytest.raises(ConfigError, match=r"text.jsonl has the format jsonl, and train.method needs preference"):
        dataset_of(*files, grouped="preference", group=2)
    with pytest.raises(ConfigError, match=r"rows.jsonl has the format preference, .*: set --train.method dpo"):
        dataset_of(*files[::-1])


@pytest.mark.parametrize("other", ["question", "instruction", "conversations"])
def test_another_name_beside_a_prompt_is_needless(write_lines: Callable[..., Path], other: str) -> None:
    row = {"prompt": "What is two and two?", "chosen": " Four.", "rejected": " Five."}
    assert (
        record(write_lines("a.jsonl", row | {other: "Two and two?"})).chosen
        == record(write_lines("a.jsonl", row)).chosen
    )
    assert isinstance(record(write_lines("a.jsonl", row | {"prompt": None, other: "Two and two?"})), BadRow)


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv"])
def test_an_empty_mapped_column_leaves_the_key_itself(tmp_path: Path, name: str) -> None:
    """Break: let the empty value replace the prompt."""
    rows = [{"prompt": "One?", "question": each, "chosen": "A", "rejected": "B"} for each in ("", "Two?")]
    if name == "a.csv":
        lines = [",".join(row.values()) for row in ({key: key for key in rows[0]}, *rows)]
    else:
        lines = list(map(json.dumps, rows))
    (tmp_path / name).write_text("\n".join(lines))
    file = replace(files_of(str(tmp_path / name), "preference")[0], columns={"prompt": "question"})
    found = list(read_records(file, 300, []))
    assert [record.chosen.texts[0] for record in found if isinstance(record, Preference)] == ["One?", "Two?"]


def test_columns_that_the_reference_loss_reads_are_refused(
    dataset_of: Callable[..., Dataset], write_lines: Callable[..., Path]
) -> None:
    row = {"prompt": "What is two and two?", "chosen": " Four.", "rejected": " Five.", "margin": 3.0}
    path = str(write_lines("a.jsonl", row))
    settings: dict[str, Any] = {"grouped": "preference", "group": 2, "batch_size": 1}
    source = source_of(path, "preference")
    assert dataset_of(source, **settings).num_train_rows
    with pytest.raises(ConfigError, match=r"has the column 'margin', and no margin is subtracted"):
        dataset_of(source, **settings, unheard={"margin": "no margin is subtracted"})
