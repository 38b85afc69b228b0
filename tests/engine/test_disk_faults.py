"""Real disk faults in the system: one clear error, or a fallback with one warning. Never a hang, a wrong number or a
leftover file.
"""

from __future__ import annotations

import contextlib
import fcntl
import gc
import hashlib
import json
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from offload import Engine, Placement
from offload.errors import ConfigError, DiskError, OffloadError, TornError
from offload.planning import disk
from offload.planning.settings import parse_throttle
from tests import forks
from tests.cases.models import build, tokens
from tests.disks import mounted, nameless
from tests.engine.device import cpu_only
from tests.engine.inside import disk_files, num_threads, parts_of
from tests.engine.test_giving_up import SOON_S, Told, ends_soon, interrupted
from tests.engine.test_model_files import FILES, engine_of, past_the_cache, saved
from tests.engine.test_overlap import deep
from tests.forks import ROOT
from tests.lanes.patience import eventually
from tests.matrix import matrix, quick

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="faults are injected by means of Linux"),
    pytest.mark.usefixtures("small_tiles"),
]

DEFERRED: dict[str, Any] = {"max_grad_norm": 0.2, "clip": "deferred", "recompute": "always"}
KINDS: dict[str, dict[str, str]] = {  # one state type each, so a failure belongs to this type
    "parameters": {"parameters": "nvme"},
    "optimizer": {"optimizer": "nvme"},
    "gradients": {"gradients": "nvme"},
    "activations": {"activations": "nvme"},
}
ALL = {"parameters": "nvme", "optimizer": "nvme", "gradients": "nvme", "activations": "nvme"}
TILE = 2048
Wanted = Sequence[Sequence[Any]]
"""Per step of a run in memory: the loss, and a hash of the weights afterwards."""


def make(folder: str | os.PathLike[str], placement: dict[str, str], **settings: Any) -> Engine:
    """Return an engine over a few small blocks, with small tiles."""
    disk._LARGEST_TILE = TILE
    return Engine(build(deep), placement=Placement(**placement, nvme_dir=str(folder)), **{**DEFERRED, **settings})


def digest(engine: Engine) -> str:
    """Return a SHA-256 hash of all weights."""
    found = hashlib.sha256()
    for _, value in engine.named_parameters():
        found.update(value.numpy().tobytes())
    return found.hexdigest()


def train(engine: Engine, wanted: Wanted, begin: int, end: int) -> None:
    """Take steps and compare the losses with the wanted ones."""
    for seed in range(begin, end):
        assert engine.step(tokens(seed)).loss.item() == wanted[seed][0], f"the loss of step {seed}"


def until_it_fails(engine: Engine, wanted: Wanted, begin: int) -> tuple[int, OffloadError]:
    """Take steps until one raises. Return the step number and the error. All losses before must be right."""
    for seed in range(begin, begin + 3):
        try:
            train(engine, wanted, seed, seed + 1)
        except OffloadError as error:
            return seed, error
    raise AssertionError("nothing failed")


def is_torn(engine: Engine, wanted: Wanted, num_steps: int) -> bool:
    """Return True for a torn engine. Otherwise the weights must equal those after `num_steps` steps."""
    try:
        assert digest(engine) == wanted[num_steps - 1][1], f"the weights after step {num_steps}"
    except TornError:
        try:
            engine.step(tokens(num_steps))
        except TornError:
            return True
        raise AssertionError("a torn engine took a step") from None
    return False


def names(error: BaseException, *words: object) -> None:
    """Check for the words in the error message."""
    assert not [word for word in words if str(word) not in str(error)], str(error)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yield a folder on a disk. Afterwards no file, thread or warning may remain."""
    threads = num_threads()
    gc.collect()  # earlier tests may have left open files, with a warning each
    with tempfile.TemporaryDirectory(prefix="fault_") as path, warnings.catch_warnings():
        warnings.simplefilter("error")
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


# -- a small test disk -----------------------------------------------------------------------------------------


class Disk:
    """An ext4 file system on a loop device over a file, mounted at `path`."""

    def __init__(self, path: Path) -> None:
        self.path, self._device = path, shell("findmnt", "--noheadings", "--output", "SOURCE", path).strip()
        (path / "lost+found").rmdir()

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


# -- a folder that lacks something -----------------------------------------------------------------------------


def test_a_folder_that_cannot_be_used_is_refused(folder: Path) -> None:
    """tests/files/test_directories.py has each reason."""
    with pytest.raises(ConfigError, match=r"offload\.nvme_dir is .*/it, .*does not exist"):
        make(folder / "it", ALL)


# -- a violent end ---------------------------------------------------------------------------------------------


def child_that_never_closes(folder: str, how: str) -> None:
    """The program ends normally or by an exception, or drops the engine during an update."""
    engine = make(folder, ALL, throttle={"nvme_write": {"latency_seconds": 0.005}})
    engine.step(tokens(0))
    if how == "exception":
        raise ValueError("of the script")
    if how == "dropped":
        del engine
        gc.collect()
        return
    globals()["_kept"] = engine


class Ended(NamedTuple):
    """Exit code and output of a child."""

    code: int
    out: str
    err: str


def run_child(child: Callable[..., None], *arguments: object) -> Ended:
    """Run a function of this module in a forked process, to its end."""
    code = f"import json, sys; from {__name__} import {child.__name__} as child; child(*json.loads(sys.argv[1]))"
    process = forks.start(["-c", code, json.dumps(arguments)], env={**os.environ, "OMP_NUM_THREADS": "1"}, cwd=ROOT)
    try:
        out, err = process.communicate()
        return Ended(process.wait(), out, err)
    finally:
        process.close()


@pytest.mark.slow
@pytest.mark.parametrize("how", quick(["end", "exception", "dropped"], ["exception", "dropped"]))
def test_an_engine_that_nobody_closes(folder: Path, how: str) -> None:
    ended = run_child(child_that_never_closes, str(folder), how)
    assert ended.code == (how == "exception")
    if how == "exception":
        assert ended.err.startswith("Traceback")
        assert ended.err.endswith("ValueError: of the script\n")
        assert "Exception ignored" not in ended.err
    else:
        assert ended.err == ""


def test_an_engine_that_cannot_be_made_leaves_nothing(folder: Path) -> None:
    threads = num_threads()

    def fill(name: str, _module: Any) -> None:
        if name == "lm_head":
            assert nameless(folder)
            raise Told

    def is_gone() -> bool:
        gc.collect()
        return not nameless(folder) and num_threads() <= threads

    with pytest.raises(Told):
        make(folder, ALL, fill=fill)
    assert eventually(is_gone)


# -- a step ends while the disk lanes are busy -----------------------------------------------------------------

GLACIAL = {"nvme_read": {"latency_seconds": 2 * SOON_S}, "nvme_write": {"latency_seconds": 2 * SOON_S}}


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
