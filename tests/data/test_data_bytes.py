"""Text bytes in the targets, against the byte letters in a byte-level vocabulary."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from offload.extras.data.dataset import Dataset, build_dataset
from offload.extras.data.settings import DataSettings
from offload.extras.data.text_encoder import _byte_counts
from tests.data.asked import source_of

ASCII = [f"Row {number} of a text is as long as its {'numbers ' * (number % 5)}say.\n" for number in range(40)]
WIDE = [f"Row {number}: Ünïcödé, 漢字, 🙂 and {'é' * (number % 4)}.\n" for number in range(40)]


@pytest.fixture
def built(dataset_of: Callable[..., Dataset]) -> Callable[..., Dataset]:
    return partial(dataset_of, sequence_length=48, batch_size=2, packing=True, eval_share=0.2)


def counted(dataset: Dataset, num_rows: int, name: str) -> int:
    """Return the target bytes in the first rows: one per vocabulary letter, none for the end token."""
    words = dataset.tokenizer.convert_ids_to_tokens(range(len(dataset.tokenizer)))
    num_bytes, end = 0, dataset.tokenizer.eos_token_id
    for batch in list(dataset.eval_batches(1, num_rows, name=name)):
        targets = batch["labels"][0, 1:]
        num_bytes += sum(len(words[index]) for index in targets.tolist() if index not in (-100, end))
    return num_bytes


@pytest.mark.parametrize(
    ("rows", "more"),
    [
        (ASCII, {"packing": True}),
        (ASCII, {"isolated": True}),
        (WIDE, {"packing": False, "sequence_length": 128}),
    ],
    ids=["packed", "isolated", "a document a row"],
)
def test_bytes_are_those_of_the_targets(
    rows: Sequence[str],
    more: dict[str, Any],
    built: Callable[..., Dataset],
    write_lines: Callable[..., Path],
) -> None:
    """Held-out documents, an eval source, and both, for some rows and for all rows.

    Break: count the first token of a row; assign a character to the last of its tokens; skip eval sources.
    """
    held, path = (write_lines(f"{name}.jsonl", *({"text": row} for row in rows)) for name in ("held", "rows"))
    held.write_text("\n".join(held.read_text().splitlines()[7:20]) + "\n")
    dataset = built(path, eval_sources=[source_of(str(held))], **more)
    for name, found in dataset.evals.items():
        for num_rows in (1, found.num_rows):
            assert dataset.eval_bytes(num_rows, name) == counted(dataset, num_rows, name) > 0
    assert dataset.train.num_bytes(dataset.train.at(0, 1, 0)) is None, "nobody asks for those"


def test_rows_that_are_held_out_of_one_document_have_their_bytes(built: Callable[..., Dataset], tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("".join(ASCII))
    dataset = built(tmp_path / "one.txt")
    assert dataset.eval_bytes(dataset.eval.num_rows, "") == counted(dataset, dataset.eval.num_rows, "") > 0


def test_of_a_conversation_they_are_those_of_the_answers(
    built: Callable[..., Dataset], write_lines: Callable[..., Path]
) -> None:
    """The targets are the answers with the end token from the template."""
    answers = [f"It is {number}." for number in range(30)]
    chats = [
        {"messages": [{"role": "user", "content": "What is it?"}, {"role": "assistant", "content": each}]}
        for each in answers
    ]
    held = write_lines("held.jsonl", *chats[:9])
    path = write_lines("chats.jsonl", *chats[9:])
    dataset = built(path, eval_share=0.0, eval_sources=[source_of(str(held))], isolated=None)
    ends = 9 * len(dataset.tokenizer.eos_token)
    assert dataset.eval_bytes(dataset.evals["held"].num_rows, "held") == sum(map(len, answers[:9])) + ends


def test_without_text_they_are_not_known(write_lines: Callable[..., Path], tmp_path: Path) -> None:
    path = write_lines("ids.jsonl", *({"input_ids": [number, 1, 2, 3]} for number in range(40)))
    found: Any = {"sequence_length": 4, "vocab_size": 64, "batch_size": 2, "eval_share": 0.2, "packing": False}
    dataset = build_dataset(DataSettings(sources=[source_of(str(path))], cache_dir=tmp_path / "cache", **found))
    assert dataset.eval_bytes(1, "") is None


def test_what_a_tokenizer_trims_and_changes_is_counted_as_it_stood() -> None:
    text = "  Ünïcödé,   and   漢字 🙂  "
    rules = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    rules.normalizer = normalizers.BertNormalizer()
    rules.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    counts = _byte_counts(rules.encode(text).offsets, text)
    assert counts.tolist() == [13, 1, 6, 6, 3, 7]
    assert counts.sum() == len(text.encode())
    assert len(_byte_counts([], "")) == 0
