"""The files of one source, and the records in them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from itertools import islice

from offload.errors import counted
from offload.extras.data.findings import Findings
from offload.extras.data.formats import CHAT_FORMATS, GROUPINGS, RENDERED_FORMATS, detect_format, read_records
from offload.extras.data.records import Chat, Group, Ids, Preference, Record
from offload.extras.data.rows import BadRow
from offload.extras.data.settings import DataSettings
from offload.extras.data.sources import (
    STDLIB_CHAT,
    Source,
    SourceFile,
    find_files,
    hash_files,
    held_out_files,
    split_hash,
)

_NUM_SEARCHED = 1000  # rows searched for a picture


class RowSource:
    """The files of a source, with their formats, and the split of their records into train and eval."""

    def __init__(self, source: Source, settings: DataSettings, *, is_evaluated: bool = False) -> None:
        """`is_evaluated`: an eval source, with all records to evaluate on. Raises ConfigError."""
        self.source = source
        self.is_evaluated = is_evaluated
        self.on_bad_row = settings.on_bad_row
        # It decides the width of the ids in a .bin file.
        self.vocab_size = settings.vocab_size
        self.group = settings.group
        # As in `Rows`.
        self.num_before = 1
        if settings.grouped:
            self.num_before = GROUPINGS[settings.grouped].num_before
        self.eval_share = settings.eval_share
        # Nothing is held out from an eval source, so all of it counts as its training part.
        if is_evaluated:
            self.eval_share = 0.0

        self.notes: list[str] = []
        """Messages for the user about the files."""
        self.files = [replace(file, format=detect_format(file)) for file in find_files(source, self.notes)]
        self.formats = {file.format for file in self.files}
        self.files_hash = hash_files(self.files)
        self.num_bytes = sum(file.num_bytes for file in self.files)
        # Text and token files are held out whole. Rows of other files are chosen by the hash of their name.
        self._held_out = held_out_files([file for file in self.files if file.is_whole], self.eval_share)

    def __str__(self) -> str:
        return f"{self.source.setting} {self.source}"

    @property
    def format(self) -> str:
        """Row format and container for all files, e.g. `messages in parquet`."""
        return " and ".join(dict.fromkeys(_describe_format(file.format, file.container) for file in self.files))

    @property
    def has_chats(self) -> bool:
        """True if some file holds prompts and answers instead of plain text."""
        return bool(self.formats & CHAT_FORMATS)

    @property
    def uses_template(self) -> bool:
        """True if a chat template renders the rows. For prompt-completion and preference, the first record decides."""
        if not self.formats & {"prompt-completion", "preference"}:
            return bool(self.formats & RENDERED_FORMATS)
        # Texts need no template.
        first = next(self._first_records(), None)
        # Both answers have one form.
        if isinstance(first, Preference):
            first = first.chosen
        return isinstance(first, Chat)

    @cached_property
    def has_pictures(self) -> bool:
        """True if one of the first conversations has a picture."""
        if not self.formats & {"messages", "sharegpt"}:
            return False
        first = islice(self._first_records(), _NUM_SEARCHED)
        return any(isinstance(record, Chat) and record.pictures for record in first)

    @property
    def may_mask(self) -> bool:
        """True if some tokens may be untrained."""
        return self.has_chats or any(file.format == "tokens" and not file.is_whole for file in self.files)

    def holds_out(self, file: SourceFile) -> bool | str:
        """Return the hold-out rule for a file: True or False for the whole file, or a seed name for its rows."""
        if file.is_whole or not self.eval_share:
            return file.name in self._held_out
        return file.name

    def records(self, findings: Findings) -> Iterator[tuple[bool, str, Record]]:
        """Yield (in_eval, machine-independent name, record).

        `findings` receives bad rows, columns without effect, untrained roles, and whether a file is a stream.
        """
        for file in self.files:
            for index, record in enumerate(read_records(file, self.vocab_size, findings.unread)):
                if isinstance(record, Group):
                    record = self._cut(record)
                if isinstance(record, BadRow):
                    findings.handle(record)
                    continue
                findings.streams |= isinstance(record, Ids) and record.stream
                findings.roles += sorted(record.untrained_roles.difference(findings.roles))
                # No path and no content in the name: the split is the same on any machine, and after an edit of a text.
                name = f"{file.name}#{index}"
                held_out = split_hash(name) < self.eval_share
                if file.is_whole:
                    held_out = file.name in self._held_out
                yield held_out, name, record

    def _cut(self, record: Group) -> Group | BadRow:
        """Return the query, the answer and the first hard negatives, as many as each row has."""
        missing = self.group - len(record.members)
        if missing > 0:
            return BadRow(
                f"{record.where} has {counted(len(record.members) - 2, 'hard negative')}, and contrastive.negatives is "
                f"{self.group - 2}: lower --contrastive.negatives, or give {counted(missing, 'more text')} in "
                "'negatives'."
            )
        return replace(record, members=record.members[: self.group])

    def _first_records(self) -> Iterator[Record]:
        # Skipping bad rows is for this look alone: the policy of the run applies later.
        return (record for _, _, record in self.records(Findings("skip")))


def _describe_format(data_format: str, container: str) -> str:
    """Return row format and container in words."""
    if data_format == STDLIB_CHAT:
        return "messages"
    if container in ("text", "ids", "json"):
        return data_format
    # JSON lines in a table would be two containers.
    if data_format == "jsonl":
        data_format = "text"
    return f"{data_format} in {container}"
