"""Batches by step: resumable, sliced by rank, independent of the caller; the token cache; the excerpt for a sample."""

from __future__ import annotations

import copy
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import processors

from offload.distributed.share import share
from offload.errors import ConfigError
from offload.extras.data.cache import load_or_build
from offload.extras.data.dataset import MOST_PROMPT_TOKENS, Dataset, cut_excerpt
from tests.data.asked import source_of

Build = Callable[..., Dataset]


@pytest.fixture
def build(tmp_path: Path, dataset_of: Build, prose: str) -> Build:
    """Return a function: build a packed dataset over 40 documents."""
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(40):
        (folder / f"{index:02}.txt").write_text(f"{index} {prose[index:]}")

    def build(source: str | list[str] = str(folder), **changes: Any) -> Dataset:
        return dataset_of(source_of(source), **{"packing": True, "eval_share": 0.1, "seed": 5, **changes})

    return build


def rows_of(batch: dict[str, torch.Tensor]) -> list[tuple[int, ...]]:
    return [tuple(row) for row in batch["input_ids"].tolist()]


def test_an_epoch_is_every_row_once_and_the_next_follows_at_once(build: Build) -> None:
    dataset = build()
    num_rows = dataset.num_train_rows
    assert num_rows % 6, "an epoch that ends inside a batch is what is tested"
    seen = [row for step in range(2 * num_rows // 6 + 1) for row in rows_of(dataset.batch(step))]
    ids, _ = dataset.train.read(np.arange(num_rows))
    every = sorted(map(tuple, ids.tolist()))
    assert sorted(seen[:num_rows]) == every
    assert sorted(seen[num_rows : 2 * num_rows]) == every
    assert seen[:num_rows] != seen[num_rows : 2 * num_rows]
    assert [dataset.num_steps(each) for each in (1, 3)] == [-(-each * num_rows // 6) for each in (1, 3)]


def test_train_and_eval_share_no_document(build: Build) -> None:
    dataset = build()
    stores = dataset.train.token_file, dataset.eval.token_file
    documents = [
        {tuple(store.tokens[a:b]) for a, b in zip(store.documents[:-1], store.documents[1:], strict=True)}
        for store in stores
    ]
    assert len(documents[0]) + len(documents[1]) == 40
    assert not documents[0] & documents[1]


def test_all_ranks_get_a_mask_when_one_of_them_needs_it(
    build: Build, write_lines: Callable[..., Path], prose: str
) -> None:
    path = write_lines("a.jsonl", *({"text": prose if i % 2 else "short"} for i in range(20)))
    dataset = build(source=str(path), packing=False, eval_share=0.0)
    masks = [[dataset.batch(step, rank, 6)["attention_mask"] for rank in range(6)] for step in range(3)]
    assert any(bool(mask.all()) for batch in masks for mask in batch), "a rank whose own row is full"
    assert all(any(not bool(mask.all()) for mask in batch) for batch in masks)


def test_unpacked_rows_are_padded_and_masked(build: Build, prose: str) -> None:
    dataset = build(packing=False, sequence_length=100)
    batch = dataset.batch(0)
    mask = batch["attention_mask"]
    assert mask.shape == (6, 100)
    assert mask.dtype == torch.int64
    assert (batch["labels"][mask == 0] == -100).all()
    assert torch.equal(batch["labels"][mask == 1], batch["input_ids"][mask == 1])
    assert (batch["input_ids"][mask == 0] == dataset.tokenizer.pad_token_id).all()
    for row, length in zip(batch["input_ids"], mask.sum(1), strict=True):
        text = dataset.tokenizer.decode(row[:length])
        assert length == 100 or text.endswith(prose[-10:] + "<|endoftext|>")
    assert any("cut off" in note for note in build(packing=False, sequence_length=20).notes)
    assert "attention_mask" not in build(packing=False, sequence_length=4).batch(0)


def test_fewer_rows_than_a_batch_repeat(build: Build, tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_text("The quick brown fox.")
    dataset = build(source=str(tmp_path / "one.txt"), eval_share=0.0, batch_size=4)
    assert dataset.num_train_rows == 1
    assert len(set(rows_of(dataset.batch(0)))) == 1
    assert dataset.batch(0)["attention_mask"].sum(1).tolist() == [dataset.train.token_file.num_tokens] * 4
    assert dataset.num_eval_rows == 0
    assert list(dataset.eval_batches(2)) == []


def test_one_document_is_split_by_rows(build: Build, tmp_path: Path, prose: str) -> None:
    (tmp_path / "one.txt").write_text(prose * 20)
    whole = build(source=str(tmp_path / "one.txt"), eval_share=0.0)
    parts = build(source=str(tmp_path / "one.txt"), eval_share=0.25)
    assert parts.num_train_rows + parts.num_eval_rows == whole.num_train_rows
    assert parts.num_eval_rows == round(whole.num_train_rows * 0.25)
    last = parts.eval.read(np.arange(parts.num_eval_rows))[0]
    assert last.tolist() == whole.train.read(np.arange(parts.num_train_rows, whole.num_train_rows))[0].tolist()
    assert whole.state_dict()["fingerprint"] != parts.state_dict()["fingerprint"]


def test_records_are_split_one_by_one(build: Build, write_lines: Callable[..., Path]) -> None:
    path = write_lines("a.jsonl", *({"text": f"document {i}"} for i in range(400)))
    dataset = build(source=str(path), eval_share=0.2)
    assert dataset.train.token_file.num_documents + dataset.eval.token_file.num_documents == 400
    assert 50 < dataset.eval.token_file.num_documents < 110


def test_eval_batches_are_every_row_once_for_any_seed(build: Build) -> None:
    dataset = build()
    seen = [row for batch in dataset.eval_batches(4) for row in rows_of(batch)]
    ids, _ = dataset.eval.read(np.arange(dataset.num_eval_rows))
    assert sorted(seen) == sorted(map(tuple, ids.tolist()))
    assert seen == [row for batch in build(seed=99).eval_batches(4) for row in rows_of(batch)]
    assert seen[:8] == [row for batch in dataset.eval_batches(4, max_batches=2) for row in rows_of(batch)]
    assert seen != list(map(tuple, ids.tolist())), "mixed, so that the first batches are a fair sample"


@pytest.mark.parametrize(("batch_size", "world_size"), [(8, 4), (5, 4), (3, 8)])
def test_eval_batches_over_ranks(build: Build, batch_size: int, world_size: int) -> None:
    dataset = build()
    alone = list(dataset.eval_batches(batch_size))
    ranks = [list(dataset.eval_batches(batch_size, None, rank, world_size)) for rank in range(world_size)]
    assert {len(batches) for batches in ranks} == {len(alone)}, "ranks keep step"
    for index, whole in enumerate(alone):
        num_rows = len(whole["labels"])
        parts = [batches[index] for batches in ranks]
        assert all(len(part["labels"]) for part in parts), "an engine is never without rows"
        filled = [part for rank, part in enumerate(parts) if not range(num_rows)[share(num_rows, rank, world_size)]]
        assert all((part["labels"] == -100).all() and len(part["labels"]) == 1 for part in filled)
        for key in whole:
            kept = torch.cat([part[key] for part in parts if not any(part is other for other in filled)])
            assert torch.equal(kept, whole[key])
    assert any(len(whole["labels"]) % world_size for whole in alone), "a batch that does not divide"


def test_rows_that_lost_their_answer_are_left_out(build: Build, write_lines: Callable[..., Path], prose: str) -> None:
    path = write_lines("a.jsonl", {"prompt": prose, "completion": "x"}, {"prompt": "x", "completion": prose})
    dataset = build(source=str(path), packing=False, eval_share=0.0)
    assert dataset.num_train_rows == 1
    assert any("without a trained token: 1 row." in note for note in dataset.notes)


LONG = "word " * 40


@pytest.mark.parametrize(
    ("row", "settings", "fix"),
    [
        ({"prompt": LONG, "completion": "4"}, {}, "Raise --data.sequence_length, or set --data.train_on_prompt true."),
        (
            {"prompt": LONG, "chosen": "4", "rejected": "5"},
            {"grouped": "preference", "group": 2, "packing": False},
            "Raise --data.sequence_length.",
        ),
        ({"input_ids": [5] * 9, "labels": [-100] * 9}, {}, "Give rows with answers, labels or masks to train on, or"),
        ({"input_ids": [5]}, {"packing": False}, "Give more data."),
    ],
)
def test_advice_for_rows_without_a_target_helps(
    build: Build, write_lines: Callable[..., Path], row: dict[str, Any], settings: dict[str, Any], fix: str
) -> None:
    given = {"source": str(write_lines("b.jsonl", row, row)), "isolated": None, "eval_share": 0.0, **settings}
    with pytest.raises(ConfigError) as error:
        build(**given)
    assert f"=16. {fix}" in str(error.value)
    if "sequence_length" in fix:
        assert build(**given, sequence_length=400).num_train_rows
    if "train_on_prompt" in fix:
        assert build(**given, train_on_prompt=True).num_train_rows


def test_tokens_are_taken_as_they_are(build: Build, tmp_path: Path) -> None:
    np.save(tmp_path / "ids.npy", np.arange(100) % 50)
    dataset = build(source=str(tmp_path / "ids.npy"), tokenizer=None, vocab_size=50, sequence_length=10, eval_share=0.0)
    assert dataset.tokenizer is None
    assert dataset.num_train_rows == 10
    assert min(rows_of(dataset.batch(0)) + rows_of(dataset.batch(1))) == tuple(range(10))
    with pytest.raises(ConfigError, match=r"ids\.npy holds the token id 49, but the model's vocabulary has 49"):
        build(source=str(tmp_path / "ids.npy"), tokenizer=None, vocab_size=49)
    with pytest.raises(ConfigError, match=r"data\.packing=false makes a row of each document"):
        build(source=str(tmp_path / "ids.npy"), tokenizer=None, packing=False)
    with pytest.raises(ConfigError, match="mixes token ids with text"):
        build(source=[str(tmp_path / "ids.npy"), str(tmp_path / "texts")], tokenizer=None)


def test_an_id_below_zero_is_refused_with_the_row(
    build: Build, tmp_path: Path, write_lines: Callable[..., Path]
) -> None:
    good, bad = [*range(10)], [5, -12, 7]
    np.save(tmp_path / "rows.npy", np.asarray([good[:3], bad]))
    rows = write_lines("rows.jsonl", {"input_ids": good}, {"input_ids": bad})
    for path, row in ((tmp_path / "rows.npy", ", row 1"), (rows, ":2")):
        with pytest.raises(ConfigError, match=f"{path}{row} holds the token id -12, and ids begin at 0"):
            build(source=str(path), tokenizer=None, vocab_size=50)


def test_the_tokenizer_is_the_given_one_the_models_or_a_trained_one(
    build: Build, bpe_folder: Callable[..., str]
) -> None:
    model = bpe_folder("{{ messages[0].content }}", "model")
    assert build(tokenizer=None, model_path=model).tokenizer.chat_template == "{{ messages[0].content }}"
    assert build(model_path=model).tokenizer.chat_template != "{{ messages[0].content }}"
    (Path(model) / "tokenizer.json").unlink()
    (Path(model) / "tokenizer_config.json").unlink()
    trained = build(tokenizer=None, model_path=model, vocab_size=300)
    assert len(trained.tokenizer) == 300
    with pytest.raises(ConfigError, match=r"pretrained weights but no tokenizer.*--data\.tokenizer"):
        build(tokenizer=None, model_path=model, is_pretrained=True)
    assert int(trained.batch(0)["input_ids"].max()) < 300
    assert not any("<|unknown|>" in note for note in trained.notes)
    assert any("<|unknown|>" in note for note in build(tokenizer=None, vocab_size=64).notes)
    with pytest.raises(ConfigError, match=r"tokens, the model's vocabulary has 290"):
        build(vocab_size=290)


def test_a_tokenizer_without_chat_template_gets_one_for_conversations_alone(
    build: Build, bpe_folder: Callable[..., str], write_lines: Callable[..., Path], tmp_path: Path
) -> None:
    folder = bpe_folder(name="bare")
    (Path(folder) / "chat_template.jinja").unlink()
    messages = [{"role": "user", "content": "What is two and two?"}, {"role": "assistant", "content": "It is four."}]
    chats = write_lines("chats.jsonl", {"messages": messages})
    for _ in range(2):  # the second build reads tokens from the cache
        text = build(tokenizer=folder)
        assert (text.tokenizer.chat_template, text.notes) == (None, ())
        chat = build(tokenizer=folder, source=str(chats), sequence_length=32)
        assert "<|assistant|>" in chat.tokenizer.chat_template, "kept, so that it is saved with the model"
        assert [note for note in chat.notes if f"{folder} has no chat template" in note]
    assert build(source=str(chats), sequence_length=32).notes == ()


@pytest.mark.parametrize(
    ("name", "content", "problem"),
    [
        ("a.txt", "", "is empty"),
        ("a.jsonl", "", "is empty"),
        ("a.json", "[]", "has no rows"),
        ("a.jsonl", '{"text": ""}\n', "has no text or tokens.* 1 document without text"),
    ],
)
def test_empty_data_is_refused_by_its_kind(build: Build, tmp_path: Path, name: str, content: str, problem: str) -> None:
    (tmp_path / name).write_text(content)
    choices: list[dict[str, Any]] = [{}, {"tokenizer": None}]
    for changes in choices:
        with pytest.raises(ConfigError, match=rf"data\.source=.* {problem}"):
            build(source=str(tmp_path / name), **changes)


def test_another_state_is_refused_by_name(build: Build, tmp_path: Path) -> None:
    state = build().state_dict()
    cases: list[tuple[dict[str, Any], str]] = [
        ({"sequence_length": 32}, r"data\.sequence_length is 32 and was 16"),
        ({"packing": False}, r"data\.packing is False and was True"),
        ({"batch_size": 12}, r"train\.batch_size is 12 and was 6"),
        ({"seed": 1}, r"run\.seed is 1 and was 5"),
        ({"eval_share": 0.3}, r"data has changed since the run began"),
    ]
    for changes, words in cases:
        with pytest.raises(ConfigError, match=words):
            build(**changes).check_state(state)
    moved = (tmp_path / "texts").rename(tmp_path / "moved")
    build(str(moved)).check_state(state)
    (moved / "00.txt").rename(moved / "zero.txt")
    with pytest.raises(ConfigError, match="because of the files, their names .*after a move, the old file names"):
        build(str(moved)).check_state(state)
    (moved / "zero.txt").write_text("other")
    (moved / "zero.txt").rename(moved / "00.txt")
    with pytest.raises(ConfigError, match="data has changed since the run began"):
        build(str(moved)).check_state(state)


def test_the_cache_is_filled_once_and_shared(build: Build, tmp_path: Path) -> None:
    reports: list[tuple[str, float]] = []

    def progress(stage: str, fraction: float) -> None:
        reports.append((stage, fraction))

    build(progress=progress)
    fractions = [fraction for _, fraction in reports]
    assert fractions == sorted(fractions)
    assert reports[-1] == ("tokenizing", 1.0)
    assert len(reports) > 10
    reports.clear()
    build(progress=progress, sequence_length=64, packing=False, batch_size=2, seed=1)
    assert reports == [], "rows are cut when they are read, so their settings need no new tokens"
    build(progress=progress, eval_share=0.2)
    assert reports


def test_a_damaged_cache_is_made_again(build: Build, tmp_path: Path) -> None:
    dataset = build()
    expected, fingerprint = dataset.batch(3)["input_ids"], dataset.state_dict()["fingerprint"]
    del dataset
    for damage in ("tokens.npy", "documents.npy", "meta.json"):
        (path,) = (tmp_path / "cache" / "tokens").glob(f"*/train/{damage}" if damage != "meta.json" else f"*/{damage}")
        path.write_bytes(path.read_bytes()[:-9])
        again = build()
        assert torch.equal(again.batch(3)["input_ids"], expected)
        assert again.state_dict()["fingerprint"] == fingerprint
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="XDG_CACHE_HOME"):
        build(cache_dir=tmp_path / "file")


def test_one_builds_while_the_others_wait(tmp_path: Path) -> None:
    builds: list[int] = []
    results: list[str] = []

    def build(folder: Path) -> None:
        builds.append(1)
        time.sleep(0.2)
        (folder / "value").write_text("whole")

    def ask() -> None:
        results.append(load_or_build(tmp_path, "entry", build, lambda folder: (folder / "value").read_text()))

    threads = [threading.Thread(target=ask) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == ["whole"] * 5
    assert len(builds) == 1


def test_what_a_killed_process_left_is_swept_up(tmp_path: Path) -> None:
    orphan = tmp_path / "entry.tmp-999999"
    orphan.mkdir()
    (orphan / "value").write_text("half")

    def fail(folder: Path) -> None:
        (folder / "value").write_text("half")
        raise RuntimeError("killed")

    with pytest.raises(RuntimeError, match="killed"):
        load_or_build(tmp_path, "entry", fail, lambda folder: (folder / "value").read_text())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["entry.lock"]


def test_a_tokenizer_without_an_end(build: Build, bpe: Any, write_lines: Callable[..., Path], tmp_path: Path) -> None:
    """Text pairs are refused, plain texts get a note, and conversations end with the template's end."""
    endless = copy.deepcopy(bpe)
    endless.eos_token, endless.chat_template = (
        None,
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}",
    )
    endless.save_pretrained(tmp_path / "endless")
    own = {"tokenizer": str(tmp_path / "endless"), "eval_share": 0.0, "packing": False, "batch_size": 1}
    assert "has no EOS token: nothing marks the end" in " ".join(build(**own).notes)
    turns = [[{"role": role, "content": text}] for role, text in (("user", "Hi"), ("assistant", "fox"))]
    for prompt, completion in (("Hi ", "fox"), turns):
        source = str(write_lines("a.jsonl", *[{"prompt": prompt, "completion": completion}] * 9))
        if isinstance(prompt, str):
            with pytest.raises(ConfigError, match=r"a\.jsonl has prompts .*no EOS token.*tokenizer_config\.json"):
                build(source=source, **own)
        else:
            assert not build(source=source, **own).notes
    endless.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="$A <|user|>", special_tokens=[("<|user|>", endless.convert_tokens_to_ids("<|user|>"))]
    )
    endless.save_pretrained(tmp_path / "endless")  # like BERT, with an end token under another name
    assert "EOS" not in " ".join(build(**own).notes)


def test_rows_with_answers_are_refused_where_they_cannot_be_told_apart(
    build: Build, write_lines: Callable[..., Path]
) -> None:
    source = str(write_lines("a.jsonl", *[{"prompt": "Hi", "completion": "fox"}] * 9))
    with pytest.raises(ConfigError, match=r"a\.jsonl has the format prompt-completion, and it cannot"):
        build(source=source, no_answers="it cannot", eval_share=0.0)
    for more in ({"train_on_prompt": True, "source": source}, {}):
        assert build(no_answers="it cannot", eval_share=0.0, **more).num_train_rows


ASKED = "aaaaBBBa"
"""A conversation with eight tokens: small letters are context, capitals are trained."""


@pytest.mark.parametrize(
    ("row", "starts", "prompt", "answer"),
    [
        (ASKED, [0], "aaaa", "BBB"),
        ("aaBBaaCC", [0], "aa", "BB"),  # the first of two answers
        ("Aaaaaaab", [0], None, None),  # no context before the trained token
        ("BBB" + ASKED, [0, 3], "aaaa", "BBB"),  # the first answer began in another row
        (ASKED + "aaB", [0, 8], "aa", "B"),
        ("a" * (MOST_PROMPT_TOKENS + 1) + "B", [0], None, None),
        ("a" * (MOST_PROMPT_TOKENS + 1) + "B" + ASKED, [0, MOST_PROMPT_TOKENS + 2], "aaaa", "BBB"),
        ("A" * 40, [0], "A" * 16, None),
        ("AAA", [0], "A", None),
        ("A", [0], None, None),
        ("AAAAAABBBB", [0, 6], "BB", None),
    ],
)
def test_the_prompt_ends_where_the_answer_begins(
    row: str, starts: Sequence[int], prompt: str | None, answer: str | None
) -> None:
    ids = np.array([ord(letter) for letter in row])
    found = cut_excerpt(ids, np.where(ids < ord("a"), ids, -100), starts)
    assert (None if found is None else "".join(map(chr, found.prompt))) == prompt
    assert (None if found is None or found.answer is None else "".join(map(chr, found.answer))) == answer
