"""`python -m offload.data` in the test process, against the training batches and the files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offload.app.config.command_line import parse_config
from offload.app.hf.models import vocab_size
from offload.app.training.build import RunSetup
from offload.app.training.objectives import Objective, choose_objective
from offload.app.training.resume import ResumePoint
from offload.data import _row, main
from offload.errors import ConfigError
from offload.extras.data.dataset import Dataset
from offload.extras.data.task import FileRows
from offload.extras.data.view import Piece, Sample, _text, histogram

Told = Callable[..., tuple[dict[str, Any], Dataset, Objective]]
CHATS = [
    [
        {"role": "user", "content": f"What is {number} & <b>one</b>?"},
        {"role": "assistant", "content": "One more. " * (number % 7 + 1)},
        {"role": "user", "content": "Why?"},
        {"role": "assistant", "content": f"I count: {number + 1}."},
    ][: 4 if number % 3 else 2]
    for number in range(40)
]
BERT = {"model_type": "bert", "architectures": ["BertForMaskedLM"], "vocab_size": 384, "max_position_embeddings": 64}
T5 = {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"], "vocab_size": 384}


@pytest.fixture
def here(folder: Path, environment: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory with chats.jsonl (the last line is invalid) and models of other types."""
    lines = [json.dumps({"messages": messages}) for messages in CHATS]
    (folder / "chats.jsonl").write_text("\n".join([*lines, "{"]))
    (folder / "bert.json").write_text(json.dumps(BERT))
    (folder / "t5.json").write_text(json.dumps(T5))
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", environment["XDG_CACHE_HOME"])
    return folder


def words(*more: str, model: str = "llama.json", source: str = "chats.jsonl") -> list[str]:
    own = ("--model.path", model, "--data.source", source, "--data.on_bad_row", "skip", "--train.steps", "6")
    return [*own, "--data.sequence_length", "64", "--train.batch_size", "4", *more]


@pytest.fixture
def told(here: Path, capsys: pytest.CaptureFixture[str]) -> Told:
    """Return a function that runs the command and returns (JSON output, dataset, objective of such a run)."""

    def tell(*given: str, samples: int = 6) -> tuple[dict[str, Any], Dataset, Objective]:
        assert main([*given, "--samples", str(samples), "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        config, architecture, kind, *_ = RunSetup.read(
            ResumePoint(parse_config(given, prog="", description="")), accelerator=None, num_ranks=1
        )
        data = FileRows.build(config, kind, vocab_size(architecture), lambda *_: None)
        size = vocab_size(architecture)
        return found, data, choose_objective(kind.name, tokenizer=data.tokenizer, vocab_size=size, seed=config.run.seed)

    return tell


def of_tokens(sample: dict[str, Any], key: str) -> np.ndarray:
    """Return one property for each token in a row."""
    return np.asarray([piece[key] for piece in sample["pieces"] for _ in range(piece["num_tokens"])])


def documents(sample: dict[str, Any]) -> list[int]:
    """Return the marked document starts in a row."""
    found, at = [0], 0
    for piece in sample["pieces"]:
        found += [at] * piece["begins_document"]
        at += piece["num_tokens"]
    return found


def targets(batch: dict[str, Any], row: int, width: int, objective: Objective) -> np.ndarray:
    """Return a mask of the target tokens in a row, from the labels in the batch."""
    labels = batch["labels"][row].numpy()
    if len(labels) < width:  # decoder labels
        labels = np.concatenate([np.full(width - len(labels), -100), labels])
    # the first token has no context
    return (labels != -100) & ((np.arange(width) > 0) | (objective.name != "next token"))


def test_an_encoder_decoder_takes_no_answers(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"chats\.jsonl has the format messages, and an encoder-decoder"):
        main(words(model="t5.json"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ("--data.packing_isolated", "true"),
        ("--data.packing_isolated", "false"),
        ("--data.packing", "false"),
        ("--model.path", "bert.json"),
        ("--model.path", "t5.json", "--data.train_on_prompt", "true"),
    ],
    ids=["apart", "stream", "a document a row", "masked", "encoder-decoder"],
)
def test_what_is_trained_is_what_the_batches_label(told: Told, layout: tuple[str, ...]) -> None:
    found, data, objective = told(*words(*layout))
    places = [(1, 1), (1, 2), (1, 3), (1, 4), (2, 1), (2, 2)]
    assert [(each["step"], each["row"]) for each in found["samples"]] == places
    for (step, row), sample in zip(places, found["samples"], strict=True):
        plain = {key: value.clone() for key, value in data.batch(step - 1).items()}
        batch, row = objective.apply(plain, step - 1), row - 1
        kinds, ids = of_tokens(sample, "kind"), plain["input_ids"][row]
        assert ((kinds == "trained") == targets(batch, row, len(ids), objective)).all()
        assert sample["num_trained"] == (kinds == "trained").sum() > 0
        is_token = torch.from_numpy(kinds != "padding")
        assert sample["num_padding"] == len(ids) - is_token.sum()
        if "position_ids" in plain:
            begins = (plain["position_ids"][row] == 0).nonzero().flatten().tolist()
            assert documents(sample) == begins[: sample["num_documents"]]
            assert begins[sample["num_documents"] :] == ([] if is_token.all() else [int(is_token.sum())])
        elif data.train.packing:  # conversations share the first token, and no other turn begins with this token
            tokens = data.tokenizer.convert_ids_to_tokens(ids.tolist())
            alike = ["".join(tokens[at : at + 4]).startswith("<|user|>ĊWhat") for at in range(64)]
            assert [at for at in documents(sample) if 0 < at < 60] == [at for at in range(1, 60) if alike[at]]
        else:
            assert documents(sample) == [0]
            assert torch.equal(plain.get("attention_mask", torch.ones_like(plain["labels"]))[row].bool(), is_token)
        assert sample["num_documents"] == len(documents(sample))
        text = "".join(piece["text"] for piece in sample["pieces"] if piece["kind"] != "padding")
        if objective.name == "masked tokens":  # the mask is an embedding row without a token
            assert text.count("<383>") == (batch["input_ids"][row] == 383).sum() > 0
        else:
            assert text == data.tokenizer.decode(ids[is_token])
    assert (sum(each["num_documents"] for each in found["samples"]) > 6) == (data.train.packing is not False)


def test_a_terminal_shows_the_first_documents_of_a_row() -> None:
    pieces = [Piece(f"document {number}", "trained", False, True, 1) for number in range(35)]
    shown = _row(Sample(1, 1, "", "chats", 35, 0, 35, (), tuple(pieces)), False).plain
    assert "document 3⟧" in shown
    assert "document 4" not in shown
    assert shown.endswith("[... 31 documents more, which --page shows ...]")


def test_the_marks_of_the_text_are_the_answers_and_colours_show_the_same(
    here: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    given = words("--data.sequence_length", "64", "--samples", "8")
    main(given)
    text = capsys.readouterr().out
    rows = text.split("another document of the row begins\n")[1]
    marked = re.findall("⟦(.*?)⟧", rows, re.DOTALL)
    answers = {
        message["content"] + "<|endoftext|>" for chat in CHATS for message in chat if message["role"] == "assistant"
    }
    cut = [each for each in marked if each not in answers]
    assert len(marked) > 10
    assert all(any(answer.startswith(each) for answer in answers) for each in cut), "but for those at the end of a row"
    assert rows.count("‖") == sum(int(number) - 1 for number in re.findall(r": (\d+) documents", rows)) > 0
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    main(given)
    coloured = capsys.readouterr().out.split("another document of the row begins\n")[1]
    assert re.sub(r"\x1b\[[\d;]*m", "", coloured) == re.sub("[⟦⟧]", "", rows)
    green = "".join(re.findall(r"\x1b\[(?:1;)?32m(.*?)\x1b\[0m", coloured, re.DOTALL))
    assert green.replace("\n", "") == "".join(marked).replace("\n", "")


def test_the_figures_are_those_of_the_files(told: Told, here: Path) -> None:
    given = words("--data.packing", "false", "--data.sequence_length", "48", "--data.group_by_length", "false")
    found, data, _ = told(*given)
    (source,) = found["sources"]
    documents = [data.tokenizer.apply_chat_template(chat, tokenize=True)["input_ids"] for chat in CHATS]
    lengths = [len(document) for document in documents]
    assert (source["name"], source["path"], source["format"]) == ("chats", "chats.jsonl", "messages")
    assert (source["num_documents"], source["num_tokens"]) == (40, sum(lengths))
    assert (source["num_bad_rows"], source["num_empty"]) == (1, 0)
    assert source["num_longer"] == sum(length > 48 for length in lengths) > 0
    assert source["num_cut_off"] == sum(max(length - 48, 0) for length in lengths)
    assert source["trained_share"] == data.sources[0].target_share
    filled = [min(48, length) for length in lengths]
    rows = data.train.lengths(np.arange(data.num_train_rows)).tolist()
    assert source["num_rows"] + found["num_eval_rows"] == 40
    assert not set(rows) - set(filled)
    assert found["padding_share"] == source["padding_share"] == pytest.approx(1 - sum(rows) / (48 * len(rows)))
    assert (found["num_steps"], found["epochs"]) == (6, 24 / found["num_train_rows"])
    assert found["packing"] is False
    assert not list(here.glob("runs*")), "there is no run folder"


@pytest.mark.parametrize(
    "more", [("--data.packing", "false", "--data.group_by_length", "false"), ("--data.packing_isolated", "true")]
)
def test_a_better_row_length_is_told_with_its_padding(more: tuple[str, ...], told: Told, here: Path) -> None:
    """A run with this length has this padding, and cuts no document that was whole."""
    chat = {"messages": [{"role": "user", "content": "Why? " * 20}, {"role": "assistant", "content": "One. " * 30}]}
    (here / "equal.jsonl").write_text((json.dumps(chat) + "\n") * 60)
    config = json.loads((here / "llama.json").read_text()) | {"max_position_embeddings": 512}
    (here / "long.json").write_text(json.dumps(config))
    given = words("--data.sequence_length", "256", *more, model="long.json", source="equal.jsonl")
    found, data, _ = told(*given, samples=1)
    better = found["better_length"]
    assert better["padding_share"] <= found["padding_share"] / 2
    other, there, _ = told(*given, "--data.sequence_length", str(better["sequence_length"]), samples=1)
    assert better["padding_share"] == pytest.approx(other["padding_share"], abs=0.03)
    assert there.sources[0].num_truncated <= data.sources[0].num_truncated
    assert other["better_length"] is None


def test_padding_of_batches_by_length_is_that_of_the_batches(told: Told) -> None:
    found, data, _ = told(*words("--data.packing", "false"))
    masks = [data.batch(step).get("attention_mask", torch.ones(4, 64)) for step in range(data.num_steps(1))]
    padding = 1 - sum(float(mask.sum()) for mask in masks) / sum(mask.numel() for mask in masks)
    assert found["padding_share"] == found["sources"][0]["padding_share"] == pytest.approx(padding)
    assert padding < 0.3


def test_rows_of_several_sources_name_theirs(told: Told) -> None:
    sources = "[{path: chats.jsonl, weight: 1}, {path: text.txt, weight: 2}]"
    given = words("--data.packing_isolated", "true")
    given[2:4] = ["--data.sources", sources]
    found, data, _ = told(*given, samples=24)
    names = ["chats" if "What is" in str(each["pieces"]) else "text" for each in found["samples"]]
    assert [each["source"] for each in found["samples"]] == names
    assert set(names) == {"chats", "text"}
    rows = data.train.at(0, found["num_train_rows"], 0)
    padding = 1 - data.train.lengths(rows).mean() / 64
    assert found["padding_share"] == pytest.approx(padding, abs=0.01), "of rows as often as they come"
    assert [each["num_documents"] for each in found["sources"]] == [40, 1]


def test_a_histogram_counts_each_document_once() -> None:
    rng = np.random.default_rng(0)
    for lengths, row in (([7], 64), ([64, 64], 64), ([65], 64), ([1, 10**7], 100), (rng.integers(1, 3000, 500), 333)):
        bins = histogram(np.asarray(lengths), row)
        ends = [end for end, _ in bins]
        assert row in ends
        assert len(ends) < 30
        begins = [0, *ends[:-1]]
        for begin, (end, count) in zip(begins, bins, strict=True):
            assert count == sum(begin < length <= end for length in lengths)
        assert sum(count for _, count in bins) == len(lengths)


SPAN = '<span class="(.*?)">(.*?)</span>'


def test_a_page_shows_the_same_rows(told: Told, capsys: pytest.CaptureFixture[str]) -> None:
    given = words("--data.packing_isolated", "true")
    found, _, _ = told(*given)
    assert main([*given, "--samples", "6", "--page", "data.html"]) == 0
    assert capsys.readouterr().out == "data.html\n"
    rows = re.findall('<div class="row">(.*?)</div>', Path("data.html").read_text(), re.DOTALL)
    page = [[(kind, unescape(text)) for kind, text in re.findall(SPAN, row, re.DOTALL)] for row in rows]
    shown = [[piece for piece in row if piece[0] != "another"] for row in page]
    expected = [
        [
            (each["kind"] + " special" * (each["is_special"] and each["kind"] != "padding"), each["text"])
            for each in sample["pieces"]
        ]
        for sample in found["samples"]
    ]
    assert shown == expected
    assert sum(kind == "another" for row in page for kind, _ in row) == sum(
        sample["num_documents"] - 1 for sample in found["samples"]
    )
    assert "<b>" in "".join(text for row in shown for _, text in row)


def test_a_blank_that_a_tokenizer_leaves_out_in_front_stays() -> None:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "c": 2, "?": 3}, unk_token="?"))
    words.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    ids = [0, 1, 2, 1]
    assert tokenizer.decode(ids[1:]) == "bc b"
    assert [_text(tokenizer, ids, *span) for span in ((0, 1), (1, 3), (3, 4))] == ["a", " bc", " b"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (("--samples", "-1"), "--samples is '-1'"),
        (("--page", "chats.jsonl"), r"--page is chats\.jsonl; name a file that ends in \.html"),
    ],
)
def test_options_are_checked(here: Path, more: tuple[str, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        main(words(*more))


@pytest.mark.parametrize(
    ("length", "shown", "said"),
    [
        (("--train.steps", "1"), 4, "1 step of 4 rows: "),
        (("--train.steps", "none", "--train.max_seconds", "9"), 5, "\nsteps of 4 rows; "),
    ],
)
def test_no_rows_are_shown_after_the_last_step(
    length: tuple[str, ...], shown: int, said: str, here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*words(), *length, "--samples", "5"])
    out = capsys.readouterr().out
    assert out.count("\nstep ") == shown
    assert said in out


def test_ids_without_a_tokenizer_are_numbers(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save("ids.npy", np.arange(256, dtype=np.uint16))
    main(words("--data.packing_isolated", "false", "--samples", "1", "--data.eval_share", "0", source="ids.npy"))
    row = capsys.readouterr().out.split("padding\n")[-1]
    numbers = [int(number) for number in re.findall(r"\d+", row)]
    assert numbers == list(range(numbers[0], numbers[0] + 64))
    assert row.startswith(f"{numbers[0]} ⟦")
