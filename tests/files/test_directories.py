"""NVMe tier directories: refused if useless, dangerous or too small."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offload.errors import ConfigError, DoesNotFitError
from offload.files.directories import check_dirs, check_space, file_system, free_bytes, open_nameless
from tests import forks

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="mounts of Linux")
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="mounts and other users need root")
needs_tmpfs = pytest.mark.skipif(
    not Path("/dev/shm").is_dir() or file_system(Path("/dev/shm")) != "tmpfs", reason="/dev/shm is not a tmpfs here"
)


@contextmanager
def memory_at(point: Path) -> Iterator[None]:
    """Mount a tmpfs. Skip the test if mounts are not permitted."""
    if subprocess.run(["mount", "-t", "tmpfs", "none", point], check=False).returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield
    finally:
        subprocess.run(["umount", point], check=True)


class TestRefusals:
    def refused(self, dirs: list[Any], *words: str) -> None:
        with pytest.raises(ConfigError) as refusal:
            check_dirs(dirs)
        for word in ("--offload.nvme_dir", *words):
            assert word in str(refusal.value)

    def test_none(self):
        self.refused([], "no directory")

    def test_missing(self, tmp_path):
        self.refused([tmp_path / "no disk"], "does not exist", f"mkdir -p '{tmp_path}/no disk'")
        assert not (tmp_path / "no disk").exists()

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

    @needs_tmpfs
    def test_memory(self):
        self.refused(["/dev/shm"], "/dev/shm", "tmpfs", "memory")

    @needs_tmpfs
    def test_memory_behind_a_link(self, tmp_path):
        (tmp_path / "link").symlink_to("/dev/shm")
        self.refused([tmp_path / "link"], "tmpfs")

    @needs_root
    def test_memory_mounted_below_a_disk(self, tmp_path):
        (tmp_path / "a b").mkdir()
        with memory_at(tmp_path / "a b"):
            (tmp_path / "a b" / "c").mkdir()
            self.refused([tmp_path / "a b" / "c"], "tmpfs")
            assert file_system(tmp_path / "a bc") != "tmpfs"

    def test_memory_mounted_over_a_disk(self, disk):
        with memory_at(disk):
            self.refused([disk], "tmpfs")

    def test_read_only_mount(self, disk):
        subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
        self.refused([disk], "cannot be written to", "EROFS")

    def test_a_file_system_without_files_of_ours(self):
        self.refused(["/proc"], "cannot be written to")

    @pytest.mark.slow
    @needs_root
    def test_no_permission(self):
        with tempfile.TemporaryDirectory(prefix="directories_") as place:
            Path(place).chmod(0o755)
            code = (
                "import os; from offload.files.directories import check_dirs\n"
                "try:\n    os.setgroups([]); os.setuid(65534); check_dirs([PLACE])\nexcept Exception as error:\n"
                "    print(error)"
            )
            child = forks.run(["-c", code.replace("PLACE", repr(place))])
        assert "cannot be written to: Permission denied (EACCES)" in child.stdout, child.stderr


class TestSpace:
    def test_too_little(self, tmp_path):
        with pytest.raises(DoesNotFitError, match=r"Nothing was created.*--offload.nvme_memory") as refusal:
            check_space([tmp_path], 1 << 60)
        assert str(1 << 60) in str(refusal.value)
        assert refusal.value.exit_code == 3

    def test_directories_of_one_file_system_are_added_up(self, disk, tmp_path):
        elsewhere = tmp_path / "elsewhere"
        places = [disk / "a", disk / "b", elsewhere]
        for path in places:
            path.mkdir()
        free = free_bytes(disk)
        assert 5 << 20 < free < 16 << 20
        check_space(places, free // 2 * 3)
        with pytest.raises(DoesNotFitError) as refusal:
            check_space(places, (free // 2 + 1) * 3)
        message = str(refusal.value)
        need = (free // 2 + 1) * 2
        for number in (need, free, need - free):
            assert f"({number} bytes)" in message
        assert f"{disk}/a, {disk}/b" in message
        assert str(elsewhere) not in message

    def test_what_another_run_has_reserved_is_seen_at_once(self, disk):
        """Reserved space is invisible in the directory, so ranks on a machine check in turn."""
        free = free_bytes(disk)
        check_space([disk], free)
        fd = open_nameless(disk, os.O_RDWR)
        try:
            os.posix_fallocate(fd, 0, 4 << 20)
            with pytest.raises(DoesNotFitError, match="lsof"):
                check_space([disk], free - (4 << 20) + 1)
        finally:
            os.close(fd)
        check_space([disk], free)
