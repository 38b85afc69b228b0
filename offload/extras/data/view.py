"""Data preview without a run: sources, document lengths, and rows in the first steps with their targets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal

import numpy as np

from offload.accelerators import own_accelerator
from offload.app.config.config import Config
from offload.app.hf.models import max_positions
from offload.app.training.build import RunSetup
from offload.app.training.decisions import FROM_NUM_STEPS, decide
from offload.app.training.objectives import OBJECTIVES, Objective
from offload.app.training.parts import stages
from offload.app.training.resume import ResumePoint
from offload.app.training.task import unit_of
from offload.errors import counted, ratio
from offload.extras.data.dataset import Dataset
from offload.extras.data.packing import Layout, best_fit
from offload.extras.data.source_rows import SourceRows
from offload.extras.data.task import FileRows

PieceKind = Literal["context", "trained", "padding"]
_PIECE_KINDS: tuple[PieceKind, ...] = ("context", "trained", "padding")
_ISOLATION_NOTE = (
    "note: before the first step a run tests whether the model keeps the documents of a row apart; a model that mixes "
    "them gets one document in each row, as with --data.packing false."
)
_WORTH_A_CHANGE = 0.1
"""Padding share from which on a better row length is searched."""
_MOST_SAMPLED = 10_000
_LENGTH_STEP = 16  # tokens: kernels prefer such rows
_MOST_BINS = 16
_MOST_BATCHES = 1000
_MANY = 4
_PICTURES = {code: 0x2400 + code for code in range(32) if chr(code) not in "\n\t"} | {0x7F: 0x2421}
"""Printable replacements for control characters, which a terminal would execute."""


@dataclass(frozen=True)
class Piece:
    """Neighbouring tokens with the same kind."""

    text: str
    """Tokens as text; special tokens by name."""
    kind: PieceKind
    """trained: targets; context: input only; padding: no tokens."""
    is_special: bool
    begins_document: bool
    """True if another document begins here in the row."""
    num_tokens: int


@dataclass(frozen=True)
class Sample:
    """One row in a step."""

    step: int
    """Step, from 1."""
    row: int
    """Row within the step, from 1."""
    place: str
    """Group and name there, such as `pair 3, chosen`; empty for other rows."""
    source: str
    num_trained: int
    num_padding: int
    num_documents: int
    """Documents with a part in the row."""
    pictures: tuple[str, ...]
    """Picture names in order."""
    pieces: tuple[Piece, ...]

    @property
    def title(self) -> str:
        """Row identity and counts, in words."""
        pictures = ""
        if self.pictures:
            pictures = f"; with {', '.join(self.pictures)}"
        num_tokens = sum(piece.num_tokens for piece in self.pieces) - self.num_padding
        position = f"row {self.row}"
        if self.place:
            position = self.place
        return (
            f"step {self.step}, {position}, of {self.source}: "
            f"{counted(self.num_documents, 'document')}, {counted(num_tokens, 'token')}, "
            f"{self.num_trained:,} trained on, {self.num_padding:,} padding{pictures}"
        )


@dataclass(frozen=True)
class SourceView:
    """One training source."""

    name: str
    path: str
    """Source as configured."""
    format: str
    """Row format and container."""
    num_documents: int
    """Documents, also held-out ones."""
    num_tokens: int
    trained_share: float
    """Approximate share of targets among all tokens."""
    num_bad_rows: int
    num_empty: int
    """Skipped documents without text."""
    num_rows: int
    padding_share: float
    num_longer: int
    """Documents longer than a row."""
    num_cut_off: int
    """Tokens cut off from these documents."""
    histogram: tuple[tuple[int, int], ...]
    """Documents by length: (upper bin limit in tokens, document count). One limit is the row length."""

    @property
    def cut(self) -> str:
        """What happens to documents longer than a row, in words."""
        if not self.num_longer:
            return "no document is longer than a row"
        longer = f"{self.num_longer:,} of {self.num_documents:,} longer than a row"
        if self.num_cut_off:
            share = self.num_cut_off / self.num_tokens
            return f"{longer}: {counted(self.num_cut_off, 'token')}, {share:.1%} of all, are cut off"
        return f"{longer}, continued in further rows: no token is cut off"


@dataclass(frozen=True)
class BetterLength:
    """Another row length."""

    sequence_length: int
    padding_share: float
    """Padding share in one epoch's rows, from a sample of the documents."""


@dataclass(frozen=True)
class DataView:
    """Data preview for a run."""

    sources: tuple[SourceView, ...]
    told: tuple[str, ...]
    """Messages about the data: notes, one line per source, rows."""
    packing: bool | Literal["isolated"]
    """Row layout: as `data.packing`, or isolated."""
    layout: str
    """Row layout, in words."""
    objective: str
    sequence_length: int
    batch_size: int
    group: int
    """Rows that stay together, such as a pair of answers."""
    num_train_rows: int
    """Rows per epoch."""
    num_eval_rows: int
    padding_share: float
    """Padding share in one epoch's rows."""
    better_length: BetterLength | None
    """Row length with much less padding, if there is one."""
    num_steps: int
    epochs: float
    """Passes over the data in these steps."""
    samples: tuple[Sample, ...]
    """First rows in the run, in order."""

    @classmethod
    def of(
        cls,
        data: Dataset,
        targets: Objective,
        messages: Sequence[str],
        *,
        num_steps: int,
        num_samples: int,
        most_tokens: int | None = None,
    ) -> DataView:
        """Build the preview.

        `num_samples`: sample rows (or groups) from the first step on, at most those of the run. `num_steps`: 0 is no
        limit. `most_tokens`: positions in the model. None: no limit.
        """
        num_samples = min(num_samples, num_steps * data.batch_size // data.group or num_samples) * data.group
        sources = tuple(_source(rows, data, targets) for rows in data.sources)
        quotas = data.quotas
        # Weighted by quota, the share in an epoch.
        padding = sum(each.padding_share * quota for each, quota in zip(sources, quotas, strict=True)) / sum(quotas)
        # Batches by length have no fixed width, so their padding is counted on actual batches.
        if data.batching.by_length:
            sources, padding = _as_batched(sources, data)
        samples: list[Sample] = []
        while len(samples) < num_samples:
            step = len(samples) // data.batch_size
            samples += _samples(data, targets, step, min(data.batch_size, num_samples - len(samples)))
        return cls(
            sources,
            tuple(messages),
            data.train.packing,
            data.layout_description,
            targets.name,
            data.sequence_length,
            data.batch_size,
            data.group,
            data.num_train_rows,
            data.num_eval_rows,
            padding,
            find_better_length(data, padding, most_tokens),
            num_steps,
            num_steps * data.batch_size / data.num_train_rows,
            tuple(samples),
        )


def look_at_data(config: Config, num_ranks: int, num_samples: int, say: Callable[[str], None]) -> DataView:
    """Prepare the data for a new run, and return a view. No weights are read. Raises OffloadError like the run.

    `say` receives each long stage.
    """
    config.check_source()
    config.check_ranks(num_ranks)
    accelerator = own_accelerator(config.offload.device)
    # As in a run, so the view shows the rows of the run. Weights are not read here.
    setup = RunSetup.read(ResumePoint(config), accelerator=accelerator, num_ranks=num_ranks)
    config = setup.config
    data = FileRows.build(
        config,
        setup.model_kind,
        setup.vocab_size,
        stages(lambda text, _: say(f"{text} ..."), lambda: None),
        setup.rope_limit,
    )
    objective = OBJECTIVES[config.train.method].of(config, setup.model_kind.name, data.tokenizer, setup.vocab_size)
    description = list(data.describe(objective))
    if data.is_isolated and config.data.packing_isolated == "auto":
        description.append(_ISOLATION_NOTE)
    num_steps = int(decide(config, FROM_NUM_STEPS, data.num_steps).train.steps or 0)
    most_tokens = max_positions(setup.architecture)
    return DataView.of(
        data, objective, description, num_steps=num_steps, num_samples=num_samples, most_tokens=most_tokens
    )


def describe_rows(view: DataView) -> str:
    """Return steps, epochs and padding share in words."""
    rows = counted(view.batch_size, "row")
    if view.group > 1:
        rows = counted(view.batch_size // view.group, unit_of(view.group))
    length = f"steps of {rows}"
    # Without a limit, the run ends for another reason, such as time.
    if view.num_steps:
        length = f"{counted(view.num_steps, 'step')} of {rows}: {ratio(view.epochs)} times the data"
    told = f"{length}; {describe_padding(view.padding_share)}"
    if view.better_length is None:
        return told
    better = view.better_length
    return f"{told}; with --data.sequence_length {better.sequence_length} it would be {better.padding_share:.1%}"


def describe_padding(share: float) -> str:
    """Return the padding share in words."""
    if not share:
        return "no padding"
    return f"{share:.1%} of the rows is padding"


def find_better_length(data: Dataset, padding: float, most_tokens: int | None) -> BetterLength | None:
    """Return the row length with the least padding, if it at most halves a padding worth a change.

    Lengths are the length of the longest document, and the current one halved and doubled. A length that cuts more
    tokens from documents does not count. Batches by length have no fixed row length.
    """
    layout, length = data.train.packing, data.sequence_length
    if padding < _WORTH_A_CHANGE or layout is True or data.batching.by_length:
        return None
    # Every n-th document: packing by best fit takes time for each piece.
    documents = [each.document_lengths for each in data.sources]
    samples = [each[:: len(each) // _MOST_SAMPLED + 1] for each in documents]
    weights = [quota / each.train.num_rows for each, quota in zip(data.sources, data.quotas, strict=True)]
    longest = max(int(each.max()) for each in samples)
    lengths = {-(-longest // _LENGTH_STEP) * _LENGTH_STEP, *(length * 2**power // 8 for power in range(7))}
    found = []
    for other in sorted(each for each in lengths if _LENGTH_STEP <= each <= (most_tokens or each)):
        rows = np.asarray([_num_rows(each, other, layout) for each in samples])
        cuts_more = other < min(length, longest)
        if cuts_more or rows.sum() < data.batch_size:
            continue
        tokens = np.asarray([np.minimum(each, other).sum() for each in samples])
        # Rounded, so the shorter of two almost equal lengths wins.
        found.append((round(1 - float((tokens * weights).sum() / (other * (rows * weights).sum())), 2), other))
    share, best = min(found, default=(1.0, length))
    # A small gain is not worth a change of the settings.
    if share > padding / 2:
        return None
    return BetterLength(best, share)


def _num_rows(lengths: np.ndarray, row_length: int, layout: Layout) -> int:
    """Return the number of rows for documents by length [documents], cut to a row."""
    if not layout:
        return len(lengths)
    return int(best_fit(np.minimum(lengths, row_length), row_length).max(initial=-1)) + 1


def histogram(lengths: np.ndarray, row_length: int) -> tuple[tuple[int, int], ...]:
    """Count documents by length [documents] in bins with constant growth: pairs (upper limit in tokens, documents).

    One bin ends at `row_length`. There are four bins per doubling, or fewer above `_MOST_BINS` bins.
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


def _source(rows: SourceRows, data: Dataset, targets: Objective) -> SourceView:
    lengths = rows.document_lengths
    return SourceView(
        rows.name,
        str(rows.source.source),
        rows.source.format,
        len(lengths),
        rows.num_tokens,
        targets.share(rows.target_share),
        rows.findings.num_bad,
        rows.findings.num_empty,
        rows.train.num_rows,
        rows.padding,
        int((lengths > data.sequence_length).sum()),
        rows.num_truncated,
        histogram(lengths, data.sequence_length),
    )


def _as_batched(sources: Sequence[SourceView], data: Dataset) -> tuple[tuple[SourceView, ...], float]:
    """Return the sources with the padding share in actual batches, and the total padding share.

    Covers one epoch, or the first `_MOST_BATCHES` batches.
    """
    real, wide = np.zeros((2, len(sources)))
    for step in range(min(data.num_steps(1), _MOST_BATCHES)):
        rows = data.rows_of(step)
        owners = data.owners(rows)
        lengths = data.train.lengths(rows)
        real += np.bincount(owners, lengths, len(sources))
        wide += np.bincount(owners, minlength=len(sources)) * data.batching.width(lengths, data.sequence_length)
    shares = 1 - real / np.maximum(wide, 1)
    updated = tuple(replace(each, padding_share=float(share)) for each, share in zip(sources, shares, strict=True))
    return updated, float(1 - real.sum() / wide.sum())


def _samples(data: Dataset, targets: Objective, step: int, num_rows: int) -> list[Sample]:
    """Return the first rows in a step."""
    ids, trained = (each.numpy() for each in targets.tokens_and_targets(data.batch(step), step))
    rows = data.rows_of(step)[:num_rows]
    owners = data.owners(rows)
    lengths = data.train.lengths(rows)
    samples = []
    picture_documents = data.train.picture_documents(rows)
    for index, borders in enumerate(data.train.document_starts(rows)):
        kind_indices = np.where(trained[index], 1, 0)
        kind_indices[lengths[index] :] = 2
        pieces = _pieces(data.tokenizer, ids[index], kind_indices, borders)
        num_trained, num_padding = int((kind_indices == 1).sum()), int((kind_indices == 2).sum())
        name = data.sources[owners[index]].name
        place = ""
        if data.group > 1:
            group, member = divmod(index, data.group)
            names = data.grouping.members
            place = f"{unit_of(data.group)} {group + 1}, {names[min(member, len(names) - 1)]}"
        pictures = tuple[str, ...]()
        if picture_documents is not None:
            pictures = tuple(each.name for each in picture_documents[index].pictures)
        counts = num_trained, num_padding, len(borders)
        samples.append(Sample(step + 1, index + 1, place, name, *counts, pictures, tuple(pieces)))
    return samples


def _pieces(tokenizer: Any, ids: np.ndarray, kind_indices: np.ndarray, borders: np.ndarray) -> list[Piece]:
    """Cut a row [tokens] where the kind changes, at special tokens, and at document starts."""
    special = np.isin(ids, _special(tokenizer)) | (ids >= _num_tokens(tokenizer))
    # Twice the kind plus one for special: the number changes wherever one of both does.
    changes = np.flatnonzero(np.diff(2 * kind_indices + (special & (kind_indices < 2)))) + 1
    cuts = np.unique(np.concatenate([[0], changes, borders, [len(ids)]]))
    pieces = []
    for begin, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        kind, is_special = _PIECE_KINDS[kind_indices[begin]], bool(special[begin])
        if kind == "padding":
            text = f"{_name(tokenizer, int(ids[begin]))} x {end - begin:,}"
        elif is_special:
            text = ""
            for token, same in groupby(ids[begin:end].tolist()):  # a picture may take a thousand equal tokens
                name, number = _name(tokenizer, token), len(list(same))
                if number < _MANY:
                    text += name * number
                else:
                    text += f"{name} x {number:,} "
        else:
            text = _text(tokenizer, ids.tolist(), begin, end)
        pieces.append(Piece(text, kind, is_special, begin > 0 and begin in borders, end - begin))
    return pieces


def _special(tokenizer: Any) -> list[int]:
    """Return the ids of special tokens. Of token ids without a tokenizer, none is known."""
    if tokenizer is None:
        return []
    added = tokenizer.added_tokens_decoder
    return [*tokenizer.all_special_ids, *(index for index, token in added.items() if token.special)]


def _num_tokens(tokenizer: Any) -> int:
    # Without a tokenizer, no id is beyond it.
    if tokenizer is None:
        return np.iinfo(np.int64).max
    return max(tokenizer.get_vocab().values()) + 1


def _name(tokenizer: Any, token: int) -> str:
    """Return the token name, or the number for an id outside the tokenizer (e.g. an extra embedding row for masks)."""
    known = None
    if tokenizer is not None and token < _num_tokens(tokenizer):
        known = tokenizer.convert_ids_to_tokens(token)
    return known or f"<{token}>"


def _text(tokenizer: Any, ids: list[int], begin: int, end: int) -> str:
    """Return tokens [begin, end) as text.

    Many tokenizers drop a leading blank on decoding. The previous token is therefore decoded too, and the prefix
    removed.
    """
    if tokenizer is None:
        return "".join(f"{token} " for token in ids[begin:end])
    before, both, alone = (
        tokenizer.decode(each, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        for each in (ids[max(begin - 1, 0) : begin], ids[max(begin - 1, 0) : end], ids[begin:end])
    )
    text = str(alone)
    # Tokens of parts of a character have another text together than one by one.
    if both.startswith(before):
        text = str(both[len(before) :])
    return text.translate(_PICTURES)
