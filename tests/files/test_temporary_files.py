"""Files that a library writes to a temporary folder: a full disk is one clear error."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from offload.errors import ConfigError, DiskError
from offload.extras.data.cache import load_or_build
from offload.files.temporary_files import files_written

FULL = [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), Exception("No space left on device (os error 28)")]
"""As Python, and as a library in Rust (tokenizers, safetensors) raise it."""


def test_what_was_written_is_returned() -> None:
    assert files_written(lambda folder: (folder / "name").write_bytes(b"data")) == {"name": b"data"}


@pytest.mark.parametrize("error", FULL, ids=["OSError", "of Rust"])
def test_a_full_disk_is_named(error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def write(folder: Path) -> None:
        raise error

    with pytest.raises(DiskError, match=r"ENOSPC\), with .*B free; .*Set TMPDIR to another folder") as caught:
        files_written(write)
    assert (caught.value.errno, caught.value.path) == (errno.ENOSPC, tmp_path)
    with pytest.raises(ConfigError, match=rf"cache {tmp_path} cannot be used: .*ENOSPC\), with .*B free; .*XDG_CACHE"):
        load_or_build(tmp_path, "name", write, lambda path: path.stat())


def test_other_errors_pass() -> None:
    def write(folder: Path) -> None:
        raise RuntimeError("os error 28")

    with pytest.raises(RuntimeError, match="os error"):
        files_written(write)
