"""Real disk faults in the system: one clear error, or a fallback with one warning. Never a hang, a wrong number or a
leftover file.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import json
import os
import platform
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from offload import Engine, Placement
from offload.engine.gradients.flow import GradientFlow
from offload.errors import DiskError, TornError
from offload.files.directories import file_system
from offload.native import kernels
from offload.planning.settings import parse_throttle
from tests.cases.models import build, tokens
from tests.cli.conftest import LLAMA, SENTENCE
from tests.disks import mounted, nameless
from tests.engine.device import cpu_only
from tests.engine.disk_children import (
    ALL,
    CALLS,
    DEFERRED,
    KINDS,
    NOBODY,
    Children,
    Ended,
    Wanted,
    child_command,
    child_in_which_a_call_fails,
    child_that_never_closes,
    child_that_reads_files_through_the_cache,
    digest,
    end,
    is_torn,
    make,
    names,
    train,
    until_it_fails,
)
from tests.engine.handmade import Stack, cross_entropy, words
from tests.engine.inside import disk_files, num_threads, parts_of
from tests.engine.test_giving_up import SOON_S, Breaks, Told, ends_soon, interrupted
from tests.engine.test_model_files import FILES, engine_of, past_the_cache, saved
from tests.engine.test_overlap import deep
from tests.lanes.patience import eventually
from tests.matrix import matrix, quick

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="faults are injected by means of Linux"),
    pytest.mark.usefixtures("small_tiles"),
]
filters = pytest.mark.skipif(platform.machine() not in CALLS, reason="call numbers are not known here")
in_cpp = pytest.mark.skipif(not kernels.is_native(), reason="the C++ module was not built")


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder on a disk, writable for every user. Afterwards no file, thread or warning may remain."""
    threads = num_threads()
    gc.collect()  # earlier tests may have left open files, with a warning each
    with tempfile.TemporaryDirectory(prefix="fault_") as path, warnings.catch_warnings():
        warnings.simplefilter("error")
        Path(path).chmod(0o777)
        yield Path(path)
        assert inside(Path(path)) == []
        assert nameless(Path(path)) == []
    assert num_threads() <= threads


@pytest.fixture(scope="module")
def wanted() -> Wanted:
    """Return (loss, hash of the weights) per step, from training in memory."""
    engine = Engine(build(deep), **DEFERRED)
    found = [(engine.step(tokens(seed)).loss.item(), digest(engine)) for seed in range(8)]
    engine.close()
    return found


@pytest.fixture(scope="module")
def children(tmp_path_factory: pytest.TempPathFactory) -> Children:
    return Children(tmp_path_factory.mktemp("cache"))


# -- a small test disk -----------------------------------------------------------------------------------------


class Disk:
    """An ext4 file system on a loop device over a file, mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path, self._device = path, shell("findmnt", "--noheadings", "--output", "SOURCE", path).strip()
        (path / "lost+found").rmdir()
        path.chmod(0o777)

    def end_at(self, file: Path | None) -> None:
        """End the device before the data of `file`: the kernel fails transfers beyond with EIO. None: restore the full
        size.
        """
        end = 0
        if file is not None:
            with file.open("rb") as opened:
                end = 4096 * struct.unpack("i", fcntl.ioctl(opened, 1, bytes(4)))[0]  # FIBMAP of block 0
            assert end
        with Path(self._device).open("rb") as device:
            status = bytearray(fcntl.ioctl(device, 0x4C05, bytes(232)))  # LOOP_GET_STATUS64
            struct.pack_into("Q", status, 32, end)  # lo_sizelimit
            fcntl.ioctl(device, 0x4C04, bytes(status))  # LOOP_SET_STATUS64

    def die(self) -> None:
        """Fail all later transfers, like an unplugged disk."""
        fd = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(fd, 0x8004587D, struct.pack("I", 2))  # EXT4_IOC_SHUTDOWN, without a flush
        finally:
            os.close(fd)

    def fill(self, left_bytes: int) -> Path:
        """Fill the disk with other data until `left_bytes` remain."""
        data = self.path / "other data"
        status = os.statvfs(self.path)
        with data.open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, status.f_bavail * status.f_frsize - left_bytes)
        return data


def shell(*words: object) -> str:
    return subprocess.run([str(word) for word in words], capture_output=True, check=True, text=True).stdout


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Disk]:
    threads = num_threads()
    with mounted(tmp_path, 16 << 20, "-b", "4096", "-O", "^has_journal") as path:
        found = Disk(path)
        try:
            yield found
        finally:
            found.end_at(None)  # otherwise umount waits forever for pending writes
    assert num_threads() <= threads


def inside(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()]


# -- the disk is full ------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_disk_fills_while_activations_grow(small_disk: Disk, wanted: Wanted) -> None:
    engine = make(small_disk.path, {**ALL, "nvme_memory": "4MiB"})
    train(engine, wanted, 0, 2)
    other, held = small_disk.fill(4096), engine.allocations
    for _ in range(2):
        with ends_soon(), pytest.raises(DiskError) as caught:
            engine.step(tokens(9, rows=64))
        names(caught.value, small_disk.path, "ENOSPC", "free space", "bytes")
    assert [a for a in engine.allocations if a[0] == "nvme"] == [a for a in held if a[0] == "nvme"]
    other.unlink()
    train(engine, wanted, 2, 4)
    engine.step(tokens(9, rows=64))
    engine.close()
    assert inside(small_disk.path) == []


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Yield the working folder for commands of any user, with a model and a text."""
    with tempfile.TemporaryDirectory(prefix="fault_") as path:
        Path(path).chmod(0o777)
        Path(path, "llama.json").write_text(json.dumps(LLAMA))
        Path(path, "text.txt").write_text("\n".join(f"{number} {SENTENCE * 3}" for number in range(60)))
        yield Path(path)


Command = Callable[..., Ended]


def words_for(nvme_dir: Path, run: str) -> list[str]:
    return [
        *("--model.path", "llama.json", "--data.source", "text.txt", "--data.sequence_length", "32"),
        *("--train.steps", "3", "--train.batch_size", "2", "--train.recompute", "always", "--run.dir", run),
        *("--offload.parameters", "nvme", "--offload.optimizer", "nvme", "--offload.nvme_dir", str(nvme_dir)),
    ]


@pytest.fixture
def command(children: Children, here: Path, request: pytest.FixtureRequest) -> Command:
    """Return a function that runs `python -m offload.train` on a tiny model with states in `nvme_dir`."""

    def run(nvme_dir: Path, *more: object, uid: int = 0) -> Ended:
        words = [*words_for(nvme_dir, request.node.name), *map(str, more)]
        return end(children.start(child_command, "offload.train", words, uid, cwd=here))

    return run


def paragraph(ended: Ended, code: int, *words: object) -> None:
    """Assert that the command ended with `code` and a one-paragraph error containing `words`."""
    assert ended.code == code, ended.err
    found = [line for line in ended.err.splitlines() if line.startswith("offload: ")]
    assert len(found) == 1
    assert ended.err.endswith(found[0] + "\n")
    assert "Traceback" not in ended.err + ended.out
    assert not [word for word in words if str(word) not in found[0]], found[0]


@pytest.mark.slow
def test_the_disk_is_full_before_a_command_or_in_the_middle(small_disk: Disk, command: Command) -> None:
    for left, code, more, said in (
        # the states need 400 KB
        (1 << 19, 1, ("--offload.activations", "nvme", "--train.batch_size", "60"), ("ENOSPC", "bytes", "free space")),
        (8192, 3, (), ("8192 bytes", "too little", "--offload.nvme_dir")),
    ):
        other = small_disk.fill(left)
        paragraph(command(small_disk.path, *more), code, small_disk.path, *said)
        assert inside(small_disk.path) == ["other data"]
        other.unlink()


# -- the disk fails --------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_disk_that_fails_for_a_while(small_disk: Disk, kind: str, wanted: Wanted) -> None:
    """The kernel fails each transfer with EIO, then heals; the same engine continues."""
    engine = make(small_disk.path, KINDS[kind])
    train(engine, wanted, 0, 2)
    assert digest(engine) == wanted[1][1]
    small_disk.end_at(disk_files(engine, "activations" if kind == "activations" else "states")[0])
    with ends_soon():
        seed, error = until_it_fails(engine, wanted, 2)
    names(error, small_disk.path, "EIO", "bytes", "offset", "use another disk")
    small_disk.end_at(None)
    torn = is_torn(engine, wanted, seed)
    if kind == "activations":  # a step that fails has no use for activations
        assert isinstance(error, DiskError)
        assert not torn
    if not torn:
        with contextlib.suppress(DiskError):  # a prefetch begun before the disk healed
            engine.evaluate(tokens(9))
        train(engine, wanted, seed, seed + 2)
    with ends_soon():
        engine.close()
    assert inside(small_disk.path) == []


@pytest.mark.slow
def test_the_disk_of_the_models_own_files_fails(small_disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fails during a step with the base read from model files. Nothing is trained, and training resumes once
    the disk heals.
    """
    past_the_cache(monkeypatch)
    folder = saved(small_disk.path / "model")
    memory, engine = engine_of(folder), engine_of(folder, placement=FILES, prefetch=0)
    wanted = [memory.step(tokens(seed)).loss.item() for seed in range(3)]
    assert engine.step(tokens(0)).loss.item() == wanted[0]
    layer: Any = engine.model.get_submodule("model.layers.1")
    file = folder / "model.safetensors"
    handle = layer.register_forward_pre_hook(lambda *_: small_disk.end_at(file))
    with ends_soon(), pytest.raises(DiskError) as caught:
        engine.step(tokens(1))
    names(caught.value, file, "EIO", "bytes", "offset", "use another disk")
    handle.remove()
    small_disk.end_at(None)
    assert [engine.step(tokens(seed)).loss.item() for seed in (1, 2)] == wanted[1:]
    engine.close()
    shutil.rmtree(folder)


@pytest.mark.slow
@filters
@in_cpp
@matrix(strength=1, kind=list(KINDS), call=["pread", "pwrite"])
def test_only_reads_or_only_writes_fail(children: Children, folder: Path, kind: str, call: str, wanted: Wanted) -> None:
    seed, torn, _ = json.loads(children.run(child_in_which_a_call_fails, str(folder), kind, call, wanted))
    harmless = (kind, call) in [("parameters", "pread"), ("activations", "pread"), ("activations", "pwrite")]
    either = (kind, call) == ("optimizer", "pread")  # the first of these states are read before the updates
    assert either or torn != harmless, "a step is given up before its updates, or torn in them"
    assert seed == 2 or not harmless


@pytest.mark.slow
def test_a_disk_that_goes_away(small_disk: Disk, wanted: Wanted) -> None:
    engine = make(small_disk.path, ALL)
    train(engine, wanted, 0, 2)
    small_disk.die()
    with ends_soon():
        _, error = until_it_fails(engine, wanted, 2)
    names(error, small_disk.path, "EIO")
    with ends_soon():
        engine.close()


@pytest.mark.slow
def test_the_folder_is_removed_under_the_run(folder: Path, wanted: Wanted) -> None:
    place = folder / "place"
    place.mkdir()
    engine = make(place, ALL)
    train(engine, wanted, 0, 2)
    place.rmdir()
    train(engine, wanted, 2, 5)
    engine.step(tokens(9, rows=8))  # the files keep growing
    engine.close()


# -- unusable folders ------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("what", ["missing", "a file", "tmpfs", "not writable", "read-only"])
def test_a_folder_that_cannot_be_used(
    what: str, folder: Path, request: pytest.FixtureRequest, command: Command
) -> None:
    uid, path, reason = 0, folder / "it", "does not exist"
    with contextlib.ExitStack() as after:
        if what == "a file":
            path.touch()
            after.callback(path.unlink)
            reason = "is a file"
        elif what == "tmpfs":
            path, reason = Path("/dev/shm"), "on tmpfs"
            if not path.is_dir() or file_system(path) != "tmpfs":
                pytest.skip("there is no tmpfs at /dev/shm")
        elif what == "not writable":
            if os.getuid():
                pytest.skip("only root can become another user")
            path.mkdir(0o755)
            after.callback(path.rmdir)
            uid, reason = NOBODY, "EACCES"
        elif what == "read-only":
            path = request.getfixturevalue("small_disk").path
            shell("mount", "-o", "remount,ro", path)
            after.callback(shell, "mount", "-o", "remount,rw", path)
            reason = "EROFS"
        paragraph(command(path, uid=uid), 2, f"offload.nvme_dir is {path}", reason, "--offload.nvme_dir")


# -- optional system features are refused ----------------------------------------------------------------------


@pytest.mark.slow
@filters
def test_the_models_own_files_are_read_without_o_direct(children: Children, folder: Path) -> None:
    saved(folder / "model")
    wanted = engine_of(folder / "model").step(tokens(0)).loss.item()
    found, messages = json.loads(children.run(child_that_reads_files_through_the_cache, str(folder / "model")))
    assert found == wanted
    assert len(messages) == 1, messages
    assert "refuses O_DIRECT: transfers go through the page cache" in messages[0]
    shutil.rmtree(folder / "model")


# -- a violent end ---------------------------------------------------------------------------------------------

SLOWLY = ("--train.steps", "1000", "--offload.throttle", "{nvme_write: {latency_seconds: 0.02}}")


@pytest.mark.slow
@pytest.mark.parametrize("number", quick([signal.SIGTERM, signal.SIGINT], [signal.SIGINT]))
def test_a_signal_in_the_middle_of_a_command(children: Children, here: Path, folder: Path, number: int) -> None:
    run = f"signal-{number}"
    process = children.start(child_command, "offload.train", [*words_for(folder, run), *SLOWLY], cwd=here)
    assert eventually((here / run / "metrics.jsonl").exists)
    assert nameless(folder, process.pid)
    process.send_signal(number)
    paragraph(end(process), 130, f"interrupted by {signal.Signals(number).name}", "saved in")


@pytest.mark.slow
@pytest.mark.parametrize("how", quick(["end", "exception", "dropped"], ["exception", "dropped"]))
def test_an_engine_that_nobody_closes(children: Children, folder: Path, how: str) -> None:
    ended = end(children.start(child_that_never_closes, str(folder), how))
    assert ended.code == (how == "exception")
    if how == "exception":
        assert ended.err.startswith("Traceback")
        assert ended.err.endswith("ValueError: of the script\n")
        assert "Exception ignored" not in ended.err
    else:
        assert ended.err == ""


@contextmanager
def goes_away(folder: Path) -> Iterator[None]:
    """Assert that the threads started in the block end, and that the files in `folder` go."""
    before = set(threading.enumerate())
    yield
    mine = {thread for thread in threading.enumerate() if thread.name.startswith("offload ")} - before

    def is_gone() -> bool:
        gc.collect()
        return not nameless(folder) and not any(thread.is_alive() for thread in mine)

    try:
        assert eventually(is_gone)
    finally:
        for thread in mine:
            if thread.is_alive():  # other tests count threads
                thread._target.__self__.close()


@pytest.mark.slow
def test_an_engine_that_is_dropped_lets_go_of_its_files(folder: Path, wanted: Wanted) -> None:
    with goes_away(folder):
        engine = make(folder, ALL)
        train(engine, wanted, 0, 2)
        del engine


def test_an_engine_that_cannot_be_made_leaves_nothing(folder: Path) -> None:
    def fill(name: str, _module: Any) -> None:
        if name == "lm_head":
            assert nameless(folder)
            raise Told

    with goes_away(folder), pytest.raises(Told):
        make(folder, ALL, fill=fill)


# -- a step ends while the disk lanes are busy -----------------------------------------------------------------

GLACIAL = {"nvme_read": {"latency_seconds": 2 * SOON_S}, "nvme_write": {"latency_seconds": 2 * SOON_S}}
BUSY = {"nvme_read": {"latency_seconds": 0.004}, "nvme_write": {"latency_seconds": 0.008}}


@pytest.mark.slow
@cpu_only("torch lets a Ctrl-C in once the backward is over, which autograd runs in another thread there")
@pytest.mark.usefixtures("nothing_collected")
@matrix(strength=1, delay_s=[0.1, 0.6], kind=list(KINDS))
def test_ctrl_c_while_the_disk_crawls(folder: Path, kind: str, delay_s: float) -> None:
    engine = Engine(build(deep), placement=Placement(**KINDS[kind], nvme_dir=folder), throttle={}, **DEFERRED)
    for lane, throttle in parse_throttle(GLACIAL).items():
        parts_of(engine).lanes.links[lane].throttle = throttle
    with interrupted(after_s=delay_s):
        for seed in range(100):
            engine.step(tokens(seed))
    with ends_soon():
        engine.close()


@pytest.mark.slow
def test_an_exception_between_autograd_and_its_hook(folder: Path, wanted: Wanted, monkeypatch: Any) -> None:
    """Where a Ctrl-C is raised that came while autograd was in C++."""
    engine = make(folder, ALL)
    train(engine, wanted, 0, 2)

    real, breaks = GradientFlow.take, [True]

    def take(*given: Any) -> None:
        if breaks:
            breaks.clear()
            raise Told
        real(*given)

    monkeypatch.setattr(GradientFlow, "take", take)
    for unit in parts_of(engine).units:  # hooks are set where parameters are made
        unit._live.clear()
    with pytest.raises(Told):
        engine.step(tokens(9))
    with contextlib.closing(engine):
        train(engine, wanted, 2, 5)


@pytest.mark.slow
@matrix(strength=1, where=["forward", "backward"], kind=[*KINDS, "all"], clip=["deferred", "speculative"])
def test_an_exception_while_the_disk_is_busy(folder: Path, where: str, kind: str, clip: str) -> None:
    settings = DEFERRED | {"clip": clip}
    undisturbed = Engine(build(lambda: Stack(Breaks)), **settings)
    engine = Engine(
        build(lambda: Stack(Breaks)),
        placement=Placement(**(KINDS | {"all": ALL})[kind], nvme_dir=folder),
        throttle=BUSY,
        **settings,
    )

    def step(engine: Engine, seed: int) -> float:
        return engine.step(words(seed), loss_fn=cross_entropy).loss.item()

    for seed in range(3):
        assert step(engine, seed) == step(undisturbed, seed)
    engine.model.blocks[1].left = 0 if where == "forward" else 1
    with ends_soon(), pytest.raises(Told):
        step(engine, 9)
    if where == "backward" and clip == "speculative":
        with pytest.raises(TornError):
            step(engine, 3)
    else:
        for seed in range(3, 6):
            assert step(engine, seed) == step(undisturbed, seed)
        assert digest(engine) == digest(undisturbed)
    for one in (engine, undisturbed):
        with ends_soon():
            one.close()
