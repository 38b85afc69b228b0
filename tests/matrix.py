"""Few setting combinations with every value pair for the quick run, and more for the long run.

The fuzzer samples from all combinations.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import combinations, product
from typing import Any

import pytest
from hypothesis import settings


def quick(values: Iterable[Any], kept: Collection[Any]) -> list[Any]:
    """Return parameters for `pytest.mark.parametrize`: values outside `kept` are marked `slow`.

    The quick run has the `kept` values. The others repeat the same claim. A tuple has a value per name.
    """
    found, kept = list(values), list(kept)
    assert all(value in found for value in kept), "a value that is kept and not there"
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)), marks=[] if value in kept else pytest.mark.slow
        )
        for value in found
    ]


def examples(number: int) -> settings:
    """Return hypothesis settings with `number` examples in the long run, and a quarter in the quick run."""
    return settings(max_examples=number * settings().max_examples // 100)


def matrix(
    *, strength: int = 2, long: int | None = None, **axes: Sequence[Any] | Mapping[str, Any]
) -> pytest.MarkDecorator:
    """Parametrize a test with covering value combinations.

    Any `strength` values (1: single values, 2: pairs) occur together at least once. Additional combinations for any
    `long` values (default: one more) are marked `slow`. An axis is a list, or a mapping from name to value.
    """
    names = {key: [name_of(value) for value in values] for key, values in axes.items()}
    assert all(len(set(each)) == len(each) for each in names.values()), "two values of one name"
    quick = [tuple(one.values()) for one in cover(names, strength)]
    wanted = quick + [tuple(one.values()) for one in cover(names, strength + 1 if long is None else long)]
    found = []
    for chosen in dict.fromkeys(wanted):
        values = [
            axis[name] if isinstance(axis, Mapping) else axis[names[key].index(name)]
            for (key, axis), name in zip(axes.items(), chosen, strict=True)
        ]
        marks = [] if chosen in quick else [pytest.mark.slow]
        found.append(pytest.param(*values, id="-".join(chosen), marks=marks))
    return pytest.mark.parametrize(list(axes), found)


def name_of(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)


def cover(axes: Mapping[str, Sequence[str]], strength: int, seed: int = 0) -> list[dict[str, str]]:
    """Return few combinations that cover all value tuples over `strength` axes.

    Greedy and deterministic: each round takes the best among some random combinations.
    """
    dice = random.Random(seed)
    strength = min(strength, len(axes))
    missing = meetings(axes, strength)
    found: list[dict[str, str]] = []
    while missing:
        first = min(missing)  # each round covers at least one tuple
        drawn = [{name: dice.choice(values) for name, values in axes.items()} | dict(first) for _ in range(100)]
        best = max(drawn, key=lambda one: len(missing.intersection(combinations(one.items(), strength))))
        missing.difference_update(combinations(best.items(), strength))
        found.append(best)
    return found


def meetings(axes: Mapping[str, Sequence[str]], strength: int) -> set[tuple[tuple[str, str], ...]]:
    """Return all value tuples to cover."""
    return {
        tuple(zip(some, values, strict=True))
        for some in combinations(axes, strength)
        for values in product(*(axes[name] for name in some))
    }
