"""Time contenders over blocks of consecutive steps. Each block begins and ends without pending work.

Work left after a step returns (disk updates continue during the next forward) is part of the step cost. If contenders
alternated after every step, this work would overlap and slow down the next contender. So a block lasts until the
contender has finished all work, and only then the next block begins.
"""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from offload.extras.tools.benches.report import Result, spread

_MIN_WARM_STEPS = 4  # after the third step an engine distributes spare device memory
_Item = TypeVar("_Item")


def do_nothing() -> None:
    """Default `settle` for contenders without pending work."""


@dataclass(frozen=True)
class Block:
    """Measurements for a block: total seconds, seconds after the last step returned, and bytes moved by name."""

    seconds: float
    left_seconds: float
    moved_bytes: dict[str, int]


@dataclass
class Contender:
    """A training implementation for batches of token ids.

    settle: waits until all work begun by `step` is done.
    reference: name of the contender to compare with.
    moved: bytes moved so far, by name.
    details: more result fields, read when no work is pending.
    """

    name: str
    step: Callable[[Any], object]
    settle: Callable[[], object]
    reference: str | None = None
    moved_bytes: Callable[[], Mapping[str, int]] = dict
    details: Callable[[], dict[str, Any]] = dict
    blocks: list[Block] = field(default_factory=list)


def rotate(items: Sequence[_Item], number: int) -> list[_Item]:
    """Rotate the items by `number`, so that the order changes every round."""
    first = number % max(1, len(items))
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
    """Run one warm-up block per contender, then `num_pairs` rounds of blocks with `num_steps` steps each.

    disk: returns disk bytes moved by this process so far, by name; None: operating system counters.
    """
    disk = disk or process_disk_bytes
    for contender in contenders:
        _run(contender, batches, max(num_steps, _MIN_WARM_STEPS), clock, disk)
    for number in range(num_pairs):
        for contender in rotate(contenders, number):
            contender.blocks.append(_run(contender, batches, num_steps, clock, disk))


def _run(
    contender: Contender,
    batches: Sequence[Any],
    num_steps: int,
    clock: Callable[[], float],
    disk: Callable[[], Mapping[str, int]],
) -> Block:
    contender.settle()
    before = {**contender.moved_bytes(), **disk()}
    begin = clock()
    for batch in itertools.islice(itertools.cycle(batches), num_steps):
        contender.step(batch)
    # The step has returned; disk writes may go on.
    returned = clock()
    contender.settle()
    end = clock()
    moved = {name: num_bytes - before[name] for name, num_bytes in {**contender.moved_bytes(), **disk()}.items()}
    return Block(end - begin, end - returned, moved)


def process_disk_bytes() -> dict[str, int]:
    """Return the disk bytes read and written by this process, with or without the page cache."""
    import psutil

    counters = psutil.Process().io_counters()
    return {"disk_read_bytes": counters.read_bytes, "disk_write_bytes": counters.write_bytes}


def summarise(contenders: Sequence[Contender], num_steps: int, tokens: int, more: dict[str, Any]) -> list[Result]:
    """Return one result per contender: median milliseconds per step over all blocks.

    Ratios are medians over rounds, each from two blocks measured shortly one after the other.

    tokens: tokens per step.
    more: fields added to every result. The "group" value is appended to names.
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
            **{
                name: statistics.median(block.moved_bytes[name] / num_steps for block in contender.blocks)
                for name in contender.blocks[0].moved_bytes
            },
            **contender.details(),
        }
        ratio = None
        if contender.reference is not None:
            pairs = zip(by_name[contender.reference].blocks, contender.blocks, strict=True)
            # Blocks of one round lie close in time, under about the same load of the machine.
            quotients = [other.seconds / own.seconds for other, own in pairs]
            ratio = statistics.median(quotients)
            slowdowns = [1 / quotient for quotient in quotients] * (1 + (len(quotients) == 1))  # quartiles need two
            low, middle, high = statistics.quantiles(slowdowns, n=4, method="inclusive")
            details |= {"slowdown": middle, "slowdown_lower_quartile": low, "slowdown_upper_quartile": high}
        name = f"{contender.name} ({more['group']})"
        results.append(Result(name, median * 1e3, "ms", contender.reference, ratio, details))
    return results
