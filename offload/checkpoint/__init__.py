"""Checkpoint writing, reading, verification and export."""
