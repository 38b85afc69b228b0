"""The same documents in every format give equal tokens and labels; and damaged files in each format."""

from __future__ import annotations

import bz2
import copy
import csv
import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq
import pytest

from offload.errors import ConfigError
from offload.extras.data.dataset import Dataset
from offload.extras.data.rows import read_rows
from offload.extras.data.task import write_rows
from tests.data.asked import files_of, source_of

Rows = list[dict[str, Any]]
Write = Callable[[Path, Rows], Path]

CALLS = [
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {name: 1}}}]}
    for name in "ab"
]
ROWS: dict[str, Rows] = {
    "text": [{"text": f'Row {i}: "quoted", ü 日本\n\tand more\r\n', "n": i} for i in range(30)],
    "messages": [
        {"messages": [{"role": "user", "content": f"What is {i}, and two?\n"}, {"role": "assistant", "content": "It."}]}
        for i in range(20)
    ]
    + [{"messages": [{"role": "user", "content": "x"}, call]} for call in CALLS],
    "prompt-completion": [{"prompt": f"{i} and one are", "completion": f" {i + 1}."} for i in range(20)],
    "alpaca": [{"instruction": f"Add {i}", "input": "1" * (i % 2), "output": str(i)} for i in range(20)],
    "tokens": [
        {"input_ids": list(range(i, i + 9)), "labels": [-100] * 3 + list(range(i + 3, i + 9))} for i in range(20)
    ],
}


def _jsonl(path: Path, rows: Rows) -> Path:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return path


def _json(path: Path, rows: Rows) -> Path:
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False))
    return path


def _separated(path: Path, rows: Rows) -> Path:
    flat = [{key: value if isinstance(value, str) else json.dumps(value) for key, value in row.items()} for row in rows]
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, list(rows[0]), delimiter="\t" if ".tsv" in path.name else ",")
        writer.writeheader()
        writer.writerows(flat)
    return path


def _parquet(path: Path, rows: Rows) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path, row_group_size=7)
    return path


def _arrow(path: Path, rows: Rows) -> Path:
    table = pa.Table.from_pylist(rows)
    make = pa.ipc.new_stream if "stream" in path.name else pa.ipc.new_file
    with make(path, table.schema) as writer:
        writer.write_table(table, max_chunksize=7)
    return path


def _feather(path: Path, rows: Rows) -> Path:
    pyarrow.feather.write_feather(pa.Table.from_pylist(rows), path, compression="zstd")
    return path


def _saved(path: Path, rows: Rows) -> Path:
    datasets.Dataset.from_list(rows).save_to_disk(path)
    return path


def json_features(messages: Any, tools: Any) -> datasets.Features:
    return datasets.Features({"messages": messages, "tools": tools})


def _calls_as(calls: Any) -> Any:
    text = datasets.Value("string")
    return datasets.List({"role": text, "content": text, "tool_calls": calls})


JSON = datasets.Json()
JSON_COLUMNS = {
    "whole": json_features(JSON, JSON),
    "elements": json_features(datasets.List(JSON), datasets.List(JSON)),
    "calls": json_features(_calls_as(JSON), JSON),
    "each call": json_features(_calls_as(datasets.List(JSON)), datasets.List(JSON)),
    "arguments": json_features(
        _calls_as(datasets.List({"function": {"name": datasets.Value("string"), "arguments": JSON}})), JSON
    ),
}


@pytest.mark.parametrize("name", JSON_COLUMNS)
def test_json_in_columns_is_read_as_datasets_reads_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In files, saved sets and sets from Python: calls with other arguments in each row, with null among them."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    rows = [
        {
            "messages": [
                {"role": "user", "content": "Add.", "tool_calls": None},
                {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": each}}]},
            ],
            "tools": [{"type": "function", "function": {"name": "f", "parameters": each}}],
        }
        for each in ({"a": 1, "n": None}, {"b": "x", "c": [{"d": 1}]})
    ]
    saved = datasets.Dataset.from_list(rows, features=JSON_COLUMNS[name])
    wanted = [{"messages": [{k: v for k, v in m.items() if v is not None} for m in r["messages"]]} for r in saved]
    saved.save_to_disk(tmp_path / "saved")
    saved.to_parquet(tmp_path / "a.parquet")
    as_text = pq.read_table(tmp_path / "a.parquet")
    plain = pa.schema([pa.field(f.name, _without_extension(f.type)) for f in as_text.schema], as_text.schema.metadata)
    pq.write_table(as_text.cast(plain), tmp_path / "texts.parquet")  # with the note in the metadata alone
    for place in ("saved", "a.parquet", "texts.parquet", write_rows(saved, "data")):
        (file,) = files_of(str(tmp_path / place))
        found = [row for _, row in read_rows(file)]
        assert [row["tools"] for row in found] == [row["tools"] for row in saved] == [row["tools"] for row in rows], (
            place
        )
        found = [{"messages": [{k: v for k, v in m.items() if v is not None} for m in r["messages"]]} for r in found]
        assert found == wanted, place


def test_a_data_set_from_python_is_the_one_in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break: keep the nulls, so that each call has the arguments of all calls."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    calls = [[{"function": {"name": "f", "arguments": {key: 1}}}] for key in "ab"]
    rows = [{"messages": [{"role": "assistant", "content": "", "tool_calls": each}], "id": 1} for each in calls]
    data = datasets.Dataset.from_list([*rows, {"messages": None, "id": None}])
    data.save_to_disk(tmp_path / "saved")
    for place in (str(tmp_path / "saved"), write_rows(data, "data"), write_rows(data.to_iterable_dataset(), "data")):
        assert [row for _, row in read_rows(files_of(place)[0])] == [*rows, {}], place
    texts = datasets.Dataset.from_list([{"text": "a"}, {"text": "b"}])["text"]
    assert [row for _, row in read_rows(files_of(write_rows(texts, "data"))[0])] == [{"text": "a"}, {"text": "b"}]


def _without_extension(kind: Any) -> Any:
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, _without_extension(field.type)) for field in kind])
    if pa.types.is_list(kind):
        return pa.list_(_without_extension(kind.value_type))
    return kind.storage_type if isinstance(kind, pa.BaseExtensionType) else kind


def _saved_splits(path: Path, rows: Rows) -> Path:
    kept = datasets.Dataset.from_list([*rows, *rows[:2]]).select(range(len(rows)))
    datasets.DatasetDict({"train": kept}).save_to_disk(path)
    return path


def _in_memory(path: Path, rows: Rows) -> str:
    url = f"memory://{path.name}"
    with fsspec.open(url, "wb") as stream:
        stream.write(_jsonl(path, rows).read_bytes())
    return url


def _packed(write: Write, pack: Callable[[bytes], bytes]) -> Write:
    def packed(path: Path, rows: Rows) -> Path:
        plain = write(path.with_suffix(""), rows)
        path.write_bytes(pack(plain.read_bytes()))
        plain.unlink()
        return path

    return packed


def _zstd(data: bytes) -> bytes:
    """Compress in two frames, like parallel packers."""
    half = len(data) // 2
    return b"".join(pa.compress(part, "zstd", asbytes=True) for part in (data[:half], data[half:]))


WRITERS: dict[str, Callable[[Path, Rows], Path | str]] = {
    "a.json": _json,
    "a.csv": _separated,
    "a.tsv": _separated,
    "a.parquet": _parquet,
    "a.arrow": _arrow,
    "a.stream.arrow": _arrow,
    "a.feather": _feather,
    "saved": _saved,
    "splits": _saved_splits,
    "a.jsonl.gz": _packed(_jsonl, gzip.compress),
    "a.csv.zst": _packed(_separated, _zstd),
    "remote.jsonl": _in_memory,
}

TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] }}"
    "{{ message['tool_calls'] | tojson if message['tool_calls'] else '' }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""Shows tool arguments: in a column format every row has all argument names."""

CHATML = """
{%- if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{% if message.role == 'assistant' %}{% generation %}
{%- if message.reasoning_content %}<think>
{{ message.reasoning_content }}
</think>

{% endif %}{{ message.content }}
{%- for call in message.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>
{% endgeneration %}{% else %}{{ message.content }}<|im_end|>
{% endif %}{% endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
LLAMA3 = """{{- bos_token }}
{%- if tools %}<|start_header_id|>system<|end_header_id|>

{{ tools | tojson(indent=4) }}<|eot_id|>{% endif %}
{%- for message in messages %}<|start_header_id|>{{ 'ipython' if message.role == 'tool' else message.role }}<|end_header_id|>

{% if message.role == 'assistant' %}{% generation %}
{%- for call in message.tool_calls or [] %}{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}
{%- else %}{{ message.content | trim }}{% endfor %}<|eot_id|>{% endgeneration %}{% else %}{{ message.content | trim }}<|eot_id|>{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""  # noqa: E501 - a line end would be text
LAST_THOUGHT = CHATML.replace("if message.reasoning_content", "if message.reasoning_content and loop.last")
"""Like Qwen3: thoughts before earlier answers are dropped."""
MARKS = "{% generation %}", "{% endgeneration %}"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add two numbers.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
        },
    }
]
THOUGHT = "reasoning_content"
CONVERSATIONS: Rows = [
    {
        "messages": [
            {"role": "system", "content": "Be kind."},
            {"role": "user", "content": " What is two and two? "},
            {"role": "assistant", "content": "It is four.", "reasoning_content": "Two twos\nare four."},
            {"role": "user", "content": "And 日本?"},
            {"role": "assistant", "content": "Ü — Paris.\n", "reasoning_content": "A place."},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "Add 1 and 2."},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": 1}}}]},
            {"role": "tool", "content": "3"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"b": 2}}}]},
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": "It is 5."},
        ],
        "tools": TOOLS,
    },
    {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
]

Load = Callable[..., Dataset]


@pytest.fixture
def load(dataset_of: Load, bpe_folder: Callable[..., str]) -> Load:
    """Return a function: build a dataset with one document per row and no held-out part."""
    tokenizer = bpe_folder(TEMPLATE, "calling")

    def load(source: Path | str, **more: Any) -> Dataset:
        how = {key: more.pop(key) for key in ("data_format", "columns", "split") if key in more}
        settings = {"tokenizer": tokenizer, "sequence_length": 128, "batch_size": 2}
        return dataset_of(source_of(str(source), **how), **settings | more)

    return load


def rows_of(dataset: Dataset) -> list[list[list[int]]]:
    return [each.tolist() for each in dataset.train.read(np.arange(dataset.num_train_rows))]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ROWS)
def test_the_same_rows_in_any_format_are_the_same_tokens_and_labels(kind: str, load: Load, tmp_path: Path) -> None:
    rows = ROWS[kind]
    expected = load(_jsonl(tmp_path / "rows.jsonl", rows))
    labels = np.asarray(rows_of(expected)[1])
    assert (labels == -100).any()
    assert (labels != -100).any(axis=1).all()
    for name in WRITERS if kind in ("text", "messages") else ("a.csv", "a.parquet", "a.stream.arrow", "saved"):
        found = load(WRITERS[name](tmp_path / name, rows))
        assert rows_of(found) == rows_of(expected), name
        assert found.state_dict() == expected.state_dict(), name


def documents_of(dataset: Dataset) -> list[tuple[list[int], list[int]]]:
    """Return (ids, labels) of the documents in rows, separated by restarting positions."""
    rows, found = np.arange(dataset.num_train_rows), []
    positions, lengths = dataset.train.positions(rows), dataset.train.lengths(rows)
    assert positions is not None
    for ids, labels, its, length in zip(*dataset.train.read(rows), positions, lengths, strict=True):
        begins = np.flatnonzero(its[:length] == 0)
        for begin, end in zip(begins, [*begins[1:], length], strict=True):
            assert its[begin:end].tolist() == list(range(end - begin))
            found.append((ids[begin:end].tolist(), labels[begin:end].tolist()))
    return sorted(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("template", "ends"), [(CHATML, "<|im_end|>"), (LLAMA3, "<|eot_id|>"), (LAST_THOUGHT, "<|im_end|>")]
)
def test_conversations_are_what_apply_chat_template_makes_and_marks(
    template: str, ends: str, load: Load, tmp_path: Path, bpe: Any
) -> None:
    """Tools, calls and thoughts in every format. Our encoder finds the answers without the template marks."""
    oracle = copy.deepcopy(bpe)
    begins = ["<|im_start|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"]
    oracle.add_special_tokens({"eos_token": ends, "bos_token": begins[1], "additional_special_tokens": begins})
    oracle.chat_template = template
    for mark in MARKS:
        oracle.chat_template = oracle.chat_template.replace(mark, "")
    oracle.save_pretrained(tmp_path / "unmarked")
    expected, rows = [], CONVERSATIONS
    if THOUGHT not in template:  # otherwise the row is refused
        rows = [{**r, "messages": [{k: m[k] for k in m if k != THOUGHT} for m in r["messages"]]} for r in rows]
    for row in rows:
        answers = [i for i, message in enumerate(row["messages"], 1) if message["role"] == "assistant"]
        thinks = template == LAST_THOUGHT and len(row["messages"]) == 5
        for end in answers if thinks else answers[-1:]:
            made = oracle.apply_chat_template(
                row["messages"][:end],
                tools=row.get("tools"),
                chat_template=template,
                return_dict=True,
                return_assistant_tokens_mask=True,
            )
            ids, mask = made["input_ids"], np.asarray(made["assistant_masks"])
            assert ids == oracle.apply_chat_template(row["messages"][:end], tools=row.get("tools"))["input_ids"]
            if thinks:
                mask[: np.flatnonzero(np.diff(mask, prepend=0) == 1)[-1]] = 0
            expected.append((ids, np.where(mask, ids, -100).tolist()))
    assert len(expected) == (4 if template == LAST_THOUGHT else 3)
    writers = {"a.jsonl": _jsonl, **WRITERS} if template != LAST_THOUGHT else {"a.jsonl": _jsonl}
    for name, write in writers.items():
        source = write(tmp_path / name, [{"tools": None, **row} for row in rows])
        more = {"tokenizer": str(tmp_path / "unmarked"), "vocab_size": 420, "sequence_length": 700}
        found = load(source, packing=True, isolated=True, **more)
        assert documents_of(found) == sorted(expected), name


def test_the_tokens_are_those_of_the_tokenizer_itself(load: Load, tmp_path: Path, bpe: Any) -> None:
    expected = [bpe(row["text"])["input_ids"] + [bpe.eos_token_id] for row in ROWS["text"]]
    ids, _ = rows_of(load(_parquet(tmp_path / "a.parquet", ROWS["text"])))
    assert [row[: len(own)] for row, own in zip(ids, expected, strict=True)] == expected
    text = "".join(row["text"] for row in ROWS["text"])
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "plain.txt").write_bytes(text.encode())
    packed, plain = (load(tmp_path / name, packing=True) for name in ("a.txt.gz", "plain.txt"))
    assert rows_of(packed) == rows_of(plain)


def test_columns_say_what_is_meant(load: Load, tmp_path: Path) -> None:
    rows = [{"body": f"Row {i} of these", "prompt": "p", "completion": "c"} for i in range(9)]
    expected = rows_of(load(_jsonl(tmp_path / "a.jsonl", [{"text": row["body"]} for row in rows])))
    for name, write in (("b.jsonl", _jsonl), ("a.csv", _separated), ("a.parquet", _parquet), ("saved", _saved)):
        assert rows_of(load(write(tmp_path / name, rows), columns={"text": "body"})) == expected, name
    with pytest.raises(ConfigError, match=r"a\.parquet lacks the column 'bdy' for data\.format=jsonl; it has 'body'"):
        load(tmp_path / "a.parquet", columns={"text": "bdy"}, data_format="jsonl")
    with pytest.raises(ConfigError, match=r"has the keys .*no known format.*--data\.columns '\{text: NAME\}'"):
        load(_parquet(tmp_path / "c.parquet", [{"body": "x"}]))


def test_each_format_says_what_it_is(load: Load, tmp_path: Path) -> None:
    found = {name: load(write(tmp_path / name, ROWS["text"])) for name, write in WRITERS.items()}
    told = {name: dataset.sources[0].contents.partition(" of ")[0] for name, dataset in found.items()}
    packed = {"a.jsonl.gz": "jsonl", "a.csv.zst": "text in csv", "remote.jsonl": "jsonl", "a.json": "jsonl"}
    plain = {"saved": "text in data set", "splits": "text in data set", "a.feather": "text in arrow"}
    assert told == {
        **{name: f"text in {name.rpartition('.')[2]}" for name in WRITERS if name not in {**packed, **plain}},
        **packed,
        **plain,
    }
    assert found["splits"].sources[0].contents.startswith(f"text in data set of {tmp_path}/splits: 30 documents, ")


def test_a_folder_is_read_as_what_it_is(load: Load, tmp_path: Path) -> None:
    folder = tmp_path / "parts"
    folder.mkdir()
    for index in range(3):
        _parquet(folder / f"part-{index}.parquet", ROWS["text"][10 * index : 10 * index + 10])
    expected = rows_of(load(_jsonl(tmp_path / "a.jsonl", ROWS["text"])))
    found = load(folder)
    assert rows_of(found) == expected
    assert found.sources[0].contents.startswith(f"text in parquet of {folder} (3 files): 30 documents, ")
    pq.write_table(pa.table({"txt": ["x"]}), folder / "part-3.parquet")
    with pytest.raises(ConfigError, match=r"part-3\.parquet has the keys \['txt'\]"):
        load(folder)
    splits = tmp_path / "splits"
    datasets.DatasetDict(
        {
            name: datasets.Dataset.from_list(ROWS["text"][part])
            for name, part in (("train", slice(9)), ("test", slice(9, 30)))
        }
    ).save_to_disk(splits)
    with pytest.raises(ConfigError, match=r"has several splits, and none is named; it has train, test.*split: train"):
        load(splits)
    with pytest.raises(ConfigError, match=r"has no split 'dev'"):
        load(splits, split="dev")
    assert rows_of(load(splits, split="test")) == [part[9:] for part in expected]
    named = tmp_path / "named"
    (named / "data").mkdir(parents=True)
    _parquet(named / "data" / "train-00000-of-00001.parquet", ROWS["text"][:9])
    _parquet(named / "data" / "test-00000-of-00001.parquet", ROWS["text"][9:])
    assert rows_of(load(named, split="test")) == [part[9:] for part in expected]


LONG_WINDOW = b"\x28\xb5\x2f\xfd\x00\x90\x79\x00\x00" + b'{"text": "ok"}\n'
"""A frame with one raw block (RFC 8878) of 15 bytes. The window has 2 ** 28 bytes."""
BAD: dict[str, tuple[str, bytes, str, int | None]] = {
    "fields": ("a.csv", b'text,n\nok,1\nno\n"a, b",3\n', r"a\.csv:3 has 1 field, but the header has 2", 2),
    "quote": ("a.csv", b'text,n\nok,1\n"never,2\nmore,3\n', r"a\.csv:3 opens a quote that never closes", None),
    "stray quote": ("a.csv", b'text\nok\n"a"b\nok\n', r"a\.csv:3 is not a valid row of a csv file", 2),
    "utf-8": ("a.csv", b"text\nok\n\xff\nok\n", r"a\.csv:3 is not UTF-8", 2),
    "json": ("a.jsonl", b'{"text": "a"}\n{"text":\n{"text": "\xff"}\n{"text": "b"}', r"a\.jsonl:2 is not valid", 2),
    "type": ("a.jsonl", b'{"text": "ok"}\n{"text": 1}\n{"text": "ok"}\n', r"a\.jsonl:2: 'text' must be a string", 2),
    "first row": ("a.jsonl", b'5\n{"error": "x"}\n{"text": "ok"}\n', r"a\.jsonl:1 is a value of type int", 1),
    "array": ("a.json", b'[{"text": "ok"}, {"text": "ok"} {"text": "ok"}]', r"a bracket is expected, not '\{'", None),
    "cut array": ("a.json", b'[{"text": "ok"}, {"text": "o', r"record 2 is not valid JSON", None),
    "gz": ("a.jsonl.gz", gzip.compress(b'{"text": "ok"}\n' * 99)[:-9], r"damaged or truncated \.gz file", None),
    "zst": ("a.jsonl.zst", _zstd(b'{"text": "ok"}\n' * 99)[:-9], r"damaged or truncated \.zst file", None),
    "zst window": ("a.jsonl.zst", LONG_WINDOW, r"window above 128 MiB .*zstd -d --long=31 .*a\.jsonl\.zst", None),
    "binary": ("a.txt", b"\0\x01\xff\xfe" * 9, r"is a binary file, not text \(byte 2, line 1\)\. Extract", None),
    "json place": ("a.jsonl", b'{"text": "a"}\n{"text" 1}', r"a\.jsonl:2 is not valid JSON: .* at character 9\.", 1),
    "vocabulary": ("a.jsonl", b'{"input_ids": [1, 2]}\n{"input_ids": [1, 999]}\n', r":2 holds the token id 999", 1),
    "negative": ("a.jsonl", b'{"input_ids": [-1, 2]}\n{"input_ids": [1, 9]}\n', r"jsonl:1 holds the token id -1", 1),
    "no gz": ("a.jsonl.gz", b'{"text": "ok"}\n', r"does not begin as a \.gz file", None),
    "bz2": ("a.jsonl.bz2", bz2.compress(b"{}"), r"is a compressed file or archive in an unsupported.*bunzip2", None),
    "misnamed": ("a.csv", b"PAR1", r"begins as a parquet file", None),
    "no parquet": ("a.parquet", b"text", r"does not begin as a parquet file", None),
    "empty parquet": ("a.parquet", b"", r"is empty, so it is no valid \.parquet file", None),
    "half parquet": ("a.parquet", b"PAR1" + b"x" * 99, r"is not a readable parquet file, or is truncated", None),
    "half arrow": ("a.arrow", b"ARROW1\0\0" + b"x" * 99, r"is not a readable Arrow file", None),
    "utf-16": ("a.txt", "text".encode("utf-16"), r"begins as UTF-16 text.*iconv -f UTF-16", None),
    "utf-16-le": ("a.csv", "text\nok".encode("utf-16-le"), r"begins as UTF-16 text.*iconv -f UTF-16LE", None),
    "utf-16-be": ("a.txt", "text".encode("utf-16-be"), r"begins as UTF-16 text.*iconv -f UTF-16BE", None),
    "latin-1 array": ("a.json", '[{"text": "ok"},\n"für"]'.encode("latin-1"), r"byte 19, line 2.*LATIN1", None),
    "latin-1": ("a.txt", b"one\ntwo\n" + "drei für".encode("latin-1"), r"byte 14, line 3.*iconv -f LATIN1", None),
    "twice": ("a.csv", b"text,text\na,b\n", r"names the column 'text' twice", None),
    "empty": ("a.csv", b"", r"a\.csv'\] is empty\. Give more data", None),
    "header": ("a.csv", b"text\n", r"a\.csv'\] has no rows\. Give more data", None),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_rows_are_named_or_skipped_and_counted(name: str, load: Load, tmp_path: Path) -> None:
    file, content, words, num_good = BAD[name]
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=words) as error:
        load(tmp_path / file)
    if num_good is None:  # the error is in the file, not in a row, so nothing can be skipped
        with pytest.raises(ConfigError, match=words):
            load(tmp_path / file, on_bad_row="skip")
        return
    assert "--data.on_bad_row skip" in str(error.value)
    for _ in range(2):  # the second load reads the cache
        found = load(tmp_path / file, on_bad_row="skip")
        assert found.num_train_rows == num_good
        assert found.sources[0].more(None, 0)[0] in ("1 bad row skipped", "2 bad rows skipped")
        assert any("left out, since unreadable" in note for note in found.notes)
    with pytest.raises(ConfigError, match=words):
        load(tmp_path / file)


def test_a_damaged_row_group_and_a_long_line(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.parquet"
    rows = [{"text": f"{i:09} " * 50} for i in range(40)]
    pq.write_table(
        pa.Table.from_pylist(rows),
        path,
        row_group_size=10,
        compression="none",
        use_dictionary=False,
        write_page_checksum=True,
    )
    data = bytearray(path.read_bytes())
    start = pq.ParquetFile(path).metadata.row_group(2).column(0).data_page_offset
    data[start + 4000] ^= 255  # after the page header with statistics
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"a\.parquet is damaged in row group 2 of 4, from row 20 on"):
        load(path)
    monkeypatch.setattr("offload.extras.data.rows._MAX_ROW_BYTES", 64)
    lines = [{"text": "ok"}, {"text": "x" * 300}, {"text": "fine"}]
    with pytest.raises(ConfigError, match=r"a\.jsonl:2 is longer than 64 bytes"):
        load(_jsonl(tmp_path / "a.jsonl", lines))
    assert load(tmp_path / "a.jsonl", on_bad_row="skip").num_train_rows == 2
    (tmp_path / "a.json").write_text(json.dumps(lines))
    with pytest.raises(ConfigError, match=r"a\.json, record 2 is longer than 64 bytes"):
        load(tmp_path / "a.json")
    assert load(tmp_path / "a.json", on_bad_row="skip").num_train_rows == 2
    (tmp_path / "a.csv").write_text(f'text\nok\n"{"x" * 300}"\n')
    with pytest.raises(ConfigError, match=r"a\.csv:3 has a field of more than 64 characters; perhaps it opens a quote"):
        load(tmp_path / "a.csv")


def test_a_long_array_is_read_in_pieces(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Break: take a number at the end of a block for whole."""
    expected, numbers = rows_of(load(_jsonl(tmp_path / "a.jsonl", ROWS["messages"]))), [-12, 0.5, 1e-9, -2.5e300, 0]
    (tmp_path / "numbers.json").write_text(json.dumps(numbers))
    for block in (1, 7, 64):
        monkeypatch.setattr("offload.extras.data.rows._BLOCK_CHARS", block)
        assert rows_of(load(_json(tmp_path / f"a{block}.json", ROWS["messages"]))) == expected
        (file,) = files_of(str(tmp_path / "numbers.json"), "jsonl")
        assert [row for _, row in read_rows(file)] == numbers


@pytest.mark.parametrize("content", ["xxxxxxx", '\\"\\ud83d\\ude00'], ids=["letters", "escapes"])
def test_a_long_element_is_named_so_at_each_size_and_place(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break: name an element that is cut at the limit as invalid."""
    monkeypatch.setattr("offload.extras.data.rows._MAX_ROW_BYTES", 64)
    monkeypatch.setattr("offload.extras.data.rows._BLOCK_CHARS", 16)
    path = tmp_path / "a.json"
    (file,) = files_of(str(_json(path, [])), "jsonl")
    for place in range(20):
        for size in range(40):
            # The text at the end is a name or a number that may be cut too.
            long = f'{{"text": "{content * size}", "n": [true, -Infinity, -2.5e300, {{}}]}}'
            path.write_text(f'["{"x" * place}", {long}, 3]')
            try:
                rows = [row for _, row in read_rows(file)]
            except ConfigError as error:
                rows = [error]
            if len(long) <= 64:
                assert rows == ["x" * place, json.loads(long), 3]
            else:
                (error,) = [row for row in rows if isinstance(row, ConfigError)]
                assert "a.json, record 2 is longer than 64 bytes" in str(error)
            path.write_text(f'["{"x" * place}", {{"a" 1, "b": "{content * size}"}}, 3]')
            with pytest.raises(ConfigError, match="record 2 is not valid JSON: Expecting ':' delimiter at character 6"):
                list(read_rows(file))


def test_a_hub_name_without_a_network_is_refused_at_once(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", Mock(side_effect=ConnectionError("no route")))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with pytest.raises(ConfigError, match=r"'nobody/nothing' does not exist here .* no route.*HF_HUB_OFFLINE=1"):
        load("nobody/nothing")


def test_hub_names_go_to_datasets_own_loading(load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def loaded(path: str, name: str | None, **how: Any) -> Any:
        asked.append((path, name, how))
        return datasets.Dataset.from_list(ROWS["text"])

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets, "load_dataset", loaded)
    expected = rows_of(load(_jsonl(tmp_path / "a.jsonl", ROWS["text"])))
    assert rows_of(load("someone/theirs", split="train[:50%]")) == expected
    assert asked == [("someone/theirs", None, {"revision": None, "split": "train[:50%]"})]


def test_a_library_that_is_not_installed_is_named_with_the_extra(
    load: Load, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import sys

    path = _parquet(tmp_path / "a.parquet", ROWS["text"])
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(ImportError, match=r"a\.parquet, a parquet file, is read by pyarrow.*pip install '\.\[data\]'"):
        load(path)
