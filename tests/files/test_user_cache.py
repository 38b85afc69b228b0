"""The per-user cache between runs."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from offload.app import user_cache
from offload.app.user_cache import code_hash, default_cache_dir, read_json, write_json


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_cache_dir() == tmp_path / "offload"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/someone")
    assert default_cache_dir() == Path("/home/someone/.cache/offload")


def test_what_is_kept_is_there_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new" / "x.json"
    assert read_json(path) is None
    write_json(path, {"a": [1]})
    assert read_json(path) == {"a": [1]}
    with monkeypatch.context() as patch:
        patch.setattr(user_cache.Path, "replace", Mock(side_effect=OSError("the disk is full")))
        write_json(path, {"a": 2})
    assert read_json(path) == {"a": [1]}
    assert list(path.parent.iterdir()) == [path]
    for damaged in ("{", "", "[" * 100_000):
        path.write_text(damaged)
        assert read_json(path) is None
    path.write_bytes(b"\xff")
    assert read_json(path) is None


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_json(tmp_path / "file" / "x.json", 1)
    assert read_json(tmp_path / "file" / "x.json") is None


def test_a_hash_of_no_code_is_an_error() -> None:
    """A folder that has moved would give a hash that no edit changes."""
    assert len({code_hash(), code_hash("extras/data"), code_hash("app/hf")}) == 3
    with pytest.raises(AssertionError, match="no code in data"):
        code_hash("data")
