"""Small read and write pieces, to split even small models."""

import pytest

from offload.files import safetensors_file as tensor_file
from offload.hf import sources as hf_source


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_source, "_BLOCK_NUMEL", 1000)
    monkeypatch.setattr(tensor_file, "_PIECE_BYTES", 4096)
