"""Fixtures for every I/O engine kind on this machine."""

from __future__ import annotations

import contextlib

import pytest

from offload.errors import ConfigError
from offload.native.io import ENGINES, IoEngine


@pytest.fixture(params=ENGINES)
def kind(request):
    try:
        IoEngine(request.param).close()
    except ConfigError as error:
        pytest.skip(str(error))
    return request.param


@pytest.fixture
def engine_of():
    """Return a function to open engines, closed after the test."""
    with contextlib.ExitStack() as stack:
        yield lambda kind, **options: stack.enter_context(IoEngine(kind, **options))
