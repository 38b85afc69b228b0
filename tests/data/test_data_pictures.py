"""Conversations with pictures: against the processor's own chat template, with the mask written by hand."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoProcessor

from offload.data.dataset import Dataset, build_dataset
from tests.data.asked import source_of
from tests.vision import about, model_folder, rows_file

BATCHES = {
    "one picture each": [["red"], ["green"]],
    "none, one, several": [["red", "blue"], [], ["white"]],
    "none at first": [[], ["blue"], ["red", "green", "white"]],
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {family: model_folder(tmp_path_factory.mktemp(family), family) for family in ("llava", "gemma3")}


def prepared(path: Path | Sequence[Path], folder: Path | str, **settings: Any) -> Dataset:
    """Prepare rows for a model's folder, with one step for all of them."""
    paths = [path] if isinstance(path, Path) else path
    values = {"batch_size": 1, "vocab_size": 512, "sequence_length": 96, "cache_dir": paths[0].parent / "cache"}
    return build_dataset(sources=[source_of(str(each)) for each in paths], model_path=str(folder), **values | settings)


def texts(number: int) -> list[dict[str, str]]:
    return [{"role": "user", "content": f"A {number}?"}, {"role": "assistant", "content": "b c"}]


def as_parts(messages: Sequence[dict[str, Any]], where: Path) -> list[dict[str, Any]]:
    """Return messages as a processor takes them: parts, with whole paths."""
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
    """Return the tokens from behind `<|assistant|>` and its line end on, to the end of the text."""
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
