"""Conversations with pictures, against the processor's chat template with a handwritten mask."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoProcessor

from offload.app.training.objectives import Objective
from offload.errors import ConfigError
from offload.extras.data.chat import ChatRenderer
from offload.extras.data.dataset import Dataset, build_dataset
from offload.extras.data.formats import read_records
from offload.extras.data.picture_encoder import PictureEncoder, load_processor
from offload.extras.data.rows import BadRow
from offload.extras.data.settings import DataSettings
from offload.extras.data.text_encoder import EncodeRequest
from offload.extras.data.view import DataView
from tests.data.asked import files_of, source_of
from tests.vision import COLOURS, about, model_folder, rows_file, square

BATCHES = {
    "one picture each": [["red"], ["green"]],
    "none, one, several": [["red", "blue"], [], ["white"]],
    "none at first": [[], ["blue"], ["red", "green", "white"]],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: model_folder(tmp_path_factory.mktemp(family), family) for family in ("llava", "gemma3")}


def prepared(path: Path | Sequence[Path], folder: Path | str, **settings: Any) -> Dataset:
    """Prepare rows for a model folder, with one step for all rows."""
    paths = [path] if isinstance(path, Path) else path
    values = {"batch_size": 1, "vocab_size": 512, "sequence_length": 96, "cache_dir": paths[0].parent / "cache"}
    sources = [source_of(str(each)) for each in paths]
    return build_dataset(DataSettings(sources=sources, model_path=str(folder), **values | settings))


def texts(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"A {number}?"}, {"role": "assistant", "content": "b c"}]


def as_parts(messages: Sequence[dict[str, Any]], where: Path) -> list[dict[str, Any]]:
    """Return messages in processor format: parts with absolute paths."""
    return [
        {
            **message,
            "content": [{"type": "text", "text": message["content"]}]
            if isinstance(message["content"], str)
            else [
                part if part["type"] == "text" else {"type": "image", "path": str(where / part["path"])}
                for part in message["content"]
            ],
        }
        for message in messages
    ]


def labels_by_hand(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Return labels for the tokens after `<|assistant|>` and the line end, to the end of the text."""
    speaks, labels, marker = False, [], tokenizer.convert_tokens_to_ids("<|assistant|>")
    other = tokenizer.convert_tokens_to_ids("<|user|>")
    for at, token in enumerate(ids):
        speaks = (speaks or ids[max(at - 2, 0)] == marker) and token not in (marker, other)
        labels.append(token if speaks and ids[at - 1] != marker else -100)
    return labels


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("family", ["llava", "gemma3"])
def test_batches_are_the_processors_own(family: str, batch: str, folders: dict[str, Path], tmp_path: Path) -> None:
    chats = [about(colours) or texts(number) for number, colours in enumerate(BATCHES[batch])]
    path = rows_file(tmp_path / "rows.jsonl", [{"messages": chat} for chat in chats])
    data = prepared(path, folders[family], batch_size=len(chats))
    found = data.batch_of("train", 0, len(chats))
    own: Any = AutoProcessor.from_pretrained(folders[family])
    wanted = own.apply_chat_template(
        [as_parts(chat, tmp_path) for chat in chats],
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"padding": "max_length", "max_length": 96, "padding_side": "right"},
    )
    assert found.keys() == {*wanted, "labels"}
    for key, value in wanted.items():
        assert torch.equal(found[key], value), key
    for ids, mask, labels in zip(wanted["input_ids"], wanted["attention_mask"], found["labels"], strict=True):
        length = int(mask.sum())
        assert labels.tolist() == labels_by_hand(ids[:length].tolist(), own.tokenizer) + [-100] * (96 - length)
    assert (found["labels"] != -100).sum() > 0


def data_uri(path: Path) -> str:
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


PARTS: dict[str, Callable[[Path, str], dict[str, Any]]] = {
    "file:// URLs": lambda where, path: {"type": "image_url", "image_url": {"url": (where / path).as_uri()}},
    "data: URIs": lambda where, path: {"type": "image_url", "image_url": {"url": data_uri(where / path)}},
    "base64": lambda where, path: {"type": "image", "base64": data_uri(where / path).partition(",")[2]},
    "OpenAI's parts": lambda where, path: {"type": "image_url", "image_url": {"url": path}},
    "a column for parts without a path": lambda where, path: {"type": "image"},
    "a column of bytes": lambda where, path: {"type": "image"},
}
SPELLINGS = [*PARTS, "sharegpt", "a column for places in texts"]


def spelled(how: str, colours: Sequence[str], where: Path) -> dict[str, Any]:
    """Return a conversation about squares in a common spelling."""
    messages, paths = about(colours), [f"squares/{colour}.png" for colour in colours]
    for message in messages:
        is_image = [part["type"] == "image" for part in message["content"]]
        parts = zip(message["content"], is_image, strict=True)
        if how in PARTS:
            message["content"] = [PARTS[how](where, part["path"]) if image else part for part, image in parts]
        else:
            message["content"] = "".join("<image>" if image else part["text"] for part, image in parts)
    if how == "sharegpt":
        turns = [{"from": message["role"], "value": message["content"]} for message in messages]
        return {"conversations": turns, "images": paths}
    columns = {}
    if how == "a column of bytes":
        columns = {"images": [{"bytes": (where / path).read_bytes(), "path": path} for path in paths]}
    elif how.startswith("a column"):
        columns = {"images": paths if len(paths) > 1 else paths[0]}
    return {"messages": messages, **columns}


@pytest.mark.parametrize("how", SPELLINGS)
def test_all_spellings_are_one(how: str, folders: dict[str, Path], tmp_path: Path) -> None:
    chats = [["red", "blue"], ["green"]]
    plain = rows_file(tmp_path / "plain.jsonl", [{"messages": about(each)} for each in chats])
    rows = [spelled(how, each, tmp_path) for each in chats]
    if how == "a column of bytes":
        path = tmp_path / "rows.parquet"
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path = rows_file(tmp_path / "rows.jsonl", rows)
    found, wanted = (prepared(each, folders["llava"]) for each in (path, plain))
    assert found.train.identity == wanted.train.identity
    if how == "a column of bytes":
        (tmp_path / "squares" / "red.png").unlink()
    one, other = found.batch_of("train", 0, 2), prepared(plain, folders["llava"]).batch_of("train", 1, 2)
    assert torch.equal(one["input_ids"][1], other["input_ids"][0])
    assert torch.equal(one["pixel_values"][2:], other["pixel_values"])


def shown(content: Any, *images: str) -> dict[str, Any]:
    """Return a conversation about a text or a part, with a column of images."""
    content = content if isinstance(content, str) else [{"type": "image", **content}]
    turns = [{"role": "user", "content": content}, {"role": "assistant", "content": "b"}]
    return {"messages": turns, **({"images": images} if images else {})}


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"messages": about(["black"])}, r":2: the picture .*squares/black.png cannot be read: No such file"),
        (shown("<image>A", "rows.jsonl"), r":2: the picture rows.jsonl is damaged, or has a format that Pillow cannot"),
        (shown("<image>A", *["squares/red.png"] * 2), r":2 has 2 images but 1 placeholder: put each image into a mess"),
        (
            shown("<image><image>", "squares/red.png"),
            r":2, message 1 has more placeholders than its row has images",
        ),
        (shown({"url": "https://a.b/c.png"}), r"the picture https://a.b/c.png is not on this machine: download it"),
        (shown({"url": "data:image/png;base64,*"}), r":2, message 1: a picture in base64 cannot be decoded"),
        (shown({"url": "data:,x"}), r"the picture data:,x is a data: URI without base64"),
        (shown({"path": "~nobody-here/a.png"}), r":2, message 1: the picture ~nobody-here/a.png has no place"),
        (shown({"path": "a\0.png"}), r":2: the picture .*a.x00.png' cannot be read"),
        (shown({"path": 3}), r"a picture must be a path, or bytes in a column of `datasets`, not 3"),
        (
            {"messages": [*about(["red"]), {"role": "user", "content": "What is <image>?"}]},
            r":2 has 1 picture, but the rendered conversation has 2 placeholders for pictures \(<image>\)",
        ),
    ],
)
def test_bad_rows_are_named_or_skipped(
    row: dict[str, Any], words: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    path = rows_file(tmp_path / "rows.jsonl", [{"messages": about(["red"])}, row])
    with pytest.raises(ConfigError, match=f"rows.jsonl.*{words}"):
        prepared(path, folders["llava"])
    data = prepared(path, folders["llava"], on_bad_row="skip")
    assert (data.num_train_rows, data.sources[0].findings.num_bad) == (1, 1)


def test_a_first_picture_in_a_late_row_is_a_bad_row(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offload.extras.data.row_source._NUM_SEARCHED", 2)
    rows = [{"messages": texts(number)} for number in range(2)]
    path = rows_file(tmp_path / "rows.jsonl", [*rows, {"messages": about(["red"])}])
    with pytest.raises(BadRow, match=r"rows.jsonl:3 has a picture, but the first rows .* put a row with a picture"):
        prepared(path, folders["llava"])
    data = prepared(path, folders["llava"], on_bad_row="skip")
    assert data.sources[0].findings.num_bad == 1


def test_a_template_that_does_not_end_a_document_gets_an_end(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model", ends="{{ '\n' }}")
    data = prepared(rows_file(tmp_path / "rows.jsonl", [{"messages": about(["red"])}]), folder)
    labels = data.batch(0)["labels"][0]
    assert labels[labels != -100][-1] == data.tokenizer.eos_token_id


def test_what_is_longer_than_a_row_is_left_out_and_told(folders: dict[str, Path], tmp_path: Path) -> None:
    path = rows_file(tmp_path / "rows.jsonl", [{"messages": about(COLOURS)}, {"messages": about(["red"])}])
    data = prepared(path, folders["llava"], sequence_length=40)
    assert data.num_train_rows == 1
    assert (data.batch(0)["input_ids"] == data.tokenizer.convert_tokens_to_ids("<image>")).sum() == 4
    assert any("data.sequence_length=40: 1 document." in note for note in data.notes)


def test_a_mixture_with_chats_of_text_over_ranks(folders: dict[str, Path], tmp_path: Path) -> None:
    pictures = rows_file(tmp_path / "rows.jsonl", [{"messages": about([colour])} for colour in COLOURS])
    words = rows_file(tmp_path / "words.jsonl", [{"messages": texts(number)} for number in range(2)])
    data = prepared([pictures, words], folders["llava"], batch_size=6)
    whole, ranks = data.batch(0), [data.batch(0, rank, 2) for rank in range(2)]
    assert len(whole["pixel_values"]) == 4
    for key, value in whole.items():
        assert torch.equal(torch.cat([each[key] for each in ranks]), value), key
    *_, last = (data.batch_of("train", 0, 6, rank, 3) for rank in range(3))
    assert last.keys() == whole.keys(), "its own rows are of text alone, and another is shown beside them"
    assert ((last["labels"] != -100).sum(1) > 0).tolist() == [True, True, False]


def test_a_picture_that_has_changed_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    path = rows_file(tmp_path / "rows.jsonl", [{"messages": about(["red"])}])
    data = prepared(path, folders["llava"])
    square(tmp_path / "squares" / "red.png", "blue")
    with pytest.raises(ConfigError, match=r"the picture .*red.png has changed since the data were prepared"):
        data.batch(0)


def test_the_same_rows_in_another_folder_have_its_pictures(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break: reuse prepared rows with the same content and relative name."""
    for where in ("one", "other"):
        (tmp_path / where).mkdir()
        rows_file(tmp_path / where / "rows.jsonl", [{"messages": about(["red"])}])
        monkeypatch.chdir(tmp_path / where)
        data = prepared(Path("rows.jsonl"), folders["llava"], cache_dir=tmp_path / "cache")
        assert f"{tmp_path}/{where}/squares/red.png" in str(data.train.picture_documents(np.arange(1)))


def test_tokens_that_are_others_in_a_batch_are_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    data = prepared(rows_file(tmp_path / "rows.jsonl", [{"messages": about(["red"])}]), folders["llava"])
    documents, (ids, _) = data.train.picture_documents(np.arange(1)), data.train.read(np.arange(1))
    assert data.pictures is not None
    assert documents is not None
    data.pictures.of(documents, ids)
    ids[0, 5] += 1
    with pytest.raises(ConfigError, match="the processor returns other tokens for rows in a batch"):
        data.pictures.of(documents, ids)


def test_a_maker_travels_to_a_process(folders: dict[str, Path], tmp_path: Path) -> None:
    path = rows_file(tmp_path / "rows.jsonl", [{"messages": about(["red", "white"])}])
    chat = next(iter(read_records(replace(files_of(str(path))[0], format="messages"), 512, [])))
    processor = load_processor(str(folders["gemma3"]))
    maker = PictureEncoder(processor, ChatRenderer(processor, train_on_prompt=True), train_on_prompt=True)
    first, second = (
        each.encode_batch([EncodeRequest(chat, False, False)]) for each in (maker, pickle.loads(pickle.dumps(maker)))
    )
    (one,), (other,) = first.parts, second.parts
    assert np.array_equal(one.ids, other.ids)
    soft = processor.tokenizer.convert_tokens_to_ids("<soft>")
    assert not one.trained[one.ids == soft].any(), "what stands for a picture is never trained"
    assert one.trained[-1]


def test_what_does_not_go_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    path = rows_file(tmp_path / "rows.jsonl", [{"messages": about(["red"])}])
    with pytest.raises(ConfigError, match=r"rows.jsonl has pictures, and train.method is dpo"):
        prepared(path, folders["llava"], no_pictures="train.method is dpo")
    (tmp_path / "text.jsonl").write_text('{"text": "A b c"}\n')
    with pytest.raises(ConfigError, match=r"text.jsonl has the format jsonl, but other sources have pictures"):
        prepared([path, tmp_path / "text.jsonl"], folders["llava"])
    own: Any = AutoProcessor.from_pretrained(folders["llava"])
    own.tokenizer.save_pretrained(tmp_path / "no processor")
    with pytest.raises(ConfigError, match=r"the data have pictures, so a processor in the model's folder.*"):
        prepared(path, tmp_path / "no processor")
    own.chat_template = own.tokenizer.chat_template = None
    own.save_pretrained(tmp_path / "no template")
    with pytest.raises(ConfigError, match=r"has no chat template, so the position of a picture in the text is unknown"):
        prepared(path, tmp_path / "no template")
    pair = {"prompt": "<image>A", "chosen": "b", "rejected": "c", "images": ["squares/red.png"]}
    with pytest.raises(ConfigError, match=r"pair.jsonl:1 has pictures, and preferences are learned between texts"):
        prepared(rows_file(tmp_path / "pair.jsonl", [pair]), folders["llava"], grouped="preference", group=2)


def test_rows_are_shown_with_the_names_of_their_pictures(folders: dict[str, Path], tmp_path: Path) -> None:
    path = rows_file(tmp_path / "rows.jsonl", [{"messages": about(["red", "blue"])}])
    (sample,) = DataView.of(prepared(path, folders["llava"]), Objective(), (), num_steps=1, num_samples=1).samples
    assert sample.title.endswith("; with squares/red.png, squares/blue.png")
    assert "<image> x 4 " in "".join(piece.text for piece in sample.pieces)
