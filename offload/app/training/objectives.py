"""Training objectives: how token rows become inputs and labels. Chosen once, by model class."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.app.config.config import Config
from offload.app.config.sections import ModelSection
from offload.app.hf.models import BuiltModel
from offload.distributed.comm import Comm
from offload.doors import Door
from offload.engine.engine import Engine
from offload.engine.loss.batch import IGNORED
from offload.engine.loss.group_loss import GroupLoss
from offload.engine.loss.loss import Loss
from offload.errors import ConfigError

Batch = dict[str, torch.Tensor]
Say = Callable[[str], None]
BuildModel = Callable[[ModelSection], BuiltModel]
"""Builds another model, unfilled, for the rows and in the precision of the run. Raises ConfigError."""
OpenFrozen = Callable[[str], Engine]
"""Opens an engine over the model that a setting names, for evaluations alone. Collective. Raises ConfigError and
DoesNotFitError.
"""


class Objective:
    """Maps a dataset batch to a model batch.

    The dataset batch has input_ids, labels and optionally attention_mask, each int64 [rows, tokens]. For causal
    language models nothing changes: the model shifts the labels.

    This is a door: `train.method` is the name of an objective in `OBJECTIVES`, with a loss of its own if it has one.
    The type of `TrainSection.method` also lists the name.
    """

    name = "next token"
    takes_labels = True
    """True if the targets are the labelled tokens in the data, except the first in a row."""
    count_unit = "tokens"
    """Unit for `count`."""
    loss: Loss | None = None
    """Loss function. None: the model's own."""

    @classmethod
    def companions(cls, _config: Config, _model: nn.Module, _build: BuildModel, /) -> Mapping[str, BuiltModel]:
        """Return the frozen models that the loss needs beside the trained one, by name. Raises ConfigError."""
        return {}

    @classmethod
    def loss_over(
        cls, _config: Config, _model: nn.Module, _companions: Mapping[str, BuiltModel], _vocab_size: int, /
    ) -> Loss | None:
        """Return the loss, if it reads another model beside the trained one, or the base of its adapter. Raises
        ConfigError.
        """
        return None

    @classmethod
    def measured_first(cls, _config: Config, _build: BuildModel, _vocab_size: int, /) -> Mapping[str, BuiltModel]:
        """Return the models that `measure_others` runs, each alone, by the settings that name them. Raises
        ConfigError.
        """
        return {}

    @classmethod
    def plan_notes(cls, _config: Config, _vocab_size: int, /) -> Iterable[str]:
        """Return what a plan does not count."""
        return ()

    @classmethod
    def decide(cls, _config: Config, _is_decoder: bool, /) -> Mapping[str, Any]:
        """Return open settings of the method, decided before the data are read, as for `Config.with_resolved`.

        `_is_decoder`: a token of the model sees only those before it. Raises ConfigError.
        """
        return {}

    @classmethod
    def of(cls, config: Config, model_kind: str, tokenizer: Any, vocab_size: int) -> Objective:
        """Return the objective for a configuration and a model kind. Raises ConfigError."""
        return choose_objective(model_kind, tokenizer=tokenizer, vocab_size=vocab_size, seed=config.run.seed)

    def measure_others(
        self, _config: Config, _open: OpenFrozen, _data: Any, _comm: Comm, _folders: Sequence[Path], _say: Say, /
    ) -> None:
        """Measure values of other models for the loss, before the engine of the run holds memory. Folders: as in
        `prepare`. Collective. Raises ConfigError, DoesNotFitError and DiskError.
        """

    def prepare(
        self, _config: Config, _engine: Engine, data: Any, _comm: Comm, _folders: Sequence[Path], _say: Say, /
    ) -> tuple[Any, Mapping[str, bytes]]:
        """Compute values for the loss before the first step. Return the data with these values, and checkpoint files.

        Folders: the checkpoints of a resumed run, newest first; empty for a new run. Collective. Raises ConfigError
        and DiskError.
        """
        return data, {}

    def export_files(self, _config: Config, _built: BuiltModel, /) -> Mapping[str, bytes]:
        """Return further files of an export, by name, for a library that reads it. Raises ConfigError."""
        return {}

    def apply(self, batch: Batch, _step: int, _first_row: int = 0, _num_rows: int | None = None, /) -> Batch:
        """Return the model batch for a step. Deterministic per step.

        The rows begin at `first_row` among `num_rows` rows over all ranks (None: no other ranks). The result for a row
        does not depend on the rank.
        """
        return batch

    def count(self, batch: Batch) -> int:
        """Return the target tokens in a batch from `apply`."""
        return int((batch["labels"][:, 1:] != IGNORED).sum())

    def inputs(self, batch: Batch) -> Batch:
        """Return the part of a batch from `apply` that the model accepts without a loss."""
        if self.loss is None:
            return batch
        return {key: value for key, value in batch.items() if key not in self.loss.own}

    def loss_metrics(self, comm: Comm) -> dict[str, float]:
        """Return further loss metrics from the last pass, as means over all ranks by name. Collective."""
        if not isinstance(self.loss, GroupLoss):
            return {}
        own = {name: (float(each.sum()), len(each)) for name, each in self.loss.metrics.items()}
        ranks = comm.gather_objects(own, "what the loss has measured")
        names = dict.fromkeys(name for each in ranks for name in each)
        sums = {name: [each[name] for each in ranks if name in each] for name in names}
        return {name: sum(total for total, _ in each) / sum(count for _, count in each) for name, each in sums.items()}

    def tokens_and_targets(self, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all tokens in a step's batch as the model sees them, and the target mask. Both [rows, tokens]."""
        model_batch = self.apply(batch, step)
        targets = model_batch["labels"] != IGNORED
        # The first token of a row has no context.
        targets[:, :1] = False
        return model_batch["input_ids"], targets

    def share(self, labelled: float) -> float:
        """Return the approximate target share among tokens. `labelled`: labelled share in the data."""
        return labelled


class MaskedTokens(Objective):
    """Masked language modelling (arXiv:1810.04805).

    15% of tokens are targets: 80% masked, 10% random, 10% unchanged.
    """

    name = "masked tokens"
    takes_labels = False

    def __init__(self, mask_id: int, num_tokens: int, seed: int) -> None:
        self._mask_id = mask_id
        self._num_tokens = num_tokens
        self._seed = seed

    def apply(self, batch: Batch, step: int, first_row: int = 0, num_rows: int | None = None, /) -> Batch:
        ids = batch["input_ids"]
        shape = (num_rows or len(ids), ids.shape[1])
        own = slice(first_row, first_row + len(ids))
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 + step)
        # Drawn for the rows of all ranks, so a row is masked alike on any number of them.
        draw = torch.rand(shape, generator=generator)[own]
        random_ids = torch.randint(self._num_tokens, shape, generator=generator)[own]
        chosen = draw < 0.15
        if "attention_mask" in batch:
            chosen &= batch["attention_mask"].bool()
        chosen &= (batch["labels"] != IGNORED).any(1, keepdim=True)  # empty row on a rank without data
        # A batch without a target has no loss. Over ranks, others have targets.
        if not chosen.any() and len(ids) == shape[0]:
            chosen[:, 0] = True
        inputs = torch.where(chosen & (draw < 0.12), self._mask_id, ids)
        inputs = torch.where(chosen & (draw >= 0.135), random_ids, inputs)
        return {**batch, "input_ids": inputs, "labels": torch.where(chosen, ids, IGNORED)}

    def count(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def tokens_and_targets(self, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        model_batch = self.apply(batch, step)
        return model_batch["input_ids"], model_batch["labels"] != IGNORED

    def share(self, _labelled: float) -> float:
        return 0.15


class Continuation(Objective):
    """Encoder-decoder training: the encoder reads the first half of a row, the decoder writes the second.

    Prefix language model, arXiv:1910.10683. Rows with prompt and answer are refused earlier.
    """

    name = "second half of a row from the first"
    takes_labels = False

    def apply(self, batch: Batch, _step: int, _first_row: int = 0, _num_rows: int | None = None, /) -> Batch:
        # The same place in all rows, so both halves are tensors without padding of their own.
        half = batch["input_ids"].shape[1] // 2
        cut = {key: value[:, :half].contiguous() for key, value in batch.items() if key != "labels"}
        return {**cut, "labels": batch["labels"][:, half:].contiguous()}

    def count(self, batch: Batch) -> int:
        return int((batch["labels"] != IGNORED).sum())

    def tokens_and_targets(self, batch: Batch, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        model_batch, targets = self.apply(batch, step), torch.zeros_like(batch["labels"], dtype=torch.bool)
        targets[:, model_batch["input_ids"].shape[1] :] = model_batch["labels"] != IGNORED
        return batch["input_ids"], targets

    def share(self, labelled: float) -> float:
        return labelled / 2


def choose_objective(model_kind: str, *, tokenizer: Any, vocab_size: int, seed: int) -> Objective:
    """Return the objective for a "causal", "masked" or "seq2seq" model. Raises ConfigError."""
    if model_kind == "causal":  # the model shifts the labels itself
        return Objective()
    if model_kind == "seq2seq":
        return Continuation()
    num_tokens = vocab_size
    if tokenizer is not None:
        num_tokens = len(tokenizer)
    mask_id = getattr(tokenizer, "mask_token_id", None)
    if mask_id is None and num_tokens < vocab_size:
        mask_id = vocab_size - 1  # an embedding row without a token
    if mask_id is None:
        raise ConfigError(
            f"the model is a masked language model, but the tokenizer has no mask token and its {num_tokens} tokens "
            f"fill the model's vocabulary of {vocab_size}; set --data.tokenizer to one with a mask token."
        )
    return MaskedTokens(mask_id, num_tokens, seed)


OBJECTIVES: Door[type[Objective]] = Door("objective", {"sft": Objective})
"""Objectives by the names of `train.method`."""
