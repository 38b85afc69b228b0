"""Batches by step number: a pure function of data, settings and step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from offload.app.training.task import unit_of
from offload.distributed.share import share
from offload.errors import ConfigError, counted, too_few_rows
from offload.extras.data.encoder import Encoder, Progress
from offload.extras.data.formats import GROUPINGS, Grouping
from offload.extras.data.mixture import LengthBatching, MixedBatching, Mixture, RowSet, StoppingStrategy, quotas
from offload.extras.data.packing import IGNORE, Layout, Rows
from offload.extras.data.picture_encoder import PictureInputs
from offload.extras.data.prepare import prepare
from offload.extras.data.row_source import RowSource
from offload.extras.data.settings import DataSettings
from offload.extras.data.source_rows import SourceRows, names_of
from offload.extras.data.sources import SourceFile, both_names, hash_text
from offload.extras.data.storage import Mark
from offload.extras.data.tokenizer import UNKNOWN, as_files

if TYPE_CHECKING:
    import torch

    from offload.app.training.objectives import Objective

    Batch = dict[str, torch.Tensor]

MOST_PROMPT_TOKENS = 256
_TEXT_TOKENS = 16
_EVAL_SEED = 0
"""Fixed shuffle seed for eval rows. The first few batches are a fair sample, equal in all runs."""


class Excerpt(NamedTuple):
    """Prompt and answer tokens, int64 [n]. `answer` is None for a text without a separate prompt."""

    prompt: np.ndarray
    answer: np.ndarray | None


class RowValues(Protocol):
    """Further batch values for a row set, such as another model's."""

    def of(self, rows: np.ndarray, labels: np.ndarray) -> Mapping[str, torch.Tensor]:
        """Return batch values [n, tokens, ...] by key. rows: indices [n]. labels: int64 [n, tokens], all ignored where
        a row only fills up a rank's share.
        """


@dataclass(frozen=True)
class Dataset:
    """Rows for training and evaluation, with their order.

    Every epoch is shuffled anew. Batches cross epoch borders: batch `step` holds positions [step * batch_size, (step +
    1) * batch_size) in the endless row sequence. The last batch in an epoch is completed with rows from the next, and a
    data set smaller than one batch repeats within the batch.
    """

    train: RowSet
    """Training rows from one source, or a mixture from several sources."""
    eval: RowSet
    """Rows held out from the training data."""
    tokenizer: Any
    """Tokenizer. None: the data is token ids."""
    batch_size: int
    """Rows per step; each document of a group is a row."""
    seed: int
    """Seed for the row order."""
    notes: tuple[str, ...] = ()
    """Messages for the user, e.g. about skipped texts or truncated tokens."""
    sources: tuple[SourceRows, ...] = ()
    """Training sources."""
    eval_sources: tuple[SourceRows, ...] = ()
    """Eval sources (without the held-out rows)."""
    pad_id: int = 0
    """Padding token id."""
    batching: MixedBatching = field(default_factory=MixedBatching)
    """Assigns rows to batches."""
    rope_limit: int | None = None
    """Longest sequence without an effect on the rotary frequencies of other rows (`rope_limit` in `app/hf/models.py`).
    Rows are padded to at most this length if none is longer, else all to `sequence_length`: a result never depends on
    the other rows of a batch. None: no limit.
    """
    pictures: PictureInputs | None = None
    """Builds picture tensors. None: text only."""
    values: Mapping[str, RowValues] = field(default_factory=dict)
    """Further batch values by row set, named as in `row_sets`."""

    @property
    def sequence_length(self) -> int:
        return self.train.sequence_length

    @property
    def num_train_rows(self) -> int:
        return self.train.num_rows

    @property
    def quotas(self) -> Sequence[int]:
        """Rows per epoch from each training source."""
        return self.train.quotas

    @property
    def group(self) -> int:
        """Neighbouring rows that stay together, such as a pair of answers."""
        return self.train.group

    @property
    def grouping(self) -> Grouping:
        """What the rows of a group are called."""
        (data_format,) = self.sources[0].source.formats
        return GROUPINGS[data_format]

    @property
    def evals(self) -> dict[str, RowSet]:
        """All eval row sets by name. The held-out rows have the empty name."""
        row_sets: dict[str, RowSet] = {each.name: each.train for each in self.eval_sources}
        # First: the first set decides about the best step.
        if self.eval.num_rows:
            return {"": self.eval, **row_sets}
        return row_sets

    @property
    def eval_sizes(self) -> dict[str, int]:
        """Rows of each eval set, by name."""
        return {name: rows.num_rows for name, rows in self.evals.items()}

    @property
    def num_eval_rows(self) -> int:
        return sum(self.eval_sizes.values())

    @property
    def is_isolated(self) -> bool:
        """True if the documents in a packed row are computed apart from each other."""
        return self.train.packing == "isolated"

    @property
    def by_length(self) -> bool:
        """True if the rows of a batch have about the same length."""
        return self.batching.by_length

    @property
    def longest(self) -> int:
        """Tokens in the longest sequence with positions of its own, in any row set."""
        return max(rows.longest for rows in self.row_sets.values())

    @property
    def has_pictures(self) -> bool:
        """True if batches have picture tensors."""
        return self.pictures is not None

    @property
    def has_one_picture_per_row(self) -> bool:
        """True if each training and eval row has exactly one picture."""
        return all(file.has_one_picture_each for rows in self.sources for file in rows.files)

    @property
    def rows_description(self) -> str:
        """Row counts and row layout, in words."""
        group, rows = self.group, "rows"
        if group > 1:
            rows = f"{unit_of(group)}s of rows"
        return (
            f"{rows}: {self.num_train_rows // group:,} of {counted(self.sequence_length, 'token')} to train on, "
            f"{self.num_eval_rows // group:,} to evaluate; {self.layout_description}"
        )

    @property
    def layout_description(self) -> str:
        """Row layout, in words."""
        if self.is_isolated:
            return "packed, each document apart, with positions of its own"
        if self.train.packing:
            return "packed, so that a row may begin and end within a document and its documents see each other"
        if self.group > 1:
            return self.grouping.layout
        if self.by_length:
            return "a document a row, those of a batch of about one length"
        return "a document a row"

    def describe(self, objective: Objective) -> Iterator[str]:
        """Yield lines about a run: notes, sources, rows."""
        yield from (f"note: {text}" for text in self.notes)
        for word, done, each, quota in (
            *(("data", "trained on", *pair) for pair in zip(self.sources, self.quotas, strict=True)),
            *(("eval", "evaluated on", each, None) for each in self.eval_sources),
        ):
            share = f"{100 * objective.share(each.target_share):.3g}% of them {done}"
            yield f"{word}: {', '.join([each.contents, share, *each.more(quota, self.num_train_rows)])}"
        yield f"{self.rows_description}; objective: {objective.name}"
        if not self.train.packing and self.rope_limit is not None and self.longest > self.rope_limit:
            yield (
                f"note: beyond {self.rope_limit:,} tokens, a model has other rotary frequencies for all rows of a "
                f"batch, and the longest row has {self.longest:,}: with such rows, every batch is padded to "
                f"{self.sequence_length:,} tokens (data.sequence_length), so that no row depends on others."
            )

    def files(self) -> dict[str, bytes]:
        """Return the tokenizer or processor files, by name."""
        # A processor saves its tokenizer, too.
        if self.pictures is not None:
            return as_files(self.pictures.processor)
        return as_files(self.tokenizer)

    def num_steps(self, epochs: float) -> int:
        """Return the batch count for `epochs` passes over the training rows.

        The last batch may extend into the next pass.
        """
        return -int(-epochs * self.num_train_rows // self.batch_size)

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Return the contiguous share (see `share`) for `rank` in the batch for `step` (from 0).

        `input_ids` and `labels` are int64 [rows, sequence_length]; with batching by length, the longest row in the
        whole batch decides the width. Labels are unshifted, and -100 marks untrained tokens. `attention_mask` (same
        shape) is present only if some row in the whole batch is padded, so all ranks get the same keys. Isolated
        documents have `position_ids` instead. Rows with pictures also have the processor tensors. Raises ConfigError
        for more ranks than rows, and for a picture changed since preparation.
        """
        if self.batch_size // self.group < world_size:
            raise ConfigError(too_few_rows(self.batch_size // self.group, world_size))
        return self._read("train", self.rows_of(step), rank, world_size)

    def rows_of(self, step: int) -> np.ndarray:
        """Return the training row indices for `step` (from 0), int64 [batch_size]."""
        return self.batching.at(self.train, step, self.batch_size, self.seed)

    def owners(self, rows: np.ndarray) -> np.ndarray:
        """Return the index in `sources` for each training row, int64 [n]."""
        return self.train.owners(rows)

    def num_tokens(self, step: int) -> int:
        """Return the token count in the batch for `step` (from 0), over all ranks, without padding."""
        return int(self.train.lengths(self.rows_of(step)).sum())

    def eval_batches(
        self,
        batch_size: int,
        max_batches: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        name: str | None = None,
    ) -> Iterator[Batch]:
        """Yield this rank's eval batches, each row once, in a fixed order independent of the seed.

        `name`: one of `evals`; None: the first. The last batch may be smaller. A rank with an empty share gets a row
        without targets (labels -100), so all ranks have equally many batches.
        """
        if name is None:
            name = next(iter(self.evals), "")
        row_set = self.evals.get(name, self.eval)
        # Every rank goes through all batches: a rank with an earlier end would leave the others in an exchange.
        num_batches = -(-row_set.num_rows // batch_size)
        for index in range(num_batches)[:max_batches]:
            begin = index * batch_size
            rows = row_set.at(begin, min(batch_size, row_set.num_rows - begin), _EVAL_SEED)
            yield self._read(f"eval {name}", rows, rank, world_size)

    @property
    def row_sets(self) -> dict[str, RowSet]:
        """All row sets by the names in `values`: `train`, and `eval NAME` for each eval set."""
        return {"train": self.train, **{f"eval {name}": rows for name, rows in self.evals.items()}}

    def batch_of(self, name: str, begin: int, end: int, rank: int = 0, world_size: int = 1) -> Batch:
        """Return this rank's share in rows [begin, end) from one of `row_sets`, in storage order."""
        return self._read(name, np.arange(begin, end), rank, world_size)

    def probe(self) -> Batch:
        """Return one group of eval rows, or of training rows without an eval set."""
        return next(self.eval_batches(self.group, 1), None) or self.batch_of("train", 0, self.group)

    def excerpt(self) -> Excerpt | None:
        """Return an excerpt of the first eval row, or of the first training row. None: all prompts are too long."""
        rows, first = next(iter(self.evals.values()), self.train), np.array([0])
        ids, labels = rows.read(first)
        length = int(rows.lengths(first)[0])
        return cut_excerpt(ids[0, :length], labels[0, :length], rows.document_starts(first)[0].tolist())

    def _read(self, name: str, indices: np.ndarray, rank: int, world_size: int) -> Batch:
        """Read this rank's share in `indices`.

        Append rows without targets if the batch keys on this rank would differ.
        """
        import torch

        rows = self.row_sets[name]
        part = share(len(indices), rank, world_size, rows.group)
        fillers = _fillers(rows, indices, part)
        own_rows = np.concatenate([indices[part], fillers])
        # Of the rows of all ranks: with their own widths and keys, ranks would cut their batches at other places.
        lengths = rows.lengths(indices)
        width = self._width(rows, lengths)
        ids, labels = (np.ascontiguousarray(each[:, :width]) for each in rows.read(own_rows))
        # Fillers only take part in the passes: they add nothing to the loss or the count.
        labels[len(own_rows) - len(fillers) :] = IGNORE
        batch = {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}
        if (positions := rows.positions(own_rows)) is not None:
            batch["position_ids"] = torch.from_numpy(positions)
        elif (lengths < width).any():  # of the rows of all ranks, so either every rank has a mask or none
            mask = np.arange(width) < rows.lengths(own_rows)[:, None]
            batch["attention_mask"] = torch.from_numpy(mask.astype(np.int64))
        if self.pictures is not None and (documents := rows.picture_documents(own_rows)) is not None:
            batch |= self.pictures.of(documents, ids)
        if name in self.values:
            batch |= self.values[name].of(own_rows, labels)
        return batch

    def _width(self, rows: RowSet, lengths: np.ndarray) -> int:
        """Return the padded width in tokens for rows of a row set with these lengths [n]."""
        # A model may choose rotary frequencies by the longest row: no row may cross the limit because of its
        # neighbours.
        width, limit = self.batching.width(lengths, rows.sequence_length), self.rope_limit
        if limit is None or self.is_isolated:  # positions of isolated documents do not depend on the width
            return width
        # Of all rows, also those of other batches: any of them may be a neighbour in another order.
        if rows.longest > limit:
            return rows.sequence_length
        return min(width, limit)

    def eval_bytes(self, num_rows: int, name: str) -> int | None:
        """Return the UTF-8 bytes of text under the targets in the first `num_rows` eval rows, in `eval_batches` order.

        None: not known, because the data is token ids or the tokenizer is not a fast one.
        """
        row_set = self.evals[name]
        return row_set.num_bytes(row_set.at(0, num_rows, _EVAL_SEED))

    def state_dict(self) -> dict[str, Any]:
        """Return plain numbers and strings by which a checkpoint recognizes the data. The position is the step."""
        settings: dict[str, Any] = {
            "tokens": self.train.identity,
            "sequence_length": self.sequence_length,
            "packing": self.train.packing,
            "batch_size": self.batch_size,
            "seed": self.seed,
        }
        if self.by_length:  # absent in checkpoints from earlier versions
            settings["group_by_length"] = True
        return {**settings, "fingerprint": hash_text(repr(settings))}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Raise ConfigError if `state` (from a `state_dict`) describes other batches."""
        keys = {"sequence_length": "data", "packing": "data", "group_by_length": "data"}
        keys |= {"batch_size": "train", "seed": "run"}
        current, state = ({"group_by_length": False, **each} for each in (self.state_dict(), state))
        for key, section in keys.items():
            if state.get(key) != current[key]:
                hint = ""
                # Two settings decide about this one state.
                if "isolated" in (current[key], state.get(key)):
                    hint = " (isolated: --data.packing_isolated true)"
                raise ConfigError(
                    f"{section}.{key} is {current[key]} and was {state.get(key)} when the run began{hint}: batches "
                    "would differ. Set it back, or begin a new run in another run.dir."
                )
        if state.get("fingerprint") != current["fingerprint"]:
            raise ConfigError(
                "The training data has changed since the run began: the tokens differ, because of the files, their "
                "names (these decide the order and the held-out rows), their format, the tokenizer, data.eval_share, "
                "data.train_on_prompt or the weights of sources. Restore them (after a move, the old file names under "
                "--data.source), or begin a new run in another run.dir."
            )


def _tell_nobody(_stage: str, _done: float) -> None:
    """Take no notice of the progress."""


def build_dataset(settings: DataSettings, progress: Progress = _tell_nobody) -> Dataset:
    """Prepare the data (once; later calls read the cache) and return the batches.

    `progress(stage, fraction done)` is called during preparation. Raises ConfigError for an unusable file, and for a
    source without a trainable row.
    """
    training = [RowSource(source, settings) for source in settings.sources]
    evaluation = [RowSource(source, settings, is_evaluated=True) for source in settings.eval_sources]
    _check_disjoint(training, evaluation)
    row_sources = [*training, *evaluation]
    _check_grouped(row_sources, settings.grouped)
    _check_kinds(row_sources, settings)
    encoder = Encoder.open(row_sources, settings, progress)
    loaded = encoder.tokenizer
    pad_id = _padding_of(loaded)
    layout = _layout(training, evaluation, settings)
    laid_out = []
    for name, each in zip(names_of([*settings.sources, *settings.eval_sources]), row_sources, strict=True):
        files, findings = prepare(each, encoder, settings, progress)
        if column := next((key for key in settings.unheard if key in findings.unread), None):
            raise ConfigError(f"{each} has the column {column!r}, and {settings.unheard[column]}")
        laid_out.append(SourceRows.of(name, each, files, findings, settings, layout, pad_id))
    notes = [note for each in row_sources for note in each.notes]
    notes += [*encoder.notes, *(note for each in laid_out for note in each.notes(len(laid_out) > 1))]
    if getattr(loaded, "unk_token", None) == UNKNOWN:
        notes.append(
            f"A vocabulary of {settings.vocab_size} has no room for every byte: rare characters are read as {UNKNOWN}."
        )
    trained, evaluated = laid_out[: len(training)], laid_out[len(training) :]
    parts = [each.train for each in trained]
    # An empty set keeps the layout, for a data set without held-out rows.
    held_out = [each.eval for each in trained if each.eval.num_rows] or [trained[0].eval]
    batching = MixedBatching()
    # Rows of a stream are all full, and a group stays together whatever its lengths.
    if settings.group_by_length and layout is False and not settings.grouped:
        batching = LengthBatching()
    pictures = None
    if encoder.processor is not None:
        pictures = PictureInputs(encoder.processor)
    return Dataset(
        _mix(parts, [each.weight for each in settings.sources], settings.stopping_strategy),
        Mixture.of(held_out, [rows.num_rows for rows in held_out]),
        loaded,
        settings.batch_size * parts[0].group,
        settings.seed,
        tuple(notes),
        tuple(trained),
        tuple(evaluated),
        pad_id,
        batching,
        settings.rope_limit,
        pictures,
    )


def _layout(training: Sequence[RowSource], evaluation: Sequence[RowSource], settings: DataSettings) -> Layout:
    """Return the row layout of all sources."""
    # Picture tokens are not cut, and a row has the pictures of one document.
    if any(each.has_pictures for each in (*training, *evaluation)):
        return False
    isolated = settings.isolated
    # Texts alone profit from the plain layout: no token is cut off or padding.
    if isolated is None:
        isolated = any(each.has_chats for each in training)
    if settings.packing and isolated:
        return "isolated"
    return settings.packing


def _fillers(rows: RowSet, indices: np.ndarray, own_slice: slice) -> np.ndarray:
    """Return filler rows for a rank, int64 [n], in addition to the rows in `own_slice`.

    A rank without rows gets one group. A rank without pictures gets one row with a picture if other ranks have
    pictures.
    """
    has_picture = np.asarray([bool(each.pictures) for each in rows.picture_documents(indices) or ()], bool)
    if has_picture.any() and not has_picture[own_slice].any():
        return indices[has_picture][:1]
    if own_slice.stop > own_slice.start:
        return indices[:0]
    return indices[: rows.group]


def _check_disjoint(training: Sequence[RowSource], evaluation: Sequence[RowSource]) -> None:
    """Raise ConfigError if a file is in both training and evaluation, under any of its names."""
    # Marks see through links and other spellings of a path.
    by_mark: dict[Mark, tuple[RowSource, SourceFile]] = {}
    for each in training:
        for file in each.files:
            for mark in file.place.marks:
                other, same = by_mark.setdefault(mark, (each, file))
                if other.holds_out(same) != each.holds_out(file):
                    raise ConfigError(
                        f"{both_names(file, same)} is in two entries of data.sources, {other.source} and "
                        f"{each.source}: rows held out for evaluation in one entry (data.eval_share={each.eval_share}) "
                        "would be trained on in the other. Name the file in one source (weight says how often), or set "
                        "--data.eval_share 0."
                    )
    for each in evaluation:
        for file in each.files:
            for other, same in (by_mark[mark] for mark in file.place.marks if mark in by_mark):
                raise ConfigError(
                    f"data.eval_source {each.source} has {both_names(file, same)}, which data.source {other.source} "
                    "trains on: an eval loss on training data says nothing. Name other files, or hold out a part of "
                    "the training data by --data.eval_share."
                )


def _check_grouped(sources: Sequence[RowSource], grouped: str) -> None:
    """Raise ConfigError unless all sources have the format `grouped`, or without one none has such a format."""
    for each in sources:
        others = each.formats - {grouped}
        if grouped and others:
            method, fix = f"needs {grouped}", f"name rows of {GROUPINGS[grouped].keys}"
        elif not grouped and (unfit := others & GROUPINGS.keys()):
            method, fix = "learns from single texts", f"set --train.method {GROUPINGS[min(unfit)].methods}"
        else:
            continue
        formats = ", ".join(sorted(each.formats))
        raise ConfigError(f"{each} has the format {formats}, and train.method {method}: {fix}.")


def _check_kinds(sources: Sequence[RowSource], settings: DataSettings) -> None:
    """Raise ConfigError for rows with pictures, or with a prompt and an answer, that a reason speaks against."""
    for each in sources:
        if each.has_pictures and settings.no_pictures:
            raise ConfigError(f"{each} has pictures, and {settings.no_pictures}")
    # Trained on as plain text, a row has no border between prompt and answer.
    if settings.train_on_prompt:
        return
    for each in sources:
        if each.may_mask and settings.no_answers:
            formats = ", ".join(sorted(each.formats))
            raise ConfigError(f"{each} has the format {formats}, and {settings.no_answers}")


def _mix(parts: Sequence[Rows], weights: Sequence[float | None], strategy: StoppingStrategy) -> RowSet:
    """Return the rows of all sources together, by their weights."""
    group = parts[0].group
    # In groups first, so a quota never cuts one.
    numbers = [part.num_rows // group for part in parts]
    return Mixture.of(parts, [group * each for each in quotas(numbers, weights, strategy)])


def _padding_of(tokenizer: object) -> int:
    """Return the token id for padding. Any valid id will do: padding has no target, and no other token sees it."""
    ids = (getattr(tokenizer, "pad_token_id", None), getattr(tokenizer, "eos_token_id", None))
    return next((each for each in ids if each is not None), 0)


def cut_excerpt(ids: np.ndarray, labels: np.ndarray, starts: Sequence[int]) -> Excerpt | None:
    """Cut an excerpt from the ids and labels (int64 [n]) of a row with documents at `starts`.

    A conversation gives everything up to the first answer, a plain text the first tokens. The first document in a row
    may have begun in an earlier row, so this document is tried last.
    """
    ends = [*starts[1:], len(ids)]
    documents = list(zip(starts, ends, strict=True))
    # A document of one token has no target.
    documents = [span for span in [*documents[1:], *documents[:1]] if span[1] - span[0] > 1]
    with_prompt = [span for span in documents if (labels[span[0] + 1 : span[1]] == IGNORE).any()]
    for begin, end in with_prompt:
        is_answer = labels[begin:end] != IGNORE
        is_answer[0] = False  # the first token has no context
        first = int(is_answer.argmax())
        behind = ~is_answer[first:]
        num_tokens = len(behind)
        # The answer may be followed by the next turn.
        if behind.any():
            num_tokens = int(behind.argmax())
        if is_answer.any() and first <= MOST_PROMPT_TOKENS:
            return Excerpt(ids[begin : begin + first], ids[begin + first : begin + first + num_tokens])
    for begin, end in documents:
        if (begin, end) not in with_prompt:
            return Excerpt(ids[begin : begin + min(_TEXT_TOKENS, (end - begin) // 2)], None)
    return None
