"""One test rank: python -m tests.distributed.ranks_child MODE [ARGUMENTS], with torchrun variables."""

from __future__ import annotations

import os
import random
import sys
import time
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from offload.distributed.comm import Comm
from offload.distributed.joining import open_comm
from offload.distributed.ranks import Ranks
from offload.distributed.watchdog import WatchdogLimits
from offload.errors import ConfigError
from tests.engine.compare import same_bits

QUICK = WatchdogLimits(beat_s=0.1, silence_s=1000, grace_s=2, stall_s=1000)
"""Long limits: a busy machine loses no rank. Tests about lost ranks set the limit in `losing`."""


def values(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the values of a rank, with many magnitudes, so that the bits show the summation order."""
    generator = torch.Generator().manual_seed(rank + 1)
    sizes = torch.exp2(torch.randint(-12, 12, (numel,), generator=generator).double())
    return (torch.randn(numel, generator=generator, dtype=torch.float64) * sizes).to(dtype)


def plain_sum(size: int, full_numel: int, rank: int, dtype: torch.dtype, to: torch.dtype) -> torch.Tensor:
    """Return ((x0 + x1) + x2) + ... over the pieces for `rank`."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    pieces = [values(other, full_numel, dtype).view(size, -1)[rank].to(wide) for other in range(size)]
    total = pieces[0]
    for piece in pieces[1:]:
        total = total + piece
    return total.to(to)


FORMATS = (
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.float64, torch.float64),
)


def exchanges(comm: Comm) -> None:
    """Run every exchange with different sizes, formats, scratch buffers and delays."""
    rank, size = comm.rank, comm.size
    dice = random.Random(rank)
    assert (comm.local_rank, comm.local_size) == (rank, size)
    for numel in (0, 1, 257, 5000):
        for dtype, to in FORMATS:
            what = f"reduce-scatter of {numel} {dtype}"
            expected = plain_sum(size, numel * size, rank, dtype, to)
            width = 2 * size * dtype.itemsize + 2 * max(4, dtype.itemsize)
            for chunk in (256, 2048, 1 << 13):
                full, shard = values(rank, numel * size, dtype), torch.empty(numel, dtype=to)
                time.sleep(dice.choice((0, 0, 0, 0.003)))
                comm.reduce_scatter(shard, full, what, scratch=torch.empty(width * chunk, dtype=torch.uint8))
                assert same_bits(shard, expected), (what, chunk)
                assert same_bits(full, values(rank, numel * size, dtype)), "the input changed"
            if dtype == to:  # in place
                own = full.view(size, -1)[rank]
                comm.reduce_scatter(own, full, what, torch.empty(width * 256, dtype=torch.uint8))
                assert same_bits(own, expected), what
            everything = torch.cat([values(other, numel, dtype) for other in range(size)])
            full = torch.empty(numel * size, dtype=dtype)
            comm.all_gather(full, values(rank, numel, dtype), "all-gather")
            assert same_bits(full, everything)
            full = torch.zeros(numel * size, dtype=dtype)
            own = full.view(size, -1)[rank]
            own.copy_(values(rank, numel, dtype))
            comm.all_gather(full, own, "all-gather in place")
            assert same_bits(full, everything)

    terms = [[0.1 * other, 1e16 * (-1) ** other, 1.0] for other in range(size)]
    total = terms[0]
    for other in terms[1:]:
        total = [a + b for a, b in zip(total, other, strict=True)]
    assert comm.sum_in_order(terms[rank], "norm") == total
    assert comm.sum_in_order(torch.tensor(terms[rank], dtype=torch.float64), "norm").tolist() == total
    assert comm.gather_objects({"rank": rank, "long": "x" * 10 * rank}, "objects") == [
        {"rank": other, "long": "x" * 10 * other} for other in range(size)
    ]
    assert comm.any(rank == size - 1, "flag")
    assert not comm.any(False, "flag")
    assert comm.from_rank(size - 1, rank, "value") == size - 1
    with comm.turn("work"):
        begin = time.monotonic_ns()  # of one clock for all processes
    begins = comm.gather_objects(begin, "begins")
    assert begins == sorted(begins)
    comm.barrier("barrier")
    comm.agree("schedule", {"b": [1, 2.5], "a": "text"})
    if size > 1:
        with pytest.raises(ValueError, match="bad: full"):
            comm.all_gather(torch.empty(3), torch.empty(5), "bad")
        with pytest.raises(ValueError, match="can be summed"):
            comm.reduce_scatter(torch.empty(1).int(), torch.empty(size).int(), "bad", torch.empty(0))


def differing(comm: Comm) -> None:
    """Rank 2 has another seed and an additional key."""
    config = {"train": {"seed": 1, "steps": 3}, "run": {"name": "x"}}
    if comm.rank == 2:
        config = {"train": {"seed": 0, "steps": 3, "clip": True}, "run": {"name": "x"}}
    try:
        comm.agree("the configuration", config)
    except ConfigError as error:
        print(error)
    try:
        comm.agree("the schedule", "abc" if comm.rank else "abd")
    except ConfigError as error:
        print(error)
    comm.barrier("all are here still")


def joined(size: int) -> None:
    """The comm uses the caller's process group and leaves it open."""
    dist.init_process_group("gloo")
    for name in ("LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        del os.environ[name]
    with open_comm(times=QUICK) as comm:
        assert (comm.local_rank, comm.local_size) == (dist.get_rank(), size)  # known without the variables
        mine = dist.all_reduce(torch.ones(1), async_op=True)  # independent of the comm exchanges
        assert comm.sum_in_order([1.0], "sum") == [size]
        mine.wait()
    total = torch.ones(1)
    dist.all_reduce(total)
    assert total.item() == size
    dist.destroy_process_group()


def again(size: int) -> None:
    """Open several comms in one process, over own and caller groups. Last, the caller destroys a group too early."""

    store, rank = next(dist.rendezvous("env://"))[0], int(os.environ["RANK"])

    def make_mine(name: str) -> None:
        """A second default group in torch would find the addresses of the first."""
        own = dist.PrefixStore(f"{name}-{os.environ['TORCHELASTIC_RESTART_COUNT']}", store)
        dist.init_process_group("gloo", store=own, rank=rank, world_size=size)

    def use() -> None:
        with open_comm(times=QUICK) as comm:
            assert comm.sum_in_order([1.0], "sum") == [size]
        assert dist.is_initialized() == is_mine

    for is_mine in (False, False, True, False):
        if is_mine:
            make_mine("first")
            use()
        use()
        if is_mine:
            dist.destroy_process_group()
    make_mine("second")
    comm = open_comm(times=QUICK)
    comm.barrier("all are here")
    dist.destroy_process_group()
    try:
        comm.barrier("too late")
    except ConfigError as error:
        print(error)
    for late in (comm, open_comm(times=QUICK)):
        late.close()


def interrupted(size: int) -> None:
    """Each rank is interrupted in another part of an exchange, and tries one more exchange on the way out."""
    with open_comm(times=QUICK) as comm:
        rank, scatter = comm.rank, dist.scatter

        def interrupt(*tensors: object, group_src: int, **how: object) -> object:
            if group_src == rank:
                raise KeyboardInterrupt
            return scatter(*tensors, group_src=group_src, **how)  # type: ignore[arg-type]

        comm.barrier("all are here")
        dist.scatter = interrupt
        for exchange in (
            lambda: comm.all_gather(torch.empty(size), torch.empty(1), "all-gather"),
            lambda: comm.all_gather(torch.empty(size), torch.empty(1), "the next one"),
            lambda: comm.barrier("of values"),
        ):
            with pytest.raises(KeyboardInterrupt):
                exchange()
            dist.scatter = scatter
        print("out")


def losing(way: str, folder: Path) -> None:
    """Ranks exchange units in a loop. From exchange 20 on, the rank VICTIM fails as named in `way`."""
    victim = int(os.environ.get("VICTIM", "1"))
    times = {name: float(os.environ.get(name.upper(), "1000")) for name in ("silence_s", "stall_s")}
    with open_comm(times=replace(QUICK, **times)) as comm:
        file = folder / f"file-of-{comm.rank}"
        file.touch()
        weakref.finalize(comm, file.unlink)  # like the removal of run folders
        comm.on_lost(lambda error: print("heard of", error.rank))
        full, shard = torch.zeros(comm.size << 10), torch.zeros(1 << 10)
        for number in range(10**9):
            if number == 20:
                comm.barrier("steady")
                print("steady", flush=True)
                if way == "deaf":
                    time.sleep(1000)  # an endless computation
                if comm.rank == victim:
                    leave(way, comm)
                if way == "computes":
                    break
                if comm.rank == victim:
                    return
            comm.all_gather(full, shard, f"all-gather of unit model.layers.{number % 4}")
        comm.barrier("end")


def leave(way: str, comm: Comm) -> None:
    """Fail the victim rank."""
    if way == "exception":
        raise ValueError("these data are bad")
    if way == "exit":
        sys.exit(3)
    if way == "diverged":
        assert isinstance(comm, Ranks)
        with comm._exchange("all-gather of unit head", comm.size << 10):
            time.sleep(1000)  # like two mismatched exchanges
    end = time.monotonic() + float(os.environ.get("COMPUTE_S", "0"))
    while way in ("computes", "stuck", "waited for") and time.monotonic() < end:
        if way == "waited for":
            time.sleep(0.1)


def main() -> None:
    mode, *arguments = sys.argv[1:]
    size = int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    if mode == "joined":
        joined(size)
    elif mode == "again":
        again(size)
    elif mode == "interrupted":
        interrupted(size)
    elif mode == "losing":
        losing(arguments[0], Path(arguments[1]))
    else:
        with open_comm(times=QUICK) as comm:
            assert isinstance(comm, Ranks) == (size > 1)
            exchanges(comm)
            if size == 3:
                differing(comm)
    print("done")


if __name__ == "__main__":
    main()
