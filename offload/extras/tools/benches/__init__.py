"""Benchmarks for `python -m offload.bench`, one module each."""
