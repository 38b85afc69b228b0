"""One source as rows, with the messages about used and skipped data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np

from offload.errors import ConfigError, counted, ratio
from offload.extras.data.formats import unread_note
from offload.extras.data.packing import Layout, Rows
from offload.extras.data.prepare import PreparedSource
from offload.extras.data.sources import Source
from offload.extras.data.storage import decompressed_name
from offload.extras.data.token_file import TokenFile

_A_ROW = "makes a row of each document"


@dataclass(frozen=True)
class SourceRows:
    """One source as rows, with counts for logs and reports."""

    name: str
    """Source name in logs."""
    prepared: PreparedSource
    train: Rows
    """Training rows; for an eval source, the eval rows."""
    eval: Rows
    layouts: tuple[Rows, Rows]
    """Layouts of training and eval documents, before rows are held out from one layout."""

    @classmethod
    def of(
        cls,
        name: str,
        prepared: PreparedSource,
        sequence_length: int,
        layout: Layout,
        pad_id: int,
        train_on_prompt: bool,
    ) -> SourceRows:
        """Lay out one source as rows. Raises ConfigError if no row has a target."""
        source = prepared.source
        if prepared.findings.streams and layout is not True:
            setting, effect = (
                ("packing_isolated=true", "keeps documents apart") if layout else ("packing=false", _A_ROW)
            )
            raise ConfigError(
                f"data.{setting} {effect}, but a one-dimensional file of tokens marks no documents. Set "
                "data.packing=true and data.packing_isolated=false, or store the ids as .npy [documents, tokens]."
            )
        group = 2 if source.has_pairs else 1
        train, held_out = (Rows.over(each, sequence_length, layout, pad_id, group) for each in prepared.files)
        layouts = train, held_out
        if source.eval_share > 0 and not (train.num_rows and held_out.num_rows):
            # Documents are held out by hash. Of few documents, one side may have got none.
            train, held_out = _split_rows(train if train.num_rows else held_out, source.eval_share)
        rows = cls(name, prepared, train, held_out, layouts)
        if not train.num_rows:
            more = [
                rows._explain_no_target(train_on_prompt),
                *(f"{text}." for text in rows.more(None, 0)),
                *prepared.findings.bad[:1],
            ]
            raise ConfigError(f"{source.source.setting}={list(source.source.paths)!r} {' '.join(more)}")
        return rows

    def _explain_no_target(self, train_on_prompt: bool) -> str:
        """Return the reason why no row has a target, and the settings that change this."""
        prepared = self.prepared
        source, findings = prepared.source, prepared.findings
        num_tokens = prepared.num_tokens
        stores = prepared.files
        if not num_tokens:
            has_rows = findings.num_empty or findings.num_bad or any(each.num_documents for each in stores)
            if not source.num_bytes:
                problem = "is empty"
            else:
                problem = "has no text or tokens" if has_rows else "has no rows"
            return f"{problem}. Give more data."
        length, layout = self.train.sequence_length, self.train.packing is True
        # Each remedy is tried on the stores, so an error never names one without effect.
        has_longer = any(self._has_target(store, max(store.num_tokens, 2), layout) for store in stores)
        may_unmask = not (source.has_pairs or train_on_prompt)
        has_unmasked = may_unmask and any(self._has_target(store.unmasked(), length, layout) for store in stores)
        unmask = "set --data.train_on_prompt true"
        if has_longer:
            fix = f"Raise --data.sequence_length{f', or {unmask}' if has_unmasked else ''}."
        elif findings.no_answers:
            fix = f"{findings.no_answers}: rename the roles of the data, to user and assistant."
        elif any(store.trained is not None for store in stores):
            fix = f"Give rows with answers, labels or masks to train on{f', or {unmask}' if has_unmasked else ''}."
        else:
            fix = "Give more data."
        return (
            f"has {counted(num_tokens, 'token')} but none to train on: a row needs a trained token after another "
            f"token within data.sequence_length={length}. {fix}"
        )

    def _has_target(self, store: TokenFile, sequence_length: int, layout: bool) -> bool:
        return Rows.over(store, sequence_length, layout, self.train.pad_id, self.train.group).num_rows > 0

    @property
    def num_truncated(self) -> int:
        """Tokens cut off at row ends."""
        return sum(rows.num_truncated_tokens for rows in self.layouts)

    @property
    def num_too_long(self) -> int:
        """Skipped documents with pictures, longer than a row."""
        return sum(rows.num_too_long for rows in self.layouts)

    @property
    def padding(self) -> float:
        """Padding share in the training rows."""
        rows = self.train
        return 1 - int(rows.lengths(np.arange(rows.num_rows)).sum()) / (rows.num_rows * rows.sequence_length)

    @property
    def target_share(self) -> float:
        """Share of tokens with a label in the data, before an objective selects targets."""
        return sum(rows.num_targets for rows in self.layouts) / self.prepared.num_tokens

    def more(self, quota: int | None, num_rows: int) -> list[str]:
        """Return phrases about skipped data and the share in an epoch.

        `quota`: rows from this source among `num_rows` per epoch; None for an eval source.
        """
        counts = (
            (self.prepared.findings.num_bad, "bad row", "skipped"),
            (self.prepared.findings.num_empty, "document", "without text left out"),
            (self.num_too_long, "document", "with pictures longer than a row left out"),
        )
        phrases = [f"{counted(count, noun)} {label}" for count, noun, label in counts if count]
        if quota is not None and num_rows != self.train.num_rows:
            often = ratio(quota / self.train.num_rows)
            passes = "" if quota == self.train.num_rows else f", {often} times its own rows"
            phrases.append(f"{100 * quota / num_rows:.3g}% of the rows of an epoch{passes}")
        return phrases

    def notes(self, with_name: bool) -> list[str]:
        """Return messages for the user. `with_name`: one among several sources, so messages begin with the name."""
        findings = self.prepared.findings
        notes = [*findings.notes()]
        if self.num_truncated:
            notes.append(
                f"cut off beyond data.sequence_length={self.train.sequence_length} "
                f"(data.packing{'_isolated=true' if self.train.packing else '=false'}): "
                f"{counted(self.num_truncated, 'token')}."
            )
        if self.num_too_long:
            notes.append(
                "left out, since documents with pictures are not cut, and longer than "
                f"data.sequence_length={self.train.sequence_length}: {counted(self.num_too_long, 'document')}."
            )
        if without_target := sum(rows.num_without_target for rows in self.layouts):
            reason = f" {findings.no_answers}." if findings.no_answers else ""
            notes.append(f"left out, without a trained token: {counted(without_target, 'row')}.{reason}")
        if findings.unread:
            source = self.prepared.source
            notes.append(unread_note(sorted(source.formats), sorted(findings.unread), source.source.columns))
        return [f"{self.name}: {note}" if with_name else note for note in notes]


def _split_rows(whole: Rows, eval_share: float) -> tuple[Rows, Rows]:
    """Hold out the last rows, for data with too few documents to split by document."""
    number = whole.num_rows // whole.group
    # At least one row on each side. The last rows: the held-out part of a stream is in one place.
    num_eval = min(max(round(number * eval_share), 1), number - 1) if number > 1 else 0
    num_train = (number - num_eval) * whole.group
    return whole.part(0, num_train), whole.part(num_train, whole.num_rows)


def names_of(sources: Sequence[Source]) -> list[str]:
    """Return unique source names for logs: the last path part without ending, or the whole source if ambiguous.

    For a glob such as "notes/*.txt" the name is the folder.
    """
    short = [_short_name(source.paths[0]) + (f"[{source.split}]" if source.split else "") for source in sources]
    whole = [str(source) for source in sources]
    # Short names where they tell the sources apart.
    names = [one if short.count(one) == 1 else other for one, other in zip(short, whole, strict=True)]
    seen: Counter[str] = Counter()
    for index, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[index] = f"{name}#{seen[name]}"
    return names


def _short_name(path: str) -> str:
    *folders, _ = PurePosixPath(path).parts
    parts = (*folders, decompressed_name(PurePosixPath(path)).stem)
    return next((part for part in reversed(parts) if part.strip("*?")), path)
