"""Benchmark scripts: every imported package name exists."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

import benchmarks

SCRIPTS = sorted(path.stem for path in Path(benchmarks.__path__[0]).glob("*.py"))


@pytest.mark.parametrize("name", SCRIPTS)
def test_it_can_be_imported(name: str) -> None:
    importlib.import_module(f"benchmarks.{name}")
