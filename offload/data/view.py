"""Data as a run would train on them, to be looked at: sources, lengths of documents, and rows of the first steps with
what is trained in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from offload.data.dataset import Dataset
from offload.data.mixture import Mixture
from offload.data.source_rows import SourceRows
from offload.errors import counted, ratio

if TYPE_CHECKING:
    import torch

Kind = Literal["context", "trained", "padding"]
_KINDS: tuple[Kind, ...] = ("context", "trained", "padding")
_MOST_BINS = 16
_MOST_BATCHES = 1000
_MANY = 4
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""Pictures of control characters, which would do what they say to a terminal."""


class Targets(Protocol):
    """Which tokens of rows are targets; the objectives of a run are such."""

    name: str

    def shown(self, batch: dict[str, torch.Tensor], step: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tokens of all rows of a step's batch as the model gets them, and which of them are targets."""

    def share(self, labelled: float) -> float:
        """Return about which share of the tokens are targets, where the data label a share of them."""


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens of one kind."""

    text: str
    """The tokens as text; special ones by their names."""
    kind: Kind
    """trained: a target; context: only read; padding: there is no token."""
    is_special: bool
    """Whether the tokens are special ones."""
    begins_document: bool
    """Whether another document of the row begins here."""
    num_tokens: int
    """Tokens of the piece."""


@dataclass(frozen=True)
class Sample:
    """A row of a step."""

    step: int
    """The step, from 1."""
    row: int
    """The row of the step, from 1."""
    answer: str
    """Of a pair, which answer the row is: chosen or rejected; empty for other rows."""
    source: str
    """The name of the source that the row is of."""
    num_trained: int
    """Targets of the row."""
    num_padding: int
    """Padding of the row."""
    num_documents: int
    """Documents of which the row has a part."""
    pictures: tuple[str, ...]
    """The names of the pictures in the row, in order."""
    pieces: tuple[Piece, ...]
    """The row in order."""

    @property
    def title(self) -> str:
        """Which row this is, and what it is made of."""
        num_tokens = sum(piece.num_tokens for piece in self.pieces) - self.num_padding
        which = f"pair {-(-self.row // 2)}, {self.answer}" if self.answer else f"row {self.row}"
        return (
            f"step {self.step}, {which}, of {self.source}: "
            f"{counted(self.num_documents, 'document')}, {counted(num_tokens, 'token')}, "
            f"{self.num_trained:,} trained on, {self.num_padding:,} padding{self._pictures}"
        )

    @property
    def _pictures(self) -> str:
        return f"; with {', '.join(self.pictures)}" if self.pictures else ""


@dataclass(frozen=True)
class SourceView:
    """A source that is trained on."""

    name: str
    """What logs call the source."""
    path: str
    """Where the source is, as it was given."""
    format: str
    """What the rows say, and what holds them."""
    num_documents: int
    """Documents, those that are held out too."""
    num_tokens: int
    """Tokens of the documents."""
    trained_share: float
    """Of the tokens, about which share are targets."""
    num_bad_rows: int
    """Rows of the files that were skipped, since they cannot be read."""
    num_empty: int
    """Documents that were left out, since they hold no text."""
    num_rows: int
    """Rows to train on."""
    padding_share: float
    """Of the tokens of these rows, the share that is padding."""
    num_longer: int
    """Documents that are longer than a row."""
    num_cut_off: int
    """Tokens of those that are in no row."""
    histogram: tuple[tuple[int, int], ...]
    """Documents by length: the most tokens of a bin, which begins above those of the bin before, and how many there
    are. The length of a row is the end of a bin."""


@dataclass(frozen=True)
class DataView:
    """Data, looked at."""

    sources: tuple[SourceView, ...]
    """What is trained on."""
    told: tuple[str, ...]
    """What a run says of its data: notes, each source, the rows."""
    packing: bool | Literal["isolated"]
    """How rows are cut: as `data.packing`, or isolated."""
    layout: str
    """How rows are cut, in words."""
    objective: str
    """What the model is asked to predict."""
    sequence_length: int
    """Tokens of a row."""
    batch_size: int
    """Rows of a step."""
    group: int
    """Rows that belong together: 2 of a pair of answers."""
    num_train_rows: int
    """Rows of an epoch."""
    num_eval_rows: int
    """Rows to evaluate."""
    padding_share: float
    """Of the tokens of an epoch's rows, the share that is padding."""
    num_steps: int
    """Steps of the run."""
    epochs: float
    """Passes over the data in these steps."""
    samples: tuple[Sample, ...]
    """The first rows of the run, in order."""

    @classmethod
    def of(cls, data: Dataset, targets: Targets, told: Sequence[str], *, num_steps: int, num_samples: int) -> DataView:
        """Look at data; of the first `num_samples` rows, or pairs of them, which fill steps from the first on."""
        num_samples *= data.group
        sources = tuple(_source(rows, data, targets) for rows in data.source_rows)
        quotas = data.train.quotas if isinstance(data.train, Mixture) else (data.train.num_rows,)
        padding = sum(each.padding_share * quota for each, quota in zip(sources, quotas, strict=True)) / sum(quotas)
        if data.batching.by_length:
            sources, padding = _as_batched(sources, data)
        samples: list[Sample] = []
        while len(samples) < num_samples:
            step = len(samples) // data.batch_size
            samples += _samples(data, targets, step, min(data.batch_size, num_samples - len(samples)))
        return cls(
            sources,
            tuple(told),
            data.train.packing,
            data.layout,
            targets.name,
            data.sequence_length,
            data.batch_size,
            data.group,
            data.num_train_rows,
            data.num_eval_rows,
            padding,
            num_steps,
            num_steps * data.batch_size / data.num_train_rows,
            tuple(samples),
        )

    def cut(self, source: SourceView) -> str:
        """What becomes of the documents of a source that are longer than a row."""
        if not source.num_longer:
            return "no document is longer than a row"
        longer = f"{source.num_longer:,} of {source.num_documents:,} longer than a row"
        if source.num_cut_off:
            share = source.num_cut_off / source.num_tokens
            return f"{longer}: {counted(source.num_cut_off, 'token')}, {share:.1%} of all, are cut off"
        return f"{longer}, to go on in other rows: no token is cut off"


def told_rows(view: DataView) -> str:
    """Return how full rows are, and how often a run reads the data."""
    rows = counted(view.batch_size // view.group, "row" if view.group == 1 else "pair")
    often = f"{ratio(view.epochs)} times the data"
    return f"{counted(view.num_steps, 'step')} of {rows}: {often}; {told_padding(view.padding_share)}"


def told_padding(share: float) -> str:
    """Return how much of rows is padding."""
    return f"{share:.1%} of the rows is padding" if share else "no padding"


def histogram(lengths: np.ndarray, row_length: int) -> tuple[tuple[int, int], ...]:
    """Count documents of these lengths [documents] in bins that grow by a constant factor: pairs of the most tokens
    of a bin and its documents. One bin ends at `row_length`; there are four for each doubling, or fewer if these were
    too many.
    """
    lengths = np.maximum(lengths, 1)
    for per_doubling in (4, 2, 1):
        ends = np.ceil(per_doubling * np.log2(np.asarray([lengths.min(), lengths.max()]) / row_length) - 1e-9)
        exponents = np.arange(min(ends[0], 0), max(ends[1], 0) + 1) / per_doubling
        if len(exponents) <= _MOST_BINS:
            break
    borders = np.unique(np.floor(row_length * 2.0**exponents + 1e-6).astype(np.int64))
    counts = np.bincount(np.searchsorted(borders, lengths), minlength=len(borders))
    return tuple(zip(borders.tolist(), counts.tolist(), strict=True))


def _source(rows: SourceRows, data: Dataset, targets: Targets) -> SourceView:
    lengths = rows.document_lengths
    facts = next(each for each in data.sources if each.name == rows.name)
    return SourceView(
        rows.name,
        str(rows.found.source),
        rows.format,
        len(lengths),
        rows.num_tokens,
        targets.share(facts.target_share),
        rows.tokens.num_bad,
        rows.tokens.num_empty,
        rows.train.num_rows,
        rows.padding,
        int((lengths > data.sequence_length).sum()),
        rows.num_truncated,
        histogram(lengths, data.sequence_length),
    )


def _as_batched(sources: Sequence[SourceView], data: Dataset) -> tuple[tuple[SourceView, ...], float]:
    """Return the sources with the padding that their rows have in batches, and the padding of all: of an epoch, or of
    the first batches of a long one.
    """
    real, wide = np.zeros((2, len(sources)))
    for step in range(min(data.num_steps(1), _MOST_BATCHES)):
        rows = data.rows_of(step)
        owners = data.owners(rows)
        lengths = data.train.lengths(rows)
        real += np.bincount(owners, lengths, len(sources))
        wide += np.bincount(owners, minlength=len(sources)) * data.batching.width(lengths, data.sequence_length)
    shares = 1 - real / np.maximum(wide, 1)
    found = tuple(replace(each, padding_share=float(share)) for each, share in zip(sources, shares, strict=True))
    return found, float(1 - real.sum() / wide.sum())


def _samples(data: Dataset, targets: Targets, step: int, num_rows: int) -> list[Sample]:
    """Return the first rows of a step."""
    ids, trained = (each.numpy() for each in targets.shown(data.batch(step), step))
    rows = data.rows_of(step)[:num_rows]
    owners, lengths, found = data.owners(rows), data.train.lengths(rows), []
    pictured = data.train.pictured(rows)
    for index, borders in enumerate(data.train.document_starts(rows)):
        kinds = np.where(trained[index], 1, 0)
        kinds[lengths[index] :] = 2
        pieces = _pieces(data.tokenizer, ids[index], kinds, borders)
        num_trained, num_padding = int((kinds == 1).sum()), int((kinds == 2).sum())
        name = data.sources[owners[index]].name
        answer = ("chosen", "rejected")[index % 2] if data.group > 1 else ""
        pictures = () if pictured is None else tuple(each.name for each in pictured[index].pictures)
        counts = num_trained, num_padding, len(borders)
        found.append(Sample(step + 1, index + 1, answer, name, *counts, pictures, tuple(pieces)))
    return found


def _pieces(tokenizer: Any, ids: np.ndarray, kinds: np.ndarray, borders: np.ndarray) -> list[Piece]:
    """Cut a row [tokens] where its kind changes, where special tokens begin and end, and where documents begin."""
    special = np.isin(ids, _special(tokenizer)) | (ids >= _num_tokens(tokenizer))
    changes = np.flatnonzero(np.diff(2 * kinds + (special & (kinds < 2)))) + 1
    cuts = np.unique(np.concatenate([[0], changes, borders, [len(ids)]]))
    pieces = []
    for begin, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        kind, is_special = _KINDS[kinds[begin]], bool(special[begin])
        if kind == "padding":
            text = f"{_name(tokenizer, int(ids[begin]))} x {end - begin:,}"
        elif is_special:
            text = "".join(
                _repeated(_name(tokenizer, token), len(list(same))) for token, same in groupby(ids[begin:end].tolist())
            )
        else:
            text = _text(tokenizer, ids.tolist(), begin, end)
        pieces.append(Piece(text, kind, is_special, begin > 0 and begin in borders, end - begin))
    return pieces


def _repeated(name: str, number: int) -> str:
    """Return a token that comes so often, as of a picture, which may be a thousand."""
    return name * number if number < _MANY else f"{name} x {number:,} "


def _special(tokenizer: Any) -> list[int]:
    if tokenizer is None:
        return []
    added = tokenizer.added_tokens_decoder
    return [*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)]


def _num_tokens(tokenizer: Any) -> int:
    return np.iinfo(np.int64).max if tokenizer is None else max(tokenizer.get_vocab().values()) + 1


def _name(tokenizer: Any, token: int) -> str:
    """Return a token's own name; of one that the tokenizer does not have, such as a row for the mask, its number."""
    known = None if tokenizer is None or token >= _num_tokens(tokenizer) else tokenizer.convert_ids_to_tokens(token)
    return known or f"<{token}>"


def _text(tokenizer: Any, ids: list[int], begin: int, end: int) -> str:
    """Return tokens [begin, end) as text. Many tokenizers leave out a blank in front of the first token that they
    decode, so the token before is decoded too, and its text taken off.
    """
    if tokenizer is None:
        return "".join(f"{token} " for token in ids[begin:end])
    before, both, alone = (
        tokenizer.decode(each, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for each in (ids[max(begin - 1, 0) : begin], ids[max(begin - 1, 0) : end], ids[begin:end])
    )
    return str(both[len(before) :] if both.startswith(before) else alone).translate(_PICTURES)
