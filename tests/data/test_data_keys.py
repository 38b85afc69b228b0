"""Cache keys for tokens and tokenizers change with every input."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from offload.extras.data import dataset, prepare, sources, tokenizer
from offload.extras.data.dataset import build_dataset
from offload.extras.data.settings import DataSettings
from offload.extras.data.sources import SourceFile, hash_files
from offload.extras.data.storage import LocalFile, RemoteFile
from offload.extras.data.tokenizer import hash_tokenizer
from tests.data.asked import files_of, source_of

NOT_IN_THE_KEY = """
model_path is_pretrained
sequence_length packing isolated group_by_length rope_limit stopping_strategy batch_size seed
eval_sources grouped
cache_dir num_workers no_pictures no_answers unheard
"""
"""Settings of data without an effect on the tokens of a source: the place of the tokenizer (the key has its
hash), the cut into rows and batches, other sources (groups are a format), and who makes or refuses tokens.
"""


class Reached(Exception):
    """Raised at the point where the token key is known."""


def test_every_argument_with_an_effect_on_tokens_is_in_their_key(
    bpe_folder: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Break: take an argument from the key."""

    def load_or_build(_root: Path, name: str, *_more: Any) -> None:
        raise Reached(name)

    monkeypatch.setattr(prepare, "load_or_build", load_or_build)
    monkeypatch.setattr(dataset, "_check_grouped", lambda *_args, **_more: None)
    for name, text in (("a.txt", "some text"), ("b.txt", "other text"), ("c.txt", "held out")):
        (tmp_path / name).write_text(text)
    given: dict[str, Any] = {
        "sources": [source_of(str(tmp_path / "a.txt"))],
        "tokenizer": bpe_folder(),
        "vocab_size": 500,
        "sequence_length": 16,
        "batch_size": 2,
    }
    others = {
        "sources": [source_of(str(tmp_path / "b.txt"))],
        "eval_sources": [source_of(str(tmp_path / "c.txt"))],
        "tokenizer": bpe_folder("{{ messages }}", "another"),
        "model_path": str(tmp_path),
        "stopping_strategy": "first_exhausted",
        "on_bad_row": "skip",
        "eval_share": 0.5,
        "grouped": "preference",
        "no_pictures": "none",
        "no_answers": "none",
        "unheard": {"margin": "leave it out"},
        "rope_limit": 8,
        "num_workers": 0,
        "cache_dir": tmp_path,
    }

    def key(**more: Any) -> str:
        with pytest.raises(Reached) as reached:
            build_dataset(DataSettings(**given | more))
        return str(reached.value)

    before, same = key(), set()
    for name, setting in DataSettings.__dataclass_fields__.items():
        if name not in others:
            was = given.get(name, setting.default)
            others[name] = not was if isinstance(was, bool) else was + 1
        same |= {name} if key(**{name: others[name]}) == before else set()
    assert same == set(NOT_IN_THE_KEY.split())
    assert all([*sources.LEFT_OUT.values(), *tokenizer.LEFT_OUT.values()])


def test_every_field_of_a_file_is_in_its_hash_or_left_out_for_a_reason(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text")
    (file,) = files_of(str(tmp_path / "a.txt"))
    others: dict[str, Any] = {"num_bytes": 10, "columns": {"text": "body"}, "place": LocalFile(tmp_path / "../a.txt")}
    changed: dict[str, SourceFile] = {
        each.name: replace(file, **{each.name: others.get(each.name, "another")})
        for each in fields(file)
        if each.name != "place"
    }
    same = {name for name, other in changed.items() if hash_files([other]) == hash_files([file])}
    assert same == set(sources.LEFT_OUT) - {"place"}


@pytest.mark.parametrize("whole_bytes", [1 << 30, 0])
def test_other_contents_of_equal_names_sizes_and_times_are_other_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole_bytes: int
) -> None:
    """Break: identify a save_to_disk folder by file names, sizes and times.

    Large data are identified by the change time (ctime), which no program can set.
    """
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(sources, "_HASH_WHOLE_BYTES", whole_bytes)
    hashes: dict[str, list[str]] = {"saved": [], "text.txt": []}
    for first in (10, 20):
        datasets.Dataset.from_dict({"input_ids": [[first] * 8]}).save_to_disk(str(tmp_path / "saved"))
        (tmp_path / "text.txt").write_text(f"{first} words")
        for path in tmp_path.rglob("*"):
            os.utime(path, (1e9, 1e9))
        for name, found in hashes.items():
            found += [hash_files(files_of(str(tmp_path / name))) for _ in range(2)]
    for found in hashes.values():
        assert found[0] == found[1]
        assert found[2] == found[3]
        assert found[0] != found[2]


def test_a_file_behind_a_url_is_known_by_all_that_its_server_says() -> None:
    """Break: use only name and size, like the fsspec key for HTTP files."""

    said = [{"ETag": "a", "url": "signed-1"}, {"url": "signed-2", "ETag": "a"}, {"ETag": "b", "url": "signed-1"}]
    servers = [SimpleNamespace(info=lambda url, each=each: {"name": url, "size": 3, **each}) for each in said]
    first, again, other = (RemoteFile("http://there/a.txt", 3, server).stamp for server in servers)
    assert first == again != other


def test_a_slow_tokenizer_is_known_by_its_files(tmp_path: Path) -> None:
    """Break: use only vocabulary, class, template and special tokens."""
    vocabulary = ["<unk>", *"abcde", *(f"{each}@@" for each in "abcde"), "ab@@", "bc@@", "ab", "bc", "abc", "<eos>"]
    config = {"tokenizer_class": "CTRLTokenizer", "unk_token": "<unk>", "eos_token": "<eos>"}

    def load(merges: str, name: str = "tokenizer", **more: Any) -> Any:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(vocabulary)}))
        (tmp_path / name / "merges.txt").write_text(f"#version: 0.2\n{merges}\n")
        (tmp_path / name / "tokenizer_config.json").write_text(json.dumps(config | more))
        return AutoTokenizer.from_pretrained(str(tmp_path / name))

    first, second = load("a b\nab c</w>"), load("b c</w>\nb c")
    assert not first.is_fast
    assert first("abc")["input_ids"] != second("abc")["input_ids"]
    assert first.get_vocab() == second.get_vocab()
    assert hash_tokenizer(load("b c</w>\nb c")) == hash_tokenizer(second) != hash_tokenizer(first)
    assert hash_tokenizer(load("b c</w>\nb c", "copied")) == hash_tokenizer(second)
    assert hash_tokenizer(load("b c</w>\nb c", split_special_tokens=True)) != hash_tokenizer(second)
