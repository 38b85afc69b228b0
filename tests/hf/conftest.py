"""Small read and write pieces, to split even small models."""

import pytest

from offload.app.hf import sources as hf_source
from offload.files import safetensors_file as tensor_file


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_source, "_BLOCK_NUMEL", 1000)
    monkeypatch.setattr(tensor_file, "_PIECE_BYTES", 4096)
