"""Fixtures for tests with whole processes."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.soak.runs import Forks, make_folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory for the commands."""
    return make_folder(tmp_path_factory.mktemp("soak"))


@pytest.fixture(scope="module")
def forks(folder: Path) -> Forks:
    return Forks(folder)
