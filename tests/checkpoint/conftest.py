"""Small pieces, so that small models are read and written in many."""

import pytest

from offload.checkpoint import hf_source, tensor_file


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_source, "_BLOCK_NUMEL", 1000)
    monkeypatch.setattr(tensor_file, "_PIECE_BYTES", 4096)
