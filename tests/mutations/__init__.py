"""The engine broken on purpose, each time in another mechanism: tests of the quick run have to fail, and the fuzzer has
to find it.

A mutation is a function that puts a mistake into this process by monkeypatch. `list_mutations` returns all of them,
`python -m tests.mutations` runs the tests that have to find each, and `pytest --mutation NAME` runs any tests with one.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

Change = Callable[["pytest.MonkeyPatch"], None]
VARIABLE = "TESTS_MUTATION"
"""Names the mutation of processes that tests fork."""
PARTS = ("waits", "gradients", "states", "recompute", "forwards", "storage", "data", "ranks", "training", "plans")
"""The modules of this package that hold mutations."""
_applied: str | None = None


@dataclass(frozen=True)
class Mutation:
    """A mistake, and the tests that have to find it."""

    name: str
    change: Change
    found_by: tuple[str, ...]
    """Files, or node ids without parameters, of the quick run, in the order in which they run. One failure suffices."""
    fuzzed: bool
    """True where the fuzzer has to find the mistake as well."""


_mutations: dict[str, Mutation] = {}


def mutation(*found_by: str, fuzzed: bool = False) -> Callable[[Change], Change]:
    """Return a decorator that enters a function in the list, under its name with hyphens."""

    def enter(change: Change) -> Change:
        enter_as(change.__name__.replace("_", "-"), change, *found_by, fuzzed=fuzzed)
        return change

    return enter


def enter_as(name: str, change: Change, *found_by: str, fuzzed: bool = False) -> None:
    assert found_by, f"{name}: no test has to find it"
    assert name not in _mutations, f"{name}: two mutations of this name"
    _mutations[name] = Mutation(name, change, found_by, fuzzed)


def replaced(target: Any, name: str, value: Any) -> Change:
    """Return the mutation that puts something else in the place of one attribute."""
    return lambda patch: patch.setattr(target, name, value)


@contextmanager
def as_it_is(*_: Any) -> Iterator[None]:
    """Stand in for a context manager that puts something back."""
    yield


def list_mutations() -> dict[str, Mutation]:
    """Return all mutations by name."""
    for part in PARTS:
        importlib.import_module(f"tests.mutations.{part}")
    return dict(_mutations)


@contextmanager
def applied(name: str) -> Iterator[None]:
    """Within, this process has the mistake."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        list_mutations()[name].change(patch)
        yield


def apply(name: str) -> None:
    """Put the mistake into this process for good, and into all that it forks. Raises pytest.UsageError."""
    import pytest

    global _applied
    if _applied == name:  # a process that was forked from one with this mistake has it
        return
    known = list_mutations()
    if name not in known:
        raise pytest.UsageError(f"--mutation: {name!r} is none of {', '.join(known)}")
    known[name].change(pytest.MonkeyPatch())
    _applied = os.environ[VARIABLE] = name


def apply_if_told() -> None:
    """Put the mistake into this process that the environment names, if any."""
    if name := os.environ.get(VARIABLE):
        apply(name)
