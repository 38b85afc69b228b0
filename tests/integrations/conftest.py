"""A fresh state of accelerate for each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integrations.plain import reset_accelerate


@pytest.fixture(autouse=True)
def no_state_of_others() -> Iterator[None]:
    reset_accelerate()
    yield
    reset_accelerate()
