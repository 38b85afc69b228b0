"""Invariants: equal bits, budgets, and complete cleanup."""

from __future__ import annotations

import gc
import os
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from offload import Engine
from tests.disks import nameless
from tests.engine.compare import same_bits
from tests.engine.inside import memory_of, states

_PATIENCE_S = 5.0
"""Time limit for threads to end."""
_OF_A_STEP = ("unit inputs", "kept tensors")
"""Device allocations released by the backward pass of a step."""


class Wrong(Exception):
    """An invariant is violated."""


def same(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> str:
    """Return the difference between named tensors, or an empty text for equal bits."""
    if list(found) != list(wanted):
        return f"names {sorted(set(found) ^ set(wanted))[:4]}, or their order"
    wrong = [name for name in wanted if not same_bits(found[name], wanted[name])]
    if not wrong:
        return ""
    name = wrong[0]
    apart = (found[name].double() - wanted[name].double()).abs().max().item()
    return f"{len(wrong)} of {len(wanted)} differ, first {name} by {apart:.3g}"


def near(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor], within: float) -> str:
    """Return the first named weights further apart than `within`, relative to the largest value in the layer."""
    scales: dict[str, float] = {}
    for name, value in wanted.items():
        layer = name.rpartition(".")[0]
        scales[layer] = max(scales.get(layer, 0.0), _largest(value))
    for name, value in wanted.items():
        apart, scale = _largest(found[name] - value), scales[name.rpartition(".")[0]]
        if not apart <= within * scale:
            return f"{name} by {apart:.3g}, where the layer's scale is {scale:.3g}"
    return ""


def _largest(value: Tensor) -> float:
    return value.abs().max().item() if value.numel() else 0.0


def all_states(engine: Engine) -> dict[str, Tensor | int | None]:
    """Return moments and step counts on this rank, and every model buffer."""
    found: dict[str, Any] = {}
    for name, state in states(engine).items():
        found |= {
            f"{name} exp_avg": state.exp_avg,
            f"{name} exp_avg_sq": state.exp_avg_sq,
            f"{name} steps": state.num_steps,
            **{f"{name} {plane}": values for plane, values in state.others.items()},
        }
    return found


def check_ledgers(engine: Engine, after_step: bool) -> None:
    """Check the budgets, and after a whole step the release of device memory."""
    memory = memory_of(engine)
    for ledger in (memory.device.ledger, memory.host, memory.disk):
        if ledger.budget_bytes is not None and ledger.peak_bytes > ledger.budget_bytes:
            raise Wrong(f"{ledger.tier} held {ledger.peak_bytes} bytes, and its budget is {ledger.budget_bytes}")
    if after_step and _of_a_step(engine):
        gc.collect()  # an exception can leave a frame cycle with tensors from a failed step
        if _of_a_step(engine):
            raise Wrong(f"after a step there still is {_of_a_step(engine)}")


def _of_a_step(engine: Engine) -> list[tuple[str, int]]:
    return [(name, size) for _, name, size in engine.allocations if name in _OF_A_STEP and size]


@contextmanager
def leaving_nothing(folder: Path) -> Iterator[None]:
    """Check that engines in this block leave no trace.

    Traces are files in `folder`, unnamed files, threads, descriptors, shared memory and swallowed exceptions.
    """
    gc.freeze()  # keeps imported objects out of each collection
    swallowed: list[str] = []
    before, hook = _traces(folder), sys.unraisablehook

    def note(event: Any) -> None:
        """Record lost interrupts and errors from our objects.

        Errors in half-built foreign objects and in weak reference sets are ignored: Python has a set with threads
        (tests/engine/test_ownership.py).
        """
        if "WeakSet" in getattr(event.object, "__qualname__", ""):
            return
        if issubclass(event.exc_type, KeyboardInterrupt) or "offload" in str(getattr(event.object, "__module__", "")):
            swallowed.append(f"{event.exc_type.__name__}: {event.exc_value} in {event.object!r}")

    sys.unraisablehook = note
    try:
        yield
        gc.collect()
        left = _left(before, folder)
        deadline = time.monotonic() + _PATIENCE_S
        while left and time.monotonic() < deadline:
            time.sleep(0.02)
            gc.collect()
            left = _left(before, folder)
    finally:
        sys.unraisablehook = hook
    files = [str(path.relative_to(folder)) for path in folder.rglob("*")] if folder.exists() else []
    if files:
        raise Wrong(f"left on disk: {files[:5]}")
    if left:
        raise Wrong(f"left behind: {left[:5]}")
    if swallowed:
        raise Wrong(f"Python has swallowed {swallowed[:3]}")


def _traces(folder: Path) -> set[str]:
    # The compiler shows progress with tqdm, and tqdm keeps a thread for the whole process.
    working = [thread for thread in threading.enumerate() if thread.name != "tqdm_monitor"]
    threads = {f"thread {thread.name} {thread.ident}" for thread in working}
    shared = {f"/dev/shm/{name}" for name in os.listdir("/dev/shm")}  # noqa: PTH208
    return threads | shared | {f"file {link}" for link in nameless(folder)} | _descriptors()


def _descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        try:
            target = os.readlink(f"/proc/self/fd/{name}")  # noqa: PTH115
            # shutil.rmtree holds the removed folder as a descriptor, left open after an interrupt.
            is_removed = target.endswith(" (deleted)") and os.path.isdir(f"/proc/self/fd/{name}")  # noqa: PTH112
        except OSError:
            continue
        if ("offload" in target or "io_uring" in target) and not is_removed:
            found.add(f"descriptor {name} of {target}")
    return found


def _left(before: set[str], folder: Path) -> list[str]:
    return sorted(one for one in _traces(folder) - before if "/dev/shm" not in one or "offload" in one)
