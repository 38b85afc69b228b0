"""Small read and write pieces, to split even small models."""

import pytest

from offload.app.hf import sources as hf_source
from offload.app.hf import tensor_writer
from offload.files import safetensors_file


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf_source, "_BLOCK_NUMEL", 1000)
    for module in (safetensors_file, tensor_writer):
        monkeypatch.setattr(module, "PIECE_BYTES", 4096)
