"""Tokenizers and small files for the data tests, without downloads."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.extras.data.dataset import Dataset, build_dataset
from offload.extras.data.encoder import Progress
from offload.extras.data.settings import DataSettings
from offload.extras.data.sources import Source
from offload.extras.data.tokenizer import train_bpe
from tests.data.asked import source_of
from tests.run_folder import write_rows

PROSE = (
    "The quick brown fox jumps over the lazy dog. A streamed block is fetched, computed and freed.\n"
    "Bits are kept exact; the master weight is split in two planes. Ü ß 日本 — 3.14159\n"
    "What is the capital of France? It is Paris. What is two and two? It is four.\n"
)


@pytest.fixture(scope="session")
def prose() -> str:
    """Three lines of text with one-byte to three-byte characters."""
    return PROSE


@pytest.fixture(scope="session")
def bpe() -> Any:
    """A byte-level BPE with at most 400 tokens and the built-in chat template. Read-only."""
    return train_bpe([PROSE] * 4, 400)


@pytest.fixture
def bpe_folder(bpe: Any, tmp_path: Path) -> Callable[..., str]:
    """Return a function: save a copy of `bpe` with another chat template or other attributes, and return the folder."""

    def save(chat_template: str | None = None, name: str = "tokenizer") -> str:
        folder = tmp_path / name
        bpe.save_pretrained(folder)
        if chat_template is not None:
            (folder / "chat_template.jinja").write_text(chat_template)
        return str(folder)

    return save


@pytest.fixture
def dataset_of(bpe_folder: Callable[..., str], tmp_path: Path) -> Callable[..., Dataset]:
    """Return a function: build a dataset over sources or paths, with `bpe` and a document a row of 16 tokens."""
    folder = bpe_folder()

    def build(*sources: Source | Path | str, progress: Progress = lambda *_: None, **settings: Any) -> Dataset:
        defaults = {"tokenizer": folder, "vocab_size": 400, "sequence_length": 16, "packing": False, "batch_size": 6}
        named = [each if isinstance(each, Source) else source_of(str(each)) for each in sources]
        values: dict[str, Any] = {"sources": named, "cache_dir": tmp_path / "cache", **defaults, **settings}
        return build_dataset(DataSettings(**values), progress)

    return build


@pytest.fixture
def write_lines(tmp_path: Path) -> Callable[..., Path]:
    """Return a function: write records as JSON lines, and return the path."""

    def write(name: str, *records: Any) -> Path:
        return write_rows(tmp_path / name, records)

    return write
