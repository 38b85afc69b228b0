"""The encoder of a data set: one tokenizer or processor that turns the records of all sources into token ids."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

from offload.errors import ConfigError
from offload.extras.data.chat import BUILTIN_TEMPLATE, ROLE_MARKERS, TOLD_DAY, ChatRenderer
from offload.extras.data.findings import Findings
from offload.extras.data.formats import RENDERED_FORMATS
from offload.extras.data.picture_encoder import PictureEncoder, load_processor
from offload.extras.data.records import Ids, Record
from offload.extras.data.row_source import RowSource
from offload.extras.data.rows import BadRow
from offload.extras.data.settings import DataSettings
from offload.extras.data.sources import hash_text, split_hash
from offload.extras.data.text_encoder import (
    ByteCountScope,
    EncodedDocument,
    TextEncoder,
    encode_ids,
    find_frame,
    in_batches,
)
from offload.extras.data.tokenizer import (
    check_vocabulary,
    end_texts,
    load_or_train_tokenizer,
    load_tokenizer,
    sampling_rate,
    tokenizer_folder,
    treat_as_sentences,
)
from offload.extras.data.workers import encode_ahead

Progress = Callable[[str, float], None]


class Encoder:
    """Encodes records with one tokenizer, or with a processor for pictures."""

    def __init__(
        self, tokenizer: Any, train_on_prompt: bool = False, ends: Sequence[str] = (), processor: Any = None
    ) -> None:
        """`tokenizer` None: all records are token ids. `ends`: as in `ChatRenderer`. `processor` None: no pictures."""
        self.tokenizer = tokenizer
        self.train_on_prompt = train_on_prompt
        self.ends = tuple(ends)
        self.processor = processor
        self.notes: list[str] = []
        """Messages for the user."""

    @classmethod
    def open(
        cls,
        sources: Sequence[RowSource],
        settings: DataSettings,
        progress: Progress,
    ) -> Encoder:
        """Load the configured or the model's tokenizer, or train one on the data for a model with random weights.

        Token id data needs no tokenizer. A tokenizer without chat template gets the built-in one if needed. Raises
        ConfigError.
        """
        model_path, train_on_prompt = settings.model_path, settings.train_on_prompt
        path = settings.tokenizer or tokenizer_folder(model_path)
        processor = _processor(sources, path)
        if path is not None:
            # The tokenizer of a processor may know more tokens than the one alone.
            if processor is not None:
                loaded = processor.tokenizer
            else:
                loaded = load_tokenizer(path)
            check_vocabulary(loaded, settings.vocab_size, path)
            if settings.grouped == "contrastive":
                treat_as_sentences(loaded, model_path)
            encoder = cls(loaded, train_on_prompt, end_texts(loaded, model_path), processor)
            without = not loaded.chat_template and processor is None
            if without and any(each.uses_template for each in sources):
                loaded.chat_template = BUILTIN_TEMPLATE  # set here, so it is saved with the model
                encoder.notes.append(
                    f"The tokenizer {path} has no chat template: conversations are written with {ROLE_MARKERS[1]} and "
                    f"{ROLE_MARKERS[2]} before the turns, and this template is saved with the model."
                )
            if any(each.uses_template for each in sources) and "strftime_now" in str(encoder.rules.chat_template):
                encoder.notes.append(
                    f"The chat template writes the date of the day: {TOLD_DAY} in all conversations, so their tokens "
                    "do not depend on the day."
                )
            return encoder
        formats = set[str]().union(*(each.formats for each in sources))
        if formats == {"tokens"}:
            return cls(None, train_on_prompt)
        if "tokens" in formats:
            raise ConfigError(
                "data.source mixes token ids with text: name the tokenizer that made the ids, as data.tokenizer."
            )
        if settings.is_pretrained:
            raise ConfigError(
                f"{model_path or 'the model'} has pretrained weights but no tokenizer (tokenizer.json or the like), "
                "and the pretrained embeddings are useless with a new tokenizer trained on the data: set "
                "--data.tokenizer to a folder or hub name with the model's own tokenizer, or set --model.init random "
                "to train from random weights."
            )
        key = " ".join(each.files_hash for each in sources)
        # The key of one source is a hash as it is.
        if len(sources) > 1:
            key = hash_text(key)
        trained = load_or_train_tokenizer(
            lambda: _sample_texts(sources), settings.vocab_size, key, settings.cache_dir, progress
        )
        return cls(trained, train_on_prompt)

    def num_last(self, source: RowSource) -> int:
        """Return the tokens at the end of a text that stay when it is cut. The truncation of a tokenizer keeps its
        special tokens, and an embedding may be that of the last one.
        """
        if "contrastive" not in source.formats:
            return 0
        return len(find_frame(self.tokenizer)[1])

    def check_ends(self, source: RowSource) -> None:
        """Raise ConfigError for text pairs without an end token; add a note for plain texts."""
        tokenizer = self.tokenizer
        if tokenizer is None or tokenizer.eos_token_id is not None or find_frame(tokenizer)[1]:
            return
        if source.formats & {"prompt-completion", "preference"} and not source.uses_template:
            raise ConfigError(
                f"{source} has prompts and answers as texts, but the tokenizer has no EOS token to end an answer: set "
                "eos_token in tokenizer_config.json in the folder of the tokenizer, or write the rows as messages, "
                "which the chat template ends."
            )
        if source.formats & {"text", "jsonl"}:
            self.notes.append(
                f"The tokenizer has no EOS token: nothing marks the end of a text of {source}, so packed texts run "
                "into each other without a separator."
            )

    def encode(
        self,
        records: Iterable[tuple[bool, Record]],
        findings: Findings,
        scope: ByteCountScope = "none",
        num_workers: int = 0,
    ) -> Iterator[EncodedDocument]:
        """Yield the encoded documents for each (in_eval, record) in order. Later batches are encoded meanwhile.

        `findings` receives refused records, counts, and documents without a token, which are skipped. `scope`:
        documents with byte counts, as in `in_batches`. `num_workers`: encoding processes; 0: this process with the
        threads of `tokenizers`.
        """
        if self.tokenizer is None:
            for in_eval, record in records:
                assert isinstance(record, Ids)
                yield encode_ids(record, in_eval, self.train_on_prompt)
            return
        # `closing` ends the worker processes, also if the caller stops in the middle.
        with closing(encode_ahead(self._batch_encoder, in_batches(records, scope), num_workers)) as batches:
            for batch in batches:
                findings.add(batch.findings)
                for part in batch.parts:
                    if isinstance(part, BadRow):
                        findings.handle(part)
                    else:
                        yield part

    @property
    def rules(self) -> Any:
        """What decides the tokens of a text: the processor, or without one the tokenizer. None: no texts."""
        if self.processor is not None:
            return self.processor
        return self.tokenizer

    @cached_property
    def _batch_encoder(self) -> TextEncoder:
        renderer = ChatRenderer(self.rules, self.train_on_prompt, self.ends)
        if self.processor is None:
            return TextEncoder(self.tokenizer, renderer, self.train_on_prompt)
        return PictureEncoder(self.processor, renderer, self.train_on_prompt)


def _processor(sources: Sequence[RowSource], path: str | None) -> Any:
    """Return the model's processor for sources with pictures. None: no pictures. Raises ConfigError."""
    if not any(each.has_pictures for each in sources):
        return None
    for each in sources:
        if others := each.formats - RENDERED_FORMATS:
            raise ConfigError(
                f"{each} has the format {', '.join(sorted(others))}, but other sources have pictures, and sources with "
                "pictures can only be mixed with conversations. Write these rows as messages."
            )
    return load_processor(path)


def _sample_texts(sources: Sequence[RowSource]) -> Iterator[str]:
    """Yield texts to train a tokenizer on."""
    rate = sampling_rate(sum(each.num_bytes for each in sources))
    for source in sources:
        for _, name, record in source.records(Findings(source.on_bad_row)):
            # By hash, so the sample does not depend on the order of files, and is spread over all of them.
            if rate < 1 and split_hash(f"sample {name}") >= rate:
                continue
            for text in record.texts:  # a row with half a surrogate pair is refused later, with the line
                yield text.encode("utf-8", "ignore").decode()
