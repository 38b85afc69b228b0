"""`verify` and a full read find damage in a checkpoint before any weight is used."""

from __future__ import annotations

import errno
import json
import os
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.app.checkpoint_folder import Checkpoints, suggesting_alternative
from offload.checkpoint import reader as reading
from offload.checkpoint.manifest import MANIFEST, Manifest, checksum
from offload.checkpoint.reader import Reader, verify
from offload.checkpoint.spread import _copying
from offload.distributed.comm import Comm
from offload.errors import CheckpointError, DiskError
from tests.checkpoint.states import check, save
from tests.matrix import quick
from tests.run_folder import flip


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """A checkpoint with four files, including two data files and one attached file."""
    return save(Checkpoints(tmp_path_factory.mktemp("whole")), 7)


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "step-7"))


def assert_refused(folder: Path, at_fault: str, words: str | None = None) -> None:
    """Check that `verify` and a full read refuse the folder with the file name in the error."""
    for look in (verify, lambda folder: check(folder, 7)):
        with pytest.raises(CheckpointError, match=words) as caught:
            look(folder)
        assert caught.value.path == folder / at_fault
        assert str(folder / at_fault) in str(caught.value)
        assert caught.value.exit_code == 1


@pytest.mark.parametrize("seed", quick(range(200), range(40)))
def test_one_flipped_bit(copy, seed):
    rng = random.Random(seed)
    files = sorted(copy.iterdir())
    assert len(files) == 4
    path = files[seed % 4]  # equal probability per file: by size, the manifest would almost never be chosen
    position = rng.randrange(path.stat().st_size * 8)
    flip(path, position)
    assert_refused(copy, path.name, "damaged")
    flip(path, position)
    verify(copy)


def test_every_bit_of_the_manifest(copy):
    data = (copy / MANIFEST).read_bytes()
    for position in range(len(data) * 8):
        changed = bytearray(data)
        changed[position // 8] ^= 1 << position % 8
        with pytest.raises(CheckpointError, match="damaged"):
            Manifest.decode(bytes(changed), copy / MANIFEST)


@pytest.mark.parametrize("name", [MANIFEST, "config.json", "rank-0.bin", "rank-1.bin"])
class TestFiles:
    @pytest.mark.parametrize("left", [0, 1, 2048, -2048, -1])
    def test_truncated(self, copy, name, left):
        os.truncate(copy / name, left if left >= 0 else (copy / name).stat().st_size + left)
        assert_refused(copy, name, "truncated|damaged|empty")

    def test_with_something_behind(self, copy, name):
        with (copy / name).open("ab") as stream:
            stream.write(b"\n")
        assert_refused(copy, name, "grown|damaged")

    def test_missing(self, copy, name):
        (copy / name).unlink()
        assert_refused(copy, name, "missing")

    @pytest.mark.parametrize(
        "make",
        [
            lambda path: path.mkdir(),
            os.mkfifo,
            lambda path: path.symlink_to("../elsewhere"),
            lambda path: path.symlink_to("/dev/zero"),
        ],
    )
    def test_something_else(self, copy, name, make: Callable[[Path], None]):
        shutil.move(copy / name, copy.parent / "elsewhere")
        make(copy / name)
        assert_refused(copy, name, "not a regular file|cannot be read")

    def test_of_another_checkpoint(self, copy, name, tmp_path):
        other = save(Checkpoints(tmp_path / "other"), 8)
        shutil.copy(other / name, copy / name)
        with pytest.raises(CheckpointError):
            verify(copy)

    def test_a_failing_disk(self, copy, name, monkeypatch):
        open_now = os.open

        def fail(path: Any, *args: Any, **kwargs: Any) -> int:
            if path == name:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return open_now(path, *args, **kwargs)

        monkeypatch.setattr(reading.os, "open", fail)
        assert_refused(copy, name, "EIO")


@pytest.mark.parametrize("name", ["rank-2.bin", "notes.txt", ".manifest.json.swp", "rank-0.bin.1"])
def test_extra_files(copy, name):
    (copy / name).touch()
    assert_refused(copy, name, "is not a file of the checkpoint")


def test_swapped_chunks(copy):
    data = (copy / "rank-0.bin").read_bytes()
    (copy / "rank-0.bin").write_bytes(data[4096:8192] + data[:4096] + data[8192:])
    assert_refused(copy, "rank-0.bin", "offset 0 ")


@pytest.mark.parametrize("numel", [10, 6400])
def test_a_damaged_chunk_is_not_given_at_the_second_time_either(copy, numel):
    flip(copy / "rank-0.bin", 0)
    with Reader(copy) as reader:
        for _ in range(2):
            with pytest.raises(CheckpointError, match="damaged"):
                reader.read("model.embed.weight", "weights", 0, torch.empty(numel, dtype=torch.bfloat16))


def test_no_folder(tmp_path):
    for path in (tmp_path / "none", tmp_path):
        with pytest.raises(CheckpointError, match="missing"):
            verify(path)
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="Not a directory"):
        verify(tmp_path / "file")


def test_truncated_while_it_is_read(copy):
    with Reader(copy) as reader:
        os.truncate(copy / "rank-1.bin", 100)
        with pytest.raises(CheckpointError, match="while it was read"):
            reader.verify()


def test_an_open_reader_does_not_notice_a_successor(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    folder = save(checkpoints, 7)
    with Reader(folder) as reader:
        before = torch.empty(100, 64, dtype=torch.bfloat16)
        reader.read("model.embed.weight", "weights", 0, before)
        save(checkpoints, 7, world_size=3)
        save(checkpoints, 8, keep=1)
        reader.verify()
    assert [path.name for path in checkpoints.folders()] == ["step-8"]


def sealed(fields: dict[str, Any], head: bytes = b'{"checksum": "') -> bytes:
    """Return a manifest with a valid checksum, like a deliberate forgery."""
    rest = ('",\n' + json.dumps(fields)[1:]).encode()
    return head + checksum(rest).encode() + rest


def change(path: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    fields = json.loads(path.read_text())
    del fields["checksum"]
    edit(fields)
    path.write_bytes(sealed(fields))


def embed(fields: dict[str, Any]) -> dict[str, Any]:
    return fields["parameters"]["model.embed.weight"]


def rename_file(fields: dict[str, Any], name: str) -> None:
    fields["files"][name] = fields["files"].pop("rank-0.bin")
    for parameter in fields["parameters"].values():
        for plane in parameter["planes"].values():
            plane["slices"] = [[*s[:2], name if s[2] == "rank-0.bin" else s[2], s[3]] for s in plane["slices"]]


SENSELESS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "newer program": lambda fields: fields.update(version=2),
    "version 0": lambda fields: fields.update(version=0),
    "version 1.5": lambda fields: fields.update(version=1.5),
    "version None": lambda fields: fields.update(version=None),
    "format other version": lambda fields: fields.update(format="other"),
    "Extra inputs": lambda fields: fields.update(more=1),
    "files: Field required": lambda fields: fields.pop("files"),
    "'version'": lambda fields: fields.pop("version"),
    "valid integer": lambda fields: fields["files"]["rank-0.bin"].update(num_bytes="10"),
    "greater than or equal": lambda fields: embed(fields)["shape"].__setitem__(0, -100),
    "greater than 0": lambda fields: fields["files"]["rank-0.bin"].update(chunk_bytes=0),
    "less than or equal": lambda fields: fields["files"]["rank-0.bin"].update(chunk_bytes=1 << 40),
    "checksums": lambda fields: fields["files"]["rank-0.bin"]["checksums"].pop(),
    "unknown dtype 'float31'": lambda fields: embed(fields)["planes"]["low"].update(dtype="float31"),
    "has 6400 elements": lambda fields: embed(fields)["planes"]["low"]["slices"].pop(),
    "are missing": lambda fields: embed(fields)["planes"]["low"]["slices"][1].__setitem__(0, 3201),
    "stored twice": lambda fields: embed(fields)["planes"]["low"]["slices"][1].__setitem__(0, 3199),
    "beyond the end": lambda fields: embed(fields)["planes"]["low"]["slices"][0].__setitem__(3, 1 << 20),
    "beyond the end of rank-9": lambda fields: embed(fields)["planes"]["low"]["slices"][0].__setitem__(2, "rank-9.bin"),
    "cover": lambda fields: fields["parameters"].pop("frozen"),
    "'../rank-0.bin' is not a valid name": lambda fields: rename_file(fields, "../rank-0.bin"),
    "is not a valid name of a data file": lambda fields: rename_file(fields, "/etc/passwd"),
    "'manifest.json' is not": lambda fields: rename_file(fields, "manifest.json"),
    "'.hidden.bin' is not": lambda fields: rename_file(fields, ".hidden.bin"),
    "'a/b.bin' is not": lambda fields: rename_file(fields, "a/b.bin"),
    "is not a valid name": lambda fields: rename_file(fields, "rank\x00.bin"),
    "'rank-0.bin' is not": lambda fields: fields["attached"].update({"rank-0.bin": fields["attached"]["config.json"]}),
    "'../config.json' is not": lambda fields: fields["attached"].update(
        {"../config.json": {"num_bytes": 0, "checksum": ""}}
    ),
    "'manifest.json' is not a valid name of an": lambda fields: fields["attached"].update(
        {MANIFEST: {"num_bytes": 0, "checksum": ""}}
    ),
}


@pytest.mark.parametrize("words", SENSELESS)
def test_a_manifest_that_makes_no_sense(copy, words):
    change(copy / MANIFEST, SENSELESS[words])
    assert_refused(copy, MANIFEST, words)


@pytest.mark.parametrize(
    "data",
    [
        b"{}",
        b"not json",
        b"\xff\xfe",
        b"[" * 100_000,
        sealed({}),
        sealed({"format": {}, "version": []}),
        b'{"checksum": "' + checksum(b'": ]').encode() + b'": ]',
        b'{"checksum": "' + checksum(b'", "x": ' + b"[" * 200_000).encode() + b'", "x": ' + b"[" * 200_000,
        b'{"checksum": "' + checksum(b'"}, 1').encode() + b'"}, 1',
    ],
)
def test_no_manifest(copy, data):
    (copy / MANIFEST).write_bytes(data)
    assert_refused(copy, MANIFEST)


@pytest.fixture
def several(tmp_path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path / "checkpoints")
    for step in (2, 9, 10, 30):
        save(checkpoints, step)
    return checkpoints


def test_the_newest_that_verifies(several):
    assert [path.name for path in several.folders()] == ["step-30", "step-10", "step-9", "step-2"]
    assert several.newest_intact() == (several.path / "step-30", [])
    flip(several.path / "step-30/rank-1.bin", 12345)
    (several.path / "step-10/rank-0.bin").unlink()
    found, skipped = several.newest_intact()
    assert found == several.path / "step-9"
    assert [path.name for path, _ in skipped] == ["step-30", "step-10"]
    assert "step-30/rank-1.bin is damaged" in skipped[0][1]
    assert "step-10/rank-0.bin is missing" in skipped[1][1]
    for step in (9, 2):
        (several.path / f"step-{step}" / MANIFEST).write_bytes(b"")
    found, skipped = several.newest_intact()
    assert found is None
    assert len(skipped) == 4


def test_the_last_good_one_is_offered(several):
    asked = several.path / "step-10"
    with suggesting_alternative(asked):
        verify(asked)
    flip(asked / "rank-1.bin", 12345)
    with (
        pytest.raises(CheckpointError, match="damaged.*The last good one is .*/step-30") as caught,
        suggesting_alternative(asked),
    ):
        verify(asked)
    assert caught.value.path == asked / "rank-1.bin"
    for step in (30, 9, 2):
        (several.path / f"step-{step}" / "rank-0.bin").unlink()
    with pytest.raises(CheckpointError, match="no other good one"), suggesting_alternative(asked):
        verify(asked)


def test_no_checkpoints(tmp_path):
    checkpoints = Checkpoints(tmp_path / "none")
    assert checkpoints.folders() == []
    assert checkpoints.newest_intact() == (None, [])
    assert checkpoints.clear() == []


@pytest.mark.parametrize(
    "name", ["step-07", "step--1", "step-1.5", "step-7.partial-00000000", "step-", "step-٧", "Step-7"]
)
def test_other_names_are_no_checkpoints(copy, name):
    copy.rename(copy.parent / name)
    assert Checkpoints(copy.parent).folders() == []


@pytest.mark.parametrize("text", ["", "step-8\n", "../step-7", "step-7/../step-7", "\xff" * 3000, "/"])
def test_a_damaged_latest(copy, text):
    (copy.parent / "latest").write_text(text, encoding="latin-1")
    checkpoints = Checkpoints(copy.parent)
    assert checkpoints.newest_intact() == (copy, [])


def test_a_disk_that_fills_within_a_piece_ends_a_copy(tmp_path: Path) -> None:
    """Break: write to the file without a buffer, where a short write is no error."""
    (tmp_path / "data").write_bytes(bytes(range(200)))
    with _copying(Comm(), tmp_path, {"data": 200}, 0, {0}) as partial:
        assert partial is not None
        assert (partial / "data").read_bytes() == bytes(range(200))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        with pytest.raises(DiskError, match="EFBIG"), _copying(Comm(), tmp_path, {"data": 200}, 0, {0}):
            pass
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
