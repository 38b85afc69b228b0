"""If the system refuses a feature, the engine uses the next best and reports this."""

from __future__ import annotations

import platform
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest

from offload.native import kernels
from offload.native.io import IoEngine
from tests.io.children import run, start
from tests.io.memory import pages

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="system call filters and limits of Linux")
in_cpp = pytest.mark.skipif(not kernels.is_native(), reason="the C++ module was not built")
filters = pytest.mark.skipif(platform.machine() not in ("x86_64", "aarch64"), reason="call numbers are not known here")


@pytest.fixture
def uring():
    with IoEngine() as engine:
        if engine.name != "io_uring":
            pytest.skip(f"there is no io_uring: {engine.why or engine.name}")


@pytest.mark.slow
@in_cpp
@filters
@pytest.mark.parametrize(("call", "error"), [("IO_URING_SETUP", "ENOSYS"), ("IO_URING_ENTER", "EPERM")])
def test_io_uring_is_refused(tmp_path, call, error):
    out = run(
        f"""
        num_files = len(os.listdir("/proc/self/fd"))
        forbid({call}, errno.{error})
        try:
            IoEngine("io_uring")
        except ConfigError as refused:
            print(refused)
        assert len(os.listdir("/proc/self/fd")) == num_files
        with IoEngine() as engine:
            print(engine.name, engine.why, sep=": ")
            round_trip(engine, sys.argv[1])
        """,
        tmp_path / "file",
    )
    first, second = out.splitlines()
    assert "io_uring does not work here" in first
    assert second.startswith("threads: the system refuses io_uring: ")
    assert error in first
    assert error in second


@pytest.mark.slow
@in_cpp
@filters
def test_io_uring_is_refused_later(uring, tmp_path):
    """The filter is installed after the start: transfers fail, nothing hangs or spins, and close() works."""
    out = run(
        """
        with IoEngine("io_uring", depth=2, block_bytes=4096) as engine:
            file = round_trip(engine, sys.argv[1], 16 << 20)
            idle = IoEngine("io_uring", depth=2, block_bytes=4096)
            reading = engine.read(file, 0, pages(16 << 20))
            forbid(IO_URING_ENTER, errno.EPERM)
            try:
                reading.wait()
            except DiskError as error:
                assert error.errno == errno.EPERM
            for other, file in [(engine, file), (idle, idle.open(sys.argv[1]))] * 3:
                try:
                    other.read(file, 0, pages(8192)).wait()
                except DiskError as error:
                    assert error.errno == errno.EPERM
            before = time.process_time()
            time.sleep(0.3)
            print(time.process_time() - before < 0.1)
        """,
        tmp_path / "file",
    )
    assert out == "True\n"


@pytest.mark.slow
@filters
def test_o_direct_is_refused(kind, tmp_path):
    out = run(
        """
        import platform
        number = {"x86_64": 257, "aarch64": 56}[platform.machine()]  # openat(folder, path, flags, mode)
        forbid(number, errno.EINVAL, argument=2, bits=os.O_DIRECT)
        with IoEngine(sys.argv[1]) as engine:
            file = round_trip(engine, sys.argv[2])
            print(file.is_direct, file.why_buffered)
            engine.read(file, 3, np.empty(5, np.uint8)).wait()  # without O_DIRECT nothing has to be aligned
        """,
        kind,
        tmp_path / "file",
    )
    assert out.startswith("False the file system of ")
    assert "refuses O_DIRECT" in out


@pytest.mark.slow
@in_cpp
@pytest.mark.parametrize("limit", [0, 512 << 10])
def test_an_ordinary_user_with_little_locked_memory(uring, limit):
    """Registered memory counts against the limit. In some kernels the ring does too."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        out = run(
            """
            pages(1, seed=1)  # imports what the other user may not read
            resource.setrlimit(resource.RLIMIT_MEMLOCK, (int(sys.argv[2]),) * 2)
            if os.getuid() == 0:
                os.setgid(65534)
                os.setuid(65534)
            with IoEngine() as engine:
                print(engine.name, engine.register(pages(1 << 20)), engine.registered_bytes)
                print(engine.why, engine.why_unregistered)
                round_trip(engine, sys.argv[1])
            """,
            Path(folder) / "file",
            limit,
        )
    first, second = out.splitlines()
    name, *registered = first.split()
    assert registered == ["False", "0"]
    if name == "io_uring":
        assert "1 MiB of memory are not registered with the kernel" in second
    else:
        assert (name, limit) == ("threads", 0)
        assert "the system refuses io_uring: " in second
    assert f"may lock {limit >> 10 or '0 B'}" in second


def test_without_the_cpp_module(tmp_path):
    out = run(
        """
        import offload.native.io
        offload.native.io._core = None
        offload.native.io._missing_because = "no compiler"
        with IoEngine() as engine:
            round_trip(engine, sys.argv[1])
            print(engine.name, engine.why, sep=": ")
        """,
        tmp_path / "file",
    )
    assert out == "python: the C++ module is missing (no compiler)\n"


@in_cpp
def test_waiting_sleeps_and_leaves_the_gil(uring):
    """Reads an empty pipe: the waiting thread uses no CPU, and another Python thread writes the byte."""
    out = run("""
        with IoEngine("io_uring") as engine:
            reader, writer = os.pipe()
            memory = pages(1)
            request = engine._backend.submit(False, reader, 0, memory.ctypes.data, 1)
            threading.Timer(0.3, lambda: os.write(writer, b"x")).start()
            before = time.process_time()
            print(engine._backend.wait(request)[0], bytes(memory), time.process_time() - before < 0.1)
    """)
    assert out == "0 b'x' True\n"


@pytest.mark.slow
def test_a_process_that_is_killed(kind, tmp_path):
    """Each sector is either old or new, all other bytes are unchanged, and the file is usable at once."""
    path, size = tmp_path / "file", 64 << 20
    old, new = pages(size, 1), pages(size, 2)
    old.tofile(path)
    process = start(
        """
        engine = IoEngine(sys.argv[1], depth=8, block_bytes=1 << 16)
        file = engine.open(sys.argv[2])
        new = pages(64 << 20, 2)
        print("ready", flush=True)
        while True:
            for begin in range(1 << 20, 63 << 20, 1 << 20):
                engine.write(file, begin, new[begin : begin + (1 << 20)])
        """,
        kind,
        path,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    while np.array_equal(np.fromfile(path, np.uint8, 4096, offset=1 << 20), old[1 << 20 : (1 << 20) + 4096]):
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with IoEngine(kind) as engine:
        back = pages(size)
        engine.read(engine.open(path), 0, back).wait()
    sectors = [array.reshape(-1, 512) for array in (back, old, new)]
    is_old, is_new = ((sectors[0] == other).all(axis=1) for other in sectors[1:])
    assert (is_old | is_new).all()
    assert is_new.any()
    edge = (1 << 20) // 512
    assert is_old[:edge].all()
    assert is_old[-edge:].all()


@pytest.mark.slow
def test_a_child_that_is_forked(kind, tmp_path):
    """The child cannot use the engine, may drop the object, and does not disturb transfers in the parent."""
    out = run(
        """
        engine = IoEngine(sys.argv[1], depth=2, block_bytes=1 << 16)
        source = pages(16 << 20, 1)
        file = engine.open(sys.argv[2], num_bytes=source.nbytes)
        ticket = engine.write(file, 0, source)
        child = os.fork()
        if child == 0:
            for call in (ticket.wait, lambda: engine.read(file, 0, source)):
                try:
                    call()
                except ConfigError as error:
                    assert "forked" in str(error)
                else:
                    os._exit(1)
            engine.close()
            del engine, ticket
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        ticket.wait()
        round_trip(engine, sys.argv[2] + ".other")
        engine.close()
        print(np.array_equal(np.fromfile(sys.argv[2], np.uint8), source))
        """,
        kind,
        tmp_path / "file",
    )
    assert out == "True\n"


@pytest.mark.slow
def test_a_program_that_ends_in_the_middle(kind, tmp_path):
    """Without close() or wait(), the process ends at once and silently."""
    run(
        """
        engine = IoEngine(sys.argv[1], depth=2, block_bytes=4096)
        file = engine.open(sys.argv[2], num_bytes=32 << 20)
        ticket = engine.write(file, 0, pages(32 << 20, 1))
        """,
        kind,
        tmp_path / "file",
    )
    assert (tmp_path / "file").stat().st_size == 32 << 20
