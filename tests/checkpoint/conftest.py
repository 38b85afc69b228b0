"""Checkpoints are made into folders of Hugging Face as well: these in small pieces."""

from tests.hf.conftest import small_pieces  # noqa: F401
