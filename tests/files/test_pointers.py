"""Every reader refuses a git-lfs pointer instead of a file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.app.config.sections import ModelSection
from offload.app.hf.models import load_model_config
from offload.errors import ConfigError
from offload.extras.data.file_types import check_file
from offload.extras.data.storage import LocalFile
from offload.extras.data.tokenizer import load_tokenizer
from offload.files.safetensors_file import TensorFile

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a214614ab2935\nsize 12345\n"
READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": lambda path: load_model_config(ModelSection(path=str(path.parent))),
    "model.safetensors": TensorFile,
    "tokenizer.json": lambda path: load_tokenizer(str(path.parent)),
    "rows.txt": lambda path: check_file(LocalFile(path), "auto"),
    "tokens.bin": lambda path: check_file(LocalFile(path), "tokens"),
}


@pytest.mark.parametrize("name", READERS)
def test_a_pointer_is_refused_as_one(name: str, tmp_path: Path) -> None:
    """Break: read the pointer text as data, or report a damaged file."""
    (tmp_path / name).write_bytes(POINTER)
    with pytest.raises(ConfigError, match=rf"{name} is a pointer of git-lfs.* `git lfs pull`"):
        READERS[name](tmp_path / name)
