"""Fixture for lanes, closed after each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lanes.patience import Opener


@pytest.fixture
def open_threads() -> Iterator[Opener]:
    opener = Opener()
    yield opener
    opener.close()
