"""Caches whose files are damaged: the data are made again, with a word."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from offload.errors import ConfigError
from offload.extras.data.dataset import Dataset
from offload.user_cache import default_cache_dir

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "half": lambda kept: kept[: len(kept) // 2],
    "empty": lambda _: b"",
    "zeros": lambda kept: kept[: len(kept) // 2] + bytes(len(kept) - len(kept) // 2),
    "a bit": lambda kept: kept[:-6] + bytes([kept[-6] ^ 1]) + kept[-5:],
}


def _ids(data: Dataset) -> np.ndarray:
    return data.train.read(np.arange(data.train.num_rows))[0]


@pytest.mark.filterwarnings("ignore:the cached data")
@pytest.mark.parametrize("tokenizer", [False, True])
def test_every_damaged_file_is_made_again(dataset_of: Callable[..., Dataset], tmp_path: Path, tokenizer: bool) -> None:
    """Break: compare sizes alone."""
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 9)
    settings = {"tokenizer": None} if tokenizer else {}
    expected = _ids(dataset_of(tmp_path / "a.txt", **settings))
    cache, whole = tmp_path / "cache", tmp_path / "whole"
    shutil.copytree(cache, whole)
    paths = [path.relative_to(whole) for path in whole.rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert len(paths) >= 7 + 3 * tokenizer
    for number, path in enumerate(paths):
        damage = list(DAMAGES)[number % len(DAMAGES)]
        (cache / path).write_bytes(DAMAGES[damage]((whole / path).read_bytes()))
        assert np.array_equal(_ids(dataset_of(tmp_path / "a.txt", **settings)), expected), (path, damage)
        assert (cache / path).read_bytes() == (whole / path).read_bytes()


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_tokens_are_made_again_and_told(
    dataset_of: Callable[..., Dataset], tmp_path: Path, damage: str
) -> None:
    (tmp_path / "a.txt").write_text("The quick brown fox jumps over the lazy dog. " * 9)
    expected = _ids(dataset_of(tmp_path / "a.txt"))
    (path,) = (tmp_path / "cache").rglob("train/tokens.npy")
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    with pytest.warns(UserWarning, match=r"the cached data in .* are damaged .*, and are made again"):
        found = _ids(dataset_of(tmp_path / "a.txt"))
    assert np.array_equal(found, expected)


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break: let the RuntimeError through."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", Mock(side_effect=RuntimeError("Could not determine home directory.")))
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        default_cache_dir()
