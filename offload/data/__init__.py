"""Text to batches, deterministic and resumable: sources -> formats -> encode -> store -> packing -> dataset.

`build_dataset` is the one entry point of the trainer. A batch is a pure function of (data, settings, step), so a run
resumes by its step number alone. Everything heavy (torch, transformers) is imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload.data.dataset import Dataset as Dataset
    from offload.data.dataset import build_dataset as build_dataset
    from offload.data.tokenizer import load_tokenizer as load_tokenizer

_HOMES = {
    "Dataset": "offload.data.dataset",
    "build_dataset": "offload.data.dataset",
    "load_tokenizer": "offload.data.tokenizer",
}
__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    import importlib

    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'offload.data' has no attribute {name!r}")
