"""The nvme tier's folders: refused where they could do harm, gone when the run is, and stale ones found and removed."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from offload.errors import ConfigError, DoesNotFitError
from offload.tiers import directories, folder
from offload.tiers.folder import RunFolders, find_stale, remove_stale
from tests.disks import mounted

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts, locks and signals of Linux")
ROOT = Path(__file__).parents[2]
PREAMBLE = """
import os, signal, sys, threading, time
from pathlib import Path
from offload.tiers import directories, folder
from offload.tiers.folder import RunFolders, find_stale, remove_stale
place = sys.argv[1]
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also under nohup

def hold():
    folders = RunFolders([place], 0)
    (folders.paths[0] / "states").write_bytes(b"1" * 10000)
    return folders

def say(text):
    print(text, flush=True)
"""
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts, file attributes and other users need root")


@pytest.fixture
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Start a Python program after PREAMBLE, which knows the directory as `place`."""
    running: list[subprocess.Popen[str]] = []

    def begin(code: str, place: Path) -> subprocess.Popen[str]:
        child = subprocess.Popen(
            [sys.executable, "-c", PREAMBLE + code, str(place)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        running.append(child)
        return child

    yield begin
    for child in running:
        child.kill()
        child.communicate()


def ours(place: Path) -> list[Path]:
    return [path for path in place.iterdir() if path.name.startswith("offload-")]


def make_stale(place: Path, start: Callable[..., subprocess.Popen[str]]) -> Path:
    child = start("f = hold(); os._exit(0)", place)
    assert child.wait(120) == 0, child.stderr.read()
    return ours(place)[0]


def make_by_hand(place: Path, lock: str | None, age_s: float, pid: int = 4194304) -> Path:
    """Make what a run could have left when it died in the middle of making its folder; no process has that pid."""
    path = place / f"offload-{pid}-0123abcd"
    path.mkdir()
    if lock is not None:
        (path / "lock").write_text(lock)
        os.utime(path / "lock", (time.time() - age_s,) * 2)
    os.utime(path, (time.time() - age_s,) * 2)
    return path


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An ext4 file system of 16 MiB."""
    with mounted(tmp_path, 16 << 20) as point:
        yield point


class TestRefusals:
    def refused(self, dirs: list[Any], *words: str, num_bytes: int = 0) -> None:
        with pytest.raises(ConfigError) as refusal:
            RunFolders(dirs, num_bytes)
        for word in ("--offload.nvme_dir", *words):
            assert word in str(refusal.value)

    def test_none(self):
        self.refused([], "no directory")

    def test_missing(self, tmp_path):
        self.refused([tmp_path / "no disk"], "does not exist", f"mkdir -p '{tmp_path}/no disk'")
        assert not (tmp_path / "no disk").exists()

    def test_nothing_is_made_where_another_one_is_refused(self, tmp_path):
        (tmp_path / "good").mkdir()
        self.refused([tmp_path / "good", tmp_path / "no disk"], "does not exist")
        assert not list((tmp_path / "good").iterdir())

    def test_file(self, tmp_path):
        (tmp_path / "file").touch()
        self.refused([tmp_path / "file"], "is a file")

    def test_unknown_user(self):
        self.refused(["~nobody-has-this-name/x"], "cannot be reached")

    @pytest.mark.parametrize("second", ["a", "a/../a", "link"])
    def test_twice(self, tmp_path, second):
        (tmp_path / "a").mkdir()
        (tmp_path / "link").symlink_to("a")
        self.refused([tmp_path / "a", tmp_path / second], "the same directory")

    def test_memory(self):
        if directories.file_system(Path("/dev/shm")) != "tmpfs":
            pytest.skip("/dev/shm is not a tmpfs here")
        self.refused(["/dev/shm"], "/dev/shm", "tmpfs", "memory")

    def test_memory_behind_a_link(self, tmp_path):
        if directories.file_system(Path("/dev/shm")) != "tmpfs":
            pytest.skip("/dev/shm is not a tmpfs here")
        (tmp_path / "link").symlink_to("/dev/shm")
        self.refused([tmp_path / "link"], "tmpfs")

    @needs_root
    def test_memory_mounted_below_a_disk(self, tmp_path):
        point = tmp_path / "a b"
        (point / "c").mkdir(parents=True)
        if subprocess.run(["mount", "-t", "tmpfs", "none", point], check=False).returncode:
            pytest.skip("no tmpfs can be mounted here")
        try:
            (point / "c").mkdir()
            self.refused([point / "c"], "tmpfs")
            assert directories.file_system(tmp_path / "a bc") != "tmpfs"
        finally:
            subprocess.run(["umount", point], check=True)

    def test_memory_mounted_over_a_disk(self, disk):
        if subprocess.run(["mount", "-t", "tmpfs", "none", disk], check=False).returncode:
            pytest.skip("no tmpfs can be mounted here")
        try:
            self.refused([disk], "tmpfs")
        finally:
            subprocess.run(["umount", disk], check=True)

    def test_read_only_mount(self, disk):
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        self.refused([disk], "cannot be written to", "EROFS")

    @needs_root
    def test_no_permission(self, start):
        with tempfile.TemporaryDirectory(prefix="folder_") as place:
            Path(place).chmod(0o755)
            child = start(
                "import traceback\n"
                "try:\n    os.setgroups([]); os.setuid(65534); hold()\nexcept Exception as error:\n    say(error)",
                Path(place),
            )
            out, err = child.communicate(timeout=120)
            assert "cannot be written to: Permission denied (EACCES)" in out, err

    def test_a_file_system_that_has_no_nameless_files(self, tmp_path, monkeypatch):
        open_file = os.open

        def refuse(path, flags, *rest, **more):
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, "no nameless files")
            return open_file(path, flags, *rest, **more)

        monkeypatch.setattr(os, "open", refuse)
        with RunFolders([tmp_path], 0) as folders:
            assert list(tmp_path.iterdir()) == folders.paths
        monkeypatch.setattr(directories, "file_system", lambda _: "ext4")
        self.refused(["/proc"], "cannot be written to")

    def test_no_locks(self, tmp_path, monkeypatch):
        def refuse(fd: int, how: int) -> None:
            raise OSError(errno.ENOLCK, "no locks")

        monkeypatch.setattr(fcntl, "flock", refuse)
        self.refused([tmp_path], "no file locks", "ENOLCK")
        assert not list(tmp_path.iterdir())


class TestSpace:
    def test_too_little(self, tmp_path):
        with pytest.raises(DoesNotFitError, match=r"Nothing was made.*--offload.nvme_memory") as refusal:
            RunFolders([tmp_path], 1 << 60)
        assert str(1 << 60) in str(refusal.value)
        assert refusal.value.exit_code == 3
        assert not list(tmp_path.iterdir())

    def test_directories_of_one_file_system_are_added_up(self, disk, tmp_path):
        elsewhere = tmp_path / "elsewhere"
        for path in (disk / "a", disk / "b", elsewhere):
            path.mkdir()
        free = directories.free_bytes(disk)
        assert 5 << 20 < free < 16 << 20
        with RunFolders([disk / "a", disk / "b", elsewhere], free // 2 * 3 - 3) as folders:
            assert [path.parent for path in folders.paths] == [disk / "a", disk / "b", elsewhere]
        free = directories.free_bytes(disk)
        with pytest.raises(DoesNotFitError) as refusal:
            RunFolders([disk / "a", disk / "b", elsewhere], (free // 2 + 1) * 3)
        message = str(refusal.value)
        need = (free // 2 + 1) * 2
        for number in (need, free, need - free):
            assert f"({number} bytes)" in message
        assert f"{disk}/a, {disk}/b" in message
        assert str(elsewhere) not in message

    def test_stale_folders_are_named_as_what_could_go(self, disk, start):
        make_stale(disk, start)
        with pytest.raises(DoesNotFitError, match=f"python -m offload.doctor --clean --nvme-dir {disk}"):
            RunFolders([disk], 1 << 30)


class TestHolding:
    def test_the_lock_file(self, tmp_path):
        with RunFolders([tmp_path], 10) as folders:
            (path,) = folders.paths
            assert path.stat().st_mode & 0o777 == 0o700
            about = json.loads((path / "lock").read_text())
            assert about["pid"] == os.getpid()
            assert about.keys() == {"pid", "host", "uid", "command", "started"}
            assert about["command"].startswith(sys.orig_argv[0])
            (fd,) = folder._open[-1].folders.values()
            assert not os.get_inheritable(fd)
            with (path / "lock").open() as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
        assert not list(tmp_path.iterdir())

    def test_two_processes_in_one_directory(self, tmp_path, start):
        first, second = start("f = hold(); say(f.paths[0]); input()", tmp_path), None
        one = Path(first.stdout.readline().strip())
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a living run is not reported
            second = RunFolders([tmp_path], 0)
        assert one != second.paths[0]
        assert remove_stale([tmp_path]).removed == []
        second.close()
        assert ours(tmp_path) == [one]
        assert (one / "states").stat().st_size == 10000
        first.communicate("\n", timeout=120)
        assert not list(tmp_path.iterdir())

    def test_all_that_is_in_a_folder_goes_and_what_links_lead_to_stays(self, tmp_path):
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "precious").touch()
        folders = RunFolders([tmp_path], 0)
        (folders.paths[0] / "deep" / "deeper").mkdir(parents=True)
        (folders.paths[0] / "deep" / "deeper" / "lock").touch()
        (folders.paths[0] / "deep" / "link").symlink_to(tmp_path / "other")
        folders.close()
        folders.close()
        assert [path.name for path in tmp_path.iterdir()] == ["other"]
        assert (tmp_path / "other" / "precious").exists()

    def test_what_vanished_is_no_matter(self, tmp_path):
        (tmp_path / "a").mkdir()
        (tmp_path / "b").mkdir()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with RunFolders([tmp_path / "a", tmp_path / "b"], 0) as folders:
                (folders.paths[0] / "lock").unlink()
                folders.paths[0].rmdir()
        assert not ours(tmp_path / "b")

    @needs_root
    def test_what_cannot_be_removed_is_one_warning_and_stale(self, tmp_path):
        folders = RunFolders([tmp_path], 0)
        files = [folders.paths[0] / name for name in "xy"]
        for file in files:
            file.touch()
        if subprocess.run(["chattr", "+i", *files], check=False, capture_output=True).returncode:
            pytest.skip("the file system has no immutable files")
        try:
            with pytest.warns(UserWarning, match="could not be removed") as caught:
                folders.close()
            assert len(caught) == 1
            assert "EPERM" in str(caught[0].message)
            cleaned = remove_stale([tmp_path])
            assert not cleaned.removed
            assert "EPERM" in cleaned.failed[0][1]
        finally:
            subprocess.run(["chattr", "-i", *files], check=True)
        assert [each.path for each in remove_stale([tmp_path]).removed] == folders.paths
        assert not list(tmp_path.iterdir())

    def test_nothing_is_left_where_the_second_folder_cannot_be_made(self, tmp_path, monkeypatch):
        make, places = folder._make_folder, [tmp_path / "a", tmp_path / "b"]
        for place in places:
            place.mkdir()

        def fail_at_b(place: Path, held: folder._Held) -> Path:
            if place.name == "b":
                raise ConfigError("the disk is gone")
            return make(place, held)

        monkeypatch.setattr(folder, "_make_folder", fail_at_b)
        with pytest.raises(ConfigError, match="gone") as error:  # which keeps the object alive
            RunFolders(places, 0)
        assert not list(places[0].iterdir())
        assert not folder._open, error


ENDS = {
    "normal end": ("f = hold()", 0),
    "nobody holds it": ("hold(); assert not os.listdir(place); os._exit(7)", 7),
    "sys.exit": ("f = hold(); sys.exit(3)", 3),
    "exception": ("f = hold(); raise RuntimeError('x')", 1),
    "exception while being made": ("folder._about_this_process = lambda: 1 / 0\nf = hold()", 1),
    "SIGTERM": ("f = hold(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)", -signal.SIGTERM),
    "SIGHUP": ("f = hold(); os.kill(os.getpid(), signal.SIGHUP); time.sleep(30)", -signal.SIGHUP),
    "two at once, SIGTERM": ("f = hold(), hold(); signal.raise_signal(signal.SIGTERM)", -signal.SIGTERM),
    "SIGTERM while being made": (
        "folder._about_this_process = lambda: signal.raise_signal(signal.SIGTERM)\nhold()",
        -signal.SIGTERM,
    ),
    "SIGTERM while being removed": (
        """f, unlink = hold(), os.unlink
os.unlink = lambda *a, **k: (setattr(os, "unlink", unlink), signal.raise_signal(signal.SIGTERM))
f.close()""",
        -signal.SIGTERM,
    ),
    "own handler, installed earlier": (
        """signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
f = hold(); os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)""",
        5,
    ),
    "own handler, installed later": (
        """f = hold(); signal.signal(signal.SIGTERM, lambda *_: (say(len(os.listdir(place))), sys.exit(5)))
os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)""",
        5,
    ),
    "own handler that calls the one before": (
        """f = hold(); before = signal.signal(signal.SIGTERM, lambda n, s: (say("mine"), before(n, s)))
os.kill(os.getpid(), signal.SIGTERM); time.sleep(30)""",
        -signal.SIGTERM,
    ),
    "own handler that puts the one before back after close": (
        """f = hold(); before = signal.signal(signal.SIGTERM, lambda *_: None); f.close()
signal.signal(signal.SIGTERM, before); signal.raise_signal(signal.SIGTERM)""",
        -signal.SIGTERM,
    ),
    "ignored": ("signal.signal(signal.SIGHUP, signal.SIG_IGN); f = hold(); signal.raise_signal(signal.SIGHUP)", 0),
    "made in a thread": (
        "made = []; t = threading.Thread(target=lambda: made.append(hold())); t.start(); t.join(); say(made[0].paths)",
        0,
    ),
    "closed in a thread, then SIGTERM": (
        "f = hold(); t = threading.Thread(target=f.close); t.start(); t.join(); signal.raise_signal(signal.SIGTERM)",
        -signal.SIGTERM,
    ),
}


class TestEnds:
    @pytest.mark.parametrize("name", ENDS)
    def test_the_folders_are_gone(self, tmp_path, start, name):
        code, status = ENDS[name]
        child = start(code, tmp_path)
        out, err = child.communicate(timeout=120)
        assert child.returncode == status, err
        assert not list(tmp_path.iterdir()), err
        assert ("Traceback" in err) == name.startswith("exception")
        if name == "own handler, installed later":
            assert out == "1\n"  # ours had not been in front of it

    @pytest.mark.parametrize("how", ["os._exit", "kill -9"])
    def test_a_violent_end_is_reported_and_cleaned(self, tmp_path, start, how):
        child = start("f = hold(); say(f.paths[0]); input(); os._exit(9)", tmp_path)
        path = Path(child.stdout.readline().strip())
        assert find_stale([tmp_path]) == []
        if how == "kill -9":
            child.kill()
        child.communicate("\n")
        (stale,) = find_stale([tmp_path, tmp_path])
        assert (stale.path, stale.pid) == (path, child.pid)
        assert 10000 < stale.num_bytes < 40000
        assert stale.started[:4] == time.strftime("%Y")
        with pytest.warns(UserWarning, match="in 1 folder is left") as caught:
            RunFolders([tmp_path], 0).close()
        assert len(caught) == 1
        assert f"`python -m offload.doctor --clean --nvme-dir {tmp_path}`" in str(caught[0].message)
        assert remove_stale([tmp_path]).removed == [stale]
        assert not list(tmp_path.iterdir())

    def test_handlers_are_there_only_while_folders_are_open(self, tmp_path):
        for number in (signal.SIGTERM, signal.SIGHUP):
            assert signal.getsignal(number) is not folder._on_signal
            signal.signal(number, signal.SIG_DFL)  # also under nohup
        one, two = RunFolders([tmp_path], 0), RunFolders([tmp_path], 0)
        one.close()
        assert signal.getsignal(signal.SIGTERM) is signal.getsignal(signal.SIGHUP) is folder._on_signal
        mine = lambda *_: None  # noqa: E731
        signal.signal(signal.SIGHUP, mine)
        try:
            two.close()
            assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
            assert signal.getsignal(signal.SIGHUP) is mine
        finally:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)

    def test_sigterm_at_any_moment(self, tmp_path, start):
        for number in range(6):
            child = start("say('go')\nwhile True: hold().close()", tmp_path)
            child.stdout.readline()
            time.sleep(0.003 * number)
            child.terminate()
            assert child.wait(120) == -signal.SIGTERM
            assert not list(tmp_path.iterdir())


class TestForks:
    FORK = """
f = hold()
if child := os.fork():
    assert os.waitpid(child, 0)[1] == STATUS
    say((f.paths[0] / "states").exists())
    say(len(find_stale([place])))
else:
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    END
"""

    @pytest.mark.parametrize(
        ("end", "status"),
        [
            ("sys.exit(0)", 0),
            ("f.close(); os._exit(0)", 0),
            ("del f; os._exit(0)", 0),
            ("os.kill(os.getpid(), 15)", 15),
        ],
    )
    def test_a_child_does_not_remove(self, tmp_path, start, end, status):
        child = start(self.FORK.replace("END", end).replace("STATUS", str(status)), tmp_path)
        out, err = child.communicate(timeout=120)
        assert out == "True\n0\n", err
        assert not list(tmp_path.iterdir())

    def test_a_child_has_folders_of_its_own(self, tmp_path, start):
        code = "g = hold(); assert len(os.listdir(place)) == 2; signal.raise_signal(15)"
        child = start(self.FORK.replace("END", code).replace("STATUS", "15"), tmp_path)
        out, err = child.communicate(timeout=120)
        assert out == "True\n0\n", err
        assert not list(tmp_path.iterdir())

    def test_a_child_that_outlives_its_parent_does_not_keep_the_folder(self, tmp_path, start):
        code = "f = hold()\nif child := os.fork(): say(child); os._exit(0)\nelse: time.sleep(60)"
        child = start(code, tmp_path)
        orphan = int(child.stdout.readline())
        assert child.wait(120) == 0
        try:
            until = time.monotonic() + 120
            while not find_stale([tmp_path]) and time.monotonic() < until:  # the child may hardly have begun to live
                time.sleep(0.01)
            assert psutil.pid_exists(orphan)
            assert len(find_stale([tmp_path])) == 1
        finally:
            os.kill(orphan, signal.SIGKILL)


class TestStale:
    @pytest.mark.parametrize("lock", [None, "", "\0\0\0"])
    def test_a_run_that_died_while_making_its_folder(self, tmp_path, lock):
        path = make_by_hand(tmp_path, lock, age_s=400)
        (stale,) = find_stale([tmp_path])
        assert (stale.path, stale.pid, stale.started) == (path, 4194304, None)
        assert remove_stale([tmp_path]).removed == [stale]
        assert not path.exists()

    @pytest.mark.parametrize("lock", [None, ""])
    @pytest.mark.parametrize(("age_s", "is_alive"), [(200, False), (400, True)])
    def test_a_run_that_may_be_making_its_folder(self, tmp_path, lock, age_s, is_alive):
        path = make_by_hand(tmp_path, lock, age_s, *([os.getpid()] if is_alive else []))
        assert find_stale([tmp_path]) == []
        assert remove_stale([tmp_path]) == folder.Cleaned()
        assert path.exists()

    def test_what_is_not_ours(self, tmp_path):
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "offload-12-0123abcd").touch()
        (tmp_path / "offload-4194304-0123abcd").symlink_to("elsewhere")
        for name in ("offload-4194304-0123abcx", "offload-x-0123abcd", "offload-4194304-0123abcd-more", "offload"):
            (tmp_path / name).mkdir()
        for number, text in enumerate(("my own lock", "[]", '{"my": "lock"}')):
            (tmp_path / f"offload-{20 + number}-0123abcd").mkdir()
            (tmp_path / f"offload-{20 + number}-0123abcd" / "lock").write_text(text)
        (tmp_path / "offload-30-0123abcd").mkdir()
        os.mkfifo(tmp_path / "offload-30-0123abcd" / "lock")
        (tmp_path / "offload-31-0123abcd").mkdir()
        (tmp_path / "offload-31-0123abcd" / "lock").symlink_to("../my.json")
        (tmp_path / "my.json").write_text('{"pid": 1}')
        for path in tmp_path.rglob("*"):
            os.utime(path, (0, 0), follow_symlinks=False)
        before = sorted(tmp_path.rglob("*"))
        assert find_stale([tmp_path, tmp_path / "missing"]) == []
        assert remove_stale([tmp_path]) == folder.Cleaned()
        assert sorted(tmp_path.rglob("*")) == before

    def test_a_folder_that_another_cleaner_holds(self, tmp_path, start, monkeypatch):
        path = make_stale(tmp_path, start)
        stale = find_stale([tmp_path])
        monkeypatch.setattr(folder, "find_stale", lambda _: stale)  # as it was found just before
        monkeypatch.setattr(folder, "_PATIENCE_S", 0.1)
        with (path / "lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            cleaned = remove_stale([tmp_path])
        assert [reason for _, reason in cleaned.failed] == ["another process uses it or is removing it"]
        assert (path / "states").exists()
        assert remove_stale([tmp_path]).removed == stale
        assert remove_stale([tmp_path]) == folder.Cleaned()  # found, and gone meanwhile

    def test_on_a_disk_that_turned_read_only(self, disk, start):
        make_stale(disk, start)
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        assert len(find_stale([disk])) == 1
        assert "EROFS" in remove_stale([disk]).failed[0][1]


RUN = """
import random, warnings
warnings.simplefilter("ignore")
until = time.monotonic() + 2
count = 0
while time.monotonic() < until:
    folders = hold()
    time.sleep(random.random() * 0.003)
    assert (folders.paths[0] / "states").stat().st_size == 10000
    assert (folders.paths[0] / "lock").stat().st_size > 0
    folders.close()
    assert WITHOUT_GRACE or not folders.paths[0].exists()  # else the cleaner may be at it, and ends it
    count += 1
last = hold() if random.random() < 0.5 else None
say(count)
os._exit(0)
"""
CLEANER = """
until = time.monotonic() + 2.5
removed = 0
while time.monotonic() < until:
    cleaned = remove_stale([place])
    removed += len(cleaned.removed)
say(removed)
"""
HASTY = """
folder._GRACE_S, folder._PATIENCE_S = -1e9, 0
folder.psutil.pid_exists = lambda pid: False
"""


@pytest.mark.parametrize("haste", ["", HASTY], ids=["as it is", "a cleaner without grace"])
def test_nobody_loses_a_folder_to_a_cleaner(tmp_path, start, haste):
    """Without grace the cleaner takes for stale whatever it can lock: then only the locks protect the runs."""
    runs = [start(RUN.replace("WITHOUT_GRACE", str(bool(haste))), tmp_path) for _ in range(8)]
    cleaners = [start(haste + CLEANER, tmp_path) for _ in range(2)]
    for child in (*runs, *cleaners):
        out, err = child.communicate(timeout=120)
        assert child.returncode == 0, err
        if child in runs:
            assert int(out) > 5
    cleaned = remove_stale([tmp_path])
    assert not cleaned.failed
    assert not ours(tmp_path)
