"""The per-user cache between runs."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from offload import user_cache
from offload.errors import ConfigError
from offload.user_cache import code_hash, default_cache_dir, read_json, write_json


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


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "offload" / "things"


def test_what_is_made_once_is_kept_by_all_its_inputs(home: Path) -> None:
    made: list[bytes] = []

    def keep(*inputs: str) -> bytes:
        def make() -> bytes:
            made.append(f"{len(made)}".encode() + bytes(1000))
            return made[-1]

        return user_cache.kept_bytes("things", inputs, make)

    assert keep("a", "bc") == keep("a", "bc") == made[0]
    assert keep("ab", "c") == keep("ab", "c") == made[1]
    assert len({keep(*inputs) for inputs in ((), ("",), ("a",), ("abc",), ("a", "bc", ""))}) == 5
    assert len(made) == len(list(home.iterdir())) == 7


DAMAGES = {
    "a bit": lambda kept: kept[:500] + bytes([kept[500] ^ 1]) + kept[501:],
    "of the digest": lambda kept: bytes([kept[0] ^ 1]) + kept[1:],
    "half": lambda kept: kept[: len(kept) // 2],
    "longer": lambda kept: kept + b"0",
    "nothing": lambda _: b"",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_made_anew(home: Path, damage: str) -> None:
    make = Mock(return_value=bytes(1000))

    def keep() -> bytes:
        return user_cache.kept_bytes("things", ["a"], make)

    keep()
    (path,) = home.iterdir()
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    assert keep() == keep() == bytes(1000)
    assert make.call_count == 2
    assert path.read_bytes() == whole
    assert list(home.iterdir()) == [path], "no temporary file"


def test_without_a_folder_it_is_made_each_time(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home.parent.parent.joinpath("offload").touch()
    make = Mock(return_value=b"x")
    assert {user_cache.kept_bytes("things", ["a"], make) for _ in range(2)} == {b"x"}
    monkeypatch.setattr(user_cache, "default_cache_dir", Mock(side_effect=ConfigError("no home")))
    assert user_cache.kept_bytes("things", ["a"], make) == b"x"
    assert make.call_count == 3


def test_a_folder_that_cannot_be_made_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    write_json(tmp_path / "file" / "x.json", 1)
    assert read_json(tmp_path / "file" / "x.json") is None


def test_a_hash_of_no_code_is_an_error() -> None:
    """A folder that has moved would give a hash that no edit changes."""
    assert len({code_hash(), code_hash("extras/data"), code_hash("app/hf")}) == 3
    with pytest.raises(AssertionError, match="no code in data"):
        code_hash("data")
