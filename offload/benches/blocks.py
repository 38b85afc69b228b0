"""Contenders that are timed over blocks of consecutive steps, each of which begins and ends with nothing pending.

What a step leaves to be done after it has returned (updates of states on disk go on beside the next forward) is part
of what it costs. Timed step by step in turn, it would be done while the others are timed, for nothing and at their
expense. So a block lasts until its contender has nothing left to do, and the next one begins only then.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from offload.benches.report import Result, spread

_MIN_WARM_STEPS = 4  # an engine gives away the device memory that is left after the third step
_Item = TypeVar("_Item")


def none_left() -> None:
    """The `settle` of what has nothing left to do when a step has returned."""


@dataclass(frozen=True)
class Block:
    """What a block gave: its seconds, those of them after the last step had returned, and the bytes that moved."""

    seconds: float
    left_seconds: float
    moved: dict[str, int]


@dataclass
class Contender:
    """Something that trains on a batch of token ids.

    settle: returns when all that `step` has begun is done. reference: the name of the contender that it is compared
    with. moved: bytes so far, by name. details: more fields for its result, asked for when nothing is pending.
    """

    name: str
    step: Callable[[Any], object]
    settle: Callable[[], object]
    reference: str | None = None
    moved: Callable[[], Mapping[str, int]] = dict
    details: Callable[[], dict[str, Any]] = dict
    blocks: list[Block] = field(default_factory=list)


def turned(items: Sequence[_Item], number: int) -> list[_Item]:
    """Return the items in another order each round, so that none always comes after the same one."""
    first = number % len(items) if items else 0
    return [*items[first:], *items[:first]]


def measure(
    contenders: Sequence[Contender],
    batches: Sequence[Any],
    num_steps: int,
    num_pairs: int,
    *,
    clock: Callable[[], float] = time.perf_counter,
    disk: Callable[[], Mapping[str, int]] | None = None,
) -> None:
    """Let each contender run a block to warm up and then `num_pairs` of `num_steps` steps, in turns. `disk`: bytes that
    this process has moved so far, by name; what the operating system counts, where None.
    """
    disk = disk or process_disk_bytes
    for contender in contenders:
        _run(contender, batches, max(num_steps, _MIN_WARM_STEPS), clock, disk)
    for number in range(num_pairs):
        for contender in turned(contenders, number):
            contender.blocks.append(_run(contender, batches, num_steps, clock, disk))


def _run(
    contender: Contender,
    batches: Sequence[Any],
    num_steps: int,
    clock: Callable[[], float],
    disk: Callable[[], Mapping[str, int]],
) -> Block:
    contender.settle()
    before = {**contender.moved(), **disk()}
    begin = clock()
    for batch in itertools.islice(itertools.cycle(batches), num_steps):
        contender.step(batch)
    returned = clock()
    contender.settle()
    end = clock()
    moved = {name: num_bytes - before[name] for name, num_bytes in {**contender.moved(), **disk()}.items()}
    return Block(end - begin, end - returned, moved)


def process_disk_bytes() -> dict[str, int]:
    """Return the bytes that this process has read from and written to disks, past the page cache or through it."""
    import psutil

    found = psutil.Process().io_counters()
    return {"disk_read_bytes": found.read_bytes, "disk_write_bytes": found.write_bytes}


def summarise(contenders: Sequence[Contender], num_steps: int, tokens: int, more: dict[str, Any]) -> list[Result]:
    """Return one result per contender: milliseconds of a step, the median over the blocks; ratios are medians over the
    rounds, each of two blocks that were measured a moment apart. `tokens`: of a step. `more`: fields of all of them;
    its "group" is a part of the names.
    """
    by_name = {contender.name: contender for contender in contenders}
    results = []
    for contender in contenders:
        times = [block.seconds / num_steps for block in contender.blocks]
        median = statistics.median(times)
        details = {
            **more,
            "steps_in_a_block": num_steps,
            "pairs": len(times),
            "best": min(times) * 1e3,
            "spread": round(spread(times), 4),
            "blocks": [round(seconds * 1e3, 3) for seconds in times],
            "left_ms": statistics.median(block.left_seconds for block in contender.blocks) * 1e3,
            "tokens_per_second": tokens / median,
            **_moved_in_a_step(contender.blocks, num_steps),
            **contender.details(),
        }
        ratio = None
        if contender.reference is not None:
            pairs = zip(by_name[contender.reference].blocks, contender.blocks, strict=True)
            quotients = [other.seconds / own.seconds for other, own in pairs]
            ratio = statistics.median(quotients)
            low, details["slowdown"], high = statistics.quantiles(
                [1 / quotient for quotient in quotients] * (1 + (len(quotients) == 1)), n=4, method="inclusive"
            )
            details |= {"slowdown_lower_quartile": low, "slowdown_upper_quartile": high}
        name = f"{contender.name} ({more['group']})"
        results.append(Result(name, median * 1e3, "ms", contender.reference, ratio, details))
    return results


def _moved_in_a_step(blocks: Sequence[Block], num_steps: int) -> dict[str, float]:
    return {name: statistics.median(block.moved[name] / num_steps for block in blocks) for name in blocks[0].moved}
