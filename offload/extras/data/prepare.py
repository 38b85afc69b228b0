"""Preparation: each source becomes two token files, for train and eval, cached under a hash of all inputs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from offload.errors import ConfigError
from offload.extras.data.cache import load_or_build
from offload.extras.data.encoder import Encoder, Progress
from offload.extras.data.findings import Findings
from offload.extras.data.records import Record
from offload.extras.data.row_source import RowSource
from offload.extras.data.rows import BadRow
from offload.extras.data.settings import DataSettings
from offload.extras.data.sources import hash_text
from offload.extras.data.text_encoder import ByteCountScope, EncodedDocument
from offload.extras.data.token_file import TokenFile, TokenWriter
from offload.extras.data.tokenizer import hash_tokenizer, versions
from offload.machine.limits import usable_cores
from offload.system import threads_within_quota
from offload.user_cache import code_hash

_PARTS = ("train", "eval")
_MIN_BYTES_FOR_WORKERS = 32 << 20  # for smaller data, starting processes takes longer than they save
_MOST_WORKERS = 16  # 300 MB each


def prepare(
    source: RowSource, encoder: Encoder, settings: DataSettings, progress: Progress
) -> tuple[tuple[TokenFile, ...], Findings]:
    """Return the tokens of a source, from the cache if already prepared: (files to train and evaluate on, findings).

    Raises ConfigError.
    """
    # Before the cache, so the note also comes in later runs.
    encoder.check_ends(source)
    return load_or_build(
        settings.cache_dir / "tokens",
        _key(source, encoder),
        lambda folder: _build(folder, source, encoder, settings, progress),
        _load,
    )


def _key(source: RowSource, encoder: Encoder) -> str:
    """Return a hash of all influences on tokens and split, also of the code of this package."""
    rules_hash, places = None, list[str]()
    if encoder.rules is not None:
        rules_hash = hash_tokenizer(encoder.rules)
    if encoder.processor is not None:
        # Absolute picture paths, independent of the working directory.
        places = [str((file.place.path and file.place.path.absolute()) or file.place) for file in source.files]
    inputs = (
        code_hash("extras/data"),
        versions(),
        (source.files_hash, source.eval_share, source.on_bad_row, source.is_evaluated, source.group),
        (source.vocab_size, encoder.train_on_prompt),
        rules_hash,
        encoder.ends,
        places,
    )
    return hash_text(repr(inputs))


def _load(folder: Path) -> tuple[tuple[TokenFile, ...], Findings]:
    meta = json.loads((folder / "meta.json").read_text())
    # Opening checks the sizes of the files, so a damaged folder is built again.
    files = tuple(TokenFile(folder / name, meta[name]) for name in _PARTS)
    return files, Findings(**meta["findings"])


def _build(folder: Path, source: RowSource, encoder: Encoder, settings: DataSettings, progress: Progress) -> None:
    has_pictures = encoder.processor is not None
    is_masked = has_pictures or source.may_mask
    num_last = encoder.num_last(source)
    writers = [TokenWriter(folder / name, source.vocab_size, is_masked, has_pictures, num_last) for name in _PARTS]
    findings = Findings(source.on_bad_row)
    scope: ByteCountScope = "none"
    # Byte counts are for the eval loss alone, and take time.
    if source.eval_share:
        scope = "held out"
    if source.is_evaluated:
        scope = "all"
    workers = settings.num_workers
    if workers is None:
        workers = _num_useful_workers(source)
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
        token = ""
        if encoder.tokenizer is not None:
            token = f" ({encoder.tokenizer.convert_ids_to_tokens(highest)!r})"
        raise BadRow(
            f"{part.where} holds the token id {highest}{token}, but the model's vocabulary has {source.vocab_size}. "
            "Use the model's own tokenizer (data.tokenizer), or a model with a larger vocab_size."
        )


def _num_useful_workers(source: RowSource) -> int:
    """Return the number of worker processes that save time.

    0: this process with the threads of `tokenizers` is faster. Workers help only with much Python work per record, and
    only for long passes.
    """
    cores = threads_within_quota(len(usable_cores()))
    if cores == 1 or not source.has_chats or source.num_bytes < _MIN_BYTES_FOR_WORKERS:
        return 0
    return min(cores, _MOST_WORKERS)
