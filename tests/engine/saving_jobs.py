"""What a rank does in the tests of checkpoints over ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from offload import Engine
from offload.checkpoint import writer as writing
from offload.checkpoint.writer import Writer
from offload.distributed.joining import open_comm
from offload.errors import ConfigError, DiskError, OffloadError
from tests.engine.families import build
from tests.engine.handmade import OneBlockInManyPlaces, Shifting, cross_entropy, words
from tests.engine.ranks_child import CASES, opened, share


def save(case: str, rows: Sequence[int], path: str, resume: str = "", **settings: Any) -> dict[str, Any]:
    """Train two steps, or resume instead, and save all states; return the meta that was loaded."""
    known, meta = CASES[case], {}
    with open_comm() as comm:
        engine = opened(comm, known, **settings)
        if resume:
            meta = engine.load_checkpoint(resume)
        for seed in () if resume else range(2):
            engine.step(share(known.batch(seed, sum(rows)), rows, comm.rank), loss_fn=known.loss_fn)
        engine.save_checkpoint(path, {"case": case})
        engine.close()
    return meta


def refused(path: str) -> tuple[str, str]:
    """Save where one rank cannot write; return the error, after which training goes on."""

    def broken(self: Writer, *_: Any) -> None:
        raise DiskError(f"the write of {self.path} failed: no space left", 28, self.path)

    write = Writer.write
    with open_comm() as comm:
        engine = opened(comm, CASES["plain"])
        try:
            if comm.rank == 1:
                Writer.write = broken  # type: ignore[method-assign]
            engine.save_checkpoint(path)
        except OffloadError as error:
            told = type(error).__name__, str(error)
        finally:
            Writer.write = write  # type: ignore[method-assign]
        engine.step(share(CASES["plain"].batch(0, 4), (2, 2), comm.rank))
        engine.close()
    return told


def refused_later(path: str) -> tuple[str, str]:
    """Save while training goes on, where one rank's disk fails meanwhile; return the error of the end of the save."""

    def full(*_: Any) -> str:
        raise OSError(28, "no space left")

    write, batch = writing._write, CASES["plain"].batch
    with open_comm() as comm:
        engine = opened(comm, CASES["plain"])
        engine.step(share(batch(0, 4), (2, 2), comm.rank))
        if comm.rank == 1:
            writing._write = full
        try:
            saving = engine.begin_checkpoint(path)
            engine.step(share(batch(1, 4), (2, 2), comm.rank))
            saving.finish()
        except OffloadError as error:
            told = type(error).__name__, str(error)
        finally:
            writing._write = write
        engine.step(share(batch(2, 4), (2, 2), comm.rank))
        engine.close()
    return told


def parted(path: str) -> tuple[str, str]:
    """Rank 0 ends a save while the others go on with a step; return the error."""
    with open_comm() as comm:
        engine, batch = opened(comm, CASES["plain"]), share(CASES["plain"].batch(0, 4), (2, 2), comm.rank)
        saving = engine.begin_checkpoint(path)
        with saving, pytest.raises(ConfigError) as caught:
            saving.finish() if comm.rank == 0 else engine.step(batch)
        engine.step(batch)
        engine.close()
    return type(caught.value).__name__, str(caught.value)


def moved_apart(path: str) -> list[dict[str, Any]]:
    """Each rank's running values are of its own rows; return a step, and the buffers, of the run that goes on and of
    the one that never stopped."""
    found = []
    with open_comm() as comm:
        for is_resumed in (False, True):
            engine = Engine(build(Shifting), comm=comm)
            if is_resumed:
                engine.load_checkpoint(path)
            else:
                for seed in range(2):
                    engine.step(words(10 * seed + comm.rank), cross_entropy)
                engine.save_checkpoint(path)
            result = engine.step(words(20 + comm.rank), cross_entropy)
            buffers = {name: buffer.tolist() for name, buffer in engine.model.named_buffers()}
            found.append({"loss": result.loss.item(), "norm": result.grad_norm, "buffers": buffers})
            engine.close()
    return found


def own_loop_after_a_step(path: str) -> list[tuple[float, dict[str, list[float]]]]:
    """Return the norm and the weights of an own loop of two backwards, after a step and after its checkpoint."""
    found = []
    with open_comm() as comm:
        for is_resumed in (False, True):
            engine = Engine(build(OneBlockInManyPlaces), comm=comm)
            if is_resumed:
                engine.load_checkpoint(path)
            else:
                engine.step(words(comm.rank), cross_entropy)
                engine.save_checkpoint(path)
            for seed in (2, 4):
                batch = words(seed + comm.rank)
                engine.backward(cross_entropy(engine.model(batch["x"]), batch))
            norm = engine.update().grad_norm
            found.append((norm, {name: value.flatten().tolist() for name, value in engine.named_parameters()}))
            engine.close()
    return found
