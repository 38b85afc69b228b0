"""Unnamed scratch files: no directory entry at any time, and no disk use after the end of the process."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from offload.errors import DiskError
from offload.files import directories
from offload.files.directories import free_bytes, open_nameless
from offload.native.io import IoEngine
from offload.tiers.host import Arena
from offload.tiers.nvme import Stripes
from tests import forks
from tests.disks import mounted, nameless
from tests.lanes.patience import eventually
from tests.matrix import quick

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="files without names of Linux")
MIB = 1 << 20
WAYS = {"without a name": directories._O_TMPFILE, "made and unlinked": 0}
"""Without the flag the kernel refuses to open a directory for writing, like a file system without unnamed files."""

HOLD = """
import os, signal, sys, time, warnings
from pathlib import Path
from offload.files import directories
from offload.native.io import IoEngine
from offload.tiers.nvme import Stripes
place = Path(PLACE)
directories._O_TMPFILE = FLAG

def hold():
    files = Stripes(IoEngine(), [place])
    files.reserve(4 << 20)
    return files

def say(text):
    print(text, flush=True)
"""


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(directories, "_O_TMPFILE", WAYS[request.param])
    return WAYS[request.param]


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system with 16 MiB. The unmount fails while a process holds an open file there."""
    with mounted(tmp_path, 16 << 20) as point:
        (point / "lost+found").rmdir()
        yield point


def pages(num_bytes: int, value: int = 0) -> torch.Tensor:
    return Arena(num_bytes).take(num_bytes, torch.uint8).fill_(value)


def values(files: Stripes) -> set[int]:
    """Return the values in the first MiB."""
    back = pages(MIB)
    files.read(0, back)
    return set(back.tolist())


def start(code: str, place: Path, way: int) -> Any:
    """Start a process that runs HOLD and then `code`."""
    lines = HOLD.replace("PLACE", repr(str(place))).replace("FLAG", str(way)) + code
    return forks.start(["-c", lines], stdin=forks.subprocess.PIPE)


class TestOpening:
    def test_it_is_in_no_directory_and_nobody_elses(self, tmp_path, way):
        fd = open_nameless(tmp_path, os.O_RDWR)
        try:
            assert not list(tmp_path.iterdir())
            status = os.fstat(fd)
            assert (status.st_nlink, status.st_mode & 0o777, status.st_size) == (0, 0o600, 0)
            assert not os.get_inheritable(fd), "a program that is started would keep its space"
            with pytest.raises(OSError, match="No such file"):
                os.link(f"/proc/self/fd/{fd}", tmp_path / "name", src_dir_fd=fd)  # linkat, following links
            assert [path.name for path in nameless(tmp_path)] == [str(fd)]
        finally:
            os.close(fd)
        assert not nameless(tmp_path)

    @pytest.mark.parametrize("code", [errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL])
    def test_a_file_system_that_has_none(self, tmp_path, monkeypatch, code):
        asked = self.refusing(monkeypatch, lambda flags: 0 if flags & os.O_CREAT else code)
        os.close(open_nameless(tmp_path, os.O_RDWR))
        assert len(asked) == 2
        assert not list(tmp_path.iterdir())

    @pytest.mark.parametrize("code", [errno.EACCES, errno.EROFS, errno.ENOSPC, errno.EMFILE])
    def test_what_another_way_would_not_help(self, tmp_path, monkeypatch, code):
        asked = self.refusing(monkeypatch, lambda flags: code)
        with pytest.raises(OSError, match=os.strerror(code)):
            open_nameless(tmp_path, os.O_RDWR)
        assert len(asked) == 1

    def refusing(self, monkeypatch: pytest.MonkeyPatch, code_for: Callable[[int], int]) -> list[int]:
        """Make os.open fail with the error code from `code_for(flags)`. Return the recorded flags."""
        asked: list[int] = []
        open_file = os.open

        def opens(path: Any, flags: int, *rest: Any) -> int:
            asked.append(flags)
            if code := code_for(flags):
                raise OSError(code, os.strerror(code))
            return open_file(path, flags, *rest)

        monkeypatch.setattr(os, "open", opens)
        return asked

    @pytest.mark.parametrize("error", [OSError(errno.EINVAL, "no O_DIRECT"), KeyboardInterrupt()], ids=repr)
    def test_a_file_that_is_made_and_not_given(self, tmp_path, monkeypatch, error):
        """Some file systems refuse O_DIRECT after they create the file. A signal can arrive at any time."""
        open_file = os.open

        def make_and_fail(path: Any, flags: int, *rest: Any) -> int:
            fd = open_file(path, flags, *rest)
            os.close(fd)
            raise error

        monkeypatch.setattr(directories, "_O_TMPFILE", 0)
        monkeypatch.setattr(os, "open", make_and_fail)
        with pytest.raises(type(error)):
            open_nameless(tmp_path, os.O_RDWR)
        assert not list(tmp_path.iterdir())

    def test_a_name_that_cannot_be_removed(self, tmp_path, monkeypatch):
        """The name of an empty file remains, and the file gets no data."""
        monkeypatch.setattr(directories, "_O_TMPFILE", 0)
        monkeypatch.setattr(Path, "unlink", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        with IoEngine() as io, pytest.raises(DiskError, match="EIO") as caught:
            Stripes(io, [tmp_path])
        monkeypatch.undo()
        assert str(tmp_path) in str(caught.value)
        assert [path.stat().st_size for path in tmp_path.iterdir()] == [0]
        assert not [link for link in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(link)]


class TestUse:
    @pytest.mark.parametrize("num_places", [1, 2])
    def test_bytes_come_back(self, tmp_path, way, num_places):
        places = [tmp_path / name for name in "ab"[:num_places]]
        for place in places:
            place.mkdir()
        wanted, found = pages(3 * MIB).random_(generator=torch.Generator().manual_seed(1)), pages(3 * MIB)
        with IoEngine() as io:
            files, others = Stripes(io, places), Stripes(io, places)
            assert [files.reserve(MIB), files.reserve(3 * MIB)] == [0, MIB]
            others.reserve(3 * MIB)
            files.write(MIB, wanted)
            others.write(0, pages(3 * MIB, 7))
            files.read(MIB, found)
            assert found.equal(wanted)
            assert len(nameless(tmp_path)) == 2 * num_places
            assert [path for path in tmp_path.rglob("*") if path.is_file()] == []
        assert not nameless(tmp_path)

    def test_without_o_direct(self, tmp_path, way, monkeypatch):
        """Both methods try O_DIRECT first."""
        open_file = os.open

        def refuse(path: Any, flags: int, *rest: Any) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT")
            return open_file(path, flags, *rest)

        monkeypatch.setattr(os, "open", refuse)
        with IoEngine() as io:
            files = Stripes(io, [tmp_path])
            assert f"{tmp_path} refuses O_DIRECT" in files.why_buffered
            files.reserve(MIB)
            files.write(0, pages(MIB, 3))
            assert values(files) == {3}
            assert not list(tmp_path.iterdir())

    def test_a_disk_that_fills(self, disk, way):
        with IoEngine() as io:
            files = Stripes(io, [disk])
            files.reserve(MIB)
            files.write(0, pages(MIB, 5))
            with pytest.raises(DiskError) as caught:
                files.reserve(1 << 30)
            assert caught.value.errno == errno.ENOSPC
            for word in (str(disk), "ENOSPC", "free space", "bytes"):
                assert word in str(caught.value)
            assert files.num_bytes == MIB
            assert values(files) == {5}

    def test_a_directory_that_vanishes(self, tmp_path, way):
        """The directory is empty, so any process can remove it. Open files stay usable, new files are refused."""
        place = tmp_path / "place"
        place.mkdir()
        with IoEngine() as io:
            files = Stripes(io, [place])
            place.rmdir()
            files.reserve(MIB)
            files.write(0, pages(MIB, 9))
            assert values(files) == {9}
            with pytest.raises(DiskError, match="ENOENT") as caught:
                Stripes(io, [place])
            assert str(place) in str(caught.value)
        assert not list(tmp_path.iterdir())


ENDS = {
    "the last line": ("", 0),
    "an exception": ("raise RuntimeError('x')", 1),
    "os._exit": ("os._exit(7)", 7),
    "SIGTERM": ("signal.signal(15, signal.SIG_DFL); signal.raise_signal(15)", -signal.SIGTERM),
    "SIGHUP": ("signal.signal(1, signal.SIG_DFL); signal.raise_signal(1)", -signal.SIGHUP),
    "kill -9": ("time.sleep(1000)", -signal.SIGKILL),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", quick(ENDS, ("the last line", "an exception", "SIGTERM", "kill -9")))
def test_nothing_is_left_however_it_ends(disk, way, end):
    """Break: keep the name, or hold the file elsewhere."""
    code, wanted = ENDS[end]
    free = free_bytes(disk)
    child = start(f"f = hold(); say('held'); input()\n{code}", disk, way)
    try:
        assert child.stdout.readline() == "held\n", child.communicate()
        assert not list(disk.iterdir())
        assert free_bytes(disk) <= free - 4 * MIB
        child.stdin.write("\n")
        child.stdin.flush()
        if end == "kill -9":
            child.kill()
        assert child.wait() == wanted
    finally:
        child.close()
    assert eventually(lambda: free_bytes(disk) == free), "the kernel releases io_uring files shortly after the end"
    assert not list(disk.iterdir())


class TestForks:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "end",
        quick(
            ["sys.exit(0)", "del f; os._exit(0)", "f._io.close(); os._exit(0)"],
            ["sys.exit(0)", "f._io.close(); os._exit(0)"],
        ),
    )
    def test_a_child_that_ends_takes_nothing_from_its_parent(self, tmp_path, way, end):
        code = f"""
import torch
from offload.tiers.host import Arena
f, block = hold(), Arena(4 << 20).take(4 << 20, torch.uint8).fill_(3)
f.write(0, block)
if child := os.fork():
    assert os.waitpid(child, 0)[1] == 0
    f.read(0, block.zero_())
    say((set(block.tolist()), os.listdir(place)))
else:
    {end}
"""
        child = start(code, tmp_path, way)
        out, err = child.communicate()
        assert out == "({3}, [])\n", err

    def test_a_child_that_outlives_its_parent_keeps_the_space_and_no_longer(self, disk, way):
        free = free_bytes(disk)
        child = start(
            "f = hold()\nif c := os.fork(): say(c); os.kill(os.getpid(), 9)\nelse: time.sleep(1000)", disk, way
        )
        orphan = int(child.stdout.readline())
        try:
            assert child.wait() == -signal.SIGKILL
            assert len(nameless(disk, orphan)) == 1
            assert free_bytes(disk) <= free - 4 * MIB
            assert not list(disk.iterdir())
        finally:
            os.kill(orphan, signal.SIGKILL)
            child.close()
        assert eventually(lambda: free_bytes(disk) == free)
