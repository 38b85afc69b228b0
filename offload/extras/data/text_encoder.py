"""Records to token ids in batches, with the training mask; and the types that all encoders share."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np

from offload.errors import ConfigError, describe, shorten
from offload.extras.data.chat import ChatRenderer, Segments
from offload.extras.data.findings import Findings
from offload.extras.data.formats import pieces_of
from offload.extras.data.pictures import PictureDocument
from offload.extras.data.records import Chat, Group, Ids, Pair, Preference, Record, Text
from offload.extras.data.rows import BadRow

_BATCH_CHARS = 2 << 20  # three batches are in memory, one with several hundred bytes per token
_BATCH_RECORDS = 4096

ByteCountScope = Literal["none", "held out", "all"]
"""Documents with a byte count for each token. `all` takes twice the time, because byte counts need offsets."""


class TokenizedText(NamedTuple):
    """Tokens in a document or a piece."""

    ids: np.ndarray
    """Token ids, int64 [n]."""
    trained: np.ndarray | None
    """Training mask, bool [n]. None: all tokens are trained."""
    num_bytes: np.ndarray | None = None
    """UTF-8 bytes per token, int64 [n]. None: not counted."""

    def with_frame(self, before: Sequence[int], after: Sequence[int]) -> TokenizedText:
        """Return the tokens between `before` and `after`, special tokens without text bytes.

        `before` is trained if all tokens are trained, `after` if the last token is.
        """
        ids, trained, num_bytes = self
        if trained is not None:
            # A document without a token has no last one.
            first, last = trained.all(), trained[-1:].any()
            trained = np.concatenate([np.full(len(before), first), trained, np.full(len(after), last)])
        if num_bytes is not None:
            num_bytes = np.pad(num_bytes, (len(before), len(after)))
        return TokenizedText(
            np.concatenate([np.asarray(before, np.int64), ids, np.asarray(after, np.int64)]), trained, num_bytes
        )


@dataclass(frozen=True)
class EncodedDocument:
    """A document or a piece as token ids [n].

    `trained` bool [n], None: all tokens are trained. `num_bytes`: as in `TokenizedText`. `closes`: the document ends
    here. `picture_document`: rendered text and pictures, for a document with pictures.
    """

    where: str
    in_eval: bool
    ids: np.ndarray
    trained: np.ndarray | None
    closes: bool
    num_bytes: np.ndarray | None = None
    picture_document: PictureDocument | None = None


class EncodeRequest(NamedTuple):
    """Request to encode one record."""

    record: Record
    in_eval: bool
    counts_bytes: bool  # count UTF-8 bytes per token


@dataclass
class _Draft:
    request: EncodeRequest
    segments: Segments
    is_framed: bool  # add the tokenizer's first and last special tokens; a chat template writes them itself
    opens: bool = True
    closes: bool = True

    @property
    def text(self) -> str:
        return "".join(text for text, _ in self.segments)

    @property
    def is_masked(self) -> bool:
        """True if some segment is not trained."""
        return any(not trained for _, trained in self.segments)

    @property
    def needs_offsets(self) -> bool:
        return self.is_masked or self.request.counts_bytes


@dataclass
class EncodedBatch:
    """Encoded batch."""

    parts: list[EncodedDocument | BadRow]
    """Documents in order, with a `BadRow` in place of each refused record."""
    findings: Findings = field(default_factory=Findings)
    """What the encoding found."""


def in_batches(records: Iterable[tuple[bool, Record]], scope: ByteCountScope) -> Iterator[list[EncodeRequest]]:
    """Cut (in_eval, record) into batches with similar size.

    `scope`: for `held out`, training documents also get byte counts until the first held-out document, because without
    one, eval rows are taken from the training rows.
    """
    batch: list[EncodeRequest] = []
    size = 0
    holds_out = False  # becomes True at the first held-out document
    for in_eval, record in records:
        holds_out |= in_eval
        # Byte counts need offsets, and these take time: training documents skip them once a held-out one is known.
        may_need_bytes = scope == "held out" and (in_eval or not holds_out)
        batch.append(EncodeRequest(record, in_eval, may_need_bytes or scope == "all"))
        size += record.size
        if size >= _BATCH_CHARS or len(batch) >= _BATCH_RECORDS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def encode_ids(record: Ids, in_eval: bool, train_on_prompt: bool) -> EncodedDocument:
    """Return the document or piece of ready-made token ids."""
    trained = record.trained
    if train_on_prompt:
        trained = None
    return EncodedDocument(record.where, in_eval, np.asarray(record.ids), trained, record.closes)


class TextEncoder:
    """Encodes records in batches, in this process or in a worker.

    Plain text gets the tokenizer's special tokens around a sequence (e.g. a BOS), then an EOS. A conversation gets the
    chat template, and an EOS. What a text or the template has written itself comes once: tokens that begin a sequence,
    and a token that ends generation. A long document in pieces is framed only at its two ends.
    """

    def __init__(self, tokenizer: Any, renderer: ChatRenderer, train_on_prompt: bool) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._train_on_prompt = train_on_prompt
        # A plain call also switches off truncation and padding stored in the tokenizer file.
        self._prefix, self._suffix = find_frame(tokenizer)
        self._eos: int | None = tokenizer.eos_token_id
        ends = dict.fromkeys((*renderer.ends, *(text for text in [tokenizer.eos_token] if text)))
        self._ends: dict[str, int] = {text: tokenizer.convert_tokens_to_ids(text) for text in ends}
        self._specials = tuple(each.content for each in tokenizer.added_tokens_decoder.values() if each.special)

    def encode_batch(self, batch: list[EncodeRequest]) -> EncodedBatch:
        """Encode one batch."""
        encoded, prepared = EncodedBatch([]), list[Sequence[EncodedDocument | _Draft] | BadRow]()
        self._renderer.findings = findings = encoded.findings
        for request in batch:
            try:
                prepared.append(self.draft_documents(request))
            except BadRow as bad:
                prepared.append(bad)
        # The texts of all records together: `tokenizers` works on the texts of a batch in parallel.
        written = [parts for parts in prepared if not isinstance(parts, BadRow)]
        drafts = (part for parts in written for part in parts if isinstance(part, _Draft))
        tokenized = self._tokenize_in_batches(drafts)
        for request, parts in zip(batch, prepared, strict=True):
            documents: list[EncodedDocument | None] | BadRow
            if isinstance(parts, BadRow):
                documents = parts
            else:
                documents = self._finish_documents(request.record, parts, tokenized)
            if isinstance(documents, BadRow):
                encoded.parts.append(documents)
                continue
            findings.num_split += isinstance(request.record, Chat) and len(documents) > 1
            findings.num_empty += documents.count(None)
            encoded.parts += [each for each in documents if each is not None]
        return encoded

    def draft_documents(self, request: EncodeRequest) -> Sequence[EncodedDocument | _Draft]:
        """Return finished documents for token ids, drafts for texts. Raises BadRow."""
        record = request.record
        if isinstance(record, Ids):
            return [encode_ids(record, request.in_eval, self._train_on_prompt)]
        if isinstance(record, Chat) and record.pictures:
            raise BadRow(
                f"{record.where} has a picture, but the first rows of its source have none, and decide whether the "
                "source has pictures: put a row with a picture first."
            )
        if isinstance(record, Preference):
            return [self._draft_answer(request, record.chosen), self._draft_answer(request, record.rejected)]
        if isinstance(record, Group):
            return [_Draft(request, [(text, True)], is_framed=True) for text in record.members]
        if isinstance(record, Text):
            pieces = list(pieces_of(record.text))
            # A long document is cut at line ends, so tokenization in pieces rarely splits a token.
            last = len(pieces) - 1
            return [
                _Draft(request, [(piece, True)], True, record.opens and not i, record.closes and i == last)
                for i, piece in enumerate(pieces)
            ]
        if isinstance(record, Pair):
            return [_Draft(request, [(record.prompt, self._train_on_prompt), (record.completion, True)], True)]
        assert isinstance(record, Chat)
        return [_Draft(request, segments, is_framed=False) for segments in self._renderer.render_documents(record)]

    def _draft_answer(self, request: EncodeRequest, record: Chat | Pair) -> _Draft:
        """Return one document (answer) for a preference. Raises BadRow."""
        if isinstance(record, Pair):
            segments, is_framed = [(record.prompt, False), (record.completion, True)], True
        else:
            segments, *more = self._renderer.render_documents(record)
            is_framed = False
            if more:
                raise BadRow(
                    f"{record.where}: the chat template changes an answer when another one follows, so several answers "
                    "in 'chosen' or 'rejected' cannot be written as one text: move all answers but the last into "
                    "'prompt'."
                )
        return _Draft(request, segments, is_framed)

    def _finish_document(self, draft: _Draft, tokens: TokenizedText) -> EncodedDocument | None:
        """Return a document, or None for a document without a token."""
        # The documents of one row must stay side by side.
        may_be_empty = isinstance(draft.request.record, Preference | Group)
        if not len(tokens.ids) and draft.opens and draft.closes and not may_be_empty:
            return None
        # Only at the true ends: a piece in the middle of a document has no special tokens around it.
        opens = draft.is_framed and draft.opens
        if opens and not self._is_written(self._prefix, tokens.ids[: len(self._prefix)], draft):
            tokens = tokens.with_frame(self._prefix, ())
        if draft.closes:
            tokens = tokens.with_frame((), self._end_tokens(tokens.ids, draft))
        record, in_eval, _ = draft.request
        return EncodedDocument(record.where, in_eval, tokens.ids, tokens.trained, draft.closes, tokens.num_bytes)

    @staticmethod
    def _is_written(frame: list[int], ids: np.ndarray, draft: _Draft) -> bool:
        """Return True if a text brings these special tokens itself, as one from a chat template does."""
        # An embedding is of the tokens that the tokenizer itself gives a text.
        return not isinstance(draft.request.record, Group) and ids.tolist() == frame

    def _end_tokens(self, ids: np.ndarray, draft: _Draft) -> list[int]:
        """Return the tokens to append to a document with these ids."""
        closing: list[int] = []
        # A template may write a line end after its end, and a line end may be several tokens.
        written = draft.text.rstrip()
        is_group = isinstance(draft.request.record, Group)
        if not is_group and any(written.endswith(text) and number in ids for text, number in self._ends.items()):
            return closing
        if draft.is_framed and not self._is_written(self._suffix, ids[len(ids) - len(self._suffix) :], draft):
            closing += self._suffix
        if self._eos is None or self._eos in closing or is_group:
            return closing
        self._renderer.findings.num_extended += not draft.is_framed and written.endswith(self._specials)
        return [*closing, self._eos]

    def _finish_documents(
        self, record: Record, parts: Sequence[EncodedDocument | _Draft], tokenized: Iterator[TokenizedText | BadRow]
    ) -> list[EncodedDocument | None] | BadRow:
        """Return the documents for a record, with None for a document without a token.

        If the tokenizer refuses one document, the result is a `BadRow` for the whole record, because a preference is
        two documents. Raises ConfigError for a refused piece of a text file, which is not a row.
        """
        documents: list[EncodedDocument | None] = []
        refused: BadRow | None = None
        for part in parts:
            if isinstance(part, EncodedDocument):
                documents.append(part)
            elif isinstance(tokens := next(tokenized), BadRow):
                # No early end: the iterator is shared, so each draft of the record must take tokens.
                refused = refused or tokens
            else:
                documents.append(self._finish_document(part, tokens))
        if refused and isinstance(record, Text) and not (record.opens and record.closes):
            raise ConfigError(str(refused)) from refused
        return refused or documents

    def _tokenize_in_batches(self, drafts: Iterable[_Draft]) -> Iterator[TokenizedText | BadRow]:
        """Yield the tokens per draft, or a `BadRow` with the tokenizer error.

        Tokenizes about `_BATCH_CHARS` at once, to bound memory.
        """
        batch: list[_Draft] = []
        num_chars = 0
        for draft in drafts:
            batch.append(draft)
            num_chars += len(draft.text)
            if num_chars >= _BATCH_CHARS:
                yield from self._tokenize_each(batch)
                batch, num_chars = [], 0
        yield from self._tokenize_each(batch)

    def _tokenize_each(self, drafts: list[_Draft]) -> list[TokenizedText | BadRow]:
        """Return the tokens per draft, or a `BadRow` with the tokenizer error."""
        try:
            return [*self._tokenize(drafts)]
        except Exception as error:  # tokenizers raise any exception, e.g. for half a surrogate pair
            # One text spoils the whole batch. One by one, the other texts survive.
            if len(drafts) != 1:
                return [tokens for draft in drafts for tokens in self._tokenize_each([draft])]
            where, text = drafts[0].request.record.where, _describe_text(drafts[0].text)
            return [BadRow(f"{where}: the tokenizer refuses {text}: {shorten(describe(error))}.")]

    def _tokenize(self, drafts: list[_Draft]) -> list[TokenizedText]:
        """Return the tokens per draft."""
        if not self._tokenizer.is_fast:
            return [self._tokenize_by_segment(draft.segments) for draft in drafts]
        texts: dict[bool, list[str]] = {False: [], True: []}  # by `needs_offsets`, because offsets take time
        for draft in drafts:
            texts[draft.needs_offsets].append(draft.text)
        rules = self._tokenizer.backend_tokenizer
        encodings = {
            False: iter(rules.encode_batch_fast(texts[False], add_special_tokens=False)),
            True: iter(rules.encode_batch(texts[True], add_special_tokens=False)),
        }
        return [_tokens(next(encodings[draft.needs_offsets]), draft) for draft in drafts]

    def _tokenize_by_segment(self, segments: Segments) -> TokenizedText:
        """Encode segment by segment: without offsets, the only way to know the segment for each token."""
        ids: list[int] = []
        mask: list[bool] = []
        for text, trained in segments:
            part = self._tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
            ids += part
            mask += [trained] * len(part)
        if all(mask):
            return TokenizedText(np.asarray(ids, np.int64), None)
        return TokenizedText(np.asarray(ids, np.int64), np.asarray(mask, bool))


def _describe_text(text: str) -> str:
    """Return a name for a text in an error message: half a surrogate pair with the position, else "the text"."""
    lone = re.search("[\ud800-\udfff]", text)
    if lone is None:
        return "the text"
    return f"half a surrogate pair ({lone[0]!a} at character {lone.start():,})"


def find_frame(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the special token ids before and after every sequence of a tokenizer.

    Found by encoding one letter with and without special tokens.
    """
    plain = tokenizer("a", add_special_tokens=False)["input_ids"]
    special = tokenizer("a")["input_ids"]
    for start in range(len(special) - len(plain) + 1):
        if special[start : start + len(plain)] == plain:
            return special[:start], special[start + len(plain) :]
    return [], []


def _tokens(encoding: Any, draft: _Draft) -> TokenizedText:
    trained = num_bytes = None
    # Both cost time for each token, so a document has only what it needs.
    if draft.is_masked:
        trained = training_mask(encoding.offsets, draft.segments)
    if draft.request.counts_bytes:
        num_bytes = _byte_counts(encoding.offsets, draft.text)
    return TokenizedText(np.asarray(encoding.ids, np.int64), trained, num_bytes)


def training_mask(offsets: list[tuple[int, int]], segments: Segments) -> np.ndarray:
    """Return bool [tokens]: True if a token covers a character in a trained segment.

    `offsets` are character ranges in the joined text. A token across the border between prompt and answer is trained,
    so no answer character is lost. Two sorts of tokens have an empty range. Trimmed blanks: the token covers the gap
    after the previous range. Later bytes of a multi-token character: the token shares the character's range.
    """
    trained = np.concatenate([np.full(len(text), mark) for text, mark in segments])
    # A cumulative count answers for all tokens at once, without a loop over ranges.
    before = np.concatenate([[0], np.cumsum(trained)])
    start, end = np.asarray(offsets, np.int64).reshape(-1, 2).T
    previous = np.concatenate([[0], end[:-1]])
    start = np.where(end > start, start, np.minimum(previous, start))
    end = np.minimum(np.maximum(end, start + 1), len(trained))
    start = np.minimum(start, end)
    return np.asarray(before[end] - before[start] > 0)


def _byte_counts(offsets: list[tuple[int, int]], text: str) -> np.ndarray:
    """Return the UTF-8 bytes of text for each token, int64 [tokens].

    `offsets` are character ranges. A token counts all bytes since the previous token, so the sum is the text size. In a
    multi-token character, all bytes count for the first token.
    """
    # UTF-32 has one number for each character: three comparisons give the UTF-8 length.
    codes = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    before = np.concatenate([[0], np.cumsum(1 + (codes >= 0x80) + (codes >= 0x800) + (codes >= 0x10000))])
    ends = np.maximum.accumulate(np.asarray(offsets, np.int64).reshape(-1, 2)[:, 1])
    # Bytes behind the last token, for example trimmed blanks, count for this token.
    ends[-1:] = len(text)
    return np.diff(before[ends], prepend=0)
