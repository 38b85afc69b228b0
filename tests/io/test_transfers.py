"""Reads return the written bytes, for every engine, all sizes and concurrent users."""

from __future__ import annotations

import itertools
import random
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from offload.native.io import ALIGNMENT_BYTES, IoEngine
from tests.io.memory import pages

SIZE = 3 << 20


def segments(rng: random.Random, unit: int) -> list[tuple[int, int]]:
    """Cut the file into pieces with random sizes, all multiples of `unit`."""
    cuts = sorted({0, SIZE, *(rng.randrange(SIZE // unit) * unit for _ in range(rng.randrange(60)))})
    return list(itertools.pairwise(cuts))


@pytest.mark.slow
@pytest.mark.parametrize(("direct", "registered", "seed"), [(True, True, 0), (False, True, 1), (True, False, 2)])
def test_many_requests_at_once(engine_of, kind, tmp_path, direct, registered, seed):
    rng = random.Random(seed)
    unit = ALIGNMENT_BYTES if direct else 1
    block_bytes = rng.choice([4096, 3 * 4096, 1 << 16, 1 << 20])
    engine = engine_of(kind, depth=rng.choice([1, 2, 5, 32]), block_bytes=block_bytes)
    path = tmp_path / "file"
    file = engine.open(path, num_bytes=SIZE, direct=direct)
    assert file.is_direct == direct
    expected = np.zeros(SIZE, np.uint8)
    source, target = pages(SIZE, seed), pages(SIZE)
    if registered:
        assert engine.register(source[: SIZE // 2]) == (kind == "io_uring")
        engine.register(target)
    for _ in range(4):
        tickets = []
        source[:] = np.roll(source, 1)
        target[:] = 255
        pieces = segments(rng, unit)
        rng.shuffle(pieces)
        written = [rng.random() < 0.5 for _ in pieces]
        for (begin, end), is_write in zip(pieces, written, strict=True):
            move, memory = (engine.write, source) if is_write else (engine.read, target)
            tickets.append(move(file, begin, memory[begin:end]))
            if not is_write:  # read the same place twice at once, into different memory
                tickets.append(engine.read(file, begin, pages(end - begin)))
        rng.shuffle(tickets)
        for ticket in tickets:
            ticket.wait()
            assert ticket.is_done()
        for (begin, end), is_write in zip(pieces, written, strict=True):
            if is_write:
                expected[begin:end] = source[begin:end]
                assert (target[begin:end] == 255).all()
            else:
                assert np.array_equal(target[begin:end], expected[begin:end])
        file.sync()
        assert np.array_equal(np.fromfile(path, np.uint8), expected)


def test_two_engines_and_several_threads(engine_of, kind, tmp_path):
    """A read lane and a write lane with separate engines, and callers with a shared engine."""
    engines = [engine_of(kind, depth=4, block_bytes=1 << 16) for _ in range(2)]
    files = [engine.open(tmp_path / "file", num_bytes=SIZE) for engine in engines]
    source, wrong = pages(SIZE, 1), []
    part = SIZE // 4

    def work(number: int) -> None:
        begin = number * part
        writer, reader = number % 2, (number + number // 2) % 2
        back = pages(part)
        for _ in range(10):
            engines[writer].write(files[writer], begin, source[begin : begin + part]).wait()
            back[:] = 0
            engines[reader].read(files[reader], begin, back).wait()
            if not np.array_equal(back, source[begin : begin + part]):
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int16])
def test_tensors(engine_of, kind, tmp_path, dtype):
    engine = engine_of(kind)
    whole = torch.frombuffer(pages(1 << 16).base, dtype=dtype)
    file = engine.open(tmp_path / "file", num_bytes=1 << 16)
    whole.copy_(torch.arange(whole.numel()) % 97)
    expected = whole.clone()
    engine.write(file, 0, whole).wait()
    whole.zero_()
    engine.read(file, 0, whole[: whole.numel() // 2]).wait()
    half = whole.numel() // 2
    assert torch.equal(whole[:half], expected[:half])
    assert not whole[half:].any()
    engine.read(file, 4096, whole[:0]).wait()  # an empty transfer completes at once


def test_short_transfers_are_completed(engine_of, kind):
    """The kernel returns this file in pieces below a page, and refuses O_DIRECT."""
    path = Path("/proc/kallsyms")
    if not path.exists():
        pytest.skip("there is no /proc/kallsyms")
    expected = path.read_bytes()[: 1 << 16]
    with path.open("rb", buffering=0) as plain:
        if len(plain.read(1 << 16)) == 1 << 16:
            pytest.skip("the kernel gives all of /proc/kallsyms at once")
    engine = engine_of(kind, block_bytes=5 * 4096)
    file = engine.open(path, writable=False)
    assert not file.is_direct
    assert "refuses O_DIRECT" in file.why_buffered
    back = pages(1 << 16)
    engine.read(file, 0, back).wait()
    assert back.tobytes() == expected


def test_writes_are_not_held_back_by_reads(tmp_path):
    """Reads and writes alternate: a write completes long before earlier reads."""
    with IoEngine("auto", depth=1, block_bytes=4096) as engine:
        file = engine.open(tmp_path / "file", num_bytes=64 << 20)
        memory, back = pages(4096, 1), pages(64 << 20)
        reading = engine.read(file, 0, back)
        engine.write(file, 0, memory).wait()
        assert engine.name == "python" or not reading.is_done()
        reading.wait()


def test_files_come_and_go(engine_of, kind, tmp_path):
    """Opens more files than the kernel table has entries; numbers of closed files are reused."""
    engine = engine_of(kind, depth=4)
    back = pages(4096)
    for turn in range(2):
        files = [engine.open(tmp_path / str(i), num_bytes=4096) for i in range(70)]
        for i, file in enumerate(files):
            engine.write(file, 0, pages(4096, turn * 100 + i)).wait()
        for i, file in enumerate(files):
            engine.read(file, 0, back).wait()
            assert np.array_equal(back, pages(4096, turn * 100 + i))
            file.close()
