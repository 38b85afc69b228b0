"""Every format on small files: content, detection, and errors for malformed records."""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from offload.errors import ConfigError
from offload.extras.data import formats
from offload.extras.data.formats import detect_format, read_records
from offload.extras.data.records import Chat, Ids, Pair, Record, Text
from offload.extras.data.rows import BadRow
from tests.data.asked import files_of, source_of

SYSTEM = {"role": "system", "content": "x"}
USER = {"role": "user", "content": "Hi"}
ADDED = {"role": "user", "content": "a\n\nb"}
ASSISTANT = {"role": "assistant", "content": "Hello"}


def read(path: Path, data_format: str = "auto", vocab_size: int = 1000) -> list[Record]:
    (file,) = files_of(str(path), data_format)
    records = []
    for record in read_records(replace(file, format=detect_format(file)), vocab_size, []):
        if isinstance(record, BadRow):
            raise record
        records.append(record)
    return records


def npy(array: np.ndarray) -> bytes:
    """Return the contents of a .npy file."""
    stream = io.BytesIO()
    np.save(stream, array)
    return stream.getvalue()


PARTS = {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
CALL = {"role": "assistant", "content": None, "tool_calls": [{"type": "function"}]}
TURNS = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]


@pytest.mark.parametrize(
    ("data_format", "row", "expected"),
    [
        ("jsonl", {"text": "x"}, Text("", "x")),
        ("messages", {"messages": [USER, ASSISTANT], "tools": [PARTS]}, Chat("", [USER, ASSISTANT], [PARTS])),
        ("messages", {"messages": [PARTS, CALL]}, Chat("", [{**PARTS, "content": "ab"}, {**CALL, "content": ""}])),
        ("sharegpt", {"conversations": TURNS, "system": "x"}, Chat("", [SYSTEM, USER, ASSISTANT])),
        ("alpaca", {"instruction": "Hi", "output": "Hello"}, Chat("", [USER, ASSISTANT])),
        ("alpaca", {"instruction": "a", "input": "b", "output": "Hello"}, Chat("", [ADDED, ASSISTANT])),
        ("prompt-completion", {"prompt": "1+1=", "completion": "2"}, Pair("", "1+1=", "2")),
    ],
)
def test_auto_goes_by_the_first_records_keys(
    write_lines: Callable[..., Path], data_format: str, row: Any, expected: Any
) -> None:
    for name in ("data.jsonl", "data.json"):
        path = write_lines(name, row)
        (file,) = files_of(str(path))
        assert detect_format(file) == data_format
        (found,) = read(path)
        assert found == replace(expected, where=found.where)


def test_auto_goes_by_the_ending(tmp_path: Path) -> None:
    names = {"a.txt": "text", "b.py": "text", "c.log": "text", "d.npy": "tokens", "e.bin": "tokens"}
    for name, data_format in names.items():
        (tmp_path / name).write_text("x")
        (file,) = files_of(str(tmp_path / name))
        assert detect_format(file) == data_format


def test_auto_says_which_keys_it_knows(write_lines: Callable[..., Path]) -> None:
    with pytest.raises(ConfigError, match=r"data\.jsonl:1 has the keys \['body', 'title'\].*jsonl: text.*data\.format"):
        read(write_lines("data.jsonl", {"title": "a", "body": "b"}))
    with pytest.raises(ConfigError, match=r"data\.jsonl, record 1 has a value of type int"):
        read(write_lines("data.jsonl", [1]))


def test_text_is_a_document_a_file(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"\xef\xbb\xbfline\r\nnext\n")
    assert read(tmp_path / "a.txt") == [Text(str(tmp_path / "a.txt"), "line\nnext\n")]


@pytest.mark.parametrize(
    "text", ["ab\n" * 40, "x" * 100, "", "short\n", "a" * 16, "a" * 15 + "\n" + "b" * 16 + "\n", "ü\n" * 33]
)
def test_long_text_comes_in_pieces(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_PIECE_CHARS", 16)
    (tmp_path / "a.txt").write_text(text)
    pieces = [record for record in read(tmp_path / "a.txt") if isinstance(record, Text)]
    assert "".join(piece.text for piece in pieces) == text
    assert [piece.opens for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert [piece.closes for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all(len(piece.text) <= 32 for piece in pieces)
    if max(map(len, text.split("\n"))) < 16:
        assert all(piece.text.endswith("\n") for piece in pieces[:-1])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", b"ok\xff\xfe", r"a\.txt is not UTF-8 text \(byte 2"),
        ("a.npy", npy(np.zeros(3)), r"float64 \[3\]; data.format=tokens needs integers"),
        ("b.npy", b"not numpy", r"b\.npy is not a \.npy file"),
        ("c.bin", b"123", "3 bytes, not a whole number of uint16"),
    ],
)
def test_contents_of_another_kind_are_refused(tmp_path: Path, name: str, content: bytes, words: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read(tmp_path / name)


def test_rows_are_told_by_line_or_number(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n\n   \n{"text": "zw\\u00f6lf"}')
    assert read(path) == [Text(f"{path}:1", "one"), Text(f"{path}:4", "zwölf")]
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"text": "one"}, {"text": "two"}], indent=2))
    assert read(path) == [Text(f"{path}, record 1", "one"), Text(f"{path}, record 2", "two")]


@pytest.mark.parametrize(
    ("data_format", "line", "words"),
    [
        ("jsonl", '{"txt": 1}', "a.jsonl:2 lacks 'text'.*it has 'txt'"),
        ("jsonl", '{"text": 1}', "a.jsonl:2: 'text' must be a string, it is int"),
        ("jsonl", '"text"', "a.jsonl:2 is a value of type str"),
        ("jsonl", '{"text": "cut', "a.jsonl:2 is not valid JSON"),
        ("messages", '{"messages": []}', "a.jsonl:2: 'messages' must be a list of at least one"),
        ("messages", '{"messages": [{"content": "x"}]}', "a.jsonl:2, message 1 lacks a 'role'"),
        ("messages", '{"messages": [{"from": "human", "value": "x"}]}', "columns '{conversations: messages}'"),
        ("sharegpt", '{"conversations": [{"role": "user", "content": "x"}]}', "columns '{messages: conversations}'"),
        (
            "messages",
            '{"messages": [{"role": "user"}]}',
            "a.jsonl:2, message 1: 'content' must be a string, and .* 'user' has none",
        ),
        (
            "messages",
            '{"messages": [{"role": "user", "content": [{"type": "image"}]}]}',
            r"message 1 has more placeholders than its row has images \(0\)",
        ),
        ("messages", '{"messages": [{"role": "user", "content": ["a"]}]}', "part of content that is no object .*: 'a'"),
        ("messages", '{"messages": [{"role": "user", "content": [{"type": "text"}]}]}', "without a string 'text'"),
        ("messages", '{"messages": [{"role": "user", "content": [{"type": []}]}]}', "no object with a 'type'"),
        ("sharegpt", '{"conversations": [{"from": ["human"], "value": "x"}]}', "message 1 is from ..human"),
        ("sharegpt", '{"conversations": [{"from": "human"}]}', "a.jsonl:2, message 1 lacks 'from' or 'value'"),
        ("sharegpt", '{"conversations": [{"from": "ghost", "value": ""}]}', "message 1 is from 'ghost'.*human"),
        ("alpaca", '{"instruction": "x"}', "a.jsonl:2 lacks 'output' for data.format=alpaca; it has 'instruction'"),
        (
            "prompt-completion",
            '{"prompt": "x", "completion": null}',
            "a.jsonl:2: 'completion' must be a string, it is null",
        ),
    ],
)
def test_a_malformed_record_is_named(tmp_path: Path, data_format: str, line: str, words: str) -> None:
    good = {
        "jsonl": {"text": "x"},
        "messages": {"messages": [USER]},
        "sharegpt": {"conversations": [{"from": "human", "value": "x"}]},
        "alpaca": {"instruction": "x", "output": "y"},
        "prompt-completion": {"prompt": "x", "completion": "y"},
    }
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(good[data_format]) + "\n" + line + "\n")
    with pytest.raises(ConfigError, match=words):
        read(path, data_format)


def ids_of(records: list[Record]) -> list[list[int]]:
    assert all(isinstance(record, Ids) for record in records)
    return [record.ids.tolist() for record in records if isinstance(record, Ids)]


def test_token_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats, "_PIECE_TOKENS", 4)
    np.save(tmp_path / "stream.npy", np.arange(10, dtype=np.int32))
    records = read(tmp_path / "stream.npy")
    assert ids_of(records) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert [record.closes for record in records if isinstance(record, Ids)] == [False, False, True]
    np.save(tmp_path / "rows.npy", np.arange(6).reshape(2, 3))
    assert ids_of(read(tmp_path / "rows.npy")) == [[0, 1, 2], [3, 4, 5]]
    np.asarray([1, 2, 3], "<u2").tofile(tmp_path / "a.bin")
    assert ids_of(read(tmp_path / "a.bin")) == [[1, 2, 3]]
    np.asarray([1, 70000], "<u4").tofile(tmp_path / "wide.bin")
    assert ids_of(read(tmp_path / "wide.bin", vocab_size=100_000)) == [[1, 70000]]
    header = np.zeros(256, "<i4")
    header[:2] = 20240520, 1
    (tmp_path / "llmc.bin").write_bytes(header.tobytes() + np.asarray([5, 6], "<u2").tobytes())
    assert ids_of(read(tmp_path / "llmc.bin")) == [[5, 6]]
    (tmp_path / "empty.bin").write_bytes(b"")
    assert ids_of(read(tmp_path / "empty.bin")) == []


def test_keys_of_several_formats_are_refused(write_lines: Callable[..., Path]) -> None:
    """Alpaca data have the whole prompt as "text" beside the parts."""
    path = write_lines("x.jsonl", {"instruction": "a", "input": "", "output": "b", "text": "a b"})
    with pytest.raises(ConfigError, match=r"fit several formats: set --data\.format to jsonl or alpaca"):
        detect_format(*files_of(str(path)))
    assert detect_format(*files_of(str(path), "alpaca")) == "alpaca"


@pytest.mark.parametrize(
    ("keys", "columns"),
    [
        (["answer", "question"], "{prompt: question, completion: answer}"),
        (["id", "query", "response"], "{prompt: query, completion: response}"),
        (["prompt", "reply"], "{prompt: prompt, completion: reply}"),
        (["body", "question"], "{text: NAME}"),
        (["answer", "context", "question"], "{instruction: question, input: context, output: answer}"),
        (["context", "instruction", "response"], "{instruction: instruction, input: context, output: response}"),
    ],
)
def test_columns_with_usual_names_are_told_as_what_they_are(keys: list[str], columns: str) -> None:
    with pytest.raises(ConfigError) as caught:
        formats._detect_by_keys(keys, "a.jsonl:1", {})
    assert str(caught.value).endswith(f"--data.columns '{columns}'.")


def test_a_renamed_key_that_no_format_reads_is_refused(write_lines: Callable[..., Path]) -> None:
    path = write_lines("a.jsonl", {"id": "x", "text": "y"})
    for key, meant in (("txet", "text"), ("promt", "prompt"), ("tols", "tools")):
        (file,) = files_of(str(path))
        with pytest.raises(ConfigError, match=rf"has the key '{key}' for .*a\.jsonl.* \(did you mean {meant}\?\)"):
            detect_format(replace(file, columns={key: "id"}))


ROLES = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]


@pytest.mark.parametrize(
    ("row", "columns", "note"),
    [
        ({"text": "a b c", "id": 1, "empty": None, "none": []}, {}, "the column 'id'. To read one, map it .*: text"),
        ({"text": "a b c"}, {}, None),
        ({"body": "a b c", "n": 1}, {"text": "body"}, "the column 'n'"),
        (
            {"messages": ROLES, "documents": [{"text": "x"}], "label": True},
            {},
            r"the column 'documents'. .* system, tools",
        ),
        (
            {"messages": ROLES, "system_message": "x"},
            {},
            r"the column 'system_message'. To read 'system_message', set --data.columns '\{system: system_message\}'",
        ),
        (
            {"instruction": "a", "context": "x", "response": "b", "category": "qa"},
            {"output": "response"},
            r"the columns 'category', 'context'. .* --data.columns '\{output: response, input: context\}'",
        ),
        (
            {"question": "a", "context": "x", "completion": "b"},
            {"prompt": "question"},
            r"the column 'context'. .*'\{instruction: question, output: completion, input: context\}'",
        ),
        ({"text": "a b c", **{f"k{i}": i for i in range(9)}}, {}, "the columns 'k0', .*'k7' and 1 more"),
    ],
)
@pytest.mark.parametrize("ending", ["jsonl", "parquet"])
def test_columns_without_effect_are_told_with_the_setting_to_read_one(
    row: dict[str, Any], columns: dict[str, str], note: str | None, ending: str, tmp_path: Path, dataset_of: Any
) -> None:
    """Once for each source, also from the cache; and the setting in the note reads the column."""
    path = tmp_path / f"a.{ending}"
    if ending == "jsonl":
        path.write_text(json.dumps(row) + "\n" + json.dumps(row) + "\n")
    else:
        row = {key: value for key, value in row.items() if value not in (None, [])}
        pq.write_table(pa.Table.from_pylist([row] * 2), path)
    for _ in range(2):
        notes = [each for each in dataset_of(source_of(str(path), columns=columns)).notes if "not read" in each]
        assert len(notes) == (note is not None)
    if note is None:
        return
    assert re.search(f"not read: {note}", notes[0])
    if given := re.search(r"To read '(\w+)', set --data.columns '\{(.*)\}'", notes[0]):
        read = dict(pair.split(": ") for pair in given[2].split(", "))
        data = dataset_of(source_of(str(path), columns=read))
        assert "x" in data.tokenizer.decode(data.batch(0)["input_ids"][0])
        assert not any(f"'{given[1]}'" in each for each in data.notes)


def test_roles_without_an_assistant_are_told(tmp_path: Path, dataset_of: Any) -> None:
    """Break: advise to train on all tokens."""
    strange = {"messages": [{"role": "human", "content": "a"}, {"role": "bot", "content": "b"}]}
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(strange) + "\n")
    with pytest.raises(
        ConfigError, match=r"none to train on: .* No message has the role assistant \(roles: bot, human\)"
    ) as error:
        dataset_of(path)
    assert "train_on_prompt" not in str(error.value)
    path.write_text(json.dumps(strange) + "\n" + json.dumps({"messages": ROLES}) + "\n")
    assert any(
        "1 row. No message has the role assistant (roles: bot, human)" in each for each in dataset_of(path).notes
    )
