"""`python -m offload.doctor`: what it tells of the directories for the nvme tier, how it exits."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from typing import Any

import pytest

from offload import doctor
from offload.errors import ConfigError
from offload.files import directories
from offload.native import io as native_io
from offload.native import kernels
from tests import forks
from tests.disks import nameless
from tests.forks import ROOT

Call = Callable[..., "tuple[int, dict[str, Any]]"]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Return the exit code and the JSON of the command."""

    def run(*words: object) -> tuple[int, dict[str, Any]]:
        code = doctor.main(["--json", *map(str, words)])
        return code, json.loads(capsys.readouterr().out)

    return run


def test_the_machine(call):
    code, found = call()
    assert code == 0
    assert found["environment"]["versions"]["torch"]
    assert found["kernels"] == kernels.describe()
    with native_io.IoEngine() as engine:
        assert (found["io"]["engine"], found["io"]["why_not_better"]) == (engine.name, engine.why or None)
    assert found["nvme"] == []


def test_directories(call, tmp_path):
    (tmp_path / "file").touch()
    code, found = call("--nvme-dir", tmp_path, tmp_path / "missing", "--nvme-dir", tmp_path / "file")
    good, missing, file = found["nvme"]
    assert code == 1
    assert good["usable"]
    assert good["refusal"] is None
    assert good["file_system"] == directories.file_system(tmp_path)
    assert good["free_bytes"] > 0
    assert good["direct"] or good["why_buffered"]
    assert not missing["usable"]
    assert "does not exist" in missing["refusal"]
    assert not file["usable"]
    assert "is a file" in file["refusal"]
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert not nameless(tmp_path)
    assert call("--nvme-dir", tmp_path)[0] == 0


@pytest.mark.parametrize("refused", ["opening", "transfer"])
def test_a_file_system_without_direct(call, tmp_path, monkeypatch, refused):
    open_file, write = os.open, native_io.IoEngine.write

    def fail_to_open(path, flags, *rest, **more):
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no")
        return open_file(path, flags, *rest, **more)

    def fail_to_write(engine, file, *rest):
        if file.is_direct:
            raise native_io.DiskError("the write failed: EINVAL", errno.EINVAL, file.path)
        return write(engine, file, *rest)

    if refused == "opening":
        monkeypatch.setattr(native_io.os, "open", fail_to_open)
    else:
        monkeypatch.setattr(native_io.IoEngine, "write", fail_to_write)
    code, found = call("--nvme-dir", tmp_path)
    assert code == 0
    assert found["nvme"][0]["usable"]
    assert found["nvme"][0]["direct"] is False
    assert ("O_DIRECT" if refused == "opening" else "EINVAL") in found["nvme"][0]["why_buffered"]
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails(call, tmp_path, monkeypatch):
    def fail(engine, file, *rest):
        raise native_io.DiskError("the write failed: EIO", errno.EIO, file.path)

    monkeypatch.setattr(native_io.IoEngine, "write", fail)
    code, found = call("--nvme-dir", tmp_path)
    assert code == 1
    assert found["nvme"][0]["refusal"] == "the write failed: EIO"
    assert not found["nvme"][0]["usable"]
    assert not list(tmp_path.iterdir())


def test_a_directory_twice():
    with pytest.raises(ConfigError, match="the same directory") as refusal:
        doctor.main(["--nvme-dir", ".", "."])
    assert refusal.value.exit_code == 2


@pytest.mark.parametrize("words", [["--nvme-dir"], ["--clean"], ["more"]])
def test_words_that_it_does_not_know(words):
    with pytest.raises(SystemExit) as leaving:
        doctor.main(words)
    assert leaving.value.code == 2


def test_for_people(tmp_path):
    """As a user runs it: compact, within 80 columns, and with the exit code of the command."""
    command = ["-m", "offload.doctor", "--nvme-dir", tmp_path, tmp_path / "missing"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "80", "TERM": "dumb"}
    child = forks.run(command, cwd=tmp_path, env=environment)
    assert child.returncode == 1, child.stderr
    assert child.stderr == ""
    lines = child.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert len(lines) < 40
    text = "".join("".join(lines).split())
    for words in ("offload0.1", "kernels", "I/Oengine", "usable,", "doesnotexist", str(tmp_path)):
        assert words in text
