"""Preparation pass: each source becomes token stores for train and eval, cached under a hash of all inputs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from offload.app.user_cache import code_hash
from offload.errors import ConfigError
from offload.extras.data.cache import load_or_build
from offload.extras.data.chat import BUILTIN_TEMPLATE, ROLE_MARKERS
from offload.extras.data.encode import ByteCountScope, EncodedDocument, Encoder, find_frame
from offload.extras.data.formats import (
    CHAT_FORMATS,
    RENDERED_FORMATS,
    Chat,
    Ids,
    Preference,
    Record,
    detect_format,
    picture_bytes,
    read_records,
    texts_of,
    untrained_roles,
)
from offload.extras.data.picture_encoder import PictureEncoder, load_processor
from offload.extras.data.rows import BadRow, BadRows
from offload.extras.data.sources import (
    Source,
    SourceFile,
    find_files,
    hash_files,
    hash_text,
    held_out_files,
    split_hash,
)
from offload.extras.data.storage import LocalFile
from offload.extras.data.store import TokenStore, TokenWriter
from offload.extras.data.tokenizer import (
    check_vocabulary,
    end_texts,
    hash_tokenizer,
    load_or_train_tokenizer,
    load_tokenizer,
    sampling_rate,
    tokenizer_folder,
    versions,
)
from offload.machine.limits import usable_cores

_MIN_BYTES_FOR_WORKERS = 32 << 20  # for smaller data, starting processes takes longer than they save
_MOST_WORKERS = 16  # 300 MB each
_NUM_SEARCHED = 1000  # rows searched for a picture

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class TokenizedData:
    """Tokens from one source, with counts from the pass."""

    train: TokenStore
    eval: TokenStore
    num_empty: int
    """Skipped documents without text."""
    num_split: int
    """Conversations split into several documents."""
    num_open: int
    """Answers before another turn, without a token that ends generation."""
    num_dropped: int
    """Texts in conversations that the chat template drops."""
    first_dropped: str
    """The place of the first one."""
    streams: bool
    """True if some tokens came from a file without document borders."""
    num_bad: int
    """Rows skipped due to `data.on_bad_row`."""
    bad: tuple[str, ...]
    """Error messages for the first bad rows."""
    unread: tuple[str, ...]
    """Columns without effect on the data."""
    roles: tuple[str, ...]
    """Roles in conversations without the role assistant and without a trained message."""


class SourceFiles:
    """The files and records in one source."""

    def __init__(
        self, source: Source, vocab_size: int, eval_share: float, on_bad_row: str, *, is_evaluated: bool = False
    ) -> None:
        self.source = source
        self.eval_share = eval_share
        self.on_bad_row = on_bad_row
        self.is_evaluated = is_evaluated
        self._vocab_size = vocab_size  # decides the width of the ids in a .bin file
        self.notes: list[str] = []  # messages for the user
        self.files = [replace(file, format=detect_format(file)) for file in find_files(source, self.notes)]
        self.formats = {file.format for file in self.files}
        self.files_hash = hash_files(self.files)
        self.num_bytes = sum(file.num_bytes for file in self.files)
        # Text and token files are held out whole. Rows of other files are chosen by the hash of their name.
        self._held_out = held_out_files([file for file in self.files if file.is_whole], eval_share)

    @property
    def has_chats(self) -> bool:
        """True if some file holds prompts and answers instead of plain text."""
        return bool(self.formats & CHAT_FORMATS)

    @property
    def has_pairs(self) -> bool:
        """True if each record is two documents: chosen and rejected answer."""
        return "preference" in self.formats

    @property
    def uses_template(self) -> bool:
        """True if a chat template renders the rows. For prompt-completion and preference, the first record decides."""
        if not self.formats & {"prompt-completion", "preference"}:
            return bool(self.formats & RENDERED_FORMATS)
        # Texts need no template. Skipping bad rows is for this look alone: the policy of the run applies later.
        first = next((record for _, _, record in self.records(BadRows("skip"))), None)
        return isinstance(first.chosen if isinstance(first, Preference) else first, Chat)

    @cached_property
    def has_pictures(self) -> bool:
        """True if one of the first conversations has a picture."""
        if not self.formats & {"messages", "sharegpt"}:
            return False
        first = islice(self.records(BadRows("skip")), _NUM_SEARCHED)
        return any(isinstance(record, Chat) and record.pictures for _, _, record in first)

    @property
    def may_mask(self) -> bool:
        """True if some tokens may be untrained."""
        return self.has_chats or any(file.format == "tokens" and not file.is_whole for file in self.files)

    def holds_out(self, file: SourceFile) -> bool | str:
        """Return the hold-out rule for a file: True or False for the whole file, or a seed name for its rows."""
        return file.name in self._held_out if file.is_whole or not self.eval_share else file.name

    def records(self, bad: BadRows, unread: set[str] | None = None) -> Iterator[tuple[bool, str, Record]]:
        """Yield (in_eval, machine-independent name, record).

        Bad rows go to `bad`, columns without effect to `unread`.
        """
        for file in self.files:
            for index, record in enumerate(read_records(file, self._vocab_size, unread)):
                if isinstance(record, BadRow):
                    bad.handle(record)
                    continue
                # No path and no content in the name: the split is the same on any machine, and after an edit of a text.
                name = f"{file.name}#{index}"
                held_out = file.name in self._held_out if file.is_whole else split_hash(name) < self.eval_share
                yield held_out, name, record


@dataclass
class Preparation:
    """Sources with a common tokenizer, and their tokens."""

    sources: Sequence[SourceFiles]
    vocab_size: int
    cache_dir: Path
    progress: Progress
    num_workers: int | None = None
    """Processes for tokenization. None: as many as save time."""
    processor: Any = None
    """The model's processor for pictures, set by `open_tokenizer`. None: no pictures."""
    ends: tuple[str, ...] = ()
    """Texts of the tokens that end generation, set by `open_tokenizer`."""

    def __post_init__(self) -> None:
        self.notes = [note for each in self.sources for note in each.notes]

    def open_tokenizer(self, tokenizer: str | None, model_path: str | None, is_pretrained: bool) -> Any:
        """Load `tokenizer` or the model's tokenizer, or train one on the data for a model without pretrained weights.

        Returns None for token id data without a tokenizer. A tokenizer without chat template gets the built-in one if
        needed. Raises ConfigError.
        """
        path = tokenizer or tokenizer_folder(model_path)
        formats = set[str]().union(*(each.formats for each in self.sources))
        if any(each.has_pictures for each in self.sources):
            for each in self.sources:
                if others := each.formats - RENDERED_FORMATS:
                    raise ConfigError(
                        f"{each.source.setting} {each.source} has the format {', '.join(sorted(others))}, but other "
                        "sources have pictures, and sources with pictures can only be mixed with conversations. Write "
                        "these rows as messages."
                    )
            self.processor = load_processor(path)
        if path is not None:
            loaded = load_tokenizer(path) if self.processor is None else self.processor.tokenizer
            check_vocabulary(loaded, self.vocab_size, path)
            self.ends = end_texts(loaded, model_path)
            without = not loaded.chat_template and self.processor is None
            if without and any(each.uses_template for each in self.sources):
                loaded.chat_template = BUILTIN_TEMPLATE  # set here, so it is saved with the model
                self.notes.append(
                    f"The tokenizer {path} has no chat template: conversations are written with {ROLE_MARKERS[1]} and "
                    f"{ROLE_MARKERS[2]} before the turns, and this template is saved with the model."
                )
            return loaded
        if formats == {"tokens"}:
            return None
        if "tokens" in formats:
            raise ConfigError(
                "data.source mixes token ids with text: name the tokenizer that made the ids, as data.tokenizer."
            )
        if is_pretrained:
            raise ConfigError(
                f"{model_path or 'the model'} has pretrained weights but no tokenizer (tokenizer.json or the like), "
                "and the pretrained embeddings are useless with a new tokenizer trained on the data: set "
                "--data.tokenizer to a folder or hub name with the model's own tokenizer, or set --model.init random "
                "to train from random weights."
            )
        hashes = [each.files_hash for each in self.sources]
        key = hashes[0] if len(hashes) == 1 else hash_text(" ".join(hashes))
        return load_or_train_tokenizer(self._texts, self.vocab_size, key, self.cache_dir, self.progress)

    def _check_ends(self, source_files: SourceFiles, tokenizer: Any) -> None:
        """Raise ConfigError for text pairs without an end token; add a note for plain texts."""
        if tokenizer is None or tokenizer.eos_token_id is not None or find_frame(tokenizer)[1]:
            return
        label = f"{source_files.source.setting} {source_files.source}"
        if source_files.formats & {"prompt-completion", "preference"} and not source_files.uses_template:
            raise ConfigError(
                f"{label} has prompts and answers as texts, but the tokenizer has no EOS token to end an answer: set "
                "eos_token in tokenizer_config.json in the folder of the tokenizer, or write the rows as messages, "
                "which the chat template ends."
            )
        if source_files.formats & {"text", "jsonl"}:
            self.notes.append(
                f"The tokenizer has no EOS token: nothing marks the end of a text of {label}, so packed texts run into "
                "each other without a separator."
            )

    def tokenize(self, source_files: SourceFiles, tokenizer: Any, train_on_prompt: bool) -> TokenizedData:
        """Return the token stores for a source, from the cache if already prepared. Raises ConfigError."""
        # Before the cache, so the note also comes in later runs.
        self._check_ends(source_files, tokenizer)
        encoder, places = tokenizer if self.processor is None else self.processor, list[str]()
        if self.processor is not None:  # absolute picture paths, independent of the working directory
            places_read = [file.place for file in source_files.files]
            places = [str(place.path.absolute() if isinstance(place, LocalFile) else place) for place in places_read]
        rules = None if encoder is None else hash_tokenizer(encoder)
        # The name of the folder has all influences on tokens and split, also the code of this package.
        source = source_files.files_hash, source_files.eval_share, source_files.on_bad_row, source_files.is_evaluated
        settings = self.vocab_size, train_on_prompt
        name = hash_text(repr((code_hash("extras/data"), versions(), source, settings, rules, self.ends, places)))
        return load_or_build(
            self.cache_dir / "tokens",
            name,
            lambda folder: self._build(folder, source_files, tokenizer, train_on_prompt),
            _load,
        )

    def _texts(self) -> Iterator[str]:
        rate = sampling_rate(sum(each.num_bytes for each in self.sources))
        for source_files in self.sources:
            for _, name, record in source_files.records(BadRows(source_files.on_bad_row)):
                # By hash, so the sample does not depend on the order of files, and is spread over all of them.
                if rate < 1 and split_hash(f"sample {name}") >= rate:
                    continue
                for text in texts_of(record):  # a row with half a surrogate pair is refused later, with the line
                    yield text.encode("utf-8", "ignore").decode()

    def _build(self, folder: Path, source_files: SourceFiles, tokenizer: Any, train_on_prompt: bool) -> None:
        picture_encoder = None if self.processor is None else PictureEncoder(self.processor, train_on_prompt, self.ends)
        masked = picture_encoder is not None or source_files.may_mask
        writers = {
            in_eval: TokenWriter(folder / name, self.vocab_size, masked, has_pictures=picture_encoder is not None)
            for name, in_eval in (("train", False), ("eval", True))
        }
        bad = BadRows(source_files.on_bad_row)
        workers = _num_useful_workers(source_files) if self.num_workers is None else self.num_workers
        encoder = None
        if tokenizer is not None:
            byte_count_scope: ByteCountScope = "held out" if source_files.eval_share else "none"
            if source_files.is_evaluated:
                byte_count_scope = "all"
            encoder = Encoder(
                tokenizer,
                train_on_prompt,
                bad,
                byte_count_scope,
                workers,
                batch_encoder=picture_encoder,
                ends=self.ends,
            )
        streams = False
        unread = set[str]()
        roles = set[str]()

        def with_progress() -> Iterator[tuple[bool, Record]]:
            """Yield the records and report progress: characters so far relative to file bytes."""
            nonlocal streams
            num_bytes = max(source_files.num_bytes, 1)
            done = reported = 0
            for in_eval, _, record in source_files.records(bad, unread):
                done += record.ids.nbytes if isinstance(record, Ids) else sum(map(len, texts_of(record)))
                done += picture_bytes(record)
                if done - reported >= num_bytes / 100:
                    reported = done
                    # A compressed file has more characters than bytes.
                    self.progress("tokenizing", min(done / num_bytes, 0.99))
                streams |= isinstance(record, Ids) and record.stream
                roles.update(untrained_roles(record))
                yield in_eval, record

        for part in encoder.encode(with_progress()) if encoder else _encode_ids(with_progress(), train_on_prompt):
            try:
                self._check_ids(part, tokenizer)
            except BadRow as bad_row:
                if streams or source_files.formats != {"tokens"}:  # the fault of the file or of the tokenizer
                    raise ConfigError(str(bad_row)) from bad_row
                bad.handle(bad_row)
                continue
            writers[part.in_eval].append(part.ids, part.trained, part.closes, part.num_bytes, part.picture_document)
        meta = {
            "train": writers[False].finish(),
            "eval": writers[True].finish(),
            "num_empty": encoder.num_empty if encoder else 0,
            "num_split": encoder.num_split if encoder else 0,
            "num_open": encoder.num_open if encoder else 0,
            "num_dropped": encoder.num_dropped if encoder else 0,
            "first_dropped": encoder.first_dropped if encoder else "",
            "streams": streams,
            "num_bad": bad.num,
            "bad": bad.examples,
            "unread": sorted(unread),
            "roles": sorted(roles),
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=1))
        self.progress("tokenizing", 1.0)

    def _check_ids(self, part: EncodedDocument, tokenizer: Any) -> None:
        """Raise BadRow for an id outside of the vocabulary."""
        if not len(part.ids):
            return
        lowest, highest = int(part.ids.min()), int(part.ids.max())
        if lowest < 0:
            raise BadRow(
                f"{part.where} holds the token id {lowest}, and ids begin at 0. Leave padding out: shorten the row, or "
                "give rows with an attention_mask that is 0 there (data.format=tokens)."
            )
        if highest >= self.vocab_size:
            token = f" ({tokenizer.convert_ids_to_tokens(highest)!r})" if tokenizer is not None else ""
            raise BadRow(
                f"{part.where} holds the token id {highest}{token}, but the model's vocabulary has {self.vocab_size}. "
                "Use the model's own tokenizer (data.tokenizer), or a model with a larger vocab_size."
            )


def _num_useful_workers(source_files: SourceFiles) -> int:
    """Return the number of worker processes that save time.

    0: this process with the threads of `tokenizers` is faster. Workers help only with much Python work per record, and
    only for long passes.
    """
    cores = len(usable_cores())
    pays = cores > 1 and source_files.has_chats and source_files.num_bytes >= _MIN_BYTES_FOR_WORKERS
    return min(cores, _MOST_WORKERS) if pays else 0


def _encode_ids(records: Iterator[tuple[bool, Record]], train_on_prompt: bool) -> Iterator[EncodedDocument]:
    for in_eval, record in records:
        assert isinstance(record, Ids)
        trained = None if train_on_prompt else record.trained
        yield EncodedDocument(record.where, in_eval, np.asarray(record.ids), trained, record.closes)


def _load(folder: Path) -> TokenizedData:
    meta = json.loads((folder / "meta.json").read_text())
    # Opening checks the sizes of the files, so a damaged folder is built again.
    train, held_out = (TokenStore(folder / name, meta[name]) for name in ("train", "eval"))
    lists = {key: tuple(meta.pop(key)) for key in ("bad", "unread", "roles")}
    return TokenizedData(**{**meta, **lists, "train": train, "eval": held_out})
