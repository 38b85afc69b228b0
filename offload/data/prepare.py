"""The one pass over the data: files to token stores for train and eval, kept in the cache under a hash of all that went
in."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from offload.data.cache import cached
from offload.data.chat import BUILTIN_TEMPLATE, ROLE_MARKERS
from offload.data.encode import Encoded, Encoder
from offload.data.formats import CHAT_FORMATS, Ids, Record, detect_format, read_records, texts_of
from offload.data.sources import STDLIB_CHAT, find_files, hash_files, hash_text, held_out_files, split_hash
from offload.data.store import TokenStore, TokenWriter
from offload.data.tokenizer import (
    check_vocabulary,
    hash_tokenizer,
    load_tokenizer,
    sampling_rate,
    tokenizer_folder,
    trained_tokenizer,
)
from offload.errors import ConfigError

_VERSION = 1
_WHOLE_FILES = frozenset({"text", "tokens", STDLIB_CHAT})
"""Formats that are split into train and eval by file, the others by record."""

Progress = Callable[[str, float], None]


@dataclass(frozen=True)
class TokenizedData:
    """Both stores, and what was met on the way (`num_empty` documents without text, `num_split` conversations,
    `streams` of tokens)."""

    train: TokenStore
    eval: TokenStore
    num_empty: int
    num_split: int
    streams: bool


class Preparation:
    """The files of one source, their tokenizer, and the tokens made of them."""

    def __init__(
        self,
        source: str | list[str],
        data_format: str,
        vocab_size: int,
        eval_fraction: float,
        cache_dir: Path,
        progress: Progress,
    ):
        self.notes: list[str] = []  # of what was found, for the user
        self.sources = [source] if isinstance(source, str) else list(source)
        found = find_files(source, data_format, self.notes)
        self.files = [replace(file, format=detect_format(file)) for file in found]
        self._formats = {file.format for file in self.files}
        self._files_hash = hash_files(self.files)
        self._vocab_size = vocab_size
        self._eval_fraction = eval_fraction
        self._held_out = held_out_files([file for file in self.files if file.format in _WHOLE_FILES], eval_fraction)
        self._num_bytes = sum(file.num_bytes for file in self.files)
        self._cache_dir = cache_dir
        self._progress = progress

    @property
    def holds_chats(self) -> bool:
        """Whether any file holds prompts and answers instead of plain text."""
        return bool(self._formats & CHAT_FORMATS)

    def tokenizer(self, tokenizer: str | None, model_path: str | None, is_pretrained: bool) -> Any:
        """Load `tokenizer`, or the model's, or train one on the data where the model's weights are not pretrained. None
        when the data is token ids and none was given. Where it has to render conversations and has no chat template,
        it gets one.
        """
        path = tokenizer or tokenizer_folder(model_path)
        if path is not None:
            loaded = load_tokenizer(path)
            check_vocabulary(loaded, self._vocab_size, path)
            if self._formats & (CHAT_FORMATS - {"prompt-completion"}) and not loaded.chat_template:
                loaded.chat_template = BUILTIN_TEMPLATE  # set, so that it is saved with the model
                self.notes.append(
                    f"The tokenizer {path} has no chat template: conversations are written with {ROLE_MARKERS[1]} and "
                    f"{ROLE_MARKERS[2]} before the turns, and this template is saved with the model."
                )
            return loaded
        if self._formats == {"tokens"}:
            return None
        if "tokens" in self._formats:
            raise ConfigError(
                "data.source mixes token ids with text: name the tokenizer that made the ids, as data.tokenizer."
            )
        if is_pretrained:
            raise ConfigError(
                f"{model_path} has pretrained weights and no tokenizer (tokenizer.json or the like), and one that is "
                "trained on the data would make noise of its embeddings: set --data.tokenizer to a folder or hub name, "
                "that of the one that the model was trained with, or --model.init random to train from nothing."
            )
        return trained_tokenizer(self._texts, self._vocab_size, self._files_hash, self._cache_dir, self._progress)

    def tokens(self, tokenizer: Any, train_on_prompt: bool) -> TokenizedData:
        """Return the token stores, from the cache when the same data was prepared before."""
        rules = hash_tokenizer(tokenizer) if tokenizer is not None else None
        parts = (_VERSION, self._files_hash, rules, train_on_prompt, self._eval_fraction, self._vocab_size)
        name = hash_text(repr(parts))
        return cached(
            self._cache_dir / "tokens", name, lambda folder: self._build(folder, tokenizer, train_on_prompt), _load
        )

    def _records(self) -> Iterator[tuple[bool, str, Record]]:
        """Yield (in_eval, a name that is the same on every machine, record)."""
        for file in self.files:
            by_file = file.format in _WHOLE_FILES
            for index, record in enumerate(read_records(file, self._vocab_size)):
                name = f"{file.name}#{index}"
                yield file.name in self._held_out if by_file else split_hash(name) < self._eval_fraction, name, record

    def _texts(self) -> Iterator[str]:
        rate = sampling_rate(self._num_bytes)
        for _, name, record in self._records():
            if rate < 1 and split_hash(f"sample {name}") >= rate:
                continue
            yield from texts_of(record)

    def _build(self, folder: Path, tokenizer: Any, train_on_prompt: bool) -> None:
        masked = not train_on_prompt and self.holds_chats
        writers = {True: TokenWriter(folder / "eval", self._vocab_size, masked)}
        writers[False] = TokenWriter(folder / "train", self._vocab_size, masked)
        encoder = Encoder(tokenizer, train_on_prompt) if tokenizer is not None else None
        streams = False

        def metered() -> Iterator[tuple[bool, Record]]:
            """Yield the records; tell how far the pass is, by characters against the bytes of the files."""
            nonlocal streams
            num_bytes, done, reported = max(self._num_bytes, 1), 0, 0
            for in_eval, _, record in self._records():
                done += record.ids.nbytes if isinstance(record, Ids) else sum(map(len, texts_of(record)))
                if done - reported >= num_bytes / 100:
                    reported = done
                    self._progress("tokenizing", min(done / num_bytes, 0.99))
                streams |= isinstance(record, Ids) and record.stream
                yield in_eval, record

        for part in encoder.encode(metered()) if encoder else _as_they_are(metered()):
            self._check_ids(part, tokenizer)
            writers[part.in_eval].append(part.ids, part.trained, part.closes)
        meta = {
            "train": writers[False].finish(),
            "eval": writers[True].finish(),
            "num_empty": encoder.num_empty if encoder else 0,
            "num_split": encoder.renderer.num_split if encoder else 0,
            "streams": streams,
        }
        (folder / "meta.json").write_text(json.dumps(meta, indent=1))
        self._progress("tokenizing", 1.0)

    def _check_ids(self, part: Encoded, tokenizer: Any) -> None:
        if len(part.ids) and not 0 <= int(part.ids.min()) <= (highest := int(part.ids.max())) < self._vocab_size:
            wrong = highest if highest >= self._vocab_size else int(part.ids.min())
            token = f" ({tokenizer.convert_ids_to_tokens(wrong)!r})" if tokenizer is not None and wrong >= 0 else ""
            raise ConfigError(
                f"{part.where} holds the token id {wrong}{token}; the model's vocabulary has {self._vocab_size}. Use "
                "the tokenizer that belongs to the model (data.tokenizer), or a model with a larger vocab_size."
            )


def _as_they_are(records: Iterator[tuple[bool, Record]]) -> Iterator[Encoded]:
    for in_eval, record in records:
        assert isinstance(record, Ids)
        yield Encoded(record.where, in_eval, np.asarray(record.ids), None, record.closes)


def _load(folder: Path) -> TokenizedData:
    meta = json.loads((folder / "meta.json").read_text())
    stores = {name: TokenStore(folder / name, meta[name]) for name in ("train", "eval")}
    return TokenizedData(stores["train"], stores["eval"], meta["num_empty"], meta["num_split"], meta["streams"])
