"""Any written slices and any read slices give the same bits, in bounded memory."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import itertools
import json
import os
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.app.checkpoint_folder import Checkpoints
from offload.checkpoint import reader as reading
from offload.checkpoint import writer as writing
from offload.checkpoint.manifest import Contents, Entry
from offload.checkpoint.reader import Reader, set_direct, verify
from offload.checkpoint.writer import Save, Writer
from offload.errors import CheckpointError, ConfigError, DiskError
from tests.checkpoint.states import CONTENTS, PLAIN, SPLIT, planes, save
from tests.engine.compare import same_bits
from tests.forks import PATIENCE_S
from tests.lanes.patience import eventually


@contextmanager
def saving(folder: Path, contents: Contents, **settings: Any) -> Iterator[Writer]:
    """Yield a writer for one rank, and publish the checkpoint at the end."""
    with Save(folder) as made, Writer(made.path, 0, contents, **settings) as writer:
        yield writer
        made.commit(contents, [writer.finish()], {})


def refuse_direct(fd: int, is_direct: bool) -> None:
    """Replace `set_direct` on a file system without direct I/O."""
    if is_direct:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
    set_direct(fd, is_direct)


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the chunks read and verified by readers."""
    found, load = list[int](), Reader._load
    monkeypatch.setattr(Reader, "_load", lambda self, *each: (found.append(each[1]), load(self, *each))[1])
    return found


def cut(numel: int, num_cuts: int, rng: random.Random) -> list[tuple[int, int]]:
    """Return slices over `numel` elements in random order."""
    edges = sorted({0, numel, *(rng.randint(0, numel) for _ in range(num_cuts))})
    slices = list(itertools.pairwise(edges))
    rng.shuffle(slices)
    return slices


@pytest.mark.slow
@given(
    seed=st.integers(0, 2**32),
    shapes=st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=5),
    world_size=st.integers(1, 4),
    chunk_bytes=st.sampled_from([1, 3, 64, 4096, 1 << 20]),
    num_cuts=st.integers(0, 6),
)
def test_any_slices(tmp_path_factory, seed, shapes, world_size, chunk_bytes, num_cuts):
    rng = random.Random(seed)
    small = chunk_bytes < 64  # limits the number of chunks
    contents = {
        f"p.{i}": Entry(tuple(n % 4 if small else n for n in shape[: 2 if small else 3]), rng.choice([SPLIT, PLAIN]))
        for i, shape in enumerate(shapes)
    }
    states = {(name, plane): values for name, plane, values in planes(contents, seed)}
    folder = tmp_path_factory.mktemp("any") / "step-1"
    pieces = [(key, *edge) for key, values in states.items() for edge in cut(len(values), num_cuts, rng)]
    rng.shuffle(pieces)
    with Save(folder) as made:
        parts = []
        for rank in range(world_size):
            with Writer(made.path, rank, contents, chunk_bytes=chunk_bytes) as writer:
                for (name, plane), begin, end in pieces[rank::world_size]:
                    piece = states[name, plane][begin:end].clone()
                    writer.write(name, plane, begin, piece)
                    piece.view(torch.uint8).fill_(0xA5)  # the caller may reuse the memory
                parts.append(json.loads(json.dumps(writer.finish())))
        made.commit(contents, parts, {"seed": seed})
    verify(folder)
    with Reader(folder) as reader:
        assert reader.contents == contents
        assert reader.meta == {"seed": seed}
        for (name, plane), values in states.items():
            for begin, end in cut(len(values), num_cuts, rng):
                out = torch.zeros(end - begin, dtype=values.dtype)
                reader.read(name, plane, begin, out)
                assert same_bits(out, values[begin:end])


def test_neighbouring_pieces_are_one_slice(tmp_path):
    contents = {"p": Entry((1000,), {"weights": torch.float32})}
    with Save(tmp_path / "here") as made, Writer(made.path, 0, contents) as writer:
        for begin in range(0, 1000, 10):
            writer.write("p", "weights", begin, torch.zeros(10))
        assert writer.finish()["slices"] == [["p", "weights", [0, 1000, "rank-0.bin", 0]]]


@pytest.mark.parametrize(
    ("slices", "complaint"),
    [
        ([(0, 4), (5, 10)], "elements 4 to 5 of weights of p are missing"),
        ([(1, 10)], "elements 0 to 1 of weights of p are missing"),
        ([(0, 6), (4, 10)], "elements 4 to 6 of weights of p are stored twice"),
        ([(0, 10), (2, 3)], "elements 2 to 3 of weights of p are stored twice"),
        ([(0, 9)], "weights of p has 10 elements, but its slices have 9"),
        ([], "weights of p has 10 elements, but its slices have 0"),
    ],
)
def test_slices_cover_everything_once(tmp_path, slices, complaint):
    contents = {"p": Entry((10,), {"weights": torch.float32})}
    with Save(tmp_path / "here") as made, Writer(made.path, 0, contents) as writer:
        for begin, end in slices:
            writer.write("p", "weights", begin, torch.zeros(end - begin))
        part = writer.finish()
        with pytest.raises(ValueError, match=complaint):
            made.commit(contents, [part], {})
    assert not list(tmp_path.iterdir())


def test_a_file_that_is_not_on_the_disk(tmp_path):
    contents = {"p": Entry((1,), {"weights": torch.float32})}
    with Save(tmp_path / "here") as made, Writer(made.path, 0, contents) as writer:
        writer.write("p", "weights", 0, torch.zeros(1))
        part = writer.finish()
        writer.path.unlink()
        with pytest.raises(DiskError, match="another rank has written"):
            made.commit(contents, [part], {})


@pytest.mark.parametrize(
    ("name", "plane", "begin", "tensor"),
    [
        ("q", "weights", 0, torch.zeros(2)),
        ("p", "low", 0, torch.zeros(2)),
        ("p", "weights", 9, torch.zeros(2)),
        ("p", "weights", -1, torch.zeros(2)),
        ("p", "weights", 0, torch.zeros(2, dtype=torch.bfloat16)),
        ("p", "weights", 0, torch.zeros(4)[::2]),
        ("p", "weights", 0, torch.zeros(2, device="meta")),
    ],
)
def test_what_is_not_there_is_refused(tmp_path, name, plane, begin, tensor):
    contents = {"p": Entry((10,), {"weights": torch.float32})}
    with saving(tmp_path / "here", contents) as writer:
        with pytest.raises(ValueError):
            writer.write(name, plane, begin, tensor)
        writer.write("p", "weights", 0, torch.zeros(10))
    with Reader(tmp_path / "here") as reader, pytest.raises(ValueError):
        reader.read(name, plane, begin, tensor)


def test_a_folder_that_is_no_checkpoint_is_left_alone(tmp_path):
    (tmp_path / "thesis.tex").write_text("precious")
    with pytest.raises(ConfigError, match=r"thesis\.tex"):
        Save(tmp_path)
    with pytest.raises(ConfigError, match="is not a checkpoint"):
        Save(tmp_path / "thesis.tex")


FLAT = {"p": Entry((1 << 20,), {"weights": torch.float32})}  # 4 MiB


TAILED = {"p": Entry(((1 << 16) + 5,), {"weights": torch.float32})}  # four chunks and 20 bytes
VALUES = torch.arange((1 << 16) + 5, dtype=torch.float32)


class TestBounds:
    CHUNK_BYTES = 1 << 16

    def write(self, folder: Path, step_numel: int) -> None:
        values = torch.arange(1 << 20, dtype=torch.float32)
        with saving(folder, FLAT, chunk_bytes=self.CHUNK_BYTES) as writer:
            for begin in range(0, len(values), step_numel):
                writer.write("p", "weights", begin, values[begin : begin + step_numel])

    def test_writes_go_past_the_page_cache_where_there_is_a_way(self, tmp_path, monkeypatch):
        """The bytes are the same without direct I/O, and for a tail shorter than a page."""
        found, asked = [], list[bool]()
        for name, change in (("direct", set_direct), ("buffered", refuse_direct)):
            monkeypatch.setattr(writing, "set_direct", lambda *each, do=change: (asked.append(each[1]), do(*each)))
            with saving(tmp_path / name, TAILED, chunk_bytes=self.CHUNK_BYTES) as writer:
                flags = fcntl.fcntl(writer._file.fileno(), fcntl.F_GETFL)
                writer.write("p", "weights", 0, VALUES)
            verify(tmp_path / name)
            assert name == "direct" or not flags & os.O_DIRECT
            found.append((tmp_path / name / "rank-0.bin").read_bytes())
        assert found == [VALUES.numpy().tobytes()] * 2
        assert asked == [True, False] * 2

    def test_a_writer_waits_for_the_disk(self, tmp_path, monkeypatch):
        gate, write_now, entered = threading.Event(), writing._write_now, threading.Semaphore(0)

        async def slow(fd: int, offset: int, data: Any) -> str:
            entered.release()
            while not gate.is_set():
                await writing.asyncio.sleep(0.001)
            return write_now(fd, offset, data)

        monkeypatch.setattr(writing, "_write", slow)
        writer: list[Writer] = []
        made = Save(tmp_path / "here")

        def run() -> None:
            with Writer(made.path, 0, FLAT, chunk_bytes=self.CHUNK_BYTES) as it:
                writer.append(it)
                it.write("p", "weights", 0, torch.zeros(1 << 20))
                made.commit(FLAT, [it.finish()], {})

        thread = threading.Thread(target=run)
        thread.start()
        for _ in range(writing._IN_FLIGHT):
            assert entered.acquire(timeout=120)
        assert not entered.acquire(timeout=0.2)
        full = writing._BUFFERS * self.CHUNK_BYTES
        assert eventually(lambda: writer[0].num_bytes == full)
        assert writer[0].num_bytes == full, "and no more"
        gate.set()
        thread.join(120)
        verify(tmp_path / "here")

    @pytest.mark.parametrize("refused", ["nothing", "the flag", "the transfer"])
    def test_reads_go_past_the_page_cache_where_there_is_a_way(self, tmp_path, monkeypatch, refused):
        """The bytes are the same without direct I/O, and for a tail shorter than a page."""
        with saving(tmp_path / "it", TAILED, chunk_bytes=self.CHUNK_BYTES) as writer:
            writer.write("p", "weights", 0, VALUES)
        preadv, were_direct = os.preadv, []

        def read(fd: int, *arguments: Any) -> int:
            is_direct = bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT)
            were_direct.append(is_direct)
            if is_direct and refused == "the transfer":
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return preadv(fd, *arguments)

        if refused == "the flag":
            monkeypatch.setattr(reading, "set_direct", refuse_direct)
        monkeypatch.setattr(reading.os, "preadv", read)
        with Reader(tmp_path / "it") as reader:
            flags = fcntl.fcntl(reader._files["rank-0.bin"].fileno(), fcntl.F_GETFL)
            out = torch.empty_like(VALUES)
            reader.read("p", "weights", 0, out)
        assert torch.equal(out, VALUES)
        if refused == "the flag":
            assert not flags & os.O_DIRECT
            assert not any(were_direct)
        elif flags & os.O_DIRECT:  # the file system supports direct I/O
            assert were_direct[0]
            assert all(were_direct) == (refused == "nothing")

    @pytest.mark.parametrize("is_announced", [False, True])
    def test_what_comes_next_is_on_its_way(self, tmp_path, monkeypatch, is_announced):
        """The reader prefetches several chunks of one piece, or announced pieces in the announced order."""
        self.write(tmp_path / "here", 1 << 20)
        numel = self.CHUNK_BYTES // 4
        gate, entered, load = threading.Event(), threading.Semaphore(0), Reader._load
        begun: list[int] = []

        def slow(self: Reader, name: str, index: int, *rest: Any) -> None:
            begun.append(index)
            entered.release()
            assert gate.wait(120)
            load(self, name, index, *rest)

        monkeypatch.setattr(Reader, "_load", slow)
        numbers = range(8) if not is_announced else (7, 60, 3, 22, 11, 5)
        out = torch.empty(numel * (len(numbers) if not is_announced else 1))
        with Reader(tmp_path / "here") as reader:
            if is_announced:
                reader.expect(("p", "weights", number * numel, numel) for number in numbers)
            thread = threading.Thread(target=reader.read, args=("p", "weights", numbers[0] * numel, out))
            thread.start()
            for _ in range(reading._AHEAD):
                assert entered.acquire(timeout=120)
            assert set(begun) == set(numbers[: reading._AHEAD])
            gate.set()
            thread.join(120)
            assert torch.equal(out, torch.arange(len(out), dtype=torch.float32) + numbers[0] * numel)
            for number in numbers[1:] if is_announced else ():
                reader.read("p", "weights", number * numel, out)
                assert out[0] == number * numel
        assert len(begun) == len(numbers)

    def test_the_threads_and_files_of_a_reader_end(self, tmp_path):
        self.write(tmp_path / "here", 1 << 20)
        with (tmp_path / "here" / "rank-0.bin").open("r+b") as stream:
            stream.seek(self.CHUNK_BYTES)
            stream.write(b"damage")
        threads, files = threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))
        with pytest.raises(CheckpointError), Reader(tmp_path / "here") as reader:  # noqa: PT012
            assert len(list(Path("/proc/self/fd").iterdir())) > files
            reader.read("p", "weights", 0, torch.empty(1 << 20))
        assert (threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))) == (threads, files)

    def test_planes_read_by_turns_verify_nothing_twice(self, tmp_path, loads):
        contents = {"p": Entry((1 << 16,), SPLIT)}
        with saving(tmp_path / "here", contents, chunk_bytes=1 << 14) as writer:
            for name, plane, values in planes(contents, 1):
                writer.write(name, plane, 0, values)
        with Reader(tmp_path / "here") as reader:
            for begin in range(0, 1 << 16, 1 << 10):
                for plane, dtype in SPLIT.items():
                    reader.read("p", plane, begin, torch.empty(1 << 10, dtype=dtype))
        assert sorted(loads) == list(range(len(loads)))

    def test_kept_chunks_are_bounded(self, tmp_path):
        self.write(tmp_path / "here", 1 << 20)
        with Reader(tmp_path / "here") as reader:
            for begin in random.Random(0).sample(range(1 << 20), 200):
                out = torch.empty(1)
                reader.read("p", "weights", begin, out)
                assert out == begin
            assert len(reader._kept) == reading._KEPT_CHUNKS


def test_the_threads_end(tmp_path):
    before = threading.active_count()
    save(Checkpoints(tmp_path), 1)
    with Save(tmp_path / "other") as made, Writer(made.path, 0, CONTENTS) as writer:
        writer.write("frozen", "weights", 0, torch.zeros(129, dtype=torch.bfloat16))
    with Save(tmp_path / "other") as made:
        (made.path / "rank-0.bin").touch()
        with pytest.raises(DiskError, match="File exists"):
            Writer(made.path, 0, CONTENTS)
    assert threading.active_count() == before
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["latest", "step-1"]


def test_an_end_that_was_interrupted_may_be_asked_for_again_at_once(tmp_path):
    """An interrupt can end the wait for a close before it begins. Leaving the block then closes the file again."""
    gate = threading.Event()
    with Save(tmp_path / "here") as made, Writer(made.path, 0, CONTENTS) as writer:
        writer._loop.call_soon_threadsafe(gate.wait)
        ends = [asyncio.run_coroutine_threadsafe(writer._close(syncs), writer._loop) for syncs in (True, False)]
        gate.set()
        for end in ends:
            end.result(timeout=PATIENCE_S)
