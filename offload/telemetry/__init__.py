"""What is told of a run: bytes, times, progress, traces."""
