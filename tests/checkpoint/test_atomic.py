"""A save ended by SIGKILL or a full disk leaves the previous checkpoint or the new one."""

from __future__ import annotations

import asyncio
import errno
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from offload.app import checkpoint_folder as folders
from offload.app.checkpoint_folder import Checkpoints
from offload.checkpoint import writer
from offload.checkpoint.manifest import MANIFEST, Entry
from offload.checkpoint.reader import verify
from offload.checkpoint.writer import Save, Writer
from offload.errors import DiskError
from offload.files import atomic_folder
from tests import forks
from tests.checkpoint.states import CONTENTS, check, latest, save
from tests.disks import mounted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="locks, limits and renames of Linux")
LARGE = {"p": Entry((4 << 20,), {"weights": torch.float32})}  # 16 MiB


def names(path: Path) -> list[str]:
    return sorted(each.name for each in path.iterdir())


def num_lines(log: Path) -> int:
    return log.read_bytes().count(b"\n") if log.exists() else 0


class Killer:
    """Starts saving processes and kills them."""

    def __init__(self) -> None:
        self.child = forks.start(["-m", "tests.checkpoint.saves_child"], stdin=subprocess.PIPE, stderr=None)

    def run(
        self, folder: Path, first: int, *, dies_at: int = -1, exchanges: bool = True, lines: int = 1, after_s: float = 0
    ) -> int:
        """Run a saving process to the end and return the wait status.

        The process kills itself at system call `dies_at`. With -1, the test kills the process `after_s` seconds after
        `lines` more log lines (begin or end of a save).
        """
        assert self.child.stdin
        assert self.child.stdout
        log = Path(f"{folder}.log")
        wanted = lines + num_lines(log)
        self.child.stdin.write(f"{folder} {first} {dies_at} {exchanges}\n")
        self.child.stdin.flush()
        pid = int(self.child.stdout.readline())
        if dies_at < 0:
            until = time.monotonic() + 120
            while num_lines(log) < wanted:
                assert time.monotonic() < until
                time.sleep(0.001)
            time.sleep(after_s)
            os.kill(pid, signal.SIGKILL)
        return int(self.child.stdout.readline())


@pytest.fixture(scope="module")
def killer() -> Iterator[Killer]:
    it = Killer()
    yield it
    assert it.child.stdin
    it.child.stdin.close()
    it.child.wait(120)
    it.child.close()


def check_after_kill(checkpoints: Checkpoints) -> int:
    """Check that a killed process left the last complete checkpoint or a newer one. Return the step."""
    lines = [line.split() for line in Path(f"{checkpoints.path}.log").read_text().splitlines()]
    begun = max(int(step) for _, step in lines)
    ended = max((int(step) for what, step in lines if what == "end"), default=0)
    newest = latest(checkpoints)
    if ended:
        assert newest is not None
        check(newest, int(newest.name.removeprefix("step-")))
        assert int(newest.name.removeprefix("step-")) >= ended
    for path in checkpoints.folders():  # all folders with a checkpoint name, not only the newest
        check(path, int(path.name.removeprefix("step-")))
    newest, skipped = checkpoints.newest_intact()
    assert not skipped
    if newest is None:
        assert not ended
        return 0
    step = int(newest.name.removeprefix("step-"))
    assert ended <= step <= begun
    return step


@pytest.mark.slow
def test_kill_at_any_moment(tmp_path, killer):
    checkpoints, rng, step = Checkpoints(tmp_path / "checkpoints"), random.Random(7), 0
    for _ in range(40):
        # The third line marks the end of a save, independent of the duration.
        status = killer.run(checkpoints.path, step + 1, lines=rng.randint(1, 3), after_s=rng.uniform(0, 0.1))
        assert os.WTERMSIG(status) == signal.SIGKILL
        step = check_after_kill(checkpoints)
    assert step > 0
    checkpoints.clear()
    assert all(name == "latest" or name.startswith("step-") for name in names(checkpoints.path) if name[0] != ".")
    assert not any("." in name[1:] for name in names(checkpoints.path) if name != ".latest.new")


@pytest.mark.slow
@pytest.mark.parametrize("exchanges", [True, False])
def test_kill_before_each_system_call(tmp_path, killer, exchanges):
    """One save deletes an old checkpoint, and the next save replaces the folder with the same name."""
    seen: set[str] = set()
    for count in range(0, 1000, 2):
        checkpoints = Checkpoints(tmp_path / str(count) / "checkpoints")
        checkpoints.path.parent.mkdir()
        for step in (3, 4):
            save(checkpoints, step)
        Path(f"{checkpoints.path}.log").write_text("begin 3\nend 3\nbegin 4\nend 4\n")
        status = killer.run(checkpoints.path, 5, dies_at=count, exchanges=exchanges)
        left = names(checkpoints.path)
        seen |= {name.split(".")[1].split("-")[0] for name in left if name.startswith("step-") and "." in name}
        if not exchanges:
            checkpoints.clear()  # restores the folder between two renames
        check_after_kill(checkpoints)
        checkpoints.clear()
        assert not any("." in name[1:] for name in names(checkpoints.path) if name != ".latest.new")
        assert check_after_kill(checkpoints) >= 4
        shutil.rmtree(checkpoints.path.parent)
        if not status:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
    assert 50 < count < 500
    assert seen == ({"partial", "removed"} if exchanges else {"partial", "removed", "replaced"})


def test_what_is_on_disk_when_it_takes_its_name(tmp_path, monkeypatch):
    """A power cut leaves only synced data: sync the files, the folder, the rename, and then `latest`."""
    save(Checkpoints(tmp_path), 1)
    events: list[str] = []
    fsync, rename = os.fsync, os.rename

    def synced(fd: int) -> None:
        events.append("sync " + Path(f"/proc/self/fd/{fd}").readlink().name.split(".partial")[0])
        fsync(fd)

    def renamed(one: Path, other: Path) -> None:
        rename(one, other)
        events.append(f"{Path(one).name.split('.partial')[0]} becomes {Path(other).name.split('.removed')[0]}")

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(writer, "_sync", writer.aiofiles.os.wrap(synced))
    monkeypatch.setattr(os, "rename", renamed)
    save(Checkpoints(tmp_path), 2, keep=1)
    parent = f"sync {tmp_path.name}"
    assert events == [
        *("sync config.json", "sync rank-0.bin", "sync rank-1.bin", "sync manifest.json", "sync step-2"),
        *("step-2 becomes step-2", parent),
        *("sync .latest.new", ".latest.new becomes latest", parent),
        "step-1 becomes step-1",
    ]


class TestKeep:
    def test_the_highest_steps_stay(self, tmp_path, monkeypatch):
        """The lowest step is removed first."""
        checkpoints, removed, remove = Checkpoints(tmp_path), [], atomic_folder.remove
        monkeypatch.setattr(folders, "remove", lambda path: (removed.append(path.name), remove(path)))
        for step in (1, 2, 9, 10, 11):
            save(checkpoints, step, keep=3)
        assert names(tmp_path) == ["latest", "step-10", "step-11", "step-9"]
        save(checkpoints, 12)
        assert len(checkpoints.folders()) == 4
        save(checkpoints, 13, keep=1)
        assert names(tmp_path) == ["latest", "step-13"]
        assert removed == ["step-1", "step-2", "step-9", "step-10", "step-11", "step-12"]
        assert latest(checkpoints) == tmp_path / "step-13"

    def test_the_new_one_stays_after_going_back(self, tmp_path):
        checkpoints = Checkpoints(tmp_path)
        for step in (20, 30, 10):
            save(checkpoints, step, keep=1)
        assert names(tmp_path) == ["latest", "step-10", "step-30"]
        assert latest(checkpoints) == tmp_path / "step-10"

    def test_the_old_ones_stay_where_the_new_one_fails(self, tmp_path, monkeypatch):
        checkpoints = Checkpoints(tmp_path)
        save(checkpoints, 1)
        monkeypatch.setattr(writer, "sync_path", Mock(side_effect=OSError(errno.EIO, os.strerror(errno.EIO))))
        with pytest.raises(DiskError, match="EIO"):
            save(checkpoints, 2, keep=1)
        assert names(tmp_path) == ["latest", "step-1"]
        check(tmp_path / "step-1", 1)


class TestReplace:
    @pytest.mark.parametrize("exchanges", [True, False])
    def test_the_same_step_again(self, tmp_path, monkeypatch, exchanges):
        if not exchanges:
            monkeypatch.setattr(atomic_folder, "_exchange", lambda one, other: False)
        checkpoints = Checkpoints(tmp_path)
        save(checkpoints, 1, world_size=3)
        (tmp_path / "step-1/rank-2.bin").write_bytes(b"damaged")
        save(checkpoints, 1, world_size=2)
        check(tmp_path / "step-1", 1)
        assert names(tmp_path) == ["latest", "step-1"]

    def test_a_failed_second_rename_brings_the_old_one_back(self, tmp_path, monkeypatch):
        checkpoints = Checkpoints(tmp_path)
        save(checkpoints, 1)
        monkeypatch.setattr(atomic_folder, "_exchange", lambda one, other: False)
        rename, seen = os.rename, []

        def fail(one: Path, other: Path) -> None:
            if ".partial-" in Path(one).name and Path(other).name == "step-1":
                seen.append(other)
                if len(seen) == 2:
                    raise OSError(errno.EIO, os.strerror(errno.EIO))
            rename(one, other)

        monkeypatch.setattr(os, "rename", fail)
        with pytest.raises(DiskError, match="the publishing of .*EIO"):
            save(checkpoints, 1, world_size=3)
        check(tmp_path / "step-1", 1)
        assert names(tmp_path) == ["latest", "step-1"]

    def test_a_step_with_notes_is_moved_aside(self, tmp_path):
        checkpoints = Checkpoints(tmp_path)
        save(checkpoints, 1)
        (tmp_path / "step-1/notes.txt").write_text("precious")
        save(checkpoints, 1)
        check(tmp_path / "step-1", 1)
        (aside,) = tmp_path.glob("step-1.foreign-*")
        assert (aside / "notes.txt").read_text() == "precious"
        assert checkpoints.clear() == []


class TestMoveAside:
    def test_what_is_above_a_step(self, tmp_path):
        checkpoints = Checkpoints(tmp_path)
        for step in (1, 5, 9, 10):
            save(checkpoints, step)
        assert [path.name.split(".aside-")[0] for path in checkpoints.move_aside(5)] == ["step-10", "step-9"]
        assert [path.name for path in checkpoints.folders()] == ["step-5", "step-1"]
        assert checkpoints.newest_intact() == (tmp_path / "step-5", [])
        assert checkpoints.clear() == checkpoints.move_aside(5) == []
        assert len(list(tmp_path.glob("step-*.aside-*"))) == 2


class TestClear:
    def test_a_living_save_is_left_alone(self, tmp_path):
        checkpoints = Checkpoints(tmp_path)
        with Save(checkpoints.target(1)) as made:
            assert checkpoints.clear() == []
            assert made.path.is_dir()
        assert names(tmp_path) == []

    @pytest.mark.parametrize("has_manifest", [True, False])
    def test_a_dead_one_goes(self, tmp_path, has_manifest):
        dead = tmp_path / "step-1.partial-0123abcd"
        dead.mkdir()
        (dead / "rank-0.bin").write_bytes(b"1" * 10000)
        if has_manifest:
            (dead / MANIFEST).touch()
        (tmp_path / "step-1.removed-0123abcd").mkdir()
        others = ["step-1.partial-0123abc", "x.partial-0123abcd", "step-1.foreign-0123abcd"]
        for name in others:
            (tmp_path / name).touch()
        assert [path.name for path in Checkpoints(tmp_path).clear()] == [dead.name, "step-1.removed-0123abcd"]
        assert names(tmp_path) == sorted(others)

    def test_a_folder_that_is_cleared_while_it_is_made_is_made_again(self, tmp_path, monkeypatch):
        lock, times = atomic_folder._lock_of, []

        def late(folder: Path) -> int:
            times.append(folder)
            if len(times) == 1:
                assert atomic_folder.clear(tmp_path) == [folder]
            return lock(folder)

        monkeypatch.setattr(atomic_folder, "_lock_of", late)
        with Save(tmp_path / "step-1") as made:
            assert len(times) == 3  # the cleared folder, the lock for the clear, and the next folder
            assert made.path == times[2] != times[0]
            assert made.path.is_dir()

    def test_a_folder_that_goes_before_it_is_locked_is_made_again(self, tmp_path, monkeypatch):
        flock, times = atomic_folder.fcntl.flock, []

        def late(fd: int, how: int) -> None:
            times.append(fd)
            if len(times) == 1:
                (path,) = tmp_path.glob("*.partial-*")
                atomic_folder.remove(path)
            flock(fd, how)

        monkeypatch.setattr(atomic_folder.fcntl, "flock", late)
        with Save(tmp_path / "step-1") as made:
            assert len(times) == 2
            assert made.path.is_dir()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 24 MiB."""
    with mounted(tmp_path, 24 << 20) as point:
        yield point


def fill(checkpoints: Checkpoints, step: int, before_write: Callable[[int], None] = lambda _: None) -> None:
    """Save 16 MiB from one rank, in 1 MiB pieces."""
    with Save(checkpoints.target(step)) as made, Writer(made.path, 0, LARGE) as it:
        for index in range(16):
            before_write(index)
            it.write("p", "weights", index << 18, torch.full((1 << 18,), float(step)))
        checkpoints.register(made.commit(LARGE, [it.finish()], {"step": step}))


def test_a_full_disk(disk):
    checkpoints = Checkpoints(disk / "checkpoints")
    for step in (1, 2):
        save(checkpoints, step)
    fill(Checkpoints(disk / "probe"), 1)  # the free space is enough
    shutil.rmtree(disk / "probe")
    (disk / "other").write_bytes(b"1" * (10 << 20))
    before = os.statvfs(disk).f_bfree
    with pytest.raises(
        DiskError, match=r"the write of \d+ bytes at offset \d+ of .*step-3.*rank-0.bin.*ENOSPC"
    ) as caught:
        fill(checkpoints, 3)
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.path.name == "rank-0.bin"
    assert caught.value.num_bytes == 4 << 20
    assert names(checkpoints.path) == ["latest", "step-1", "step-2"]
    assert os.statvfs(disk).f_bfree >= before - 8
    check(checkpoints.path / "step-2", 2)
    assert checkpoints.newest_intact() == (checkpoints.path / "step-2", [])
    (disk / "other").unlink()
    fill(checkpoints, 3)
    verify(checkpoints.path / "step-3")


def test_a_disk_that_is_full_for_the_manifest_or_latest(tmp_path, monkeypatch):
    """The disk is full at the last few blocks. The previous checkpoint stays valid."""
    checkpoints = Checkpoints(tmp_path)
    save(checkpoints, 1)
    for failing in (MANIFEST, ".latest.new"):
        fsync = os.fsync

        def full(fd: int, failing: str = failing, fsync: Callable[[int], None] = fsync) -> None:
            if Path(f"/proc/self/fd/{fd}").readlink().name == failing:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(fd)

        monkeypatch.setattr(os, "fsync", full)
        if failing == MANIFEST:
            with pytest.raises(DiskError, match="ENOSPC"):
                save(checkpoints, 2, keep=1)
            check(tmp_path / "step-1", 1)
            assert latest(checkpoints) == tmp_path / "step-1"
            assert not (tmp_path / "step-2").exists()
        else:
            # the save is complete without `latest`; old checkpoints go, because the disk is full
            save(checkpoints, 2, keep=1)
        monkeypatch.setattr(os, "fsync", fsync)
    assert checkpoints.folders() == [tmp_path / "step-2"]
    check(tmp_path / "step-2", 2)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        *((where, OSError(code, "")) for where in ("_write", "_sync") for code in (errno.EIO, errno.ENOSPC)),
        ("_write", MemoryError()),  # a lost buffer is no deadlock
        ("", KeyboardInterrupt()),  # between two pieces
    ],
)
def test_a_failing_write_stops_the_others(tmp_path, monkeypatch, where, error):
    calls = []

    async def fail(*args: object) -> str:
        calls.append(args)
        raise error

    def interrupt(index: int) -> None:
        if index == 9 and not where:
            raise error

    if where:
        monkeypatch.setattr(writer, where, fail)
    is_told = isinstance(error, OSError)
    words = rf"rank-0.bin.*{errno.errorcode[error.errno]}" if is_told else ""
    with pytest.raises(DiskError if is_told else type(error), match=words):
        fill(Checkpoints(tmp_path), 1, interrupt)
    assert len(calls) <= 4
    assert names(tmp_path) == []


@pytest.mark.parametrize("fails", [True, False])
def test_what_waits_in_a_copy_is_not_written_after_a_failure_or_the_end(tmp_path, monkeypatch, fails):
    calls, gate = [], threading.Event()

    async def late(*args: object) -> str:
        calls.append(args)
        while not gate.is_set() and not it._error:
            await asyncio.sleep(0.001)
        if fails:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return ""

    monkeypatch.setattr(writer, "_write", late)
    contents = {"weight": Entry((20, 4096), {"bytes": torch.uint8})}
    with (
        Save(tmp_path / "here") as made,
        Writer(made.path, 0, contents, chunk_bytes=4096, spare_bytes=20 * 4096) as it,
    ):
        it.write("weight", "bytes", 0, torch.zeros(20 * 4096, dtype=torch.uint8))
        it.end()
        it._run(asyncio.sleep(0))  # lets all pending tasks start
        if fails:
            gate.set()
            with pytest.raises(DiskError, match="EIO"):
                it.finish()
    assert len(calls) <= 4
    assert names(tmp_path) == []


def test_a_copy_for_which_there_is_no_memory_is_not_made(tmp_path):
    """Without memory for the copy (address-space limit, no overcommit) the writer works without one."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    with Save(tmp_path / "here") as made:
        resource.setrlimit(resource.RLIMIT_AS, (used + (1 << 30), hard))
        try:
            it = Writer(made.path, 0, CONTENTS, spare_bytes=4 << 30)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        with it:
            assert it.spare_bytes == 0
            it.write("scale", "weights", 0, torch.zeros(1))
            it.finish()
