"""One training step over streamed units."""
