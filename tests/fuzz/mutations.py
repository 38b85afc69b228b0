"""The engine broken on purpose, each time in another mechanism: what the fuzzer has to find."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

Change = Callable[[pytest.MonkeyPatch], None]
MUTATIONS: dict[str, Change] = {}


@contextmanager
def applied(name: str) -> Iterator[None]:
    """Within, the engine is broken in this way."""
    with pytest.MonkeyPatch.context() as patch:
        MUTATIONS[name](patch)
        yield
