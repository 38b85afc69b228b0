"""Mutations in data sets: row order, labels, batches."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from offload.app.training.objectives import MaskedTokens
from offload.extras.data import dataset, order
from offload.extras.data.chat import ChatRenderer
from offload.extras.data.dataset import Dataset
from offload.extras.data.packing import IGNORE, Rows
from offload.extras.large import document_attention
from offload.extras.prefs.losses import DPO
from tests.mutations import mutation


@mutation("tests/data/test_data_order.py")
def rows_of_each_epoch_in_the_order_of_the_first(patch: pytest.MonkeyPatch) -> None:
    shuffled = order.shuffled
    patch.setattr(order, "shuffled", lambda positions, num_rows, seed, _: shuffled(positions, num_rows, seed, 0))


@mutation("tests/data/test_data_dataset.py::test_an_epoch_is_every_row_once_and_the_next_follows_at_once")
def rows_not_shuffled(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(order, "shuffled", lambda positions, num_rows, seed, epoch: np.asarray(positions, np.int64))


@mutation("tests/data/test_data_packing.py")
def labels_shifted_by_one(patch: pytest.MonkeyPatch) -> None:
    read = Rows.read

    def shifted(self: Rows, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids, labels = read(self, rows)
        return ids, np.roll(labels, -1, axis=1)

    patch.setattr(Rows, "read", shifted)


@mutation("tests/data/test_data_packing.py")
def mask_of_the_loss_ignored(patch: pytest.MonkeyPatch) -> None:
    """All tokens are targets, including the prompts."""
    read = Rows.read

    def unmasked(self: Rows, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids, _ = read(self, rows)
        return ids, np.where(np.arange(ids.shape[1]) < self.lengths(rows)[:, None], ids, IGNORE)

    patch.setattr(Rows, "read", unmasked)


@mutation("tests/data/test_data_packing.py")
def documents_of_a_row_not_apart(patch: pytest.MonkeyPatch) -> None:
    """Positions continue across documents, so attention does not separate the documents."""
    patch.setattr(Rows, "positions", lambda self, rows: np.tile(np.arange(self.sequence_length), (len(rows), 1)))


@mutation("tests/data/test_data_packing.py")
def first_token_of_a_document_is_a_target(patch: pytest.MonkeyPatch) -> None:
    """The previous document's last token gets a target."""
    read = Rows.read

    def targeted(self: Rows, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        ids, labels = read(self, rows)
        for row, at, *_ in zip(*self._spans(rows), strict=True):
            labels[row, at] = ids[row, at]
        return ids, labels

    patch.setattr(Rows, "read", targeted)


@mutation("tests/training/test_resume.py::test_a_resumed_run_is_one_that_never_stopped")
def position_in_the_data_not_restored(patch: pytest.MonkeyPatch) -> None:
    """A process starts with the first batch at any step."""
    batch, first = Dataset.batch, dict[int, int]()

    def anew(self: Dataset, step: int, *whose: int) -> Any:
        return batch(self, step - first.setdefault(id(self), step), *whose)

    patch.setattr(Dataset, "batch", anew)


@mutation("tests/data/test_data_mixture.py")
def ranks_share_a_row(patch: pytest.MonkeyPatch) -> None:
    share = dataset.share

    def wider(num_rows: int, *whose: int) -> slice:
        own = share(num_rows, *whose)
        return slice(own.start, min(num_rows, own.stop + 1))

    patch.setattr(dataset, "share", wider)


@mutation("tests/data/test_data_dataset.py")
def rows_of_ranks_without_any_are_counted(patch: pytest.MonkeyPatch) -> None:
    """A rank without rows gets a row from another rank, and the loss counts the labels."""
    patch.setattr(dataset, "IGNORE", 0)


@mutation("tests/data/test_data_mixture.py")
def weights_of_sources_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(dataset, "quotas", lambda num_rows, weights, strategy: list(num_rows))


@mutation("tests/data/test_data_chat.py")
def prompts_of_chats_are_targets(patch: pytest.MonkeyPatch) -> None:
    begin = ChatRenderer.__init__
    patch.setattr(ChatRenderer, "__init__", lambda self, tokenizer, _, ends: begin(self, tokenizer, True, ends))


@mutation("tests/training/test_objectives.py")
def same_tokens_masked_in_every_step(patch: pytest.MonkeyPatch) -> None:
    apply = MaskedTokens.apply
    patch.setattr(MaskedTokens, "apply", lambda self, batch, step, *rows: apply(self, batch, 0, *rows))


@mutation("tests/training/test_preferences.py")
def reference_of_preferences_not_subtracted(patch: pytest.MonkeyPatch) -> None:
    of = DPO.of

    def alone(self: DPO, found: torch.Tensor, batch: Any) -> torch.Tensor:
        return of(self, found, {**batch, "reference": torch.zeros_like(batch["reference"])})

    patch.setattr(DPO, "of", alone)


@mutation("tests/engine/test_sink_attention.py")
def sums_without_the_sink(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(torch, "logaddexp", lambda sums, _sinks: sums)


@mutation("tests/engine/test_document_attention.py")
def a_document_begins_a_token_late(patch: pytest.MonkeyPatch) -> None:
    find_starts = document_attention.find_starts

    def late(documents: torch.Tensor, window: int | None) -> torch.Tensor:
        starts = find_starts(documents, window)
        starts[:, 2:] = starts[:, 1:-1].clone()
        return starts

    patch.setattr(document_attention, "find_starts", late)
