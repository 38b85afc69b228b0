"""Door to the data: the rows of a run, in batches by step number.

Names in a configuration are checked here too: this module imports neither numpy nor torch, so a wrong name fails in a
fraction of a second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from offload.app.config.config import Config
from offload.app.config.sections import PYTHON_PREFIX
from offload.app.hf.model_path import find_model
from offload.doors import Door

if TYPE_CHECKING:
    import numpy as np
    from transformers import PreTrainedConfig

    from offload.app.config.config import Config
    from offload.app.hf.models import ModelKind
    from offload.app.training.objectives import Batch, Objective


def unit_of(group: int) -> str:
    """Return the word for `group` neighbouring rows that stay together."""
    return {1: "row", 2: "pair"}.get(group, "group")


class Task(Protocol):
    """Rows for training and evaluation. Any order, but the same batch for the same step, rank and number of ranks.

    The number to follow a number, without evaluation (more members are below):

        class Count:
            batch_size, group, num_train_rows, eval_sizes = 8, 1, 1 << 30, {}

            def batch(self, step, rank=0, world_size=1):
                ids = torch.arange(8 * step, 8 * step + 8)[share(8, rank, world_size), None] + torch.arange(16)
                return {"input_ids": ids, "labels": ids}

            def num_tokens(self, step):
                return 8 * 16

            def state_dict(self):
                return {"first": 0}
    """

    @property
    def tokenizer(self) -> Any:
        """Tokenizer. None: the rows are token ids."""

    @property
    def pad_id(self) -> int:
        """Padding token id."""

    @property
    def batch_size(self) -> int:
        """Rows per step, over all ranks."""

    @property
    def group(self) -> int:
        """Neighbouring rows that stay together, such as a pair of answers."""

    @property
    def num_train_rows(self) -> int:
        """Rows in an epoch."""

    @property
    def eval_sizes(self) -> Mapping[str, int]:
        """Rows of each eval set, by name. The first set decides about the best step."""

    @property
    def is_isolated(self) -> bool:
        """True if a row has several documents, computed apart from each other."""

    @property
    def by_length(self) -> bool:
        """True if the rows of a batch have about the same length."""

    @property
    def longest(self) -> int:
        """Tokens in the longest sequence with positions of its own: a row, or a document that is apart from others."""

    @property
    def has_pictures(self) -> bool:
        """True if batches have picture tensors."""

    @property
    def rows_description(self) -> str:
        """Row counts and row layout, in words."""

    def describe(self, objective: Objective) -> Iterator[str]:
        """Yield lines about notes, sources and rows."""

    def num_steps(self, epochs: float) -> int:
        """Return the steps for `epochs` passes over the training rows, rounded up."""

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Return the rows of a rank at a step (from 0), each tensor [rows, tokens].

        Raises StopIteration at the end of the data.
        """

    def num_tokens(self, step: int) -> int:
        """Return the tokens at a step over all ranks, without padding."""

    def eval_batches(
        self, batch_size: int, max_batches: int | None, rank: int, world_size: int, name: str
    ) -> Iterator[Batch]:
        """Yield the batches of a rank from the eval set `name`, in a fixed order. All ranks get equally many."""

    def eval_bytes(self, num_rows: int, name: str) -> int | None:
        """Return the UTF-8 bytes of text under the targets in the first rows of an eval set. None: unknown."""

    def probe(self) -> Batch:
        """Return one group of eval rows, or of training rows without an eval set."""

    def excerpt(self) -> tuple[np.ndarray, np.ndarray | None] | None:
        """Return a short prompt and the answer in the data, token ids [n]. The answer is None for plain text.

        None: no short row.
        """

    def files(self) -> Mapping[str, bytes]:
        """Return the tokenizer or processor files, by name."""

    def state_dict(self) -> dict[str, Any]:
        """Return numbers and strings by which a checkpoint recognizes the data."""

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ConfigError if `state` (from `state_dict`) belongs to other batches."""


class TaskKind(Protocol):
    """Makes the task of a run from its configuration. Door: an object under a name in `TASKS`.

    The import of a kind must not import numpy or torch: names are checked before the slow imports.
    """

    def check_names(self, config: Config) -> None:
        """Raise ConfigError if the data of a new run do not exist."""

    def store(self, rows: Any, name: str) -> str:
        """Write rows from Python to a file, and return its path for `data.source`. `name`: argument, for errors."""

    def trains_tokenizer(self, config: Config) -> bool:
        """Return whether the tokenizer is trained from the data, because neither configuration nor model has one."""

    def grow_vocabulary(self, config: Config, architecture: PreTrainedConfig) -> bool:
        """Grow the vocabulary for tokens added to the tokenizer. Return whether any embedding row was missing."""

    def build(
        self,
        config: Config,
        model_kind: ModelKind,
        vocabulary: int,
        progress: Callable[[str, float], None],
        rope_limit: int | None = None,
    ) -> Task:
        """Return the task for a resolved configuration. Raises ConfigError.

        `progress(stage, share done)`. `rope_limit`: the length of a row from which on the model treats other rows of
        the batch differently, too. None: no such length.
        """


TASKS: Door[TaskKind] = Door("task", {})
"""Kinds of tasks by name. Runs use "rows": rows from files."""


def check_names(config: Config) -> None:
    """Raise ConfigError if model or data for a new run do not exist.

    A resumed run may lack the model path, because the checkpoint contains the model.
    """
    # A look at names alone: this runs before the slow imports, and the choice of a checkpoint needs them.
    goes_on = config.run.dir is not None and (Path(config.run.dir) / "checkpoints").is_dir()
    if goes_on or config.checkpoint.resume not in ("auto", "never"):
        return
    if config.model.path is not None and not config.model.path.startswith(PYTHON_PREFIX):
        find_model(config.model.path)
    TASKS["rows"].check_names(config)
