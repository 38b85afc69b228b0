"""Batches by step number: what a step trains on is a pure function of the data, the settings and the step. The order of
rows is a permutation of each epoch, computed entry by entry, so that a position needs no memory and no history.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from offload.data.packing import IGNORE, Rows
from offload.data.prepare import Preparation, TokenizedData
from offload.data.sources import STDLIB_CHAT, hash_text
from offload.data.tokenizer import UNKNOWN
from offload.errors import ConfigError, too_few_rows
from offload.files.user_cache import default_cache_dir

if TYPE_CHECKING:
    import torch

    Batch = dict[str, torch.Tensor]

_NUM_ROUNDS = 8  # of the network that orders rows
_EVAL_SEED = 0
"""Eval rows stand in one fixed mixed order, so that the first few batches are a fair sample, equal for all runs."""


@dataclass(frozen=True)
class Dataset:
    """Rows for training and evaluation, and the order they come in.

    Epoch after epoch is shuffled anew, and batches run on across the borders of epochs: batch `step` holds positions
    [step * batch_size, (step + 1) * batch_size) of the endless sequence, so the last batch of an epoch is completed by
    the first rows of the next, and data of fewer rows than a batch repeats within it.
    """

    train: Rows
    eval: Rows
    tokenizer: Any
    batch_size: int
    seed: int
    notes: tuple[str, ...] = ()  # what the user should know: text left out, tokens cut off; for the trainer to print
    contents: str = ""  # what was read: format, source, how much
    target_share: float = 1.0  # of all tokens, those with a label; as the data have it, before an objective chooses

    @property
    def sequence_length(self) -> int:
        return self.train.sequence_length

    @property
    def num_train_rows(self) -> int:
        return self.train.num_rows

    @property
    def num_eval_rows(self) -> int:
        return self.eval.num_rows

    @property
    def layout(self) -> str:
        """How the rows are cut, in words."""
        if self.train.packing:
            return "packed, so that a row may begin and end within a document and its documents see each other"
        return "a document a row"

    def num_steps(self, epochs: float) -> int:
        """Return how many batches cover `epochs` passes over the training rows; the last one may run into the next
        pass."""
        return -int(-epochs * self.num_train_rows // self.batch_size)

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Return rank's contiguous share of the batch of `step` (from 0), see `share`.

        `input_ids` and `labels` are int64 [rows, sequence_length], labels unshifted with -100 where nothing is trained.
        `attention_mask`, alike, is there only when a row of the whole batch is padded, so that all ranks get the same
        keys. Raises ConfigError where there are more ranks than rows.
        """
        if self.batch_size < world_size:
            raise ConfigError(too_few_rows(self.batch_size, world_size))
        rows = rows_at(step * self.batch_size, self.batch_size, self.num_train_rows, self.seed)
        return _batch(self.train, rows, rank, world_size)

    def eval_batches(
        self, batch_size: int, max_batches: int | None = None, rank: int = 0, world_size: int = 1
    ) -> Iterator[Batch]:
        """Yield rank's shares of the eval rows, each row once, in an order that no seed changes.

        The last batch may be smaller. A rank whose share of it is empty gets a row without targets (labels -100), so
        that all ranks have the same number of batches.
        """
        if batch_size < 1:
            raise ConfigError(f"An eval batch of {batch_size} rows is none; it must have at least 1.")
        num_batches = -(-self.num_eval_rows // batch_size)
        for index in range(num_batches if max_batches is None else min(num_batches, max_batches)):
            positions = np.arange(index * batch_size, min((index + 1) * batch_size, self.num_eval_rows))
            rows = shuffled(positions, self.num_eval_rows, _EVAL_SEED, epoch=0)
            yield _batch(self.eval, rows, rank, world_size)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps to recognize this data; plain numbers and strings. The position is the step
        number."""
        settings: dict[str, Any] = {
            "tokens": f"{self.train.store.content_hash}/{self.train.first}+{self.num_train_rows}",
            "sequence_length": self.sequence_length,
            "packing": self.train.packing,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }
        return {**settings, "fingerprint": hash_text(repr(settings))}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ConfigError when `state`, of a `state_dict`, belongs to other batches than these."""
        keys = {"sequence_length": "data", "packing": "data", "batch_size": "train", "seed": "run"}
        own = self.state_dict()
        for key, section in keys.items():
            if state.get(key) != own[key]:
                raise ConfigError(
                    f"{section}.{key} is {own[key]} and was {state.get(key)} when the run began: the batches would be "
                    "others. Set it back, or begin another run.dir."
                )
        if state.get("fingerprint") != own["fingerprint"]:
            raise ConfigError(
                "The training data is not what the run began with: the tokens differ, by the files, their format, the "
                "tokenizer, data.eval_fraction or data.train_on_prompt. Restore them, or begin another run.dir."
            )


def build_dataset(
    *,
    source: str | list[str],
    format: str = "auto",  # noqa: A002 - the key is data.format
    tokenizer: str | None = None,
    model_path: str | None = None,
    is_pretrained: bool = False,
    vocab_size: int,
    sequence_length: int,
    packing: bool = True,
    train_on_prompt: bool = False,
    eval_fraction: float = 0.0,
    batch_size: int,
    seed: int = 0,
    cache_dir: Path | None = None,
    progress: Callable[[str, float], None] | None = None,
) -> Dataset:
    """Prepare the data (once; later calls find it in the cache) and return its batches.

    `tokenizer` is a folder or the name of a model in the local hub cache; None takes the one in `model_path`, and where
    there is none trains one on the data of at most `vocab_size`, the model's, tokens; unless the model `is_pretrained`,
    whose embeddings mean other tokens. `progress` is called with (stage,
    fraction done) while there is something to prepare. Raises ConfigError for every setting or file that cannot be
    used.
    """
    if sequence_length < 2:
        raise ConfigError(f"data.sequence_length={sequence_length} leaves no token to predict; it must be at least 2.")
    if batch_size < 1:
        raise ConfigError(f"train.batch_size={batch_size} must be at least 1.")
    if not 0 <= eval_fraction < 1:
        raise ConfigError(
            f"data.eval_fraction={eval_fraction} must lie in [0, 1): the share of the data kept for evaluation."
        )
    where = cache_dir if cache_dir is not None else default_cache_dir()
    preparation = Preparation(source, format, vocab_size, eval_fraction, where, progress or (lambda *_: None))
    loaded = preparation.tokenizer(tokenizer, model_path, is_pretrained)
    prepared = preparation.tokens(loaded, train_on_prompt)
    if prepared.streams and not packing:
        raise ConfigError(
            "data.packing=false makes a row of each document, but a one-dimensional file of tokens marks no "
            "documents. Set data.packing=true, or store the ids as .npy [documents, tokens]."
        )
    pad_id = next(
        (i for i in (getattr(loaded, "pad_token_id", None), getattr(loaded, "eos_token_id", None)) if i is not None), 0
    )
    train = Rows.over(prepared.train, sequence_length, packing, pad_id)
    held_out = Rows.over(prepared.eval, sequence_length, packing, pad_id)
    whole = train, held_out
    notes = [*preparation.notes, *_notes(prepared, train, held_out)]
    if getattr(loaded, "unk_token", None) == UNKNOWN:
        notes.append(f"A vocabulary of {vocab_size} has no room for every byte: rare characters are read as {UNKNOWN}.")
    if eval_fraction > 0 and not (train.num_rows and held_out.num_rows):
        train, held_out = _split_rows(train if train.num_rows else held_out, eval_fraction)
    num_tokens = prepared.train.num_tokens + prepared.eval.num_tokens
    if not train.num_rows:
        raise ConfigError(
            f"data.source={source!r} has {num_tokens} tokens and none of them can be trained; one row needs a trained "
            f"token after another token within data.sequence_length={sequence_length}. "
            + ("Give more data." if num_tokens < 2 else "Raise --data.sequence_length, or set data.train_on_prompt.")
        )
    share = (whole[0].num_targets + whole[1].num_targets) / num_tokens
    contents = _contents(preparation, prepared)
    return Dataset(train, held_out, loaded, batch_size, seed, tuple(notes), contents, share)


def _contents(preparation: Preparation, prepared: TokenizedData) -> str:
    """Return what was read, such as `text of notes/*.txt (3 files): 3 documents, 1,204 tokens`."""
    files, sources = preparation.files, preparation.sources
    formats = dict.fromkeys("messages" if file.format == STDLIB_CHAT else file.format for file in files)
    shown = ", ".join(sources[:3]) + (", ..." if len(sources) > 3 else "")
    num_documents = prepared.train.num_documents + prepared.eval.num_documents
    documents = ("conversation" if preparation.holds_chats else "document") + "s" * (num_documents != 1)
    num_tokens = prepared.train.num_tokens + prepared.eval.num_tokens
    return (
        f"{' and '.join(formats)} of {shown}{f' ({len(files):,} files)' if len(files) > 1 else ''}: "
        f"{num_documents:,} {documents}, {num_tokens:,} tokens"
    )


def _split_rows(whole: Rows, eval_fraction: float) -> tuple[Rows, Rows]:
    """Hold out the last rows: for data of too few documents to be split between them."""
    num_eval = min(max(round(whole.num_rows * eval_fraction), 1), whole.num_rows - 1) if whole.num_rows > 1 else 0
    num_train = whole.num_rows - num_eval
    return whole.part(0, num_train), whole.part(num_train, whole.num_rows)


def _notes(prepared: TokenizedData, *parts: Rows) -> list[str]:
    truncated = sum(rows.num_truncated_tokens for rows in parts)
    without_target = sum(rows.num_without_target for rows in parts)
    notes = []
    if prepared.num_empty:
        notes.append(f"{prepared.num_empty} documents hold no text and were left out.")
    if prepared.num_split:
        notes.append(
            f"{prepared.num_split} conversations became one document for each answer, as the chat template rewrites "
            "earlier turns."
        )
    if truncated:
        notes.append(
            f"{truncated} tokens lie beyond data.sequence_length={parts[0].sequence_length} and are cut off "
            "(data.packing=false)."
        )
    if without_target:
        notes.append(f"{without_target} rows hold no trained token and were left out.")
    return notes


def share(num_rows: int, rank: int, world_size: int) -> slice:
    """Return which of `num_rows` rows are rank's: shares are contiguous and differ by one row at most."""
    return slice(num_rows * rank // world_size, num_rows * (rank + 1) // world_size)


def _batch(rows: Rows, indices: np.ndarray, rank: int, world_size: int) -> Batch:
    """Read rank's share of `indices`, or a row without targets where it is empty."""
    import torch

    own = indices[share(len(indices), rank, world_size)]
    is_filler = not len(own)
    if is_filler:
        own = indices[:1]
    ids, labels = rows.read(own)
    if is_filler:
        labels[:] = IGNORE
    batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
    if (rows.lengths(indices) < rows.sequence_length).any():
        mask = np.arange(rows.sequence_length) < rows.lengths(own)[:, None]
        batch["attention_mask"] = torch.from_numpy(mask.astype(np.int64))
    return batch


def shuffled(positions: np.ndarray, num_rows: int, seed: int, epoch: int) -> np.ndarray:
    """Return which row stands at each of `positions` [n] (0 <= position < num_rows) in this epoch, int64 [n].

    A Feistel network over the next even power of two is a permutation of it; walking on while the result is outside [0,
    num_rows) makes it one of the rows [Black and Rogaway 2002, "Ciphers with arbitrary finite domains"].
    """
    half_bits = np.uint64(max((int(num_rows - 1).bit_length() + 1) // 2, 2))
    mask = np.uint64((1 << int(half_bits)) - 1)
    keys = _keys(seed, epoch)
    value = np.asarray(positions, np.uint64)
    outside = np.ones(value.shape, bool)
    while outside.any():
        left, right = value >> half_bits, value & mask
        for key in keys:
            left, right = right, left ^ (_mix(right + key) & mask)
        value = np.where(outside, left << half_bits | right, value)
        outside = value >= num_rows
    return value.astype(np.int64)


def rows_at(start: int, count: int, num_rows: int, seed: int) -> np.ndarray:
    """Return the rows at global positions [start, start + count) of the endless sequence of epochs, int64 [count]."""
    positions = np.arange(start, start + count)
    epochs = positions // num_rows
    rows = np.empty(count, np.int64)
    for epoch in np.unique(epochs):
        here = epochs == epoch
        rows[here] = shuffled(positions[here] % num_rows, num_rows, seed, int(epoch))
    return rows


def _keys(seed: int, epoch: int) -> np.ndarray:
    base = _mix(np.asarray([seed % 2**64], np.uint64)) + np.uint64(epoch)
    return _mix(_mix(base) + np.arange(1, _NUM_ROUNDS + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _mix(value: np.ndarray) -> np.ndarray:
    """The finalizer of splitmix64 [Steele, Lea and Flood 2014]; uint64 arithmetic wraps."""
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.asarray(value ^ (value >> np.uint64(31)))
