"""What the data of a run are read from and cut into: one object for all stages from a path to a batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from offload.extras.data.mixture import StoppingStrategy
from offload.extras.data.sources import Source
from offload.user_cache import default_cache_dir


@dataclass(frozen=True, kw_only=True)
class DataSettings:
    """Settings of a data set. Fields with the name of a setting in `DataSection` have its meaning."""

    sources: Sequence[Source]
    """Training sources."""
    eval_sources: Sequence[Source] = ()
    """Evaluation sources, each evaluated under a separate name."""
    eval_share: float = 0.0
    on_bad_row: str = "error"

    tokenizer: str | None = None
    """Folder, or model name in the local hub cache. None: the tokenizer in `model_path`; if absent, a new one with at
    most `vocab_size` tokens is trained on the data, unless the model `is_pretrained` (the embeddings belong to another
    vocabulary).
    """
    model_path: str | None = None
    """Model folder or hub name."""
    is_pretrained: bool = False
    vocab_size: int
    train_on_prompt: bool = False
    num_workers: int | None = None
    cache_dir: Path = field(default_factory=default_cache_dir)
    """Token cache folder."""

    sequence_length: int
    packing: bool = True
    isolated: bool | None = False
    """Separate packed documents from each other. None: only for data with conversations."""
    grouped: str = ""
    """Format with several documents per row (in `GROUPINGS`). Empty: any other format."""
    group: int = 1
    """Documents per row that stay together. A batch has `batch_size` groups of rows."""
    no_pictures: str = ""
    """Reason why rows with pictures are not trainable, and the remedy. Empty: pictures are allowed, and each document
    is a row for any `packing`.
    """
    no_answers: str = ""
    """The same for rows that separate a prompt from an answer."""
    unheard: Mapping[str, str] = field(default_factory=dict)
    """Columns that the loss of other libraries reads, and this one does not: the remedy for each."""

    stopping_strategy: StoppingStrategy = "all_exhausted"
    group_by_length: bool = False
    rope_limit: int | None = None
    """As in `Dataset`."""
    batch_size: int
    """Rows (or groups) per step."""
    seed: int = 0
