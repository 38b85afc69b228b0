"""One source as rows, with the messages about used and skipped data."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

import numpy as np

from offload.app.training.task import unit_of
from offload.errors import ConfigError, counted, ratio
from offload.extras.data.findings import Findings
from offload.extras.data.formats import unread_note
from offload.extras.data.packing import Layout, Rows
from offload.extras.data.row_source import RowSource
from offload.extras.data.settings import DataSettings
from offload.extras.data.sources import Source
from offload.extras.data.storage import decompressed_name, with_split
from offload.extras.data.token_file import TokenFile


@dataclass(frozen=True)
class SourceRows:
    """One source as rows, with counts for logs and reports."""

    name: str
    """Source name in logs."""
    source: RowSource
    files: tuple[TokenFile, ...]
    """One file to train on, and one to evaluate on."""
    findings: Findings
    train: Rows
    """Training rows; for an eval source, the eval rows."""
    eval: Rows
    layouts: tuple[Rows, Rows]
    """Layouts of training and eval documents, before rows are held out from one layout."""

    @classmethod
    def of(
        cls,
        name: str,
        source: RowSource,
        files: tuple[TokenFile, ...],
        findings: Findings,
        settings: DataSettings,
        layout: Layout,
        pad_id: int,
    ) -> SourceRows:
        """Lay out the token files of one source as rows. Raises ConfigError if no row has a target."""
        if findings.streams and layout is not True:
            setting, effect = "packing=false", "makes a row of each document"
            if layout:
                setting, effect = "packing_isolated=true", "keeps documents apart"
            raise ConfigError(
                f"data.{setting} {effect}, but a one-dimensional file of tokens marks no documents. Set "
                "data.packing=true and data.packing_isolated=false, or store the ids as .npy [documents, tokens]."
            )
        train, held_out = (
            Rows.over(each, settings.sequence_length, layout, pad_id, source.num_before, source.group) for each in files
        )
        layouts = train, held_out
        if source.eval_share > 0 and not (train.num_rows and held_out.num_rows):
            # Documents are held out by hash. Of few documents, one side may have got none.
            whole = max(layouts, key=lambda each: each.num_rows)
            train, held_out = _split_rows(whole, source.eval_share)
        rows = cls(name, source, files, findings, train, held_out, layouts)
        if not train.num_rows:
            more = [
                rows._explain_no_target(settings.train_on_prompt),
                *(f"{text}." for text in rows.more(None, 0)),
                *findings.bad[:1],
            ]
            raise ConfigError(f"{source.source.setting}={list(source.source.paths)!r} {' '.join(more)}")
        return rows

    def _explain_no_target(self, train_on_prompt: bool) -> str:
        """Return the reason why no row has a target, and the settings that change this."""
        source, findings = self.source, self.findings
        files = self.files
        num_tokens = self.num_tokens
        if not num_tokens:
            problem = "has no rows"
            if not source.num_bytes:
                problem = "is empty"
            elif findings.num_empty or findings.num_bad or any(each.num_documents for each in files):
                problem = "has no text or tokens"
            return f"{problem}. Give more data."
        length, layout = self.train.sequence_length, self.train.packing is True
        # Each remedy is tried on the files, so an error never names one without effect.
        has_longer = any(self._has_target(each, max(each.num_tokens, 2), layout) for each in files)
        may_unmask = source.group == 1 and not train_on_prompt
        or_unmask = ""
        if may_unmask and any(self._has_target(each.unmasked(), length, layout) for each in files):
            or_unmask = ", or set --data.train_on_prompt true"
        if has_longer:
            fix = f"Raise --data.sequence_length{or_unmask}."
        elif findings.no_answers:
            fix = f"{findings.no_answers}: rename the roles of the data, to user and assistant."
        elif any(each.trained is not None for each in files):
            fix = f"Give rows with answers, labels or masks to train on{or_unmask}."
        else:
            fix = "Give more data."
        return (
            f"has {counted(num_tokens, 'token')} but none to train on: a row needs a trained token after another "
            f"token within data.sequence_length={length}. {fix}"
        )

    def _has_target(self, file: TokenFile, sequence_length: int, layout: bool) -> bool:
        rows = self.train
        return Rows.over(file, sequence_length, layout, rows.pad_id, rows.num_before, rows.group).num_rows > 0

    @property
    def num_tokens(self) -> int:
        """Tokens in all documents, also held-out or cut-off ones."""
        return sum(each.num_tokens for each in self.files)

    @property
    def document_lengths(self) -> np.ndarray:
        """Tokens per document, also held-out ones, int64 [documents]."""
        return np.concatenate([np.diff(each.documents) for each in self.files])

    @property
    def contents(self) -> str:
        """Format, source and amount: `text of notes/*.txt (3 files): 3 documents, 1,204 tokens`."""
        source, kind = self.source, "document"
        number = sum(each.num_documents for each in self.files)
        if source.has_chats:
            kind = "conversation"
        # Each member of a group is a document.
        if source.group > 1:
            kind, number = unit_of(source.group), number // source.group
        in_files = ""
        if len(source.files) > 1:
            in_files = f" ({counted(len(source.files), 'file')})"
        amount = f"{counted(number, kind)}, {counted(self.num_tokens, 'token')}"
        return f"{source.format} of {source.source}{in_files}: {amount}"

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
        return sum(rows.num_targets for rows in self.layouts) / self.num_tokens

    def more(self, quota: int | None, num_rows: int) -> list[str]:
        """Return phrases about skipped data and the share in an epoch.

        `quota`: rows from this source among `num_rows` per epoch; None for an eval source.
        """
        counts = (
            (self.findings.num_bad, "bad row", "skipped"),
            (self.findings.num_empty, "document", "without text left out"),
            (self.num_too_long, "document", "with pictures longer than a row left out"),
        )
        phrases = [f"{counted(count, noun)} {label}" for count, noun, label in counts if count]
        if quota is not None and num_rows != self.train.num_rows:
            passes = ""
            # A source used once per epoch needs no further number.
            if quota != self.train.num_rows:
                passes = f", {ratio(quota / self.train.num_rows)} times its own rows"
            phrases.append(f"{100 * quota / num_rows:.3g}% of the rows of an epoch{passes}")
        return phrases

    def notes(self, with_name: bool) -> list[str]:
        """Return messages for the user. `with_name`: one among several sources, so messages begin with the name."""
        findings = self.findings
        notes = [*findings.notes()]
        # Packed without isolation, no token is cut off.
        setting = "data.packing=false"
        if self.train.packing:
            setting = "data.packing_isolated=true"
        if self.num_truncated:
            notes.append(
                f"cut off beyond data.sequence_length={self.train.sequence_length} ({setting}): "
                f"{counted(self.num_truncated, 'token')}."
            )
        if self.num_too_long:
            notes.append(
                "left out, since documents with pictures are not cut, and longer than "
                f"data.sequence_length={self.train.sequence_length}: {counted(self.num_too_long, 'document')}."
            )
        if without_target := sum(rows.num_without_target for rows in self.layouts):
            reason = ""
            if findings.no_answers:
                reason = f" {findings.no_answers}."
            notes.append(f"left out, without a trained token: {counted(without_target, 'row')}.{reason}")
        if findings.unread:
            source = self.source
            notes.append(unread_note(sorted(source.formats), sorted(findings.unread), source.source.columns))
        if with_name:
            return [f"{self.name}: {note}" for note in notes]
        return notes


def _split_rows(whole: Rows, eval_share: float) -> tuple[Rows, Rows]:
    """Hold out the last rows, for data with too few documents to split by document."""
    number = whole.num_rows // whole.group
    # At least one row on each side, and all to train on if there is only one.
    num_eval = max(min(max(round(number * eval_share), 1), number - 1), 0)
    # The last rows: the held-out part of a stream is in one place.
    num_train = (number - num_eval) * whole.group
    return whole.part(0, num_train), whole.part(num_train, whole.num_rows)


def names_of(sources: Sequence[Source]) -> list[str]:
    """Return unique source names for logs: the last path part without ending, or the whole source if ambiguous.

    For a glob such as "notes/*.txt" the name is the folder.
    """
    names = [with_split(_short_name(source.paths[0]), source.split) for source in sources]
    # Short names where they tell the sources apart.
    repeated = {name for name, count in Counter(names).items() if count > 1}
    for index, source in enumerate(sources):
        if names[index] in repeated:
            names[index] = str(source)
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
