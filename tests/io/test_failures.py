"""Every failure is one clear error, and harms nothing else."""

from __future__ import annotations

import errno
import gc
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from offload.errors import ConfigError, DiskError
from offload.native.io import IoEngine
from tests.disks import mounted
from tests.io.children import run
from tests.io.memory import pages
from tests.lanes.patience import eventually

MIB = 1 << 20


def test_the_file_ends_too_early(engine_of, kind, tmp_path):
    engine = engine_of(kind, depth=2, block_bytes=4096)
    path = tmp_path / "file"
    file = engine.open(path, num_bytes=MIB)
    os.truncate(path, 10_000)
    ticket = engine.read(file, 0, pages(MIB))
    for _ in range(2):  # every wait raises
        with pytest.raises(DiskError, match=r"reached the end of the file after \d+ bytes: .* truncated") as caught:
            ticket.wait()
    error = caught.value
    assert (error.errno, error.path, error.num_bytes) == (0, path, 4096)
    assert error.offset >= 8192
    assert str(path) in str(error)
    back = pages(8192)
    engine.read(file, 0, back).wait()  # the engine still works


def test_a_write_to_a_file_that_is_read_only(engine_of, kind, tmp_path):
    engine = engine_of(kind, block_bytes=4096)
    path = tmp_path / "file"
    path.write_bytes(bytes(16384))
    file = engine.open(path, writable=False)
    with pytest.raises(DiskError, match=r"write of 4096 bytes at offset \d+ of .*EBADF") as caught:
        engine.write(file, 4096, pages(8192, 1)).wait()
    assert caught.value.errno == errno.EBADF
    assert caught.value.offset in (4096, 8192)
    assert path.read_bytes() == bytes(16384)


@pytest.mark.slow
def test_a_limit_on_the_size_of_files(kind, tmp_path):
    """The first blocks are written, a short transfer is completed, and then the error names the place."""
    out = run(
        """
        resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
        with IoEngine(sys.argv[1], depth=1, block_bytes=8192) as engine:
            file = engine.open(sys.argv[2], num_bytes=4096, direct=False)
            try:
                engine.write(file, 0, pages(65536, 3)).wait()
            except DiskError as error:
                print(error.errno == errno.EFBIG, error.offset, error.num_bytes)
        print(np.array_equal(np.fromfile(sys.argv[2], np.uint8), pages(65536, 3)[:20000]))
        """,
        kind,
        tmp_path / "file",
    )
    assert out.split() == ["True", "16384", "8192", "True"]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 16 MiB."""
    with mounted(tmp_path, 16 * MIB) as folder:
        yield folder


def test_a_full_disk(kind, small_disk):
    with IoEngine(kind, block_bytes=MIB) as engine:
        file = engine.open(small_disk / "file", num_bytes=MIB)
        with pytest.raises(DiskError, match="ENOSPC.*, with .* free; the file system is full: free space") as caught:
            engine.write(file, 0, pages(32 * MIB, 1)).wait()
        assert caught.value.errno == errno.ENOSPC
        assert caught.value.offset % MIB == 0
        with pytest.raises(DiskError, match="reservation of 33554432 bytes of .*ENOSPC"):
            engine.open(small_disk / "other", num_bytes=32 * MIB)
        (small_disk / "other").unlink()
        file.close()
        file.path.unlink()
        assert shutil.disk_usage(small_disk).free > 12 * MIB  # no open handle keeps the file


def num_open() -> int:
    return sum(link.exists() for link in Path("/proc/self/fd").iterdir())  # excludes the closed listing descriptor


def num_threads() -> int:
    return len(list(Path("/proc/self/task").iterdir()))


def test_opening_fails(engine_of, tmp_path):
    engine = engine_of("auto")
    before = num_open()
    with pytest.raises(DiskError, match=r"opening of .*missing.* failed: .*ENOENT") as caught:
        engine.open(tmp_path / "missing" / "file", num_bytes=1)
    assert caught.value.errno == errno.ENOENT
    with pytest.raises(DiskError, match="ENOENT"):
        engine.open(tmp_path / "file")
    assert num_open() == before


def test_what_is_wrong_at_once(engine_of, kind, tmp_path):
    engine = engine_of(kind)
    file = engine.open(tmp_path / "file", num_bytes=16384)
    page = pages(8192)
    for offset, array in ((1, page), (0, page[:100]), (0, page[512:4608]), (-4096, page)):
        with pytest.raises(ConfigError, match="multiples of 4096"):
            engine.read(file, offset, array)
    fixed = pages(4096)
    fixed.flags.writeable = False
    for array, words in ((page.reshape(2, 4096).T, "not contiguous"), ([0] * 4096, "is a list"), (fixed, "read-only")):
        with pytest.raises(ConfigError, match=words):
            engine.read(file, 0, array)
    engine.write(file, 0, page).wait()
    with IoEngine() as other, pytest.raises(ConfigError, match="not open in this engine"):
        other.write(file, 0, page)
    file.close()
    file.close()
    with pytest.raises(ConfigError, match="not open in this engine"):
        engine.write(file, 0, page)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kind": "io-uring"}, "did you mean io_uring"),
        ({"depth": 0}, "depth is 0"),
        ({"block_bytes": 5000}, "multiple of 4096"),
        ({"block_bytes": 2 << 30}, "at most 1 GiB"),
    ],
)
def test_wrong_options(options, message):
    with pytest.raises(ConfigError, match=message):
        IoEngine(**options)


def test_closing_carries_out_what_was_begun(kind, tmp_path):
    source = pages(8 * MIB, 1)
    with IoEngine(kind, depth=2, block_bytes=1 << 16) as engine:
        file = engine.open(tmp_path / "file", num_bytes=source.nbytes)
        for begin in range(0, source.nbytes, MIB):
            engine.write(file, begin, source[begin : begin + MIB])
    engine.close()
    assert np.array_equal(np.fromfile(tmp_path / "file", np.uint8), source)
    with pytest.raises(ConfigError, match="closed"):
        engine.write(file, 0, source)


def test_memory_outlives_its_transfer(kind, tmp_path):
    """Ticket and array have no other reference, and the engine is dropped without close()."""
    path = tmp_path / "file"
    engine = IoEngine(kind, depth=2, block_bytes=1 << 16)
    file = engine.open(path, num_bytes=8 * MIB)
    engine.write(file, 0, pages(8 * MIB, 1))
    del engine, file
    gc.collect()
    assert np.array_equal(np.fromfile(path, np.uint8), pages(8 * MIB, 1))


def test_an_error_that_nobody_waited_for(kind, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    engine = IoEngine(kind)
    file = engine.open(path, writable=False)
    engine.write(file, 0, pages(4096))
    with pytest.raises(DiskError, match="EBADF"):
        file.close()
    file = engine.open(path, writable=False)
    engine.write(file, 0, pages(4096))
    with pytest.raises(DiskError, match="EBADF"):
        engine.close()
    engine = IoEngine(kind)
    engine.write(engine.open(path, writable=False), 0, pages(4096))
    with pytest.raises(KeyError), engine:  # the first error wins
        raise KeyError


def test_nothing_is_left(kind, tmp_path):
    before = num_open(), num_threads()
    for _ in range(20):
        with IoEngine(kind, depth=8) as engine:
            engine.register(pages(MIB))
            engine.register(pages(0))
            file = engine.open(tmp_path / "file", num_bytes=MIB)
            engine.write(file, 0, pages(MIB)).wait()
    # Joining a Python thread returns just before the system ends the thread.
    assert eventually(lambda: num_threads() <= before[1]), "one of an earlier test may have ended meanwhile"
    assert num_open() == before[0]
