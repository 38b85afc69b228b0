"""Checkpoint exports also use small pieces."""

from tests.hf.conftest import small_pieces  # noqa: F401
