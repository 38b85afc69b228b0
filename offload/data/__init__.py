"""Data pipeline from text to batches, deterministic and resumable: sources, formats, encode, store, packing, dataset.

The trainer enters through `build_dataset` in `dataset.py`. A batch is a pure function of (data, settings, step), so a
run resumes from the step number alone. Heavy libraries (torch, transformers) are imported on first use.
"""
