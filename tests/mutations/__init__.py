"""Deliberate engine faults, one mechanism each. The quick tests must fail, and the fuzzer must detect the fault.

A mutation is a function that monkeypatches a fault into this process. `list_mutations` returns all of them.
`python -m tests.mutations` runs the tests for each one, and `pytest --mutation NAME` runs any tests with one.
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
"""Environment variable with the mutation name, for processes forked by tests."""
PARTS = ("waits", "gradients", "states", "recompute", "forwards", "storage", "data", "ranks", "training", "plans")
"""Modules in this package with mutations."""
_applied: str | None = None


@dataclass(frozen=True)
class Mutation:
    """A fault, and the tests required to detect it."""

    name: str
    change: Change
    found_by: tuple[str, ...]
    """Files or node ids (without parameters) of quick tests, in running order. One failure suffices."""
    fuzzed: bool
    """True: the fuzzer must detect the fault as well."""
    options: tuple[str, ...]
    """pytest options, for tests that are quick on another device."""


_mutations: dict[str, Mutation] = {}


def mutation(*found_by: str, fuzzed: bool = False) -> Callable[[Change], Change]:
    """Return a decorator that registers a mutation under the function name, with hyphens."""

    def enter(change: Change) -> Change:
        enter_as(change.__name__.replace("_", "-"), change, *found_by, fuzzed=fuzzed)
        return change

    return enter


def enter_as(name: str, change: Change, *found_by: str, fuzzed: bool = False, options: tuple[str, ...] = ()) -> None:
    assert found_by, f"{name}: no test has to find it"
    assert name not in _mutations, f"{name}: two mutations of this name"
    _mutations[name] = Mutation(name, change, found_by, fuzzed, options)


def replaced(target: Any, name: str, value: Any) -> Change:
    """Return a mutation that replaces one attribute."""
    return lambda patch: patch.setattr(target, name, value)


@contextmanager
def as_it_is(*_: Any) -> Iterator[None]:
    """Context manager without effect, in place of one for restoring state."""
    yield


def list_mutations() -> dict[str, Mutation]:
    """Return all mutations by name."""
    for part in PARTS:
        importlib.import_module(f"tests.mutations.{part}")
    return dict(_mutations)


@contextmanager
def applied(name: str) -> Iterator[None]:
    """Apply the mutation inside the context."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        list_mutations()[name].change(patch)
        yield


def apply(name: str) -> None:
    """Apply the mutation for the life of this process and all forked children. Raises pytest.UsageError."""
    import pytest

    global _applied
    if _applied == name:  # a child forked from a mutated process already has the fault
        return
    known = list_mutations()
    if name not in known:
        raise pytest.UsageError(f"--mutation: {name!r} is none of {', '.join(known)}")
    known[name].change(pytest.MonkeyPatch())
    _applied = os.environ[VARIABLE] = name


def apply_if_told() -> None:
    """Apply the mutation named by the environment, if any."""
    if name := os.environ.get(VARIABLE):
        apply(name)
