"""Preparation: each source becomes token files for train and eval, cached under a hash of all inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from offload.app.user_cache import code_hash
from offload.errors import ConfigError, counted
from offload.extras.data.cache import load_or_build
from offload.extras.data.encoder import Encoder, Progress
from offload.extras.data.findings import Findings
from offload.extras.data.records import Record
from offload.extras.data.row_source import RowSource
from offload.extras.data.rows import BadRow
from offload.extras.data.sources import hash_text
from offload.extras.data.text_encoder import ByteCountScope, EncodedDocument
from offload.extras.data.token_file import TokenFile, TokenWriter
from offload.extras.data.tokenizer import hash_tokenizer, versions
from offload.machine.limits import usable_cores

_PARTS = ("train", "eval")
_MIN_BYTES_FOR_WORKERS = 32 << 20  # for smaller data, starting processes takes longer than they save
_MOST_WORKERS = 16  # 300 MB each


@dataclass(frozen=True)
class PreparedSource:
    """The documents of one source."""

    source: RowSource
    files: tuple[TokenFile, ...]
    """One file to train on, and one to evaluate on."""
    findings: Findings

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
        source, kind = self.source, "conversation" if self.source.has_chats else "document"
        number = sum(each.num_documents for each in self.files)
        if source.has_pairs:
            kind, number = "pair", number // 2
        in_files = f" ({counted(len(source.files), 'file')})" if len(source.files) > 1 else ""
        amount = f"{counted(number, kind)}, {counted(self.num_tokens, 'token')}"
        return f"{source.format} of {source.source}{in_files}: {amount}"


def prepare(
    source: RowSource, encoder: Encoder, cache_dir: Path, progress: Progress, num_workers: int | None = None
) -> PreparedSource:
    """Return the tokens of a source, from the cache if already prepared. Raises ConfigError.

    `num_workers`: processes for tokenization. None: as many as save time.
    """
    # Before the cache, so the note also comes in later runs.
    encoder.check_ends(source)
    return load_or_build(
        cache_dir / "tokens",
        _key(source, encoder),
        lambda folder: _build(folder, source, encoder, progress, num_workers),
        lambda folder: _load(folder, source),
    )


def _key(source: RowSource, encoder: Encoder) -> str:
    """Return a hash of all influences on tokens and split, also of the code of this package."""
    rules, places = encoder.tokenizer, list[str]()
    if encoder.processor is not None:
        rules = encoder.processor
        # Absolute picture paths, independent of the working directory.
        found = [file.place for file in source.files]
        places = [str(place if place.path is None else place.path.absolute()) for place in found]
    inputs = (
        code_hash("extras/data"),
        versions(),
        (source.files_hash, source.eval_share, source.on_bad_row, source.is_evaluated),
        (source.vocab_size, encoder.train_on_prompt),
        None if rules is None else hash_tokenizer(rules),
        encoder.ends,
        places,
    )
    return hash_text(repr(inputs))


def _load(folder: Path, source: RowSource) -> PreparedSource:
    meta = json.loads((folder / "meta.json").read_text())
    # Opening checks the sizes of the files, so a damaged folder is built again.
    files = tuple(TokenFile(folder / name, meta[name]) for name in _PARTS)
    return PreparedSource(source, files, Findings(**meta["findings"]))


def _build(folder: Path, source: RowSource, encoder: Encoder, progress: Progress, num_workers: int | None) -> None:
    has_pictures = encoder.processor is not None
    is_masked = has_pictures or source.may_mask
    writers = [TokenWriter(folder / name, source.vocab_size, is_masked, has_pictures) for name in _PARTS]
    findings = Findings(source.on_bad_row)
    scope: ByteCountScope = "held out" if source.eval_share else "none"
    if source.is_evaluated:
        scope = "all"
    workers = _num_useful_workers(source) if num_workers is None else num_workers
    for part in encoder.encode(_watched(source, findings, progress), findings, scope, workers):
        try:
            _check_ids(part, source, encoder)
        except BadRow as bad_row:
            if findings.streams or source.formats != {"tokens"}:  # the fault of the file or of the tokenizer
                raise ConfigError(str(bad_row)) from bad_row
            findings.handle(bad_row)
            continue
        writers[part.in_eval].append(part.ids, part.trained, part.closes, part.num_bytes, part.picture_document)
    meta = {name: writer.finish() for name, writer in zip(_PARTS, writers, strict=True)}
    meta["findings"] = asdict(findings)
    (folder / "meta.json").write_text(json.dumps(meta, indent=1))
    progress("tokenizing", 1.0)


def _watched(source: RowSource, findings: Findings, progress: Progress) -> Iterator[tuple[bool, Record]]:
    """Yield (in_eval, record) for all records and report progress: sizes so far relative to file bytes."""
    num_bytes = max(source.num_bytes, 1)
    done = reported = 0
    for in_eval, _, record in source.records(findings):
        done += record.size
        if done - reported >= num_bytes / 100:
            reported = done
            # A compressed file has more characters than bytes.
            progress("tokenizing", min(done / num_bytes, 0.99))
        yield in_eval, record


def _check_ids(part: EncodedDocument, source: RowSource, encoder: Encoder) -> None:
    """Raise BadRow for an id outside of the vocabulary."""
    if not len(part.ids):
        return
    lowest, highest = int(part.ids.min()), int(part.ids.max())
    if lowest < 0:
        raise BadRow(
            f"{part.where} holds the token id {lowest}, and ids begin at 0. Leave padding out: shorten the row, or "
            "give rows with an attention_mask that is 0 there (data.format=tokens)."
        )
    if highest >= source.vocab_size:
        tokenizer = encoder.tokenizer
        token = "" if tokenizer is None else f" ({tokenizer.convert_ids_to_tokens(highest)!r})"
        raise BadRow(
            f"{part.where} holds the token id {highest}{token}, but the model's vocabulary has {source.vocab_size}. "
            "Use the model's own tokenizer (data.tokenizer), or a model with a larger vocab_size."
        )


def _num_useful_workers(source: RowSource) -> int:
    """Return the number of worker processes that save time.

    0: this process with the threads of `tokenizers` is faster. Workers help only with much Python work per record, and
    only for long passes.
    """
    cores = len(usable_cores())
    pays = cores > 1 and source.has_chats and source.num_bytes >= _MIN_BYTES_FOR_WORKERS
    return min(cores, _MOST_WORKERS) if pays else 0
