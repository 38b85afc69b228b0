"""Batches from threads and processes: equal items in equal order, and a reported end."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.errors import ConfigError
from offload.extras.data.encoder import Encoder
from offload.extras.data.findings import Findings
from offload.extras.data.records import Chat, Ids, Pair, Record, Text
from offload.extras.data.tokenizer import load_tokenizer
from offload.extras.data.workers import encode_ahead
from tests.data.test_data_chat import MISTRAL


@dataclass
class Squares:
    """Squares numbers. Some numbers cause a failure or kill the process."""

    dies_at: int = -1
    fails_at: int = -1

    def encode_batch(self, number: int) -> tuple[int, int]:
        print("what a library may print")
        if number == self.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if number == self.fails_at:
            raise ConfigError(f"no square of {number}")
        return number**2, os.getpid()


@pytest.mark.slow
def test_processes_give_what_this_one_gives_in_order() -> None:
    expected = [number**2 for number in range(40)]
    here = list(encode_ahead(Squares(), range(40), 0))
    there = list(encode_ahead(Squares(), range(40), 2))
    assert [value for value, _ in here] == [value for value, _ in there] == expected
    assert {process for _, process in here} == {os.getpid()}
    assert not any(os.path.exists(f"/proc/{process}") for _, process in there)  # noqa: PTH110 - a number of a process
    with pytest.raises(ConfigError, match="no square of 7"):
        list(encode_ahead(Squares(fails_at=7), range(40), 1))


def test_no_more_batches_are_read_than_are_made_and_one() -> None:
    read = []
    for number, _ in enumerate(encode_ahead(Squares(), (read.append(i) or i for i in range(9)), 0)):
        assert len(read) <= number + 2


@pytest.mark.slow
def test_a_process_that_ends_is_told_and_one_that_is_not_needed_ends() -> None:
    with pytest.raises(ConfigError, match=r"exit code -9 .*--data\.num_workers"):
        list(encode_ahead(Squares(dies_at=3), range(40), 1))
    batches = encode_ahead(Squares(), range(10**9), 1)
    _, process = next(batches)
    batches.close()
    assert subprocess.run(["ps", "-p", str(process)], capture_output=True, check=False).returncode != 0


@pytest.mark.slow
def test_processes_encode_as_this_one_does(bpe_folder: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents, masks, counts and errors for every record type."""
    monkeypatch.setattr("offload.extras.data.text_encoder._BATCH_RECORDS", 3)
    tokenizer = load_tokenizer(bpe_folder(MISTRAL))
    turns = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "The fox."}]
    records: list[Record] = [
        *(Text("t", f"text {i}") for i in range(4)),
        Chat("c", turns),
        Chat("bad", turns[:1] * 2),
        Text("empty", ""),
        Pair("p", "two and two", " four"),
        Ids("i", np.arange(5), closes=True, stream=False),
        Chat("d", turns * 2),
    ]

    def encoded(num_workers: int) -> list[Any]:
        findings = Findings("skip")
        given = ((i in (2, 4), record) for i, record in enumerate(records))
        found = [
            (each.where, *(None if one is None else one.tolist() for one in (each.ids, each.trained, each.num_bytes)))
            for each in Encoder(tokenizer).encode(given, findings, "held out", num_workers)
        ]
        return [found, findings.num_empty, findings.num_split, findings.num_bad, findings.bad]

    assert encoded(1) == encoded(0)
    found, *counts, examples = encoded(0)
    assert [where for where, *_ in found] == ["t"] * 4 + ["c", "p", "i", "d"]
    assert [num_bytes is not None for *_, num_bytes in found] == [True] * 3 + [False, True] + [False] * 3
    assert counts == [1, 0, 1]
    assert "refuses a conversation of user, user" in examples[0]
    with pytest.raises(ConfigError, match=r"bad: .*refuses a conversation"):
        list(Encoder(tokenizer).encode(((False, record) for record in records), Findings(), num_workers=1))


def test_the_setting_reaches_the_tokenizing(
    tmp_path: Path, bpe_folder: Callable[..., str], write_lines: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    from offload.extras.data import prepare
    from offload.extras.data.dataset import build_dataset
    from offload.extras.data.settings import DataSettings
    from tests.data.asked import source_of

    asked, encode = [], Encoder.encode

    def told(*args: Any) -> Any:
        asked.append(args[-1])
        return encode(*args[:-1])

    monkeypatch.setattr(Encoder, "encode", told)
    monkeypatch.setattr(prepare, "usable_cores", lambda: range(40))
    text = write_lines("t.jsonl", {"text": "one two"})
    chats = write_lines("c.jsonl", {"prompt": "one", "completion": " two"})

    def build(path: Path, num_workers: int | None) -> None:
        folder = tmp_path / f"cache-{len(asked)}"
        more: dict[str, Any] = {"vocab_size": 400, "sequence_length": 8, "batch_size": 1, "cache_dir": folder}
        more |= {"tokenizer": bpe_folder(), "num_workers": num_workers}
        build_dataset(DataSettings(sources=[source_of(str(path))], **more))

    build(text, 3)
    build(chats, None)
    monkeypatch.setattr(prepare, "_MIN_BYTES_FOR_WORKERS", 1)
    build(chats, None)
    build(text, None)
    build(chats, 0)
    assert asked == [3, 0, 16, 0, 0], "by itself for much that Python has to render, and nothing else"
