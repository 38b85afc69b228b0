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
from offload.extras.data.prepare import SourceFiles, TokenizedData
from offload.extras.data.sources import STDLIB_CHAT, Source
from offload.extras.data.storage import decompressed_name
from offload.extras.data.store import TokenStore

_A_ROW = "makes a row of each document"


@dataclass(frozen=True)
class SourceRows:
    """One source as rows, with counts for logs and reports."""

    name: str
    """Source name in logs."""
    source_files: SourceFiles
    tokens: TokenizedData
    train: Rows
    """Training rows; for an eval source, the eval rows."""
    eval: Rows
    layouts: tuple[Rows, Rows]
    """Layouts of training and eval documents, before rows are held out from one layout."""

    @classmethod
    def of(
        cls,
        name: str,
        source_files: SourceFiles,
        tokens: TokenizedData,
        sequence_length: int,
        layout: Layout,
        pad_id: int,
        train_on_prompt: bool,
    ) -> SourceRows:
        """Lay out one source as rows. Raises ConfigError if no row has a target."""
        if tokens.streams and layout is not True:
            setting, effect = (
                ("packing_isolated=true", "keeps documents apart") if layout else ("packing=false", _A_ROW)
            )
            raise ConfigError(
                f"data.{setting} {effect}, but a one-dimensional file of tokens marks no documents. Set "
                "data.packing=true and data.packing_isolated=false, or store the ids as .npy [documents, tokens]."
            )
        group = 2 if source_files.has_pairs else 1
        train = Rows.over(tokens.train, sequence_length, layout, pad_id, group)
        held_out = Rows.over(tokens.eval, sequence_length, layout, pad_id, group)
        layouts = train, held_out
        if source_files.eval_share > 0 and not (train.num_rows and held_out.num_rows):
            # Documents are held out by hash. Of few documents, one side may have got none.
            train, held_out = _split_rows(train if train.num_rows else held_out, source_files.eval_share)
        rows = cls(name, source_files, tokens, train, held_out, layouts)
        if not train.num_rows:
            source = source_files.source
            more = [
                rows._explain_no_target(train_on_prompt),
                *(f"{text}." for text in rows.more(None, 0)),
                *tokens.bad[:1],
            ]
            raise ConfigError(f"{source.setting}={list(source.paths)!r} {' '.join(more)}")
        return rows

    def _explain_no_target(self, train_on_prompt: bool) -> str:
        """Return the reason why no row has a target, and the settings that change this."""
        files, tokens = self.source_files, self.tokens
        if not self.num_tokens:
            has_rows = tokens.num_empty or tokens.num_bad or tokens.train.num_documents or tokens.eval.num_documents
            if not files.num_bytes:
                problem = "is empty"
            else:
                problem = "has no text or tokens" if has_rows else "has no rows"
            return f"{problem}. Give more data."
        length, layout = self.train.sequence_length, self.train.packing is True
        # Each remedy is tried on the stores, so an error never names one without effect.
        stores = [tokens.train, tokens.eval]
        has_longer = any(self._has_target(store, max(store.num_tokens, 2), layout) for store in stores)
        may_unmask = not (files.has_pairs or train_on_prompt)
        has_unmasked = may_unmask and any(self._has_target(store.unmasked(), length, layout) for store in stores)
        unmask = "set --data.train_on_prompt true"
        if has_longer:
            fix = f"Raise --data.sequence_length{f', or {unmask}' if has_unmasked else ''}."
        elif tokens.roles:
            fix = f"{self._roles}: rename the roles of the data, to user and assistant."
        elif any(store.trained is not None for store in stores):
            fix = f"Give rows with answers, labels or masks to train on{f', or {unmask}' if has_unmasked else ''}."
        else:
            fix = "Give more data."
        return (
            f"has {counted(self.num_tokens, 'token')} but none to train on: a row needs a trained token after another "
            f"token within data.sequence_length={length}. {fix}"
        )

    @property
    def _roles(self) -> str:
        """Roles in conversations without a trained message, in words; empty without such."""
        roles = self.tokens.roles
        return f"No message has the role assistant (roles: {', '.join(roles)})" if roles else ""

    def _has_target(self, store: TokenStore, sequence_length: int, layout: bool) -> bool:
        return Rows.over(store, sequence_length, layout, self.train.pad_id, self.train.group).num_rows > 0

    @property
    def num_tokens(self) -> int:
        """Tokens in all documents, also held-out or cut-off ones."""
        return self.tokens.train.num_tokens + self.tokens.eval.num_tokens

    @property
    def document_lengths(self) -> np.ndarray:
        """Tokens per document, also held-out ones, int64 [documents]."""
        return np.concatenate([np.diff(store.documents) for store in (self.tokens.train, self.tokens.eval)])

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

    @property
    def contents(self) -> str:
        """Format, source and amount: `text of notes/*.txt (3 files): 3 documents, 1,204 tokens`."""
        files, tokens = self.source_files, self.tokens
        num_documents = (tokens.train.num_documents + tokens.eval.num_documents) // self.train.group
        kind = "conversation" if files.has_chats else "document"
        if files.has_pairs:
            kind = "pair"
        in_files = f" ({counted(len(files.files), 'file')})" if len(files.files) > 1 else ""
        amount = f"{counted(num_documents, kind)}, {counted(self.num_tokens, 'token')}"
        return f"{self.format} of {files.source}{in_files}: {amount}"

    def more(self, quota: int | None, num_rows: int) -> list[str]:
        """Return phrases about skipped data and the share in an epoch.

        `quota`: rows from this source among `num_rows` per epoch; None for an eval source.
        """
        counts = {
            ("bad row", "skipped"): self.tokens.num_bad,
            ("document", "without text left out"): self.tokens.num_empty,
            ("document", "with pictures longer than a row left out"): self.num_too_long,
        }
        phrases = [f"{counted(count, noun)} {label}" for (noun, label), count in counts.items() if count]
        if quota is not None and num_rows != self.train.num_rows:
            often = ratio(quota / self.train.num_rows)
            passes = "" if quota == self.train.num_rows else f", {often} times its own rows"
            phrases.append(f"{100 * quota / num_rows:.3g}% of the rows of an epoch{passes}")
        return phrases

    @property
    def format(self) -> str:
        """Row format and container for all files, e.g. `messages in parquet`."""
        return " and ".join(
            dict.fromkeys(_describe_format(file.format, file.container) for file in self.source_files.files)
        )

    def notes(self, with_name: bool) -> list[str]:
        """Return messages for the user. `with_name`: one among several sources, so messages begin with the name."""
        tokens, notes = self.tokens, []
        if tokens.num_bad:
            examples = " ".join(tokens.bad)
            bad = counted(tokens.num_bad, "row")
            notes.append(f"left out, since unreadable (data.on_bad_row skip): {bad}. {examples}")
        if tokens.num_empty:
            notes.append(f"left out, without text: {counted(tokens.num_empty, 'document')}.")
        if tokens.num_split:
            notes.append(
                "split into one document for each answer, since the chat template rewrites earlier turns: "
                f"{counted(tokens.num_split, 'conversation')}."
            )
        if tokens.num_open:
            notes.append(
                "without a token behind them that ends generation, so a model does not learn to stop there: "
                f"{counted(tokens.num_open, 'answer')} before other turns. Name the token at the end of an answer, or "
                "the role marker behind it, in eos_token_id of the model's generation_config.json."
            )
        if tokens.num_dropped:
            notes.append(
                "dropped by the tokenizer's chat template, so no token has them: "
                f"{counted(tokens.num_dropped, 'text')}, the first one is {tokens.first_dropped}. Use a tokenizer with "
                "another chat template, or write the text into a message of the user."
            )
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
            reason = f" {self._roles}." if self._roles else ""
            notes.append(f"left out, without a trained token: {counted(without_target, 'row')}.{reason}")
        if tokens.unread:
            source = self.source_files
            notes.append(unread_note(sorted(source.formats), tokens.unread, source.source.columns))
        return [f"{self.name}: {note}" if with_name else note for note in notes]


def _describe_format(data_format: str, container: str) -> str:
    """Return row format and container in words."""
    data_format = "messages" if data_format == STDLIB_CHAT else data_format
    if container in ("text", "ids", "json"):
        return data_format
    return f"{'text' if data_format == 'jsonl' else data_format} in {container}"


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
