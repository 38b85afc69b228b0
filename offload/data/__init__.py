"""Text to batches, deterministic and resumable: sources -> formats -> encode -> store -> packing -> dataset.

`build_dataset` in `dataset.py` is the one entry point of the trainer. A batch is a pure function of (data, settings,
step), so a run resumes by its step number alone. Everything heavy (torch, transformers) is imported on first use.
"""
