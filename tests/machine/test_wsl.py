"""WSL: which environment variables `import offload` sets there."""

from __future__ import annotations

import os
import runpy
from pathlib import Path

import pytest

import offload
from offload import system
from offload.system import is_wsl
from tests.machine.groups import write

NAMES = "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF"
RELEASES = {
    "5.15.153.1-microsoft-standard-WSL2": True,
    "4.4.0-19041-Microsoft": True,
    "6.8.0-1021-azure": False,
    "6.12.0": False,
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("own", [None, *NAMES])
def test_the_allocator_has_segments_that_grow_except_in_wsl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, release: str, own: str | None
) -> None:
    for name in NAMES:
        monkeypatch.setenv(name, "")  # restored afterwards, although the import sets it
        monkeypatch.delenv(name)
    given = {} if own is None else {own: "backend:native"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(system, "ROOT", write(tmp_path, {"proc/sys/kernel/osrelease": release}))
    assert is_wsl() == RELEASES[release]
    runpy.run_path(str(offload.__file__))
    wanted = {} if own or RELEASES[release] else {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert {name: os.environ[name] for name in NAMES if name in os.environ} == given | wanted


def test_a_system_without_the_file_is_not_wsl(tmp_path: Path) -> None:
    assert not is_wsl(tmp_path)
